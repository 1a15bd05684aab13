"""Every kind of row gives the tokens that it means, and a row that means nothing is named."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample, iter_texts, messages_of
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer
from kitforge.foundation.errors import DataError
from tests.data.chat.cases import CALL, CHATML, THINKING, TOOLS, save_tokenizer

SHARED = Path(__file__).parents[4] / "shared" / "data"
TOKENIZER = ByteTokenizer()
CHAT = [{"role": "user", "content": "Hi"}]
REPLY = [{"role": "assistant", "content": "Hello"}]


def reader(columns: Mapping[str, str] | None = None) -> ChatDatasetReader:
    return ChatDatasetReader(TOKENIZER, template_of(TOKENIZER), columns)


def learnt(response: TokenizedExample) -> str:
    """What is to be learnt, with a bar for the end."""
    kept = [token for token, is_learnt in zip(response.tokens, response.loss_mask, strict=True) if is_learnt]
    return "".join("|" if token == TOKENIZER.eos_id else chr(token) for token in kept)


def given(response: TokenizedExample) -> str:
    kept = [token for token, is_learnt in zip(response.tokens, response.loss_mask, strict=True) if not is_learnt]
    return TOKENIZER.decode(kept)


DEMONSTRATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "text": ({"text": "abc"}, "", "abc|"),
    "prompt and completion": ({"prompt": "ab", "completion": "cd"}, "ab", "cd|"),
    "tokens": ({"prompt": [97, 98], "completion": [99]}, "ab", "c|"),
    "messages": ({"messages": CHAT + REPLY}, "\n\nHuman: Hi\n\nAssistant: ", "Hello|"),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]},
                *REPLY,
            ]
        },
        "\n\nHuman: Hi\n\nAssistant: ",
        "Hello|",
    ),
    "chat prompt": ({"prompt": CHAT, "completion": REPLY}, "\n\nHuman: Hi\n\nAssistant: ", "Hello|"),
    "alpaca": (
        {"instruction": "Add", "input": "1 2", "output": "3"},
        "\n\nHuman: Add\n1 2\n\nAssistant: ",
        "3|",
    ),
    "alpaca without input": (
        {"instruction": "Say", "input": "", "output": "so"},
        "\n\nHuman: Say\n\nAssistant: ",
        "so|",
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        "\n\nHuman: Hi\n\nAssistant: ",
        "Hello|",
    ),
    "alpaca as on the hub": (
        {"instruction": "Say", "input": "", "output": "so", "text": "### Instruction:\nSay\n### Response:\nso"},
        "\n\nHuman: Say\n\nAssistant: ",
        "so|",
    ),
    "null beside text": ({"prompt": None, "completion": None, "text": "abc"}, "", "abc|"),
    "a text and a chat": ({"prompt": "Hi", "completion": REPLY}, "\n\nHuman: Hi\n\nAssistant: ", "Hello|"),
    "a text and a whole chat": (
        {"prompt": "Hi", "completion": [*CHAT, *REPLY]},
        "\n\nHuman: Hi\n\nAssistant: ",
        "Hello|",
    ),
    "two replies": (
        {"messages": [*CHAT, *REPLY, *CHAT, *REPLY]},
        "\n\nHuman: Hi\n\nAssistant: \n\nHuman: Hi\n\nAssistant: ",
        "Hello|Hello|",
    ),
}


@pytest.mark.parametrize("name", DEMONSTRATIONS)
def test_a_demonstration_is_learnt_where_the_model_speaks(name: str) -> None:
    row, before, wanted = DEMONSTRATIONS[name]
    (response,) = reader().demonstrations([row])
    assert (given(response), learnt(response)) == (before, wanted)


NO = [{"role": "assistant", "content": "No"}]
OPENED = "\n\nHuman: Hi\n\nAssistant: "
SHAREGPT = {
    "conversations": [{"from": "human", "value": "Hi"}],
    "chosen": {"from": "gpt", "value": "Hello"},
    "rejected": {"from": "gpt", "value": "No"},
}
SKY = {"chosen": "the sky is blue", "rejected": "the sky is black"}
PAIRS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "text": ({"prompt": "ab", "chosen": "cd", "rejected": "e"}, "ab", "cd|", "e|"),
    "implicit prompt": (SKY, "the sky is ", "blue|", "black|"),
    "chat": ({"chosen": [*CHAT, *REPLY], "rejected": [*CHAT, *NO]}, OPENED, "Hello|", "No|"),
    "chat prompt and text": ({"prompt": CHAT, "chosen": "Hello", "rejected": "No"}, OPENED, "Hello|", "No|"),
    "hh": ({"chosen": f"{OPENED}Hello", "rejected": f"{OPENED}No"}, OPENED, "Hello|", "No|"),
    "sharegpt": (SHAREGPT, OPENED, "Hello|", "No|"),
    "ultrafeedback": ({"prompt": "Hi", "chosen": [*CHAT, *REPLY], "rejected": [*CHAT, *NO]}, OPENED, "Hello|", "No|"),
    "a text and chats": ({"prompt": "Hi", "chosen": REPLY, "rejected": NO}, OPENED, "Hello|", "No|"),
    "a chat and whole chats": (
        {"prompt": CHAT, "chosen": [*CHAT, *REPLY], "rejected": [*CHAT, *NO]},
        OPENED,
        "Hello|",
        "No|",
    ),
    "a null prompt": ({"prompt": None, "chosen": [*CHAT, *REPLY], "rejected": [*CHAT, *NO]}, OPENED, "Hello|", "No|"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_shares_its_prompt(name: str) -> None:
    row, prompt, chosen, rejected = PAIRS[name]
    (pair,) = reader().pairs([{**row, "margin": 2, "source": "here"}])
    assert given(pair.chosen) == given(pair.rejected) == prompt
    assert (learnt(pair.chosen), learnt(pair.rejected)) == (chosen, rejected)
    assert (pair.margin, pair.source) == (2.0, "here")


def test_replies_within_a_prompt_are_not_learnt() -> None:
    # NVIDIA-NeMo/RL #2176 trained on them.
    row = {"prompt": [*CHAT, *REPLY, *CHAT], "chosen": "Yes", "rejected": "No"}
    (pair,) = reader().pairs([row])
    assert learnt(pair.chosen) == "Yes|"


def test_single_verdicts_and_prompts_are_read() -> None:
    (judged,) = reader().unpaired([{"prompt": "a", "completion": "b", "label": False}])
    assert (learnt(judged.completion), judged.is_desirable) == ("b|", False)
    (prompt,) = reader().prompts([{"prompt": CHAT, "answer": "4"}])
    assert TOKENIZER.decode(prompt.tokens) == "\n\nHuman: Hi\n\nAssistant: "
    assert prompt.columns["answer"] == "4"


def test_the_prompt_of_a_pair_is_what_both_begin_with() -> None:
    (prompt,) = reader().prompts([{"chosen": f"{OPENED}Hello", "rejected": f"{OPENED}No", "answer": "4"}])
    assert TOKENIZER.decode(prompt.tokens) == OPENED
    assert prompt.columns["answer"] == "4"


def test_the_prompt_of_ultrafeedback_is_the_chat_that_both_begin_with() -> None:
    (prompt,) = reader().prompts([{"prompt": "Hi", "chosen": [*CHAT, *REPLY], "rejected": [*CHAT, *NO]}])
    assert TOKENIZER.decode(prompt.tokens) == OPENED


def test_what_is_not_read_beside_prompt_and_completion_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    row = {"prompt": "a", "completion": "b", "text": "zzz", "messages": CHAT}
    assert len(list(reader().demonstrations([row, row]))) == 2
    assert caplog.text.count("messages and text beside") == 1


def test_a_call_in_sharegpt_is_the_assistants(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", THINKING))
    call = json.dumps(CALL["function"])
    talk = [{"from": "human", "value": "2+2?"}, {"from": "function_call", "value": call}]
    row = {"conversations": [*talk, {"from": "observation", "value": "4"}, {"from": "gpt", "value": "Four"}]}
    (response,) = ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations([row])
    kept = [token for token, is_learnt in zip(response.tokens, response.loss_mask, strict=True) if is_learnt]
    assert '"arguments": {"a": 1' in tokenizer.decode(kept) and "Four" in tokenizer.decode(kept)
    assert "<tool_response>4" in tokenizer.decode(response.tokens) and "<tool_response>" not in tokenizer.decode(kept)


def test_tools_and_what_else_a_template_reads_are_columns(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", THINKING))
    template = template_of(tokenizer)
    chats = ChatDatasetReader(tokenizer, template, {"tools": "functions"})
    kwargs = {"enable_thinking": False}
    for tools, more in ((TOOLS, kwargs), (json.dumps(TOOLS), json.dumps({**kwargs, "of_another_row": None}))):
        row = {"functions": tools, "chat_template_kwargs": more}
        (response,) = chats.demonstrations([{"messages": CHAT + REPLY, **row}])
        assert list(response.tokens) == template.tokens(CHAT + REPLY, tools=TOOLS, chat_template_kwargs=kwargs)
        (prompt,) = chats.prompts([{"prompt": CHAT, **row}])
        wanted = template.tokens(CHAT, opens_reply=True, tools=TOOLS, chat_template_kwargs=kwargs)
        assert list(prompt.tokens) == wanted and "<think>\n\n</think>" in tokenizer.decode(wanted)
        (pair,) = chats.pairs([{"prompt": CHAT, "chosen": REPLY, "rejected": NO, **row}])
        assert '"name": "add"' in tokenizer.decode(pair.rejected.tokens)


TEXTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "text": ({"text": "abc", "other": "x"}, ["abc"]),
    "messages": ({"messages": CHAT + REPLY}, ["Hi", "Hello"]),
    "a pair": ({"chosen": "cd", "rejected": "e"}, ["cd", "e"]),
    "sharegpt": (SHAREGPT, ["Hi", "Hello", "No"]),
    "tokens": ({"prompt": [97, 98], "completion": "c"}, ["c"]),
    "another name": ({"question": "2+2?", "answer": "4"}, ["2+2?"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_everything_that_is_said_is_there_for_a_tokenizer(name: str) -> None:
    row, wanted = TEXTS[name]
    assert list(iter_texts([row], {"prompt": "question"})) == wanted


def test_columns_of_other_names_are_mapped() -> None:
    (prompt,) = reader({"prompt": "question"}).prompts([{"question": "2+2?", "answer": "4"}])
    assert TOKENIZER.decode(prompt.tokens) == "2+2?"


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "a missing column": ("pairs", {"prompt": "a", "chosen": "b", "rejcted": "c"}, "rejected"),
    "an empty chosen completion": ("pairs", {"prompt": "a", "chosen": "", "rejected": "c"}, "empty completion"),
    "a completion preferred to itself": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "b"}, "to itself"),
    "a number for a text": ("demonstrations", {"prompt": "a", "completion": 3}, "completion"),
    "no reply": ("demonstrations", {"messages": CHAT}, "nothing to learn"),
    "a message without a role": ("demonstrations", {"messages": [{"content": "x"}]}, "role"),
    "no verdict": ("unpaired", {"prompt": "a", "completion": "b", "label": "good"}, "verdict"),
    "an empty text": ("demonstrations", {"text": ""}, "empty text"),
    "no messages": ("demonstrations", {"messages": []}, "empty messages"),
    "a null completion": ("demonstrations", {"prompt": "a", "completion": None}, "null in column 'completion'"),
    "an empty completion": ("demonstrations", {"prompt": "a", "completion": ""}, "empty completion"),
    "no replies": ("demonstrations", {"prompt": CHAT, "completion": []}, "empty completion"),
    "another prompt": ("pairs", {"prompt": "a", "chosen": CHAT + REPLY, "rejected": CHAT + NO}, "another prompt"),
    "tokens beside a chat": ("demonstrations", {"prompt": [1, 2], "completion": REPLY}, "beside tokens"),
    "a chat beside tokens": ("demonstrations", {"prompt": CHAT, "completion": [1, 2]}, "beside messages"),
    "tools that are none": ("demonstrations", {"messages": CHAT + REPLY, "tools": "add"}, "column 'tools'"),
    "a tool that is none": ("demonstrations", {"messages": CHAT + REPLY, "tools": ["add"]}, "column 'tools'"),
    "kwargs in a list": ("prompts", {"prompt": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "a call in words": (
        "demonstrations",
        {"messages": [*CHAT, {"role": "function_call", "content": "add"}]},
        "function_call",
    ),
    "an empty prompt": ("prompts", {"prompt": ""}, "empty prompt"),
    "a margin in words": ("pairs", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}, "margin"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_row_that_cannot_be_used_is_named(name: str, tmp_path: Path) -> None:
    kind, row, words = WRONG[name]
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": True}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (good, row)))
    with pytest.raises(DataError, match=words) as error:
        list(getattr(reader(), kind)(file))
    assert "rows.jsonl:2" in str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_such_rows_are_left_out_and_counted_where_that_was_asked_for(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    kind, row, words = WRONG[name]
    good = {"prompt": "a", "chosen": "b", "rejected": "c", "completion": "d", "label": True}
    dropping = ChatDatasetReader(TOKENIZER, template_of(TOKENIZER), on_invalid="skip")
    assert list(getattr(dropping, kind)([good, row, good])) == list(getattr(reader(), kind)([good, good]))
    assert "1 of 3 rows" in caplog.text and words in caplog.text
    with pytest.raises(DataError, match=words):
        list(getattr(dropping, kind)([row]))


def test_a_dialogue_that_goes_on_where_the_other_ends_is_no_pair() -> None:
    row = {"chosen": f"{OPENED}Hello", "rejected": f"{OPENED}Hello\n\nHuman: Yes"}
    with pytest.raises(DataError, match="empty completion"):
        list(reader().pairs([row]))


@pytest.mark.parametrize("spec", [[], [3], "missing.jsonl"])
def test_no_rows_at_all_are_refused(spec: object) -> None:
    with pytest.raises(DataError):
        list(reader().prompts(spec))


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match="holds texts"):
        list(reader().prompts(tmp_path / "a.txt"))


def test_files_of_every_format_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    wanted = list(reader().demonstrations(rows))
    for name in ("rows.jsonl", "rows.json", "rows.jsonl.gz"):
        assert list(reader().demonstrations(tmp_path / name)) == wanted


def test_a_spelt_dialogue_is_its_messages() -> None:
    found = messages_of("\n\nHuman: a\nb\n\nAssistant: c\n\nHuman: d\n\nAssistant: e")
    assert [(each["role"], each["content"]) for each in found] == [
        ("user", "a\nb"), ("assistant", "c"), ("user", "d"), ("assistant", "e"),
    ]  # fmt: skip


def test_thoughts_and_calls_are_learnt_and_a_null_content_is_none(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", THINKING))
    chats = ChatDatasetReader(tokenizer, template_of(tokenizer))
    call = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    thought = {"prompt": CHAT, "completion": [{"role": "assistant", "content": "<think>a</think> b"}]}
    for row, wanted in (({"messages": call}, '"arguments": {"a": 1'), (thought, "<think>\na\n</think>\n\n b")):
        (response,) = chats.demonstrations([row])
        kept = [token for token, is_learnt in zip(response.tokens, response.loss_mask, strict=True) if is_learnt]
        assert wanted in tokenizer.decode(kept) and kept.count(tokenizer.special_tokens["<|im_end|>"]) == 1
        assert "Hi" not in tokenizer.decode(kept)


def test_a_template_for_texts_is_given_the_text_of_parts(tmp_path: Path) -> None:
    source = THINKING.replace(
        "{{- '<|im_start|>' + m.role", "{{- '' if m.content is not string else '<|im_start|>' + m.role"
    )
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    asked: list[Any] = [{"role": "user", "content": content} for content in ("Hi", [{"type": "text", "text": "Hi"}])]
    first, second = ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations(
        [{"messages": [each, *REPLY]} for each in asked]
    )
    assert first == second and "Hi" in tokenizer.decode(first.tokens)


def test_a_null_content_is_an_empty_one_to_a_template_that_reads_it(tmp_path: Path) -> None:
    source = THINKING.replace("m.content or ''", "m.content + ''")
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    found = [
        next(ChatDatasetReader(tokenizer, template_of(tokenizer)).demonstrations([{"messages": [*CHAT, reply]}]))
        for reply in ({"role": "assistant", "content": content, "tool_calls": [CALL]} for content in (None, ""))
    ]
    assert found[0] == found[1]


def test_a_response_that_begins_with_white_space_is_learnt_whole(tmp_path: Path) -> None:
    # Its first token may lie across the end of the prompt.
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", CHATML))
    (pair,) = ChatDatasetReader(tokenizer, template_of(tokenizer)).pairs(
        [{"prompt": CHAT, "chosen": "\n b", "rejected": "c"}]
    )
    kept = [token for token, is_learnt in zip(pair.chosen.tokens, pair.chosen.loss_mask, strict=True) if is_learnt]
    assert tokenizer.decode(kept) == "\n\n b\n"


@pytest.mark.skipif(not SHARED.exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("kind", "file", "columns"),
    [
        ("pairs", "hh_rlhf/helpful_test.jsonl.gz", {"source": "tranche"}),
        ("pairs", "dpo_en_demo/train.jsonl.gz", {}),
        ("demonstrations", "alpaca_demo/alpaca_en_demo.jsonl.gz", {}),
        ("prompts", "hh_rlhf/helpful_test.jsonl.gz", {}),
        ("prompts", "gsm8k/test.jsonl.gz", {"prompt": "question"}),
    ],
)
def test_real_rows_are_read(kind: str, file: str, columns: dict[str, str]) -> None:
    with gzip.open(SHARED / file) as lines:
        rows = [json.loads(line) for line in lines][:200]
    found = list(getattr(reader(columns), kind)(rows))
    assert len(found) == len(rows)
