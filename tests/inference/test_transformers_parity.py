"""Greedy continuations equal those of Hugging Face's `generate` on the same fp32 weights, for every variant."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.inference.recomputation import logits_of
from tests.models.variants import VARIANTS, build_peer, ours_from

# Prompts and what follows end before any of the variants changes its positions on the way, which the peer does without
# turning the keys that it has.
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [3, 1, 4, 1, 5, 9]]
NEW_TOKENS = 9
# Below this margin between the best two logits either of them may be called the most likely.
MARGIN = 1e-5
EXCUSED: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def few_are_excused() -> Iterator[None]:
    yield
    assert len(EXCUSED) <= 1, EXCUSED


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_texts_equal_those_of_generate(tmp_path: Path, name: str) -> None:
    peer = build_peer(VARIANTS[name])
    peer.save_pretrained(tmp_path)
    model = ours_from(tmp_path, "O1").requires_grad_(False)
    engine = Engine(
        model, EngineOptions(block_size=4, max_num_batched_tokens=8, max_num_seqs=3, prompt_lookup_tokens=2)
    )
    completions = engine.generate(PROMPTS, SamplingOptions(max_new_tokens=NEW_TOKENS))
    for prompt, (completion,) in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        texts = peer.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        compare(model, prompt, completion.tokens, texts[0, len(prompt) :].tolist())


def compare(model: Decoder, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> None:
    place = next((place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
    if place is None:
        return
    logits = logits_of(model, [*prompt, *ours[:place]], len(prompt) + NEW_TOKENS)[-1]
    best, second = logits.topk(2).values.tolist()
    assert best - second < MARGIN, (ours, theirs)
    EXCUSED.append(f"{prompt} at {place}")
