"""Rows are read as they were meant: spellings of messages, speakers, columns, weights, numbers and tokens."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from kitforge.data import readers
from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.chat.example_cache import build_example_cache
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer
from kitforge.foundation.errors import DataError
from tests.data.chat.cases import CHATML, THINKING, assistant, save_tokenizer, user

TOKENIZER = ByteTokenizer()
CHAT, REPLY, NO = [user("Hi")], [assistant("Hello")], [assistant("No")]
OPENED = "\n\nHuman: Hi\n\nAssistant: "
BE_KIND = "\n\nSystem: Be kind"


def reader(columns: dict[str, str] | None = None, on_invalid: Any = "refuse") -> ChatDatasetReader:
    return ChatDatasetReader(TOKENIZER, template_of(TOKENIZER), columns, on_invalid)


def shown(example: TokenizedExample) -> str:
    """The text, with what is learnt in brackets."""
    parts, was = [], False
    for token, is_learnt in zip(example.tokens, example.loss_mask, strict=True):
        parts.append("" if is_learnt == was else "[" if is_learnt else "]")
        parts.append("|" if token == TOKENIZER.eos_id else chr(token))
        was = bool(is_learnt)
    return "".join(parts) + "]" * was


SPELLINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("demonstrations", {"messages": CHAT + REPLY}),
    "conversations": (
        "demonstrations", {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ),
    "a prompt and its completion": ("demonstrations", {"prompt": CHAT, "completion": REPLY}),
    "one message": ("demonstrations", {"prompt": CHAT, "completion": REPLY[0]}),
    "a pair": ("pairs", {"prompt": CHAT, "chosen": REPLY, "rejected": NO}),
    "whole conversations": ("pairs", {"chosen": CHAT + REPLY, "rejected": CHAT + NO}),
    "a judged completion": ("unpaired", {"prompt": CHAT, "completion": REPLY, "label": True}),
    "a conversation and replies": (
        "pairs", {"conversations": [{"from": "human", "value": "Hi"}],
                  "chosen": {"from": "gpt", "value": "Hello"}, "rejected": {"from": "gpt", "value": "No"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("spell", [json.dumps, lambda value: f" {json.dumps(value, indent=1)}\n", np.array])
def test_messages_spelt_as_json_or_in_an_array_are_messages(name: str, spell: Any) -> None:
    kind, row = SPELLINGS[name]
    respelt = {key: spell(value) if isinstance(value, (list, dict)) else value for key, value in row.items()}
    if spell is np.array and any(isinstance(value, dict) for value in row.values()):
        pytest.skip("an array of no dimension")
    assert list(getattr(reader(), kind)([respelt])) == list(getattr(reader(), kind)([row]))


def test_a_prompt_spelt_as_json_is_a_chat_for_rewards_too() -> None:
    (prompt,) = reader().prompts([{"prompt": json.dumps(CHAT)}])
    assert prompt.columns["prompt"] == CHAT and TOKENIZER.decode(prompt.tokens) == OPENED


@pytest.mark.parametrize("text", ['[{"name": "Alice"}]', "[1, 2]", "{}", "[]", "[not json]", '{"role"', "[x](y)"])
def test_json_that_is_no_messages_stays_a_text(text: str) -> None:
    (found,) = reader().demonstrations([{"prompt": "a", "completion": text}])
    assert shown(found) == f"a[{text}|]"


SINGLE_QUOTES = str(CHAT + REPLY)
NO_MESSAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a text": ("demonstrations", {"messages": "hello"}, "a text in column 'messages'"),
    "an empty text": ("demonstrations", {"messages": ""}, "a text in column 'messages'"),
    "half of JSON": ("demonstrations", {"messages": json.dumps(CHAT + REPLY)[:-1]}, "a text in column 'messages'"),
    "a text as a conversation": ("demonstrations", {"conversations": "hello"}, "a text in column"),
    "a text as a conversation of a pair": (
        "pairs", {"conversations": "Hi", "chosen": "a", "rejected": "b"}, "a text in column",
    ),
    "a list of Python": ("demonstrations", {"messages": SINGLE_QUOTES}, "Python list"),
    "a pair of Python": ("pairs", {"chosen": SINGLE_QUOTES, "rejected": str(CHAT + NO)}, "Python list"),
    "a prompt of Python": ("prompts", {"prompt": str(CHAT)}, "Python list"),
    "an array as Python prints it": (
        "demonstrations", {"messages": "[{'content': 'Hi', 'role': 'user'}\n {'content': 'a'}]"}, "Python list",
    ),
    "tokens that are flags": ("demonstrations", {"prompt": [True, False], "completion": "a"}, "column 'prompt'"),
    "an unknown speaker": ("demonstrations", {"conversations": [{"from": "narrator", "value": "x"}]}, "narrator"),
    "an unknown role": ("demonstrations", {"messages": [{"role": "narrator", "content": "x"}, *REPLY]}, "narrator"),
    "a token beyond the vocabulary": ("demonstrations", {"prompt": [1], "completion": [400]}, "does not know"),
    "a huge token": ("pairs", {"prompt": [1], "chosen": [99999], "rejected": [2]}, "does not know"),
    "a negative token": ("unpaired", {"prompt": [-1], "completion": [3], "label": True}, "does not know"),
    "an array with such a token": ("demonstrations", {"prompt": np.array([1]), "completion": [258]}, "does not know"),
    "a prompt with such a token": ("prompts", {"prompt": [70000]}, "does not know"),
    "half a character": ("demonstrations", {"text": "a\ud83d b"}, "surrogate"),
    "half a character in a message": ("demonstrations", {"messages": [user("\udc00"), *REPLY]}, "surrogate"),
    "half a character in a pair": ("pairs", {"prompt": "a", "chosen": "\ud83d", "rejected": "b"}, "surrogate"),
    "half a character in a prompt": ("prompts", {"prompt": "\ud83d"}, "surrogate"),
    "half a character in a system": ("demonstrations", {"messages": CHAT + REPLY, "system": "\ud83d"}, "surrogate"),
    "no number": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": float("nan")}, "finite"),
    "an infinite margin": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": -1e999}, "finite"),
    "a margin beyond floats": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 10**400}, "finite"),
    "too large a margin": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1e39}, "finite"),
    "a label that is not a number": ("unpaired", {"prompt": "a", "completion": "b", "label": float("nan")}, "verdict"),
    "half a weight": ("demonstrations", {"messages": [*CHAT, {**REPLY[0], "weight": 0.5}]}, "partly"),
    "a weight that is not a number": (
        "demonstrations", {"messages": [*CHAT, {**REPLY[0], "weight": float("nan")}]}, "partly",
    ),
    "no weight at all": ("demonstrations", {"messages": [*CHAT, {**REPLY[0], "weight": 0}]}, "nothing to learn"),
    "a history of texts": ("demonstrations", {"instruction": "a", "output": "b", "history": ["c"]}, "history"),
    "a system that is a list": ("demonstrations", {"messages": CHAT + REPLY, "system": [1]}, "system"),
    "a system beside tokens": ("demonstrations", {"prompt": [1], "completion": [2], "system": "x"}, "beside a system"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_MESSAGES)
def test_what_cannot_be_meant_is_refused_with_its_line_or_left_out(name: str, tmp_path: Path) -> None:
    kind, row, words = NO_MESSAGES[name]
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": True}
    sources: list[Any] = [[good, row]]
    if not any(isinstance(value, np.ndarray) for value in row.values()):
        sources.append(tmp_path / "rows.jsonl")
        sources[1].write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    for source, place in zip(sources, ("row 2", "rows.jsonl:2"), strict=False):
        with pytest.raises(DataError, match=words) as error:
            list(getattr(reader(), kind)(source))
        assert place in str(error.value)
        assert len(list(getattr(reader(on_invalid="skip"), kind)(source))) == 1


def test_a_cache_refuses_or_drops_such_rows_too(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": [1], "completion": [99999]}, {"text": "\ud83d"}]
    with pytest.raises(DataError, match="99999"):
        build_example_cache(reader(), TOKENIZER, "demonstrations", rows, tmp_path)
    assert len(build_example_cache(reader(on_invalid="skip"), TOKENIZER, "demonstrations", rows, tmp_path)) == 1


TURNS = "\n\nHuman: Hi\n\nAssistant: [Hello|]"
SYSTEM_TURNS = f"{BE_KIND}{TURNS}"
HISTORY = [["Old?", "Yes"], ["Sure?", "No"]]
PAST = "\n\nHuman: Old?\n\nAssistant: Yes|\n\nHuman: Sure?\n\nAssistant: No|"
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
CONTEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "messages": ({"messages": CHAT + REPLY}, SYSTEM_TURNS),
    "conversations": ({"conversations": SHAREGPT}, SYSTEM_TURNS),
    "an instruction": ({"instruction": "Hi", "output": "Hello"}, SYSTEM_TURNS),
    "a text prompt": ({"prompt": "Hi", "completion": "Hello"}, SYSTEM_TURNS),
    "a dialogue": ({"prompt": f"{OPENED}", "completion": "Hello"}, SYSTEM_TURNS),
    "a whole conversation": ({"prompt": "Hi", "completion": CHAT + REPLY}, SYSTEM_TURNS),
    "a system of its own": (
        {"messages": [{"role": "system", "content": "Be brief"}, *CHAT, *REPLY]}, f"\n\nSystem: Be brief{TURNS}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_system_column_is_the_first_message(name: str) -> None:
    row, wanted = CONTEXTS[name]
    (found,) = reader().demonstrations([{**row, "system": "Be kind"}])
    assert shown(found) == wanted
    bare = reader().demonstrations([{**row, "system": None, "history": []}])
    assert list(bare) == list(reader().demonstrations([row]))


def test_a_system_column_counts_in_pairs_verdicts_and_prompts() -> None:
    parts = {"question": "Hi", "system": "Be kind"}
    named = reader({"prompt": "question"})
    (pair,) = named.pairs([{**parts, "chosen": "Hello", "rejected": "No"}])
    (whole,) = reader().pairs([{"system": "Be kind", "chosen": CHAT + REPLY, "rejected": CHAT + NO}])
    (judged,) = named.unpaired([{**parts, "completion": "Hello", "label": 0}])
    assert [shown(each) for each in (pair.chosen, whole.chosen, judged.completion)] == [SYSTEM_TURNS] * 3
    for row in ({**parts}, {**parts, "chosen": "Hello", "rejected": "No"}):
        (prompt,) = named.prompts([row])
        assert TOKENIZER.decode(prompt.tokens) == f"{BE_KIND}{OPENED}"


@pytest.mark.parametrize("spell", [list, json.dumps])
def test_a_history_is_what_was_said_before_and_is_not_learnt(spell: Any) -> None:
    row = {"instruction": "Hi", "output": "Hello", "history": spell(HISTORY), "system": "Be kind"}
    (found,) = reader().demonstrations([row])
    assert shown(found) == f"{BE_KIND}{PAST}{TURNS}"
    (prompt,) = reader().prompts([row])
    assert prompt.messages is not None and [each["role"] for each in prompt.messages][:3] == [
        "system",
        "user",
        "assistant",
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "abc", "system": "x"},
        {"text": "abc", "weight": 0},
        {"prompt": "a", "completion": "b", "tools": [{"name": "add"}]},
        {"messages": CHAT + REPLY, "train": False},
    ],
)
def test_a_column_with_a_meaning_that_is_not_read_is_named_once(
    row: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    name = list(row)[-1]
    assert len(list(reader().demonstrations([row, row]))) == 2
    assert caplog.text.count(f"has {name} beside") == 1


@pytest.mark.parametrize("speaker", ["gpt", "chatgpt", "bing", "bard", "assistant", "model", "GPT", "Assistant"])
@pytest.mark.parametrize("key", ["from", "role"])
def test_every_name_of_the_model_is_the_assistants(speaker: str, key: str) -> None:
    row = {"conversations": [{key: "human", "value": "Hi"}, {key: speaker, "value": "Hello"}]}
    (found,) = reader().demonstrations([row])
    assert shown(found) == TURNS


def test_results_of_tools_and_systems_have_several_names() -> None:
    speakers = {"system": "Be kind", "user": "Hi", "observation": "4", "tool": "5", "gpt": "Hello"}
    talk = [{"from": speaker, "value": text} for speaker, text in speakers.items()]
    (found,) = reader().demonstrations([{"conversations": talk}])
    assert shown(found) == f"{BE_KIND}\n\nHuman: Hi\n\nTool: 4\n\nTool: 5\n\nAssistant: [Hello|]"


def test_a_role_that_the_template_names_is_known(tmp_path: Path) -> None:
    source = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.role == 'narrator' %}{% endif %}"
    )
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    row = {"messages": [{"role": "narrator", "content": "Once"}, *CHAT, *REPLY]}
    (found,) = ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations([row])
    assert "narrator" in tokenizer.decode(found.tokens)


@pytest.mark.parametrize("flag", [{"weight": 0}, {"weight": 0.0}, {"weight": False}, {"train": False}, {"train": 0}])
def test_a_message_that_is_not_to_be_learnt_is_not(flag: dict[str, Any]) -> None:
    talk = [*CHAT, {**NO[0], **flag}, *CHAT, {**REPLY[0], "weight": 1, "train": True}, *CHAT, {**NO[0], **flag}]
    (found,) = reader().demonstrations([{"messages": talk}])
    assert shown(found) == f"{OPENED}No|{TURNS}{OPENED}No|"
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No", **flag}, *SHAREGPT]
    (found,) = reader().demonstrations([{"conversations": shared}])
    assert shown(found) == f"{OPENED}No|{TURNS}"


def test_an_instruction_is_asked_by_the_chat_template(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", CHATML))
    chats = ChatDatasetReader(tokenizer, template_of(tokenizer))
    (found,) = chats.demonstrations([{"instruction": "Add.", "input": "1 2", "output": "3"}])
    (wanted,) = chats.demonstrations([{"messages": [user("Add.\n1 2"), assistant("3")]}])
    assert found == wanted
    (prompt,) = chats.prompts([{"instruction": "Add.", "input": "1 2", "output": "3"}])
    assert prompt.tokens == found.tokens[: len(prompt.tokens)]


def test_no_source_is_not_a_source_of_that_name() -> None:
    pairs = reader().pairs([{"prompt": "a", "chosen": "b", "rejected": "c", "source": each} for each in (None, "x", 3)])
    assert [each.source for each in pairs] == ["", "x", "3"]


@pytest.mark.parametrize("margin", [1, 0.5, np.float32(0.5), np.int64(2), None, -1e30])
def test_finite_margins_are_read(margin: Any) -> None:
    (pair,) = reader().pairs([{"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}])
    assert pair.margin == pytest.approx(0.0 if margin is None else float(margin))


@pytest.mark.parametrize(
    "tokens", [np.array([97, 98]), [np.int64(97), 98], (97, np.uint16(98)), torch.tensor([97, 98])]
)
def test_tokens_may_be_of_numpy(tokens: Any) -> None:
    (found,) = reader().demonstrations([{"prompt": tokens, "completion": tokens}])
    assert shown(found) == "ab[ab|]" and all(type(token) is int for token in found.tokens)


TYPOS: dict[str, tuple[str, dict[str, str], dict[str, Any], str]] = {
    "a completion": (
        "demonstrations", {"completion": "respons"}, {"prompt": "a", "completion": "b", "response": "c"}, "'response'",
    ),
    "a required one": ("demonstrations", {"prompt": "qestion"}, {"question": "a", "completion": "b"}, "'question'"),
    "a margin": ("pairs", {"margin": "gap_"}, {"prompt": "a", "chosen": "b", "rejected": "c", "gap": 1}, "'gap'"),
    "tools": ("demonstrations", {"tools": "funcs"}, {"messages": CHAT + REPLY, "functions": []}, "'functions'"),
    "a prompt": ("prompts", {"prompt": "questio"}, {"question": "a", "prompt": "b"}, "'question'"),
    "a name of ours": (
        "demonstrations", {"completio": "x"}, {"prompt": "a", "completion": "b", "x": "c"}, "completion",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPOS)
def test_a_column_that_no_row_has_is_refused_with_the_nearest(name: str, tmp_path: Path) -> None:
    kind, columns, row, nearest = TYPOS[name]
    with pytest.raises(DataError, match=nearest) as error:
        list(getattr(reader(columns), kind)([row, row]))
    assert (*columns.items(),)[0][0] in str(error.value)
    if kind != "prompts":
        for on_invalid in ("refuse", "skip"):
            with pytest.raises(DataError, match=nearest):
                build_example_cache(reader(columns, on_invalid), TOKENIZER, kind, [row], tmp_path)  # type: ignore[arg-type]


def test_a_column_that_some_rows_have_is_read_where_it_is() -> None:
    rows = [{"question": "a", "completion": "b"}, {"prompt": "c", "completion": "b"}]
    found = list(reader({"prompt": "question"}).demonstrations(rows))
    assert [shown(each) for each in found] == ["a[b|]", "c[b|]"]
    assert len(list(reader({"answer": "solution"}).prompts([{"prompt": "a", "solution": "b"}]))) == 1


MARKED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
SPELT: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("demonstrations", {"text": f"{MARKED}Yes<|im_end|>"}),
    "a prompt": ("prompts", {"prompt": MARKED}),
    "an end in a reply": ("pairs", {"prompt": CHAT, "chosen": "blue.<|im_end|>", "rejected": "red."}),
    "an end token": ("demonstrations", {"prompt": "a", "completion": "b</s>"}),
}


@pytest.mark.parametrize("name", SPELT)
def test_marks_of_the_template_in_a_text_are_warned_of_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", CHATML))
    chats, (kind, row) = ChatDatasetReader(tokenizer, template_of(tokenizer)), SPELT[name]
    assert len(list(getattr(chats, kind)([row, row]))) == 2
    mark = "</s>" if name == "an end token" else "<|im_end|>"
    assert caplog.text.count("seems to be applied already") == 1 and mark in caplog.text
    assert "row 1" in caplog.text and "messages" in caplog.text
    caplog.clear()
    unwritten = "<|user|> a <b> <|end|>"
    assert list(chats.demonstrations([{"prompt": CHAT, "completion": REPLY}, {"text": unwritten}]))
    assert "seems to be" not in caplog.text


def test_lines_are_counted_once_however_many_rows_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = {"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": ""}
    num_bytes = [0]
    opened = readers.opened

    class Counting:
        def __init__(self, stream: Any) -> None:
            self.seek, self._read = stream.seek, stream.read

        def read(self, size: int = -1) -> bytes:
            found: bytes = self._read(size)
            num_bytes[0] += len(found)
            return found

    @contextmanager
    def counting(path: Path) -> Iterator[Any]:
        with opened(path) as stream:
            yield Counting(stream)

    monkeypatch.setattr(readers, "opened", counting)
    monkeypatch.setattr(readers, "SHARD_BYTES", 2000)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [good, *[bad] * 999]))
    num_shards, size = len(readers.row_file_shards(file)), file.stat().st_size
    num_bytes[0] = 0
    assert len(list(reader(on_invalid="skip").demonstrations(file))) == 1
    # One pass to cut the file, one to read it and one to count its lines; the cuts read ahead.
    assert num_shards > 9 and num_bytes[0] <= 3 * size + num_shards * size // 2


def test_a_line_is_named_by_its_number_in_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SHARD_BYTES", 200)
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": "a", "completion": "b" * (number % 7 + 1)}) for number in range(60)]
    file.write_text("\n\n".join([*lines, json.dumps({"prompt": "a", "completion": ""})]))
    with pytest.raises(DataError, match=r"rows\.jsonl:121 "):
        list(reader().demonstrations(file))
    assert len(readers.row_file_shards(file)) > 3


MANY: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "messages": (
        "demonstrations",
        [{"messages": [*CHAT, {**NO[0], "weight": 0}, *CHAT, *REPLY], "system": "Be kind", "tools": "[]"}] * 2,
    ),
    "JSON": ("demonstrations", [{"messages": json.dumps(CHAT + REPLY)}, {"messages": json.dumps(CHAT + NO)}]),
    "an alpaca": ("demonstrations", [{"instruction": "a", "input": "b", "output": "c", "history": HISTORY}] * 2),
    "an open dialogue": ("pairs", [{"prompt": OPENED.strip(" "), "chosen": " Hello", "rejected": " No"}] * 2),
    "pairs of texts": ("pairs", [{"chosen": "A:\nyes", "rejected": "A:\nno", "margin": 1.5, "source": None}] * 2),
    "a prefilled prompt": ("unpaired", [{"prompt": CHAT + NO, "completion": " way", "label": True}] * 2),
}


@pytest.mark.parametrize("name", MANY)
def test_rows_mean_the_same_wherever_they_are(name: str, tmp_path: Path) -> None:
    kind, rows = MANY[name]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "rows.parquet")
    read = getattr(reader(), kind)
    wanted = list(read(rows))
    for file in ("rows.jsonl", "rows.json", "rows.parquet"):
        assert list(read(tmp_path / file)) == wanted, file
    for given in (
        table,
        table.to_iterable_dataset(),
        table.with_format("numpy"),
        table.with_format("torch"),
        iter(rows),
    ):
        assert list(read(given)) == wanted, type(given)


@pytest.mark.parametrize("flag", ["weight", "train", "loss"])
@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_reply_with_a_flag_is_not_trained_on(flag: str, key: str) -> None:
    talk = [user("Hi"), {**assistant("Draft"), flag: False}, user("So"), {**assistant("Good"), flag: True}]
    (found,) = reader().demonstrations([{key: talk}])
    assert "[Good|]" in shown(found)
    assert "[Draft|]" not in shown(found)
    with pytest.raises(DataError, match="partly trained on"):
        list(reader().demonstrations([{key: [user("Hi"), {**assistant("Draft"), flag: 0.5}]}]))


def test_keys_of_messages_that_nobody_reads_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    template = CHATML.replace("m['content']", "m['content'] + m.get('sign', '')")
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", template))
    talk = [user("Hi"), {**assistant("Hello"), "loss_scale": 0.0, "sign": "!", "loss": None, "tool_call_id": "7"}]
    list(ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations([{"messages": talk}] * 2))
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "row 1 of the data has a message with 'loss_scale'"
    ]


@pytest.mark.parametrize("said", [("a", "Yes", "?", "Yes"), ("a", ".", ".", "."), ("a", "Yes", "b", "Yes")])
def test_replies_that_are_alike_are_told_apart_where_earlier_thoughts_are_dropped(said: Any, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", THINKING))
    talk = [(assistant if number % 2 else user)(text) for number, text in enumerate(said)]
    (found,) = ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations([{"messages": talk}])
    learnt = [token for token, is_learnt in zip(found.tokens, found.loss_mask, strict=True) if is_learnt]
    first, last = f"{said[1]}<|im_end|>\n", f"<think>\n\n</think>\n\n{said[3]}<|im_end|>\n"
    assert tokenizer._tokenizer.decode(learnt, skip_special_tokens=False) == first + last


def test_a_renamed_column_is_not_read_again_under_its_own_name() -> None:
    (asked,) = reader({"prompt": "system", "completion": "reply"}).demonstrations([{"system": "Hi", "reply": "Hello"}])
    assert shown(asked) == "Hi[Hello|]"
    (pair,) = reader({"prompt": "history"}).pairs([{"history": "Hi", "chosen": "yes", "rejected": "no"}])
    assert shown(pair.chosen) == "Hi[yes|]"
    # Rewards read every column of the row.
    (question,) = reader({"prompt": "system"}).prompts([{"system": "Hi", "answer": 4}])
    assert question.columns == {"prompt": "Hi", "system": "Hi", "answer": 4}


def test_the_last_message_of_a_row_with_a_verdict_is_what_is_judged() -> None:
    for row in ({"messages": CHAT + REPLY}, {"conversations": SPELLINGS["messages"][1]["messages"]}):
        (found,) = reader().unpaired([{**row, "label": False}])
        (wanted,) = reader().unpaired([{"prompt": CHAT, "completion": REPLY, "label": False}])
        assert found == wanted
    with pytest.raises(DataError, match=r"row 1 of the data has no completion in its messages\n.*user last"):
        list(reader().unpaired([{"messages": CHAT, "label": True}]))


@pytest.mark.parametrize("rejected", ["No", NO])
def test_a_conversation_beside_a_rejected_response_is_a_pair(rejected: Any) -> None:
    (found,) = reader().pairs([{"messages": CHAT + REPLY, "rejected_response": rejected}])
    (wanted,) = reader().pairs([{"prompt": CHAT, "chosen": REPLY, "rejected": NO}])
    assert found == wanted


@pytest.mark.parametrize("spec", ["dataset", "parquet", "jsonl"])
def test_tools_have_no_nulls_that_arrow_filled_in(spec: str, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "tokenizer", "bytes", THINKING))
    rows = []
    for name in ("city", "zone"):
        properties = {name: {"type": "string", "default": "x"}}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
        call = {"type": "function", "function": {"name": "f", "arguments": {name: "Rome"}}}
        rows.append({"messages": [user("Hi"), assistant("So", tool_calls=[call])], "tools": [tool]})
    columns = {"messages": "messages"}
    wanted = list(ChatDatasetReader(tokenizer, template_of(tokenizer), columns).demonstrations(rows))
    given: Any = datasets.Dataset.from_list(rows)
    if spec == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), given := tmp_path / "a.parquet")
    if spec == "jsonl":
        # What JSON says is so: null is a value there.
        rows[0]["tools"][0]["function"]["parameters"]["properties"]["zone"] = None
        (given := tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = list(ChatDatasetReader(tokenizer, template_of(tokenizer), columns).demonstrations(given))
    assert [each.tokens for each in found] == [each.tokens for each in wanted] or spec == "jsonl"
    assert ("null" in tokenizer.decode(found[0].tokens)) is (spec == "jsonl")
    assert "zone" not in tokenizer.decode(found[0].tokens) or spec == "jsonl"
