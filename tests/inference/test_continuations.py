"""Continuations read beside one another are as likely as each on its own."""

from __future__ import annotations

import random

import pytest
import torch

from kitforge.foundation.errors import DataError
from kitforge.inference import continuations
from kitforge.inference.continuations import Branches, score_branches
from kitforge.inference.score import score
from kitforge.models.catalog import config_of
from kitforge.models.folder import build
from tests.trainer import tiny

VOCAB = 50


def trees(seed: int) -> list[Branches]:
    chance = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(chance.randint(low, high))]

    return [
        Branches(stem=tokens(1, 30), branches=[tokens(1, 9) for _ in range(chance.randint(1, 5))]) for _ in range(12)
    ]


@pytest.mark.parametrize("network", [tiny.LLAMA, tiny.GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("max_tokens", [1, 64, 512])
def test_each_is_as_likely_as_on_its_own(network: dict[str, object], max_tokens: int) -> None:
    model = build(config_of({**network, "vocab_size": VOCAB}), device=torch.device("cpu"), seed=1).double().eval()
    for tree, found in zip(trees(1), score_branches(model, trees(1), max_tokens), strict=True):
        for branch, value in zip(tree.branches, found, strict=True):
            (alone,) = score(model, [[*tree.stem, *branch]], 512)
            assert value.logprob == pytest.approx(sum(alone[len(tree.stem) - 1 :]), abs=1e-9)
            tokens = torch.tensor([[*tree.stem, *branch]])
            greedy = model(tokens)[0].argmax(-1)[len(tree.stem) - 1 : -1].tolist()
            assert value.greedy == tuple(greedy)
            assert value.is_greedy(greedy) and value.is_greedy(branch) == (branch == greedy)


def test_where_keys_depend_on_the_length_each_is_read_alone() -> None:
    scaling = {"kind": "dynamic", "factor": 2.0, "original_length": 8}
    config = config_of({**tiny.LLAMA, "vocab_size": VOCAB, "rope_scaling": scaling})
    model = build(config, device=torch.device("cpu"), seed=1).double().eval()
    assert model.geometry.depends_on_length
    for tree, found in zip(trees(1), score_branches(model, trees(1), 64), strict=True):
        for branch, value in zip(tree.branches, found, strict=True):
            # What is read is the text without its last token, as in `transformers`.
            with torch.no_grad():
                logits = model(torch.tensor([[*tree.stem, *branch[:-1]]]))[0, len(tree.stem) - 1 :]
            wanted = logits.log_softmax(-1).gather(-1, torch.tensor(branch)[:, None]).sum()
            assert value.logprob == pytest.approx(float(wanted), abs=1e-9)
            assert value.greedy == tuple(logits.argmax(-1).tolist())


def test_a_branch_that_saw_another_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config_of({**tiny.LLAMA, "vocab_size": VOCAB}), device=torch.device("cpu"), seed=1).double().eval()
    right = [value.logprob for tree in score_branches(model, trees(1), 512) for value in tree]
    plain = continuations.BranchAttend

    def blind(trees: torch.Tensor, branches: torch.Tensor, positions: torch.Tensor) -> continuations.BranchAttend:
        return plain(trees, torch.zeros_like(branches), positions)

    monkeypatch.setattr(continuations, "BranchAttend", blind)
    assert [value.logprob for tree in score_branches(model, trees(1), 512) for value in tree] != pytest.approx(right)


def test_a_text_is_read_once_for_all_that_follow_it() -> None:
    assert Branches(stem=[1] * 100, branches=[[1, 2], [3], [4, 5, 6]]).num_tokens == 103


def test_what_is_too_long_or_empty_is_refused() -> None:
    model = build(config_of({**tiny.LLAMA, "vocab_size": VOCAB}), device=torch.device("cpu"), seed=1)
    limit = model.config.decoder().max_length
    # The last token is predicted and takes up no position.
    score_branches(model, [Branches(stem=[1] * (limit - 8), branches=[[1] * 9])], 512)
    with pytest.raises(DataError, match="longer than the model"):
        score_branches(model, [Branches(stem=[1] * (limit - 7), branches=[[1] * 9])], 512)
    with pytest.raises(DataError, match="at least one token"):
        Branches(stem=[], branches=[[1]])
