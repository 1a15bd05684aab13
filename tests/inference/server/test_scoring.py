"""Prompts that are echoed and scored, tokens over HTTP, and what benchmarks of other servers send."""

import inspect
import json
from typing import Any

import httpx
import openai
import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.data.chat.template import ChatTemplate
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, serving
from tests.patience import PATIENCE

PROMPT = "Once é a"


@torch.no_grad()
def logprobs_of(model: Decoder, tokens: list[int]) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([tokens]))[0].double().log_softmax(-1)
    return found


@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_an_echo_is_the_prompt_with_its_log_probabilities(
    client: openai.OpenAI, model: Decoder, as_tokens: bool, max_tokens: int
) -> None:
    tokens = list(PROMPT.encode())
    prompt: Any = tokens if as_tokens else PROMPT
    answer = client.completions.create(
        model="tiny", prompt=[prompt, prompt], echo=True, logprobs=2, max_tokens=max_tokens, temperature=0
    )
    plain = client.completions.create(model="tiny", prompt=PROMPT, logprobs=2, max_tokens=max_tokens or 1).choices[0]
    made = plain.text if max_tokens else ""
    scores = logprobs_of(model, tokens)
    for choice in answer.choices:
        told = choice.logprobs
        assert choice.text == PROMPT + made
        assert len(told.tokens) == len(tokens) + max_tokens == len(told.text_offset)
        assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
        assert told.text_offset[: len(tokens)] == [0, 1, 2, 3, 4, 5, 5, 6, 7]
        for place, token in enumerate(tokens[1:], 1):
            assert told.token_logprobs[place] == pytest.approx(scores[place - 1, token].item(), abs=1e-4)
            best = sorted(scores[place - 1].tolist(), reverse=True)[:2]
            assert sorted(told.top_logprobs[place].values(), reverse=True)[:2] == pytest.approx(best, abs=1e-4)
            assert told.top_logprobs[place][told.tokens[place]] == told.token_logprobs[place]
        if max_tokens:
            assert told.token_logprobs[len(tokens) :] == pytest.approx(plain.logprobs.token_logprobs, abs=1e-4)
            assert told.text_offset[len(tokens)] == len(PROMPT)
    assert answer.usage.completion_tokens == 2 * max_tokens


def test_a_prompt_as_long_as_the_model_can_be_scored(client: openai.OpenAI) -> None:
    tokens = [97] * 128
    found = client.completions.create(model="tiny", prompt=tokens, echo=True, logprobs=0, max_tokens=0)
    assert len(found.choices[0].logprobs.tokens) == 128 and found.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="at most max_length=128") as refused:
        client.completions.create(model="tiny", prompt=tokens, echo=True, logprobs=0, max_tokens=1)
    # Clients shorten a chat at this code.
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")


def test_an_echo_is_streamed_before_the_answer(client: openai.OpenAI) -> None:
    wishes = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 6, "n": 2}
    whole = client.completions.create(**wishes, temperature=1, seed=2)
    texts, tokens = ["", ""], [[], []]
    for event in client.completions.create(**wishes, temperature=1, seed=2, stream=True):
        (choice,) = event.choices
        assert texts[choice.index] or choice.text.startswith(PROMPT)
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.token_logprobs
    assert texts == [choice.text for choice in whole.choices]
    assert [each[0] for each in tokens] == [None, None]
    for found, choice in zip(tokens, whole.choices, strict=True):
        assert found[1:] == pytest.approx(choice.logprobs.token_logprobs[1:], abs=1e-4)
    bare = client.completions.create(model="tiny", prompt=PROMPT, echo=True, max_tokens=0).choices[0]
    assert bare.text == PROMPT and bare.logprobs is None


def test_prompt_log_probabilities_have_vllms_shape(client: openai.OpenAI, model: Decoder) -> None:
    tokens = list(PROMPT.encode())
    scores = logprobs_of(model, tokens)
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"prompt_logprobs": 1}
    ).choices[0]
    first, *rest = found.model_extra["prompt_logprobs"]
    assert first is None and len(rest) == len(tokens) - 1
    for place, (token, told) in enumerate(zip(tokens[1:], rest, strict=True)):
        own, best = told[str(token)], int(scores[place].argmax())
        assert own["logprob"] == pytest.approx(scores[place, token].item(), abs=1e-4)
        assert own["rank"] == int((scores[place] > scores[place, token]).sum()) + 1
        assert told[str(best)]["rank"] == 1 and len(told) == (1 if best == token else 2)
        assert own["decoded_token"] == (chr(token) if token < 128 else f"bytes:\\x{token:02x}")
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert len(chat.model_extra["prompt_logprobs"]) == chat.usage.prompt_tokens


def test_ends_can_be_moved(client: openai.OpenAI) -> None:
    wishes = {"model": "tiny", "prompt": "a", "max_tokens": 12, "temperature": 0}
    letters = {str(byte): 90.0 for byte in range(97, 123)}
    free = client.completions.create(**wishes, logit_bias=letters).choices[0].text
    ended = client.completions.create(**wishes, logit_bias={"256": 100}).choices[0]
    assert (ended.text, ended.finish_reason) == ("", "stop")
    gone_on = client.completions.create(**wishes, logit_bias={"256": 100}, extra_body={"ignore_eos": True})
    assert gone_on.choices[0].finish_reason == "length" and gone_on.usage.completion_tokens == 12
    least = client.completions.create(**wishes, logit_bias={"256": 100}, extra_body={"min_tokens": 5})
    assert least.usage.completion_tokens == 6 and least.choices[0].finish_reason == "stop"
    byte = free.encode()[4]
    cut = client.completions.create(**wishes, logit_bias=letters, extra_body={"stop_token_ids": [byte]})
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens == free.encode().index(byte) + 1
    with pytest.raises(openai.BadRequestError, match="min_new_tokens"):
        client.completions.create(**wishes, extra_body={"min_tokens": 13})


def test_answers_without_chance_are_made_once(client: openai.OpenAI, served: Served) -> None:
    before = served.service.worker._text_engine.engine.stats()["steps"]
    answer = client.completions.create(model="tiny", prompt=["ab", "b"], max_tokens=6, n=3, temperature=0, logprobs=1)
    assert served.service.worker._text_engine.engine.stats()["steps"] - before <= 8
    assert [choice.index for choice in answer.choices] == list(range(6))
    for three in (answer.choices[:3], answer.choices[3:]):
        assert len({choice.text for choice in three}) == 1
        assert three[0].logprobs == three[2].logprobs
    assert answer.usage.completion_tokens == 36
    streams = ["", "", ""]
    for event in client.completions.create(model="tiny", prompt="ab", max_tokens=6, n=3, temperature=0, stream=True):
        streams[event.choices[0].index] += event.choices[0].text
    assert streams == [choice.text for choice in answer.choices[:3]]


def test_a_served_prompt_begins_as_its_tokenizer_begins_a_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "encode_prompt", lambda tokenizer, text: [7, *tokenizer.encode(text)])

    def read(**choices: Any) -> tuple[list[int], int]:
        tokens = httpx.post(f"{served.url}/tokenize", json={"prompt": "ab", **choices}).json()["tokens"]
        body = {"model": "tiny", "prompt": "ab", "max_tokens": 1, **choices}
        answer = httpx.post(f"{served.url}/v1/completions", json=body).json()
        return tokens, answer["usage"]["prompt_tokens"]

    assert read() == ([7, *b"ab"], 3)
    assert read(add_special_tokens=True) == ([7, *b"ab"], 3)
    assert read(add_special_tokens=False) == (list(b"ab"), 2)


def test_tokens_over_http(served: Served) -> None:
    def post(path: str, **body: Any) -> dict[str, Any]:
        answer = httpx.post(f"{served.url}{path}", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    tokens = list("né".encode())
    assert post("/tokenize", prompt="né", model="tiny") == {
        "count": 3,
        "max_model_len": 128,
        "tokens": tokens,
        "token_strs": None,
    }
    told = post("/tokenize", prompt="né", add_special_tokens=False, return_token_strs=True)
    assert told["token_strs"] == ["n", "bytes:\\xc3", "bytes:\\xa9"]
    assert post("/detokenize", tokens=[*tokens, 256]) == {"prompt": "né"}
    chat = post("/tokenize", messages=[{"role": "user", "content": "né"}])
    assert ByteTokenizer().decode(chat["tokens"]) == "\n\nHuman: né\n\nAssistant: "
    closed = post("/tokenize", messages=[{"role": "user", "content": "né"}], add_generation_prompt=False)
    assert ByteTokenizer().decode(closed["tokens"]) == "\n\nHuman: né"
    assert set(httpx.get(f"{served.url}/tokenizer_info").json()) >= {"eos_token", "bos_token", "chat_template"}
    for path, body in (
        ("/tokenize", {"text": "a"}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert httpx.post(f"{served.url}{path}", json=body).status_code == 400


def test_a_model_can_be_looked_up_and_health_asked_for_without_a_body(client: openai.OpenAI, served: Served) -> None:
    found = client.models.retrieve("tiny")
    assert found.id == "tiny" and found.model_extra["max_model_len"] == 128
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("a/b")
    answer = httpx.head(f"{served.url}/health")
    assert (answer.status_code, answer.content) == (200, b"")


# As vLLM's benchmark client makes them: its present version, and one that named `best_of` in every request.
BENCH: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "ab", "repetition_penalty": 1.0, "max_tokens": 7, "logprobs": None}),
    ("/v1/completions", {"prompt": [97, 98], "temperature": 0.0, "best_of": 1, "max_tokens": 7, "logprobs": 2}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}], "max_completion_tokens": 7},
    ),
]


@pytest.mark.parametrize(("path", "payload"), BENCH, ids=["completions", "older", "chat"])
def test_what_vllms_benchmark_sends_is_answered(served: Served, path: str, payload: dict[str, Any]) -> None:
    further = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    ended = {"logit_bias": {"256": 100}}
    answer = httpx.post(served.url + path, json=payload | further | ended, headers={"x-request-id": "bench-0"})
    *events, done = [
        json.loads(line[6:]) if line[6:] != "[DONE]" else None for line in answer.text.split("\n\n") if line
    ]
    assert answer.status_code == 200 and done is None
    assert not events[-1]["choices"] and events[-1]["usage"]["completion_tokens"] == 7
    assert any(event["choices"] for event in events[:-1])


@pytest.mark.slow
def test_others_are_answered_while_a_long_prompt_is_scored(model: Decoder) -> None:
    """In pieces of a few tokens, between which there is room for others."""
    service = make_service(model, ServeOptions(), EngineOptions(max_num_batched_tokens=8, max_num_seqs=4))
    with serving(service) as served, httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        body = {"prompt": [[97] * 120] * 8, "echo": True, "logprobs": 1, "max_tokens": 1}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as slow:
            answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=PATIENCE)
            assert answer.status_code == 200
            assert slow.read().endswith(b"data: [DONE]\n\n")
    assert service.worker._text_engine.engine.stats()["blocks_used"] == 0


KNOWS_MORE = "continue_final_message" in inspect.signature(ChatTemplate.tokens).parameters


@pytest.mark.skipif(not KNOWS_MORE, reason="the template takes nothing but messages")
def test_a_message_of_the_assistant_is_gone_on_with(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}]
    body = {"messages": messages, "continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    tokens = httpx.post(f"{served.url}/tokenize", json=body).json()["tokens"]
    assert ByteTokenizer().decode(tokens) == "\n\nHuman: Hi\n\nAssistant: I am"
    assert ByteTokenizer.eos_id not in tokens
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body | {"max_tokens": 4}).json()
    same = httpx.post(f"{served.url}/v1/completions", json={"prompt": tokens, "max_tokens": 4}).json()
    assert answer["choices"][0]["message"]["content"] == same["choices"][0]["text"]
    for own in ("messages", "tools"):
        wrong = httpx.post(f"{served.url}/tokenize", json=body | {"chat_template_kwargs": {own: []}})
        assert wrong.status_code == 400 and own in wrong.json()["error"]["param"]
