"""Log-probabilities of an answer go with its text: true bytes, offsets of the text, nothing of what was cut."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.server.responses import ChoiceReader, CompletionFormat, ResponseOptions, TokenLogprob
from kitforge.inference.server.service import EncodedPrompt, TokenTexts
from kitforge.inference.text_engine import Detokenizer, TextDelta
from tests.inference.server.conftest import Served

# Towards the two bytes of é and nothing else.
HALVES = {"195": 100.0, "169": 100.0}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    lines = served.post(COMPLETIONS, body | {"stream": True}).text.split("\n\n")
    events = [line.removeprefix("data: ") for line in lines if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0] for event in events]


def test_bytes_join_to_the_text_though_no_token_is_a_character(served: Served) -> None:
    wishes = {"max_tokens": 12, "temperature": 1, "seed": 1, "logit_bias": HALVES}
    chat = served.ask(CHAT, messages=[{"role": "user", "content": "é"}], logprobs=True, top_logprobs=2, **wishes)
    told = chat["choices"][0]["logprobs"]["content"]
    assert len(told) == 12
    assert (
        bytes(byte for each in told for byte in each["bytes"]).decode("utf-8", "replace")
        == (chat["choices"][0]["message"]["content"])
    )
    assert {each["token"] for each in told} == {"bytes:\\xc3", "bytes:\\xa9"}
    for each in told:
        assert [other["bytes"] for other in each["top_logprobs"]] in ([[195], [169]], [[169], [195]])
    found = served.ask(COMPLETIONS, prompt="é", logprobs=2, **wishes)["choices"][0]
    for token, logprob, top in zip(
        *(found["logprobs"][name] for name in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert len(top) == 2 and top[token] == logprob


@pytest.mark.parametrize("stops", [[], ["e"], ["\ufffd"]])
def test_offsets_are_places_in_the_text_and_go_on_over_a_stream(served: Served, stops: list[str]) -> None:
    """Of a text of letters, of one of halves of letters, and of both."""
    for bias in (HALVES, {str(byte): 50.0 for byte in range(97, 103)}, HALVES | {"97": 99.0, "101": 99.5}):
        wishes = {"prompt": "a", "max_tokens": 30, "temperature": 1, "seed": 3, "logit_bias": bias, "stop": stops}
        whole = served.ask(COMPLETIONS, logprobs=1, **wishes)["choices"][0]
        told = whole["logprobs"]
        parts = streamed(served, logprobs=1, **wishes)
        assert "".join(part["text"] for part in parts) == whole["text"]
        for name, values in told.items():
            assert [value for part in parts for value in part["logprobs"][name]] == values
        size = len(whole["text"])
        assert told["text_offset"] == sorted(told["text_offset"]) and all(0 <= at < size for at in told["text_offset"])
        for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
            if not token.startswith("bytes:"):
                assert whole["text"][offset] == token
        # What was cut has no log-probabilities: each token has at least a part of a letter of the text.
        lengths = [len(each.encode()) for each in whole["text"].replace("\ufffd", "a")]
        assert size <= len(told["tokens"]) <= sum(lengths)
        if whole["finish_reason"] == "stop":
            assert not set(stops) & set(whole["text"])


def test_the_end_token_is_told_in_completions_and_not_in_chats(served: Served) -> None:
    """Clients that ask for one token after an echo take the last one for it."""
    bias = {"256": 100.0}
    found = served.ask(COMPLETIONS, prompt="a", max_tokens=5, logprobs=1, logit_bias=bias)["choices"][0]
    assert (found["text"], found["finish_reason"], found["logprobs"]["text_offset"]) == ("", "stop", [0])
    messages = [{"role": "user", "content": "a"}]
    chat = served.ask(CHAT, messages=messages, max_tokens=5, logprobs=True, logit_bias=bias)["choices"][0]
    assert chat["logprobs"]["content"] == [] and chat["finish_reason"] == "stop"


def test_alternatives_stay_with_their_tokens_where_a_text_ends(served: Served) -> None:
    bias = {"97": 20.0, "256": 19.0}
    wishes = {"prompt": "a", "max_tokens": 40, "temperature": 1, "logit_bias": bias}
    for seed in range(20):
        told = served.ask(COMPLETIONS, seed=seed, logprobs=5, **wishes)["choices"][0]
        if told["finish_reason"] == "stop" and len(told["text"]) > 1:
            break
    tokens, logprobs, top, _ = told["logprobs"].values()
    assert tokens == ["a"] * len(told["text"]) + [""]
    for token, logprob, others in zip(tokens, logprobs, top, strict=True):
        assert others[token] == logprob and list(others.values()) == sorted(others.values(), reverse=True)


def delta(tokens: list[int], logprobs: list[float], top: list[list[tuple[int, float]]], **more: Any) -> TextDelta:
    where: dict[str, Any] = {"request": 0, "sample": 0, "hit_stop_string": False, "prompt_logprobs": None}
    return TextDelta(tokens=tokens, logprobs=logprobs, top_logprobs=top, **where, **more)


def test_alternatives_stay_with_their_tokens_where_the_end_comes_with_others() -> None:
    """As they do where guessed tokens come true."""
    likely = [[(97, -1.0)], [(98, -2.0)], [(256, -3.0)]]
    piece = delta([97, 98, 256], [-1.0, -2.0, -3.0], likely, text="ab", offsets=[0, 1], finish_reason="stop")
    reader = ChoiceReader(EncodedPrompt(tokens=[97]), ResponseOptions(num_top_logprobs=1, has_stop_token=True))
    assert [(each.token, each.top_logprobs) for each in reader.read(piece, None).tokens] == [
        (97, likely[0]),
        (98, likely[1]),
        (256, likely[2]),
    ]


class Twins:
    """Letters that two tokens each have, one after another."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([97 + token // 2])


def test_tokens_of_equal_text_are_told_apart_and_the_chosen_one_has_it() -> None:
    form = CompletionFormat("m", TokenTexts(Twins()), ResponseOptions(num_top_logprobs=3))  # type: ignore[arg-type]
    told = TokenLogprob(token=1, logprob=-2.0, top_logprobs=[(0, -1.0), (1, -2.0), (2, -3.0)], offset=0)
    assert form._by_text(told) == {"token_id:0": -1.0, "a": -2.0, "b": -3.0}
    assert form._by_text(replace(told, token=3, logprob=-4.0)) == {
        "a": -1.0,
        "token_id:1": -2.0,
        "token_id:2": -3.0,
    } | {"b": -4.0}
    assert form._by_text(replace(told, token=9, logprob=-9.0, top_logprobs=[])) == {"e": -9.0}


def test_sixteen_thousand_tokens_are_told_in_time_that_grows_with_them() -> None:
    """Steps are counted, as a clock depends on who else is there."""
    length = 16_384
    tokens = list("né🌙 ".encode()) * (length // 8)
    detokeniser, calls, read = Detokenizer(ByteTokenizer()), 0, 0
    decode = detokeniser._tokenizer.decode

    class Counted:
        def decode(self, ids: list[int]) -> str:
            nonlocal calls, read
            calls, read = calls + 1, read + len(ids)
            return decode(ids)

        def token_bytes(self, token: int) -> bytes:
            return bytes([token])

    detokeniser._tokenizer = Counted()  # type: ignore[assignment]
    reader, total, offsets = ChoiceReader(EncodedPrompt(tokens=[1]), ResponseOptions(num_top_logprobs=0)), 0, []
    for token in tokens:
        text = detokeniser.push([token])
        piece = delta([token], [-1.0], [[]], text=text, offsets=detokeniser.offsets[-1:], finish_reason=None)
        choice = reader.read(piece, None)
        total += len(choice.text)
        offsets += [each.offset for each in choice.tokens]
    assert total == length // 2 and len(offsets) == length and offsets[-1] == total - 1
    assert calls <= 2 * length and read <= 20 * length
