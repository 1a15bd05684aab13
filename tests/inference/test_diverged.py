"""A model that has diverged for some texts only: those end, and the others are what they are alone."""

import copy

import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.paged_attention import KeyValueCache
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.text_engine import InferenceOptions
from tests.inference.recomputation import alone, by_sample, network, until_end

BAD = 11  # a token whose embedding is no number
POISONED = [BAD, *range(1, 10)]
# Shorter than the poisoned text and longer, so that both read beyond an end.
PROMPTS = [[3, 1], POISONED, [9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]]
SAMPLED = SamplingOptions(max_new_tokens=6, temperature=1.0, seed=1)


@pytest.fixture
def model() -> Decoder:
    model = copy.deepcopy(network("llama"))
    # Where the embedding is the head's weight too, every text would be lost.
    assert model.output is not None
    with torch.no_grad():
        model.embedding.weight[BAD] = float("nan")
    return model


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("options", [SamplingOptions(max_new_tokens=6), SAMPLED], ids=["greedy", "sampled"])
def test_a_text_of_no_numbers_ends_and_its_mates_do_not_notice(
    model: Decoder, options: SamplingOptions, chunk: int, layout: str
) -> None:
    size = EngineOptions(max_num_seqs=4, block_size=4, max_num_batched_tokens=chunk, kv_layout=layout)  # type: ignore[arg-type]
    engine = Engine(model, size)
    # Twice, so that texts come into the blocks that the poisoned one had.
    for _ in range(2):
        requests = [engine.submit(prompt, options, key=place) for place, prompt in enumerate(PROMPTS)]
        found = by_sample(engine)
        for place, (request, prompt) in enumerate(zip(requests, PROMPTS, strict=True)):
            tokens = [token for output in found[request, 0] for token in output.tokens]
            if prompt is POISONED:
                assert tokens == []
                assert found[request, 0][-1].finish_reason == "diverged"
                continue
            assert tokens == alone(Engine(model, size), prompt, options, place).tokens
    assert engine.stats()["blocks_used"] == 0


def test_blocks_that_are_not_cleared_reach_the_next_text(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above is worth."""
    monkeypatch.setattr(KeyValueCache, "clear", lambda *_: None)
    options = SamplingOptions(max_new_tokens=6)
    engine = Engine(model, EngineOptions(max_num_seqs=2, block_size=4, kv_layout="paged", kv_cache_bytes=None))
    engine.submit(POISONED, options)
    by_sample(engine)
    for prompt in ([3, 1], [9, 2, 6]):
        engine.submit(prompt, options)
    reasons = {outputs[-1].finish_reason for outputs in by_sample(engine).values()}
    assert "diverged" in reasons


def test_samples_of_a_text_of_no_numbers_all_end(model: Decoder) -> None:
    engine = Engine(model)
    engine.submit(POISONED, SAMPLED, num_samples=3)
    assert [output.finish_reason for output in until_end(engine)] == ["diverged"] * 3


def test_a_pipeline_says_so() -> None:
    model = copy.deepcopy(network("llama"))
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    pipeline = TextGenerationPipeline(model, ByteTokenizer(), InferenceOptions(max_new_tokens=4))
    with pytest.raises(ModelError, match="not finite"):
        pipeline("\x01\x02")
