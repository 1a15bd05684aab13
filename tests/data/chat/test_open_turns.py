"""A last turn that is open is gone on with, in every task, and pairs of texts share their beginning up to a word."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer
from kitforge.foundation.errors import DataError
from tests.data.chat.cases import CHATML, LLAMA_2, MISTRAL, THINKING, assistant, save_tokenizer, user

BYTES = ByteTokenizer()
QUESTION = "\n\nHuman: What is 2+2?\n\nAssistant:"


def marked(response: TokenizedExample, tokenizer: Any = BYTES) -> str:
    """The text with [[...]] around what is learnt and a bar for the byte tokenizer's end."""
    parts: dict[bool, list[int]] = {False: [], True: []}
    for token, is_learnt in zip(response.tokens, response.loss_mask, strict=True):
        assert not (parts[True] and not is_learnt)
        parts[is_learnt].append(int(token))
    given, learnt = (spelt(each, tokenizer) for each in parts.values())
    return f"{given}[[{learnt}]]"


def spelt(tokens: list[int], tokenizer: Any) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        ends = [at for at, token in enumerate(tokens) if token == tokenizer.eos_id]
        cuts = [0, *(end + 1 for end in ends), len(tokens)]
        return "|".join(tokenizer.decode(tokens[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
    return str(tokenizer._tokenizer.decode(tokens, skip_special_tokens=False))


def reader(tokenizer: Any = BYTES) -> ChatDatasetReader:
    return ChatDatasetReader(tokenizer, template_of(tokenizer))


def every_kind(row: Mapping[str, Any], tokenizer: Any = BYTES) -> list[str]:
    """What a prompt and a completion become in each task."""
    chats, other = reader(tokenizer), {"chosen": row["completion"], "rejected": row["other"], "prompt": row["prompt"]}
    (demonstration,) = chats.demonstrations([row])
    (judged,) = chats.unpaired([{**row, "label": True}])
    (pair,) = chats.pairs([other])
    (flipped,) = chats.pairs([{**other, "chosen": other["rejected"], "rejected": other["chosen"]}])
    (prompt,) = chats.prompts([{"prompt": row["prompt"]}])
    found = [marked(each, tokenizer) for each in (demonstration, judged.completion, pair.chosen, flipped.rejected)]
    assert all(each.startswith(spelt(list(prompt.tokens), tokenizer) + "[[") for each in found)
    assert demonstration.tokens[: len(prompt.tokens)] == prompt.tokens
    return found


OPEN_DIALOGUES = {
    "no space": (QUESTION, " It is 4.", f"{QUESTION} [[It is 4.|]]"),
    "a space": (f"{QUESTION} ", "It is 4.", f"{QUESTION} [[It is 4.|]]"),
    "another question": (
        f"{QUESTION} 4.\n\nHuman: No?\n\nAssistant:", " 5", f"{QUESTION} 4.|\n\nHuman: No?\n\nAssistant: [[5|]]",
    ),
    "a beginning": (f"{QUESTION} It is", " 4.", f"{QUESTION} It is[[ 4.|]]"),
    "a beginning and a space": (f"{QUESTION} It is ", "4.", f"{QUESTION} It is[[ 4.|]]"),
    "another turn": (QUESTION, " 4.\n\nHuman: Ok\n\nAssistant: Yes", None),
    "a closed turn": ("\n\nHuman: Hi", "Hello", "\n\nHuman: Hi\n\nAssistant: [[Hello|]]"),
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN_DIALOGUES)
def test_a_dialogue_whose_last_turn_is_open_is_gone_on_with(name: str) -> None:
    prompt, completion, wanted = OPEN_DIALOGUES[name]
    if wanted is None:
        (found,) = reader().demonstrations([{"prompt": prompt, "completion": completion}])
        learnt = [token for token, is_learnt in zip(found.tokens, found.loss_mask, strict=True) if is_learnt]
        assert spelt(learnt, BYTES) == "4.|Yes|"
        return
    found = every_kind({"prompt": prompt, "completion": completion, "other": "another"})
    assert found == [wanted] * 4


def test_an_open_prompt_and_whole_texts_give_the_same_pair() -> None:
    (apart,) = reader().pairs([{"prompt": QUESTION, "chosen": " It is 4.", "rejected": " It is 5."}])
    (whole,) = reader().pairs([{"chosen": f"{QUESTION} It is 4.", "rejected": f"{QUESTION} It is 5."}])
    (both,) = reader().pairs(
        [{"prompt": QUESTION, "chosen": f"{QUESTION} It is 4.", "rejected": f"{QUESTION} It is 5."}]
    )
    assert apart == whole == both


PREFILLED = [user("Sky?"), assistant("The answer is")]


@pytest.mark.parametrize("source", [CHATML, LLAMA_2, MISTRAL, None])
def test_a_message_of_the_assistant_at_the_end_of_a_prompt_is_continued(source: str | None, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    opened = template_of(tokenizer).tokens(PREFILLED, continue_final_message=True)
    whole = template_of(tokenizer).tokens([user("Sky?"), assistant("The answer is blue.")])
    for completion in (" blue.", [assistant(" blue.")]):
        other = [assistant(" red.")] if isinstance(completion, list) else " red."
        found = every_kind({"prompt": PREFILLED, "completion": completion, "other": other}, tokenizer)
        assert len(set(found)) == 1 and found[0].replace("[[", "").replace("]]", "") == spelt(whole, tokenizer)
        assert found[0].startswith(spelt(opened, tokenizer) + "[[")


def test_the_tokens_of_a_prefilled_prompt_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, "bytes", CHATML)
    peer, tokenizer = transformers.AutoTokenizer.from_pretrained(folder), HuggingFaceTokenizer(folder)
    (prompt,) = reader(tokenizer).prompts([{"prompt": PREFILLED}])
    wanted = peer.apply_chat_template(PREFILLED, continue_final_message=True, return_dict=False)
    assert list(prompt.tokens) == wanted


def test_a_reply_that_begins_within_a_word_has_the_tokens_of_its_prompt(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", CHATML))
    row = {"prompt": [user("Hi"), assistant("Hel")], "completion": "lo", "other": "ium"}
    assert every_kind(row, tokenizer)[0].endswith("assistant\nHel[[lo<|im_end|>\n]]")


def test_a_template_that_writes_the_beginning_otherwise_is_refused(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", THINKING))
    row = {"prompt": [user("Hi"), assistant("Well")], "completion": [assistant("", reasoning_content="so")]}
    with pytest.raises(DataError, match="once the reply goes on") as error:
        list(reader(tokenizer).demonstrations([row]))
    assert "row 1" in str(error.value)


def test_a_call_at_the_end_of_a_prompt_is_no_open_turn() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    row = {"prompt": [user("Hi"), assistant("", tool_calls=[call])]}
    with pytest.raises(DataError, match="tool_calls"):
        list(reader().prompts([row]))


SPLITS: dict[str, tuple[str, str, str]] = {
    "a line": ("### Instruction:\nSay yes\n\n### Response:\nYes", "### Instruction:\nSay yes\n\n### Response:\nNo",
               "### Instruction:\nSay yes\n\n### Response:\n"),
    "a tab": ("Q: hi\nA:\tyes", "Q: hi\nA:\tno", "Q: hi\nA:\t"),
    "a space": ("the sky is blue", "the sky is black", "the sky is "),
    "another space": ("a b\u3000yes", "a b\u3000no", "a b\u3000"),
    "none": ("Answer:yes", "Answer:no", "Answer:"),
    "a common beginning of a word": ("Answer:\nyesterday", "Answer:\nyes", "Answer:\n"),
    "a word that goes on": ("the sky is", "the sky island", "the sky "),
    "numbers": ("x = 3.14", "x = 3.15", "x = "),
    "contractions": ("I don't", "I don", "I "),
    "chinese": ("问:天空是什么颜色?答:蓝色。", "问:天空是什么颜色?答:红色。", "问:天空是什么颜色?答:"),
    "chinese with a common word": ("答案是好的", "答案是好吧", "答案是好"),
    "japanese": ("空は青い", "空は赤い", "空は"),
    "devanagari": ("हिन्दी नमस्ते", "हिन्दी नमन", "हिन्दी "),
    "a word of two": ("new-born", "new-found", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_texts_share_their_beginning_up_to_the_word_in_which_they_differ(name: str) -> None:
    chosen, rejected, wanted = SPLITS[name]
    (pair,) = reader().pairs([{"chosen": chosen, "rejected": rejected}])
    assert marked(pair.chosen) == f"{wanted}[[{chosen[len(wanted) :]}|]]"
    assert marked(pair.rejected) == f"{wanted}[[{rejected[len(wanted) :]}|]]"
    if wanted:
        (prompt,) = reader().prompts([{"chosen": chosen, "rejected": rejected}])
        assert spelt(list(prompt.tokens), BYTES) == wanted


NO_PAIRS: dict[str, tuple[Any, Any, str]] = {
    "a longer text": ("Q? yes", "Q? yes, sir", "empty completion"),
    "equal texts": ("Q? yes", "Q? yes", "to itself"),
    "a longer conversation": ([user("a"), assistant("b")], [user("a"), assistant("b"), user("c")], "empty completion"),
    "longer tokens": ([1, 2], [1, 2, 3], "empty completion"),
    "other questions": ([user("a"), assistant("b")], [user("c"), assistant("b")], "share no message"),
    "a text and messages": ("a b", [user("a"), assistant("b")], "two kinds"),
    "tokens and messages": ([1, 2], [user("a"), assistant("b")], "two kinds"),
}


@pytest.mark.parametrize("name", NO_PAIRS)
def test_what_is_no_pair_is_no_prompt_either(name: str) -> None:
    chosen, rejected, words = NO_PAIRS[name]
    for first, second in ((chosen, rejected), (rejected, chosen)):
        for read in (reader().pairs, reader().prompts):
            with pytest.raises(DataError, match=words):
                list(read([{"chosen": first, "rejected": second}]))
