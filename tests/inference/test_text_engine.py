"""Pieces of text are certain when they come: whole characters, nothing of a stop string, together the whole text."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data.text.continuation import Detokenizer, ReplyMarks
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from tests.differential.drawn import drawn
from tests.inference.recomputation import recomputed
from tests.tiny import built
from tests.trainer import tiny


def pieces(
    tokens: Sequence[int], sizes: Sequence[int], stop: Sequence[str], marks: ReplyMarks | None = None
) -> tuple[list[str], bool]:
    """What comes of tokens that arrive a few at a time."""
    text, found, start = Detokenizer(ByteTokenizer(), stop, marks=marks), [], 0
    for size in sizes:
        if start >= len(tokens) or text.is_stopped:
            break
        found.append(text.push(tokens[start : start + size], is_last=start + size >= len(tokens)))
        start += size
    return found, text.is_stopped


@given(
    text=st.text(alphabet="abé夜🌙", max_size=12),
    extra=st.lists(st.integers(0, 255), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60),
    stop=st.lists(st.text(alphabet="ab夜", min_size=1, max_size=3), max_size=2),
)
def test_pieces_are_the_text_before_the_first_stop_string(
    text: str, extra: list[int], sizes: list[int], stop: list[str]
) -> None:
    tokens = [*text.encode(), *extra]
    whole = ByteTokenizer().decode(tokens)
    found, is_stopped = pieces(tokens, sizes, stop)
    end = min((whole.index(each) for each in stop if each in whole), default=None)
    assert "".join(found) == whole[:end]
    assert is_stopped == (end is not None)


@drawn(60)
@given(
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "\n", " ", "a", "夜", chr(200)]), max_size=9),
    sizes=st.lists(st.integers(1, 4), min_size=80, max_size=80),
    stop=st.lists(st.sampled_from(["a", "<", "</", "\n", "k>", ">", "\na", "夜"]), min_size=1, max_size=2),
    is_thinking=st.booleans(),
)
def test_stop_strings_do_not_apply_within_a_thought(
    parts: list[str], sizes: list[int], stop: list[str], is_thinking: bool
) -> None:
    marks = ReplyMarks(spelled={200: "a<"}, thought=("<think>", "</think>"), is_thinking=is_thinking)
    tokens = [token for part in parts for token in ([200] if part == chr(200) else part.encode())]
    whole = "".join("a<" if part == chr(200) else part for part in parts)
    thought = re.match(r".*?(</think>\n*|\Z)" if is_thinking else r"\s*<think>.*?(</think>\n*|\Z)", whole, re.DOTALL)
    start = thought.end() if thought else 0
    found, is_stopped = pieces(tokens, sizes, stop, marks)
    end = min((whole.index(each, start) for each in stop if each in whole[start:]), default=None)
    assert ("".join(found), is_stopped) == (whole[:end], end is not None)


@pytest.mark.parametrize(
    "stop", [["y", "b"], ["b", "y"], ["zy", "y", "by"], ["zz", "b"], ["yz", "by", "b"], ["zy", "byz"]]
)
def test_of_several_stop_strings_in_one_piece_the_first_in_the_text_counts(stop: list[str]) -> None:
    assert pieces(list(b"abyzy"), [5], stop) == (["a"], True)


def test_half_a_character_is_held_back() -> None:
    found, _ = pieces(list("né 夜🌙!".encode()), [1] * 20, [])
    assert [piece for piece in found if piece] == ["n", "é", " ", "夜", "🌙", "!"]


def test_what_follows_a_thought_is_given_at_once() -> None:
    marks = ReplyMarks(thought=("<think>", "</think>"), is_thinking=True)
    assert pieces(list(b"a</think>\n\nbcd"), [1] * 20, ["x"], marks)[0][-3:] == ["</think>\n\nb", "c", "d"]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    found, is_stopped = pieces(list(b"x<|y<|e<|end|>z"), [1] * 20, ["<|end|>"])
    assert is_stopped
    assert found[:5] == ["x", "", "", "<|y", ""]
    assert "".join(found) == "x<|y<|e"


def test_a_request_ends_at_its_stop_string_and_others_go_on() -> None:
    model = built(tiny.LLAMA, ByteTokenizer.vocab_size)
    tokenizer = ByteTokenizer()
    options = InferenceOptions(max_new_tokens=24, temperature=1.0)
    whole = tokenizer.decode(
        recomputed(model, tokenizer.encode("ab"), SamplingOptions(max_new_tokens=24, temperature=1.0)).tokens
    )
    stop = whole[10:12]
    texts = TextEngine(Engine(model), tokenizer)
    cut = texts.submit("ab", InferenceOptions(max_new_tokens=24, temperature=1.0, stop=(stop,)), key=0, num_samples=2)
    free = texts.submit("ab", options, key=0)
    left = texts.submit("ab", options, key=5)
    found: dict[tuple[int, int], str] = {}
    reasons: dict[tuple[int, int], str | None] = {}
    for _ in range(60):
        for piece in texts.step():
            found[piece.request, piece.sample] = found.get((piece.request, piece.sample), "") + piece.text
            reasons[piece.request, piece.sample] = piece.finish_reason
        if (left, 0) in found:
            texts.cancel(left)
    assert not texts.has_work
    assert found[free, 0] == whole
    assert found[cut, 0] == whole[: whole.index(stop)]
    assert reasons[cut, 0] == "stop" and reasons[free, 0] == "length" and reasons[left, 0] is None


@pytest.mark.parametrize("stop", [("c\ufffdc\ufffdc",), ("c\ufffdc\ufffdc\ufffd", "\ufffdc\ufffdc\ufffd")])
def test_no_token_stands_behind_a_stop_string_however_many_a_step_has(stop: tuple[str, ...]) -> None:
    model = built(tiny.LLAMA, ByteTokenizer.vocab_size)
    options = InferenceOptions(max_new_tokens=30, temperature=0, repetition_penalty=0.2, stop=stop)
    found = []
    for drafts in (0, 4):
        engine = Engine(model, EngineOptions(prompt_lookup_tokens=drafts))
        texts, deltas = TextEngine(engine, ByteTokenizer()), []
        texts.submit("abcabcabcabc", options, key=0)
        while texts.has_work:
            deltas += texts.step()
        assert all(len(each.tokens) == len(each.logprobs) == len(each.top_logprobs) for each in deltas)
        assert (max(len(each.tokens) for each in deltas) > 1) == (drafts > 0)
        found.append(("".join(each.text for each in deltas), [token for each in deltas for token in each.tokens]))
    assert found[0] == found[1] and len(found[0][1]) < 30


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inference\.stop"):
        InferenceOptions(stop=("",))


@given(
    tokens=st.lists(
        st.sampled_from([*range(97, 100), 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x8C, 0x99, 0xFF, 256])
    ),
    sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60),
)
def test_every_token_is_told_the_character_that_it_begins(tokens: list[int], sizes: list[int]) -> None:
    """However few bytes make up a character, and whatever never becomes one."""
    text, start = Detokenizer(ByteTokenizer()), 0
    while start < len(tokens):
        text.push(tokens[start : start + sizes[start % 60]])
        start += sizes[start % 60]
    wanted = []
    for place, token in enumerate(tokens):
        before = ByteTokenizer().decode(tokens[:place])
        # What follows tells whether the last character was whole.
        with_it = ByteTokenizer().decode([*tokens[:place], token] if token < 256 else tokens[:place])
        goes_on = before.endswith("\ufffd") and len(with_it) == len(before) and token != 256
        wanted.append(len(before) - goes_on)
    told = [offset for offset, token in zip(text.offsets, tokens, strict=True) if token != 256]
    assert told == [place for place, token in zip(wanted, tokens, strict=True) if token != 256]
