"""Generated texts continue their prompts, whatever the tokenizer does at the beginning of a text."""

import json
from functools import cache
from typing import Any, cast

import httpx
import openai
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.inference.engine import Engine
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.service import Service
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from tests.inference.server.conftest import serving
from tests.tiny import built
from tests.tokenizer_kinds import MAKERS, PREFIXING, tokenizer_of
from tests.trainer import tiny

PROMPT = "He went to"


@cache
def model_of(kind: str) -> Decoder:
    return cast(Decoder, built(tiny.LLAMA, tokenizer_of(kind).vocab_size))


def pipeline_of(kind: str) -> TextGenerationPipeline:
    return TextGenerationPipeline(model_of(kind), tokenizer_of(kind), InferenceOptions(max_new_tokens=3))


def forced(kind: str, text: str = " the") -> dict[str, Any]:
    """Options that generate the first token of the text only."""
    tokenizer = tokenizer_of(kind)
    token = tokenizer.encode(PROMPT + text)[len(tokenizer.encode(PROMPT))]
    assert tokenizer.token_bytes(token) == text.encode()
    return {"logit_bias": {str(token): 100.0}}


def without_bytes(kind: str) -> dict[str, float]:
    """A bias against tokens of single bytes: an invalid byte turns the decoded ones before it into U+FFFD, which a
    stream has then already given out."""
    tokenizer = tokenizer_of(kind)
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return {}
    spelled = tokenizer._tokenizer.get_vocab()
    return {str(token): -100.0 for text, token in spelled.items() if text.startswith("<0x")}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_generated_text_is_what_the_tokens_add_to_that_of_the_prompt(kind: str) -> None:
    """Token by token too."""
    tokenizer, pipeline = tokenizer_of(kind), pipeline_of(kind)
    prompt = tokenizer.encode_prompt(PROMPT)
    options = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "logit_bias": without_bytes(kind)}
    (samples,) = Engine(model_of(kind)).generate([prompt], SamplingOptions(**options))
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *samples[0].tokens])
    assert whole.startswith(before)
    (answer,) = pipeline(PROMPT, **options)
    assert answer["generated_text"] == PROMPT + whole[len(before) :]
    assert "".join(pipeline.stream(PROMPT, **options)) == whole[len(before) :]


@pytest.mark.parametrize("kind", PREFIXING)
@pytest.mark.parametrize("stop", [" the", " the the", "he t", "t"])
def test_a_stop_string_may_begin_with_the_space_of_the_first_token(kind: str, stop: str) -> None:
    (answer,) = pipeline_of(kind)(PROMPT, stop=[stop], **forced(kind))
    assert answer["generated_text"] == PROMPT + " the the the".partition(stop)[0]


@pytest.mark.parametrize("kind", PREFIXING)
def test_the_space_behind_special_tokens_is_kept(kind: str) -> None:
    """After a prompt that ends with them, and after end tokens that are ignored."""
    tokenizer = tokenizer_of(kind)
    texts = TextEngine(Engine(model_of(kind)), tokenizer)
    options = InferenceOptions(max_new_tokens=4, **forced(kind))
    texts.submit([*tokenizer.encode_prompt(PROMPT), tokenizer.eos_id, tokenizer.eos_id], options)
    assert "".join(delta.text for _ in range(9) for delta in texts.step()) == " the the the the"


@pytest.mark.parametrize("kind", ["prepend and strip", "sentencepiece"])
@pytest.mark.parametrize("as_tokens", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_server_gives_the_same_texts(kind: str, as_tokens: bool, streams: bool) -> None:
    tokenizer = tokenizer_of(kind)
    texts = TextEngine(Engine(model_of(kind), stop_ids=tokenizer.eos_ids), tokenizer)
    bias = forced(kind)["logit_bias"]
    prompt = tokenizer.encode_prompt(PROMPT) if as_tokens else PROMPT
    body = {"prompt": prompt, "max_tokens": 2, "echo": True, "logprobs": 0, "logit_bias": bias, "temperature": 0}
    with serving(Service(texts, "tiny", InferenceOptions(), ServeOptions())) as served:
        if streams:
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
            chunks = [each.choices[0] for each in client.completions.create(model="tiny", stream=True, **body)]
            text = "".join(each.text for each in chunks)
            offsets = [offset for each in chunks if each.logprobs for offset in each.logprobs.text_offset or ()]
        else:
            (choice,) = httpx.post(f"{served.url}/v1/completions", json=body).json()["choices"]
            text, offsets = choice["text"], choice["logprobs"]["text_offset"]
        stopped = httpx.post(f"{served.url}/v1/completions", json=body | {"echo": False, "stop": " the"}).json()
    assert text == f"{PROMPT} the the"
    assert offsets[-2:] == [len(PROMPT), len(f"{PROMPT} the")]
    assert [stopped["choices"][0][name] for name in ("text", "finish_reason")] == ["", "stop"]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_text_by_a_grammar_is_spelled_as_the_grammar_says(kind: str) -> None:
    """Whatever the tokenizer puts before a text, also where the grammar leaves one text alone."""
    pipeline = pipeline_of(kind)
    schema = {"type": "object", "properties": {"the answer": {"enum": ["He", " school", "é\n"]}, "ok": {"const": 12}}}
    tokenizer = tokenizer_of(kind)
    if not any(b"{" in tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)):
        with pytest.raises(ConfigError, match="cannot write"):
            pipeline(PROMPT, schema={"type": "object"})
        return
    schema |= {"required": ["the answer", "ok"], "additionalProperties": False}
    for temperature in (0.0, 1.0, 3.0):
        options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": 100, "num_samples": 2}
        for answer in pipeline(PROMPT, schema=schema, **options):
            value = json.loads(answer["generated_text"].removeprefix(PROMPT))
            assert value["the answer"] in ("He", " school", "é\n") and value["ok"] == 12
        for answer in pipeline(PROMPT, regex="the school(: A|, 1)", **options):
            assert answer["generated_text"].removeprefix(PROMPT) in ("the school: A", "the school, 1")
