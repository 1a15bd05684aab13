"""Texts in, Hugging Face's shapes out; a stream never cuts a character."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from kitforge.data.tokenizer import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.inference.sampling import SamplingOptions
from kitforge.kits.transformers import pipeline as pipeline_module
from kitforge.kits.transformers.pipeline import TextGenerationPipeline
from kitforge.models.catalog import config_of
from kitforge.models.folder import build
from tests.trainer import tiny

TEXTS = ["the sun", "a", "old café"]


@pytest.fixture(scope="module")
def pipeline() -> TextGenerationPipeline:
    config = config_of(tiny.LLAMA | {"vocab_size": ByteTokenizer.vocab_size})
    model = build(config, device=torch.device("cpu"), seed=3)
    return TextGenerationPipeline(model, ByteTokenizer(), SamplingOptions(max_new_tokens=6, temperature=1.0))


def test_a_text_gives_a_list_of_one_answer(pipeline: TextGenerationPipeline) -> None:
    answers = pipeline("the sun")
    assert [list(answer) for answer in answers] == [["generated_text"]]
    assert answers[0]["generated_text"].startswith("the sun")


def test_texts_give_a_list_for_each(pipeline: TextGenerationPipeline) -> None:
    answers = pipeline(TEXTS)
    assert all(answer[0]["generated_text"].startswith(text) for answer, text in zip(answers, TEXTS, strict=True))
    assert pipeline([]) == []


def test_the_batch_size_changes_no_text(pipeline: TextGenerationPipeline) -> None:
    small = TextGenerationPipeline(pipeline.model, pipeline.tokenizer, pipeline.options, batch_size=2)
    assert small(TEXTS * 2) == pipeline(TEXTS * 2)


def test_options_of_a_call_hold_for_that_call(pipeline: TextGenerationPipeline) -> None:
    greedy = pipeline("a", temperature=0, max_new_tokens=2)
    assert greedy == pipeline("a", temperature=0, max_new_tokens=2, seed=9)
    assert len(pipeline("a", temperature=0, max_new_tokens=12)[0]["generated_text"]) > len(greedy[0]["generated_text"])
    with pytest.raises(ConfigError, match="temperature"):
        pipeline("a", temperatur=1.0)


def test_a_stream_is_the_text_in_pieces(pipeline: TextGenerationPipeline) -> None:
    for seed in range(5):
        whole = pipeline("a", max_new_tokens=20, seed=seed)[0]["generated_text"]
        assert "a" + "".join(pipeline.stream("a", max_new_tokens=20, seed=seed)) == whole


def test_a_stream_yields_whole_characters(pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def speak(_model: Any, _prompts: Sequence[Any], *_rest: Any) -> Iterator[list[int]]:
        return ([byte] for byte in "né 夜🌙!".encode())

    monkeypatch.setattr(pipeline_module, "stream", speak)
    assert [piece for piece in pipeline.stream("a") if piece] == ["n", "é", " ", "夜", "🌙", "!"]
