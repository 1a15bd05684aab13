"""Continuations read beside one another are as likely as each on its own."""

import random
from typing import Any

import pytest
import torch

from kitforge.foundation.errors import DataError
from kitforge.inference.choice_scoring import ChoiceBatch, choice_logprobs
from tests.core.nn import networks
from tests.tiny import built
from tests.trainer import tiny

VOCAB = 50


def trees(seed: int) -> list[ChoiceBatch]:
    chance = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(chance.randint(low, high))]

    return [
        ChoiceBatch(prefix=tokens(1, 30), continuations=[tokens(1, 9) for _ in range(chance.randint(1, 5))])
        for _ in range(12)
    ]


def check(model: Any, asked: list[ChoiceBatch], max_tokens: int) -> None:
    """Each choice as by a pass over its text alone, without the last token, as in `transformers`."""
    for tree, found in zip(asked, choice_logprobs(model, asked, max_tokens), strict=True):
        for branch, value in zip(tree.continuations, found, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*tree.prefix, *branch[:-1]]]))[0, len(tree.prefix) - 1 :]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(branch)[:, None]).sum()
            assert value.logprob == pytest.approx(float(wanted), abs=1e-9)
            greedy = logits.argmax(-1).tolist()
            assert value.greedy == tuple(greedy)
            assert value.is_greedy(greedy) and value.is_greedy(branch) == (branch == greedy)


# Keys of the last one depend on the length, so that each choice is read alone.
SCALED = tiny.LLAMA | {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_length": 8}}


@pytest.mark.parametrize("network", [tiny.LLAMA, tiny.GPT2, SCALED], ids=["llama", "gpt2", "scaled"])
@pytest.mark.parametrize("max_tokens", [1, 64, 512])
def test_each_is_as_likely_as_on_its_own(network: dict[str, Any], max_tokens: int) -> None:
    model = built(network, VOCAB).double()
    assert model.geometry.depends_on_length == (network is SCALED)
    check(model, trees(1), max_tokens)


SHORT = [ChoiceBatch(prefix=[3, 5, 7, 9, 2], continuations=[[4, 6, 8, 1, 30], [11], [12, 13, 4]])] * 2


@pytest.mark.parametrize("name", sorted(networks.CONFIGS.keys() - {"dynamic"}))
def test_every_family_gives_each_choice_the_logits_that_it_has_alone(name: str) -> None:
    check(networks.build(networks.CONFIGS[name]), SHORT, 512)


def test_a_text_is_read_once_for_all_that_follow_it() -> None:
    assert ChoiceBatch(prefix=[1] * 100, continuations=[[1, 2], [3], [4, 5, 6]]).num_tokens == 103


def test_what_is_too_long_or_empty_is_refused() -> None:
    model = built(tiny.LLAMA, VOCAB)
    limit = model.config.decoder().max_length
    # The last token is predicted and takes up no position.
    choice_logprobs(model, [ChoiceBatch(prefix=[1] * (limit - 8), continuations=[[1] * 9])], 512)
    with pytest.raises(DataError, match="longer than the model"):
        choice_logprobs(model, [ChoiceBatch(prefix=[1] * (limit - 7), continuations=[[1] * 9])], 512)
    with pytest.raises(DataError, match="at least one token"):
        ChoiceBatch(prefix=[], continuations=[[1]])
