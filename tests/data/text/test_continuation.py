"""A continuation is encoded and decoded as a continuation, with every kind of tokenizer."""

import os
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pieces
from tokenizers import models, processors

from kitforge.data.chat.datasets import ChatDatasetReader
from kitforge.data.chat.template import ChatTemplate, template_of
from kitforge.data.text.continuation import Detokenizer, decode_continuation, encode_completion, encode_continuation
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.data.tokenizers.loading import load_tokenizer
from kitforge.data.tokenizers.protocol import Tokenizer
from tests.tokenizer_folders import write_kind
from tests.tokenizer_kinds import EXACT, MAKERS, PREFIXING, WORDS, tokenizer_of

PARTS = [*WORDS.split(), *(" ", "  ", "\n", ".", "?", "(x)", "12", " school", "\n\n", "é", "🌙", ": ", "x")]
KINDS = st.sampled_from(sorted(EXACT))
TEXTS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)


def streamed(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """The text of tokens that come one by one."""
    text = Detokenizer(tokenizer, prompt=prompt)
    pieces = [text.push([token]) for token in tokens]
    return "".join([*pieces, text.push([], is_last=True)])


@given(kind=KINDS, prefix=TEXTS, rest=TEXTS)
def test_the_continuation_of_a_text_is_the_text_that_was_encoded(kind: str, prefix: str, rest: str) -> None:
    """Whatever stands on both sides of the border, with and without special tokens before it."""
    tokenizer = tokenizer_of(kind)
    for prompt in (tokenizer.encode(f"Q{prefix}"), tokenizer.encode_prompt(f"Q{prefix}")):
        tokens = encode_continuation(tokenizer, prompt, rest)
        assert tokenizer.decode([*prompt, *tokens]) == tokenizer.decode(prompt) + rest
        assert decode_continuation(tokenizer, prompt, tokens) == rest
        assert streamed(tokenizer, prompt, tokens) == rest


@given(kind=st.sampled_from(sorted(MAKERS)), text=TEXTS, cut=st.integers(0, 40), seed=st.integers(0, 9))
def test_a_prompt_and_the_tokens_after_it_are_the_whole_text(kind: str, text: str, cut: int, seed: int) -> None:
    """Also with special tokens and numbers that are no tokens anywhere."""
    tokenizer, draw = tokenizer_of(kind), random.Random(seed)
    ids = tokenizer.encode_prompt(f"x{text}")
    for _ in range(seed % 4):
        ids.insert(draw.randint(0, len(ids)), draw.choice([tokenizer.eos_id, tokenizer.vocab_size + 3]))
    prompt, tokens = ids[:cut], ids[cut:]
    before, whole = tokenizer.decode(prompt), tokenizer.decode(ids)
    added = whole[len(os.path.commonprefix([before, whole])) :]
    assert decode_continuation(tokenizer, prompt, tokens) == added
    assert streamed(tokenizer, prompt, tokens) == added


@given(kind=st.sampled_from(sorted(MAKERS)), prompt=TEXTS, completion=TEXTS)
def test_a_prompt_and_its_completion_have_the_tokens_of_the_joined_text(
    kind: str, prompt: str, completion: str
) -> None:
    tokenizer = tokenizer_of(kind)
    opening, tokens = encode_completion(tokenizer, prompt, completion)
    assert [*opening, *tokens] == tokenizer.encode_prompt(prompt + completion)
    alone = tokenizer.encode_prompt(prompt)
    assert alone[: len(opening)] == opening
    assert alone == opening or alone[len(opening)] != next(iter(tokens), None)


@pytest.mark.parametrize("kind", PREFIXING)
@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("Q: what?\nA:", " school"),
        ("He s", "aid"),
        ("a\n", "def\n"),
        ("def f(x):\n", "    return x"),
        ("A: ", "school"),
    ],
)
def test_rows_of_plain_text_have_the_tokens_of_the_joined_text(kind: str, prompt: str, completion: str) -> None:
    """A token across the border is learnt."""
    tokenizer = tokenizer_of(kind)
    rows = ChatDatasetReader(tokenizer, template_of(tokenizer))
    row = {"prompt": prompt, "completion": completion, "chosen": completion, "rejected": "x", "label": True}
    (demonstration,), (pair,), (unpaired,) = rows.demonstrations([row]), rows.pairs([row]), rows.unpaired([row])
    alone, joined = tokenizer.encode_prompt(prompt), tokenizer.encode_prompt(prompt + completion)
    size = len(os.path.commonprefix([alone, joined]))
    for example in (demonstration, pair.chosen, unpaired.completion):
        assert list(example.tokens) == [*joined, tokenizer.eos_id]
        assert list(example.loss_mask) == [False] * size + [True] * (len(joined) + 1 - size)


@pytest.mark.parametrize("kind", [*PREFIXING, "byte-level"])
def test_a_completion_of_text_continues_a_prompt_of_tokens(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    rows = ChatDatasetReader(tokenizer, template_of(tokenizer))
    (example,) = rows.demonstrations([{"prompt": tokenizer.encode("He s"), "completion": "aid"}])
    assert tokenizer.decode(example.tokens) == "He said"
    assert example.loss_mask[:3] == (False, False, True)


@pytest.mark.parametrize("kind", [*PREFIXING, "sentencepiece without prefix", "byte-level", "bytes"])
def test_a_chat_without_a_template_has_no_spaces_of_the_tokenizers_own(kind: str) -> None:
    template, tokenizer = ChatTemplate(tokenizer_of(kind), None, {}), tokenizer_of(kind)
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    chat = template.training([*talk, *talk])
    turn = "\n\nHuman: hi\n\nAssistant: "
    assert tokenizer.decode(chat.tokens) == f"{turn}hello{turn}hello"
    opening = template.tokens([*talk, talk[0]], opens_reply=True)
    assert list(chat.tokens[: len(opening)]) == opening
    reply = chat.replies[1]
    assert decode_continuation(tokenizer, chat.tokens[: reply.start], chat.tokens[reply.start :]) == "hello"
    following = template.continuation(talk[:1], "hello", talk[:1], has_end=False)
    assert list(chat.tokens[: len(opening)]) == [*template.tokens(talk)[:-1], *following]


CHATML = (
    "{% for message in messages %}Q: {{ message.content }}"
    "{% if message.role == 'assistant' %} {{ eos_token }}{% endif %}\n{% endfor %}"
)


@pytest.mark.parametrize("kind", ["prepend and strip", "metaspace always", "gguf"])
def test_what_a_template_writes_after_a_reply_continues_it(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    template = ChatTemplate(tokenizer, CHATML, {"eos_token": "</s>"})
    asked = [{"role": "user", "content": "hi"}]
    reply = tokenizer.encode("Q: hi\nQ: hello")
    following = template.continuation(asked, "hello", asked, has_end=False)
    assert decode_continuation(tokenizer, reply, following).startswith(" ")
    assert following[: following.index(tokenizer.eos_id)] == encode_continuation(tokenizer, reply, " ")


def test_tokens_without_text_are_not_decoded_again_and_again() -> None:
    """End tokens that are ignored, spaces and tokens beyond the vocabulary, in any number."""
    tokenizer = tokenizer_of("prepend and strip")
    space, word = tokenizer.encode("the  the")[1:]
    assert tokenizer.token_bytes(space) == b" "
    text = Detokenizer(tokenizer, prompt=tokenizer.encode("He"))
    pieces = [text.push([each]) for each in [tokenizer.eos_id] * 50 + [space] * 50 + [word]]
    assert "".join(pieces) == f"{' ' * 51}the"
    assert len(text._tokens) <= 3


@pytest.mark.parametrize("kind", PREFIXING)
def test_a_number_that_is_no_token_does_not_begin_the_text_anew(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    first, second = tokenizer.encode("He went")
    unknown = tokenizer.vocab_size
    assert tokenizer.decode([first, unknown, second, unknown, unknown, second]) == "He\ufffd went\ufffd\ufffd went"


def test_a_number_that_is_no_token_may_stand_within_a_character() -> None:
    tokenizer = tokenizer_of("bytes")
    first, *others = tokenizer.encode("€")
    assert tokenizer.decode([first, 999, *others]) == "\ufffd" * 4


def test_special_tokens_around_a_prompt_stay_where_they_are(tmp_path: Path) -> None:
    """Those that end it too, and with a vocabulary that has no token for most texts."""
    tokenizer = load_tokenizer(write_kind("both ends", tmp_path))
    opening, tokens = encode_completion(tokenizer, "ab", "cd")
    assert opening == tokenizer.encode_prompt("ab") and tokens == tokenizer.encode("cd")
    words = HuggingFaceTokenizer(few_words())
    assert words.encode("a") == []
    assert encode_completion(words, "b b", " b") == ([1, 2, 2], [2])
    assert encode_completion(words, "", "b") == ([1], [2])


def few_words() -> dict[str, bytes]:
    """A vocabulary of a begin token, an end token and a single word; what it does not know has no token."""
    pieces = Pieces(models.BPE(vocab={"</s>": 0, "<s>": 1, "b": 2}, merges=[]))
    pieces.add_special_tokens(["</s>", "<s>"])
    pieces.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return {"tokenizer.json": pieces.to_str().encode(), "tokenizer_config.json": b'{"eos_token": "</s>"}'}
