"""OpenAI's own client understands every answer, and answers are what the pipeline gives."""

import openai
import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.text_engine import InferenceOptions
from tests.inference.server.conftest import Served

CHAT = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Wér are you?"}]


@pytest.fixture(scope="module")
def pipeline(model: Decoder) -> TextGenerationPipeline:
    return TextGenerationPipeline(model, ByteTokenizer(), InferenceOptions(max_new_tokens=16))


def test_a_completion_is_the_pipelines(client: openai.OpenAI, pipeline: TextGenerationPipeline) -> None:
    answer = client.completions.create(model="tiny", prompt="Once", max_tokens=20)
    assert "Once" + answer.choices[0].text == pipeline("Once", max_new_tokens=20)[0]["generated_text"]
    assert answer.object == "text_completion" and answer.model == "tiny"
    assert answer.usage and answer.usage.prompt_tokens == 4
    assert answer.usage.total_tokens == 4 + answer.usage.completion_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_the_loop_is_woken_for_every_token_of_a_stream_only(
    client: openai.OpenAI, served: Served, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    calls: list[object] = []
    call_soon = served.service.worker._call_soon
    monkeypatch.setattr(served.service.worker, "_call_soon", lambda *given: (calls.append(given), call_soon(*given)))
    answer = client.completions.create(model="tiny", prompt=["Once", "Wér"], n=2, max_tokens=12, stream=streams)
    if streams:
        list(answer)
    assert len(calls) >= 12 if streams else len(calls) <= 2


def test_a_chat_is_the_pipelines(client: openai.OpenAI, pipeline: TextGenerationPipeline) -> None:
    answer = client.chat.completions.create(model="tiny", messages=CHAT, max_completion_tokens=20)
    assert answer.choices[0].message.content == pipeline(CHAT, max_new_tokens=20)[0]["generated_text"][-1]["content"]
    assert answer.choices[0].message.role == "assistant"
    parts = [{"type": "text", "text": "Wér "}, {"type": "text", "text": "are you?"}]
    same = client.chat.completions.create(
        model="tiny", messages=[CHAT[0], {"role": "user", "content": parts}], max_tokens=20
    )
    assert same.choices[0].message.content == answer.choices[0].message.content


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    wishes = {"model": "tiny", "max_tokens": 20, "temperature": 1.0, "seed": 5, "n": 3}
    whole = client.chat.completions.create(messages=CHAT, **wishes)
    texts, reasons, usage = [""] * 3, [None] * 3, None
    for event in client.chat.completions.create(
        messages=CHAT, stream=True, stream_options={"include_usage": True}, **wishes
    ):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    assert len(set(texts)) > 1


def test_several_prompts_are_answered_in_order(client: openai.OpenAI, pipeline: TextGenerationPipeline) -> None:
    prompts = ["a", "Once upon", "the river"]
    answer = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [
        each[0]["generated_text"].removeprefix(prompt)
        for prompt, each in zip(prompts, pipeline(prompts, max_new_tokens=8), strict=True)
    ]
    assert [choice.text for choice in answer.choices] == [text for text in expected for _ in range(2)]
    tokens = [list(prompt.encode()) for prompt in prompts]
    assert [
        choice.text for choice in client.completions.create(model="tiny", prompt=tokens, max_tokens=8).choices
    ] == expected


@pytest.mark.slow
def test_a_seed_repeats_an_answer_and_none_does_not(client: openai.OpenAI) -> None:
    def text(**wishes: int) -> str:
        answer = client.completions.create(model="tiny", prompt="a", max_tokens=16, temperature=1.5, **wishes)
        return answer.choices[0].text

    assert text(seed=7) == text(seed=7) != text(seed=8)
    assert len({text() for _ in range(3)}) > 1


def test_a_stop_string_ends_an_answer(client: openai.OpenAI) -> None:
    wishes = {"model": "tiny", "prompt": "a", "max_tokens": 24, "temperature": 1.0, "seed": 1}
    whole = client.completions.create(**wishes).choices[0].text
    stop = whole[8:10]
    cut = client.completions.create(**wishes, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


# A bias towards tokens that are characters.
LETTERS = {str(byte): 30.0 for byte in range(97, 123)}


@torch.no_grad()
def most_likely(model: Decoder, text: str, num: int) -> dict[str, float]:
    """Of what may follow a text, told with plain operations."""
    tokenizer = ByteTokenizer()
    logits = model(torch.tensor([tokenizer.encode(text)]))[0, -1].double()
    logits[97:123] += 30
    logprobs = (logits - logits.exp().sum().log()).tolist()
    order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
    return {tokenizer.decode([token]): logprobs[token] for token in order[:num]}


@pytest.mark.parametrize("streams", [False, True])
def test_the_most_likely_tokens_come_in_both_of_openais_shapes(
    client: openai.OpenAI, model: Decoder, streams: bool
) -> None:
    wishes = {"model": "tiny", "max_tokens": 5, "temperature": 0, "stream": streams, "logit_bias": LETTERS}
    answer = client.completions.create(prompt="Once", logprobs=4, **wishes)
    choices = [choice for event in answer for choice in event.choices] if streams else answer.choices
    text = "Once"
    for choice in choices:
        for token, told in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True):
            wanted = most_likely(model, text, 4)
            assert told == pytest.approx(wanted, abs=1e-5) and token in told
            text += token
    assert text == "Once" + "".join(choice.text for choice in choices)
    chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=20, **wishes)
    choices = [choice for event in chat for choice in event.choices] if streams else chat.choices
    told = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
    assert len(told) == 5
    for each in told:
        values = [other.logprob for other in each.top_logprobs]
        assert len(values) == 20 and values == sorted(values, reverse=True)
        assert (each.top_logprobs[0].token, values[0]) == (each.token, each.logprob)
        assert each.top_logprobs[0].bytes == list(each.token.encode())


def test_a_bias_changes_what_is_said(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="a", max_tokens=4, logit_bias={"120": 100})
    assert answer.choices[0].text == "xxxx"
