"""Continuations read beside one another are as likely as each on its own."""

import random

import pytest
import torch

from kitforge.foundation.errors import DataError
from kitforge.inference.choice_scoring import ChoiceBatch, choice_logprobs
from kitforge.inference.logprobs import token_logprobs
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from tests.core.nn import networks
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


@pytest.mark.parametrize("network", [tiny.LLAMA, tiny.GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("max_tokens", [1, 64, 512])
def test_each_is_as_likely_as_on_its_own(network: dict[str, object], max_tokens: int) -> None:
    model = build(config_of({**network, "vocab_size": VOCAB}), device=torch.device("cpu"), seed=1).double().eval()
    for tree, found in zip(trees(1), choice_logprobs(model, trees(1), max_tokens), strict=True):
        for branch, value in zip(tree.continuations, found, strict=True):
            (alone,) = token_logprobs(model, [[*tree.prefix, *branch]], 512)
            assert value.logprob == pytest.approx(sum(alone[len(tree.prefix) - 1 :]), abs=1e-9)
            tokens = torch.tensor([[*tree.prefix, *branch]])
            greedy = model(tokens)[0].argmax(-1)[len(tree.prefix) - 1 : -1].tolist()
            assert value.greedy == tuple(greedy)
            assert value.is_greedy(greedy) and value.is_greedy(branch) == (branch == greedy)


SHORT = [ChoiceBatch(prefix=[3, 5, 7, 9, 2], continuations=[[4, 6, 8, 1, 30], [11], [12, 13, 4]])] * 2


@pytest.mark.parametrize("name", sorted(networks.CONFIGS.keys() - {"dynamic"}))
def test_every_family_gives_each_choice_the_logits_that_it_has_alone(name: str) -> None:
    model = networks.build(networks.CONFIGS[name])
    for tree, found in zip(SHORT, choice_logprobs(model, SHORT, 512), strict=True):
        for branch, value in zip(tree.continuations, found, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*tree.prefix, *branch[:-1]]]))[0, len(tree.prefix) - 1 :]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(branch)[:, None]).sum()
            assert value.logprob == pytest.approx(float(wanted), abs=1e-9)


def test_where_keys_depend_on_the_length_each_is_read_alone() -> None:
    scaling = {"kind": "dynamic", "factor": 2.0, "original_length": 8}
    config = config_of({**tiny.LLAMA, "vocab_size": VOCAB, "rope_scaling": scaling})
    model = build(config, device=torch.device("cpu"), seed=1).double().eval()
    assert model.geometry.depends_on_length
    for tree, found in zip(trees(1), choice_logprobs(model, trees(1), 64), strict=True):
        for branch, value in zip(tree.continuations, found, strict=True):
            # What is read is the text without its last token, as in `transformers`.
            with torch.no_grad():
                logits = model(torch.tensor([[*tree.prefix, *branch[:-1]]]))[0, len(tree.prefix) - 1 :]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(branch)[:, None]).sum()
            assert value.logprob == pytest.approx(float(wanted), abs=1e-9)
            assert value.greedy == tuple(logits.argmax(-1).tolist())


def test_a_text_is_read_once_for_all_that_follow_it() -> None:
    assert ChoiceBatch(prefix=[1] * 100, continuations=[[1, 2], [3], [4, 5, 6]]).num_tokens == 103


def test_what_is_too_long_or_empty_is_refused() -> None:
    model = build(config_of({**tiny.LLAMA, "vocab_size": VOCAB}), device=torch.device("cpu"), seed=1)
    limit = model.config.decoder().max_length
    # The last token is predicted and takes up no position.
    choice_logprobs(model, [ChoiceBatch(prefix=[1] * (limit - 8), continuations=[[1] * 9])], 512)
    with pytest.raises(DataError, match="longer than the model"):
        choice_logprobs(model, [ChoiceBatch(prefix=[1] * (limit - 7), continuations=[[1] * 9])], 512)
    with pytest.raises(DataError, match="at least one token"):
        ChoiceBatch(prefix=[], continuations=[[1]])
