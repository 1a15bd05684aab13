"""Files of prompts become files of answers, also after a kill in the middle of a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from kitforge.kits.transformers.batch_inference import read_prompts, run_batch_inference
from tests.data.chat.cases import CHATML, THINKING, TOOLS, save_tokenizer, user
from tests.tiny import built
from tests.trainer import tiny

OPTIONS = InferenceOptions(max_new_tokens=8, temperature=1.0)


@pytest.fixture
def texts() -> TextEngine:
    model = built(tiny.LLAMA, ByteTokenizer.vocab_size)
    return TextEngine(Engine(model, EngineOptions(max_num_seqs=2), stop_ids=(256,)), ByteTokenizer())


def chat_engine(tokenizer: HuggingFaceTokenizer) -> TextEngine:
    model = built(tiny.LLAMA, tokenizer.vocab_size, max_length=512)
    return TextEngine(Engine(model, EngineOptions(max_num_seqs=2), stop_ids=tokenizer.eos_ids), tokenizer)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "ab" * (1 + place % 5), "id": place}) + "\n" for place in range(20)))
    return path


CLOSED = {"additionalProperties": False}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("lost", [0, 7])
def test_a_killed_file_goes_on_to_what_it_would_have_been(
    texts: TextEngine, prompts: Path, tmp_path: Path, lost: int
) -> None:
    whole, broken, told = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl", list[int]()
    run_batch_inference(texts, read_prompts(prompts), whole, OPTIONS, {"model": "run"}, told.append)
    assert told == list(range(21))
    assert [json.loads(line)["id"] for line in whole.read_text().splitlines()] == list(range(20))

    def kill(done: int) -> None:
        if done == 9:
            raise Killed

    with pytest.raises(Killed):
        run_batch_inference(texts, read_prompts(prompts), broken, OPTIONS, {"model": "run"}, kill)
    part = tmp_path / "broken.jsonl.part"
    content = part.read_bytes()
    part.write_bytes(content[: len(content) - lost])
    with pytest.raises(ConfigError, match="begun with another"):
        run_batch_inference(texts, read_prompts(prompts), broken, InferenceOptions(max_new_tokens=9), {"model": "run"})
    run_batch_inference(texts, read_prompts(prompts), broken, OPTIONS, {"model": "run"})
    assert broken.read_bytes() == whole.read_bytes()
    assert not part.exists()


def test_every_completion_has_the_structure_that_was_asked_for(
    texts: TextEngine, prompts: Path, tmp_path: Path
) -> None:
    target = tmp_path / "answers.jsonl"
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]} | CLOSED)
    about = {"model": "run", "structure": ("schema", schema)}
    run_batch_inference(texts, read_prompts(prompts), target, InferenceOptions(max_new_tokens=40), about)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [each["id"] for each in rows] == list(range(20)) and {each["finish_reason"] for each in rows} == {"stop"}
    assert all(isinstance(json.loads(each["generated_text"])["a"], bool) for each in rows)

    def kill(done: int) -> None:
        if done == 2:
            raise Killed

    again = tmp_path / "again.jsonl"
    with pytest.raises(Killed):
        run_batch_inference(texts, read_prompts(prompts), again, OPTIONS, about, kill)
    with pytest.raises(ConfigError, match="begun with another"):
        run_batch_inference(texts, read_prompts(prompts), again, OPTIONS, {"model": "run"})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "not JSON"),
        (b'{"text": "a"}', "not a prompt"),
        (b'{"prompt": ""}', "empty"),
        (b"\xff", "UTF-8"),
        (b'{"prompt": "a \\ud800"}', "half of a surrogate pair"),
        (b'{"prompt": "a", "note": ["\\udc00"]}', "half of a surrogate pair"),
        (b'{"prompt": "a", "generated_text": "b", "id": 1}', "would overwrite"),
        (b'{"prompt": "a", "finish_reason": null}', "would overwrite"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"prompts\.jsonl:3 .*{words}"):
        read_prompts(path)


def test_a_prompt_that_is_too_long_is_named_and_those_before_it_are_kept(texts: TextEngine, tmp_path: Path) -> None:
    path, target = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"prompt": "a"}] * 12 + [{"prompt": "a" * 500}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(DataError, match=r"prompts\.jsonl:13: the sequence would become longer"):
        run_batch_inference(texts, read_prompts(path), target, OPTIONS, {"model": "run"})
    assert not target.exists()
    assert (tmp_path / "answers.jsonl.part").read_bytes().count(b"\n") > 1


def test_tools_and_what_else_the_template_reads_reach_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kwargs = {"enable_thinking": False}
    rows = [
        {"messages": [user("2+2?")]},
        {"messages": [user("2+2?")], "tools": TOOLS, "chat_template_kwargs": kwargs},
        {"messages": [user("2+2?")], "tools": json.dumps(TOOLS), "chat_template_kwargs": json.dumps(kwargs)},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "thinking", "bytes", THINKING))
    texts = chat_engine(tokenizer)
    submitted: list[list[int]] = []
    submit = texts.submit

    def recorded(tokens: list[int], options: InferenceOptions, **further: Any) -> int:
        submitted.append(list(tokens))
        return submit(tokens, options, **further)

    monkeypatch.setattr(texts, "submit", recorded)
    run_batch_inference(texts, read_prompts(path), tmp_path / "answers.jsonl", OPTIONS, {"model": "run"})
    tokens = template_of(tokenizer).tokens
    full = tokens([user("2+2?")], opens_reply=True, tools=TOOLS, chat_template_kwargs=kwargs)
    assert submitted == [tokens([user("2+2?")], opens_reply=True), full, full]


def test_tools_that_the_template_does_not_write_are_refused_with_their_line(tmp_path: Path) -> None:
    path, line = tmp_path / "prompts.jsonl", {"messages": [user("2+2?")], "tools": TOOLS}
    path.write_text(json.dumps(line))
    texts = chat_engine(HuggingFaceTokenizer(save_tokenizer(tmp_path / "chatml", "bytes", CHATML)))
    with pytest.raises(DataError, match=r"prompts\.jsonl:1: the chat template does not write tools"):
        run_batch_inference(texts, read_prompts(path), tmp_path / "answers.jsonl", OPTIONS, {"model": "run"})
    path.write_text(json.dumps({**line, "tools": "add"}))
    with pytest.raises(DataError, match=r"prompts\.jsonl:1 cannot be read in column 'tools'"):
        read_prompts(path)
