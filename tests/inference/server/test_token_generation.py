"""/inference/v1/generate: tokens in and tokens out, each with the log-probability that it was drawn with."""

import json
import math
from typing import Any

import httpx
import pytest
import torch
from openai.types.chat.chat_completion import ChoiceLogprobs

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.engine import Engine
from tests.inference.server.conftest import Served

PROMPT = [97, 200, 98, 257, 99]  # no text: half a character, and a special token


def post(served: Served, sampling: dict[str, Any], **body: Any) -> httpx.Response:
    body = {"model": "tiny", "token_ids": PROMPT, "sampling_params": {"max_tokens": 12, "seed": 1} | sampling} | body
    return served.post("/inference/v1/generate", body)


def drawn(served: Served, sampling: dict[str, Any], **body: Any) -> list[tuple[list[int], list[float]]]:
    """The tokens of each choice with their log-probabilities, as clients that train check them."""
    response = post(served, sampling, **body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    found = []
    for place, choice in enumerate(choices):
        told = ChoiceLogprobs.model_validate({"refusal": None, **choice["logprobs"]}).content or []
        assert choice["index"] == place
        assert [each.token for each in told] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert all(math.isfinite(each.logprob) and each.logprob <= 0 for each in told)
        found.append((choice["token_ids"], [each.logprob for each in told]))
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
@torch.no_grad()
def test_a_log_probability_is_that_of_the_distribution_a_token_was_drawn_from(
    served: Served, model: Decoder, temperature: float
) -> None:
    for tokens, logprobs in drawn(served, {"n": 3, "temperature": temperature}):
        logits = model(torch.tensor([PROMPT + tokens]))[0, len(PROMPT) - 1 : -1] / (temperature or 1)
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(tokens).unsqueeze(-1))[:, 0]
        assert logprobs == pytest.approx(wanted.tolist(), abs=1e-5)
        if temperature in (0, 1):
            own = Engine(model).score([PROMPT + tokens])[0][len(PROMPT) - 1 :]
            assert logprobs == pytest.approx(own, abs=1e-5)


def test_what_was_drawn_is_scored_alike_when_it_comes_back(served: Served) -> None:
    ((tokens, logprobs),) = drawn(served, {"temperature": 1})
    body = post(served, {"max_tokens": 1, "prompt_logprobs": 0}, token_ids=PROMPT + tokens).json()
    told = body["choices"][0]["prompt_logprobs"][len(PROMPT) :]
    own = [each[str(token)]["logprob"] for each, token in zip(told, tokens, strict=True)]
    assert own == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("sampling", [{"n": 2}, {"stop": ["e"]}, {"logprobs": 3, "stop_token_ids": [100]}], ids=str)
def test_a_stream_has_the_same_tokens(served: Served, sampling: dict[str, Any]) -> None:
    sampling = {"logit_bias": {"100": 3, "101": 3}, "max_tokens": 30, **sampling}
    whole = post(served, sampling).json()
    lines = post(served, sampling, stream=True, stream_options={"include_usage": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    usage = events.pop()["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert len({each["request_id"] for each in events}) == 1
    for place, choice in enumerate(whole["choices"]):
        parts = [part for each in events for part in each["choices"] if part["index"] == place]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [each for part in parts for each in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]


def test_the_token_that_ends_a_text_is_one_of_it(served: Served) -> None:
    ((free, _),) = drawn(served, {"temperature": 0})
    for sampling in ({"stop_token_ids": [free[4]]}, {"stop_token_ids": [free[4]], "min_tokens": 1}):
        response = post(served, {"temperature": 0, **sampling}).json()
        choice = response["choices"][0]
        assert choice["token_ids"] == free[: free.index(free[4]) + 1] and choice["finish_reason"] == "stop"
        assert response["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert post(served, {}).json()["choices"][0]["finish_reason"] == "length"


def test_the_most_likely_tokens_have_their_numbers(served: Served) -> None:
    # As clients that train send it.
    wishes = {"skip_special_tokens": False, "detokenize": False, "flat_logprobs": True, "extra_args": {"compact": True}}
    content = post(served, {"logprobs": 4, "temperature": 0, **wishes}).json()["choices"][0]["logprobs"]["content"]
    for each in content:
        top = each["top_logprobs"]
        assert len(top) == 4 and top[0]["logprob"] == each["logprob"] and top[0]["token"] == each["token"]
        assert len({other["token"] for other in top}) == 4


def test_a_text_ends_where_the_model_ends_it(served: Served) -> None:
    ((tokens, _),) = drawn(served, {"max_tokens": None, "ignore_eos": True})
    assert len(PROMPT) + len(tokens) == served.service.max_model_len


def test_a_salt_keeps_prefixes_apart(served: Served) -> None:
    prompt = [98] * 64
    cached = []
    for salt in ("a", "a", "b", "b", None):
        body = post(served, {"max_tokens": 1}, token_ids=prompt, cache_salt=salt).json()
        cached.append(body["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == cached[4] == 0 < cached[1] == cached[3]
