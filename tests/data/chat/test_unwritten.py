"""What a chat template leaves out of a row is refused by name, as it would be lost; blocks belong to their replies."""

from pathlib import Path
from typing import Any

import pytest

from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer, Tokenizer
from kitforge.foundation.errors import DataError
from tests.data.chat.cases import CALL, CHATML, MERGING, THINKING, TOOL, TOOLS, assistant, save_tokenizer, user

# Trims contents, writes calls instead of contents, and drops thoughts of earlier turns.
TRIMMING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes what users and assistants say, and nothing of others.
TWO_ROLES = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    sources = {"chatml": CHATML, "thinking": THINKING, "trimming": TRIMMING, "two roles": TWO_ROLES, "merging": MERGING}
    folders = {name: save_tokenizer(tmp_path_factory.mktemp("t"), "bytes", each) for name, each in sources.items()}
    return {"plain": ByteTokenizer(), **{name: HuggingFaceTokenizer(each) for name, each in folders.items()}}


def reader(tokenizer: Tokenizer, on_invalid: Any = "refuse") -> ChatDatasetReader:
    return ChatDatasetReader(tokenizer, template_of(tokenizer), on_invalid=on_invalid)


def learnt(example: TokenizedExample, tokenizer: HuggingFaceTokenizer) -> str:
    kept = [token for token, is_learnt in zip(example.tokens, example.loss_mask, strict=True) if is_learnt]
    return str(tokenizer._tokenizer.decode(kept, skip_special_tokens=False))


CALLED = assistant(None, tool_calls=[CALL])
THOUGHT = assistant("4", reasoning_content="hm")
SHAREGPT_CALL = [{"from": "human", "value": "2+2?"}, {"from": "function_call", "value": '{"name": "add"}'}]
OPENAI_CALL = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}
LOST: dict[str, tuple[str, dict[str, Any], str]] = {
    "a call": ("chatml", {"messages": [user("2+2?"), CALLED, TOOL, assistant("4")]}, "tool_calls"),
    "a call beside a text": ("chatml", {"messages": [user("2+2?"), {**CALLED, "content": "Let me see"}]}, "tool_calls"),
    "a call of ShareGPT": ("chatml", {"conversations": SHAREGPT_CALL}, "tool_calls"),
    "a call as OpenAI had it": ("chatml", {"messages": [user("2+2?"), OPENAI_CALL]}, "tool_calls"),
    "a call within a prompt": (
        "chatml", {"prompt": [user("2+2?"), CALLED, TOOL], "completion": [assistant("4")]}, "tool_calls",
    ),
    "thoughts": ("chatml", {"messages": [user("2+2?"), THOUGHT]}, "reasoning_content"),
    "thoughts alone": ("chatml", {"messages": [user("2+2?"), assistant(None, thinking="hm")]}, "thinking"),
    "tools": ("chatml", {"messages": [user("2+2?"), assistant("4")], "tools": TOOLS}, "tools"),
    "tools without a template": ("plain", {"messages": [user("2+2?"), assistant("4")], "tools": TOOLS}, "tools"),
    "thoughts without a template": ("plain", {"messages": [user("2+2?"), THOUGHT]}, "reasoning_content"),
    "a call without a template": ("plain", {"messages": [user("2+2?"), {**CALLED, "content": "x"}]}, "tool_calls"),
    "a text beside a call": ("trimming", {"messages": [user("2+2?"), {**CALLED, "content": "Well"}]}, "content"),
    "a result": ("two roles", {"messages": [user("2+2?"), TOOL, assistant("4")]}, "content of message 1"),
    "a system in other letters": (
        "two roles", {"messages": [{"role": "system", "content": "你好"}, user("a"), assistant("b")]}, "message 0",
    ),
    "an empty reply": ("chatml", {"messages": [user("a"), assistant("")]}, "empty completion"),
    "an empty completion": ("chatml", {"prompt": [user("a")], "completion": [assistant("")]}, "empty completion"),
    "an empty turn": ("chatml", {"messages": [user("a"), assistant(""), user("b"), assistant("c")]}, "an empty comp"),
    "an empty reply without a template": ("plain", {"messages": [user("a"), assistant("")]}, "empty completion"),
    "a reply of white space": ("trimming", {"messages": [user("a"), assistant(" \n")]}, "empty completion"),
    "an open dialogue": ("plain", {"text": "\n\nHuman: a\n\nAssistant:"}, "empty completion"),
    "nothing behind a beginning": (
        "chatml", {"prompt": [user("a"), assistant("b")], "completion": [assistant("")]}, "empty completion",
    ),
    "an empty list of parts": ("chatml", {"messages": [user("a"), assistant([])]}, "empty completion"),
    "tokens that only end": ("plain", {"prompt": [1], "completion": [256]}, "empty completion"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_what_the_template_does_not_write_is_refused_by_name(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    which, row, words = LOST[name]
    with pytest.raises(DataError, match=words) as error:
        list(reader(tokenizers[which]).demonstrations([row]))
    assert "row 1" in str(error.value)
    good = {"messages": [user("a"), assistant("b")]}
    assert len(list(reader(tokenizers[which], "skip").demonstrations([good, row, good]))) == 2


@pytest.mark.parametrize("extra", [{"tools": TOOLS}, {"prompt": [user("2+2?"), CALLED, TOOL]}])
def test_prompts_lose_nothing_either(extra: dict[str, Any], tokenizers: dict[str, Tokenizer]) -> None:
    with pytest.raises(DataError, match="tool"):
        list(reader(tokenizers["chatml"]).prompts([{"prompt": [user("a")], **extra}]))
    assert list(reader(tokenizers["thinking"]).prompts([{"prompt": [user("a")], **extra}]))


KEPT: dict[str, tuple[str, dict[str, Any]]] = {
    "thoughts of an earlier turn": ("thinking", {"messages": [user("a"), THOUGHT, user("b"), THOUGHT]}),
    "thoughts in an earlier text": (
        "thinking",
        {"messages": [user("a"), assistant("<think>\nx\n</think>\n\nYes"), user("b"), assistant("c")]},
    ),
    "a call": ("thinking", {"messages": [user("2+2?"), CALLED, TOOL, assistant("4")], "tools": TOOLS}),
    "a call and blanks": ("trimming", {"messages": [user("2+2?"), {**CALLED, "content": " "}]}),
    "results that are merged": (
        "merging",
        {"messages": [user("a"), assistant("b"), TOOL, TOOL, assistant("c")], "tools": TOOLS},
    ),
    "other letters": ("chatml", {"messages": [user("字"), assistant("👍")]}),
    "one letter": ("two roles", {"messages": [user("a"), assistant("a")]}),
    "nulls of a table": ("chatml", {"messages": [{**user("a"), "tool_calls": None, "thinking": None}, assistant("b")]}),
    "an empty turn in a prompt": (
        "chatml",
        {"prompt": [user("a"), assistant(""), user("b")], "completion": [assistant("c")]},
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_written_somewhere_is_no_loss(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    which, row = KEPT[name]
    assert len(list(reader(tokenizers[which]).demonstrations([row]))) == 1


ALIKE: dict[str, tuple[str, Any, Any]] = {
    "calls": ("chatml", [CALLED], [assistant(None, tool_calls=[{**CALL, "function": {"name": "sub"}}])]),
    "white space": ("trimming", "Yes.", "Yes.\n"),
    "an empty one": ("chatml", [assistant("Yes")], [assistant("")]),
    "kinds": ("plain", [97, 98], "ab"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_pairs_are_compared_as_what_they_became(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    which, chosen, rejected = ALIKE[name]
    prompt: Any = [user("a")] if which != "plain" else "a"
    with pytest.raises(DataError, match=r"itself|tool_calls|empty completion"):
        list(reader(tokenizers[which]).pairs([{"prompt": prompt, "chosen": chosen, "rejected": rejected}]))


def test_thoughts_of_an_earlier_turn_make_no_pair(tokenizers: dict[str, Tokenizer]) -> None:
    chosen, rejected = ([user("a"), assistant("b", reasoning_content=each), user("c"), assistant("d")] for each in "xy")
    with pytest.raises(DataError, match="itself"):
        list(reader(tokenizers["thinking"]).pairs([{"chosen": chosen, "rejected": rejected}]))


def blocks(reply: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + reply
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


END = "{% generation %}<|im_end|>{% endgeneration %}"
CONTENT = "{% generation %}{{ m.content }}{% endgeneration %}"
THOUGHTS = "{% generation %}{{ '<think>' + m.thinking + '</think>' }}{% endgeneration %}"
BLOCKS: dict[str, tuple[str, str]] = {
    "an answer and its end": (blocks(CONTENT + END), "No.<|im_end|>"),
    "thoughts and an answer": (blocks(THOUGHTS + CONTENT + END), "<think>y</think>No.<|im_end|>"),
    "thoughts of the last turn": (
        blocks("{% if loop.last %}" + THOUGHTS + "{% endif %}" + CONTENT + END), "<think>y</think>No.<|im_end|>",
    ),
    "the last turn alone": (
        blocks("{% if loop.last %}" + THOUGHTS + CONTENT + END + "{% else %}{{ m.content }}<|im_end|>{% endif %}"),
        "<think>y</think>No.<|im_end|>",
    ),
    "one block": (blocks("{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"), "No.<|im_end|>"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("contents", [("Yes", "No."), ("是", "不")])
def test_replies_within_the_prompt_are_not_learnt_whatever_their_blocks(
    name: str, contents: tuple[str, str], tmp_path: Path
) -> None:
    source, wanted = BLOCKS[name]
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    thoughts = [{"thinking": each} if "m.thinking" in source else {} for each in "xyz"]
    first, second = (assistant(each, **thought) for each, thought in zip(contents, thoughts, strict=False))
    prompt, chats = [user("Hello"), first, user("More")], reader(tokenizer)
    row = {"prompt": prompt, "completion": [second], "label": True}
    (demonstration,), (judged,) = chats.demonstrations([row]), chats.unpaired([row])
    (pair,) = chats.pairs([{"prompt": prompt, "chosen": [second], "rejected": [assistant("other", **thoughts[2])]}])
    for each in (demonstration, judged.completion, pair.chosen):
        assert learnt(each, tokenizer) == wanted.replace("No.", contents[1])


def test_a_block_without_the_end_token_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"messages": [user("Hello"), assistant("Yes")]}] * 2
    for number, (source, count) in enumerate(((blocks(CONTENT + "<|im_end|>"), 1), (blocks(CONTENT + END), 0))):
        tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / str(number), "bytes", source))
        caplog.clear()
        assert len(list(reader(tokenizer).demonstrations(rows))) == 2
        assert caplog.text.count("leaves the end token out") == count
