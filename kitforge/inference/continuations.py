"""How likely a model finds several continuations of one text. N tokens of a pass, all in one row.

A text is read once for all its continuations: they follow it in the row as branches that see it and not one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import AttentionSpec, Context, causal_mask
from kitforge.foundation.errors import DataError
from kitforge.inference.score import logprobs_of, score


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """A text and what may follow it, in tokens."""

    stem: Sequence[int]
    branches: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if not self.stem or not self.branches or not all(self.branches):
            raise DataError("a text and its continuations have at least one token each", got="one without any")

    @property
    def num_tokens(self) -> int:
        """How many are read: the last of each branch is only predicted."""
        return len(self.stem) + sum(len(branch) - 1 for branch in self.branches)

    @property
    def longest(self) -> int:
        """Tokens of the longest whole text."""
        return len(self.stem) + max(map(len, self.branches))


@torch.no_grad()
def score_branches(model: nn.Module, trees: Sequence[Branches], max_tokens: int) -> list[list[float]]:
    """The log-probability of every continuation, tree by tree. A pass has at most `max_tokens` tokens, or one tree.

    Raises DataError for a text that is longer than the model allows.
    """
    network = cast(CausalLM, model)
    limit = network.geometry.max_length
    for tree in trees:
        if tree.longest > limit:
            raise DataError("a text is longer than the model allows", got=tree.longest, expected=f"at most {limit}")
    if network.geometry.depends_on_length:
        return [_one_by_one(model, tree, max_tokens) for tree in trees]
    scores: list[list[float]] = []
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(trees, max_tokens):
            scores += _score_batch(network, batch)
    finally:
        model.train(was_training)
    return scores


@final
class BranchAttend:
    """Attention within each text of a row. Is an `Attend`. Tokens see what stands before them in their own tree, of its
    stem (branch 0) and of their own branch."""

    def __init__(self, trees: Tensor, branches: Tensor, positions: Tensor) -> None:
        same_tree = trees.unsqueeze(1) == trees.unsqueeze(0)
        is_open = (branches.unsqueeze(0) == 0) | (branches.unsqueeze(1) == branches.unsqueeze(0))
        self._seen = same_tree & is_open
        self._positions = positions
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `Attend`."""
        if spec.window not in self._masks:
            order = causal_mask(self._positions, self._positions, spec.window)
            self._masks[spec.window] = self._seen & order
        return spec.kernel(query, key, value, mask=self._masks[spec.window], causal=False, scale=spec.scale)


@dataclass(slots=True)
class _Row:
    """Tokens of a pass, and of each the tree, the branch and the position."""

    tokens: list[int] = field(default_factory=list)
    trees: list[int] = field(default_factory=list)
    branches: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def add(self, tokens: Sequence[int], tree: int, branch: int, start: int) -> range:
        """Where they come to lie."""
        first = len(self.tokens)
        self.tokens += tokens
        self.trees += [tree] * len(tokens)
        self.branches += [branch] * len(tokens)
        self.positions += range(start, start + len(tokens))
        return range(first, len(self.tokens))


def _score_batch(network: CausalLM, trees: Sequence[Branches]) -> list[list[float]]:
    row = _Row()
    rows: list[int] = []
    targets: list[int] = []
    sizes: list[int] = []
    for number, tree in enumerate(trees):
        stem = row.add(tree.stem, number, 0, 0)
        for branch, tokens in enumerate(tree.branches, 1):
            # The first token of a branch is predicted by the stem, each other by the one before it.
            rows += [stem[-1], *row.add(tokens[:-1], number, branch, len(stem))]
            targets += tokens
            sizes.append(len(tokens))
    device = network.head_weight.device
    trees_of, branches, positions = (
        torch.tensor(values, device=device) for values in (row.trees, row.branches, row.positions)
    )
    context = Context(positions=positions.unsqueeze(0), attend=BranchAttend(trees_of, branches, positions))
    hidden = network.hidden(torch.tensor([row.tokens], device=device), context)[0]
    logprobs = logprobs_of(network, hidden[rows], torch.tensor(targets, device=device))
    sums = iter([part.double().sum().item() for part in torch.split(logprobs, sizes)])
    return [[next(sums) for _ in tree.branches] for tree in trees]


def _one_by_one(model: nn.Module, tree: Branches, max_tokens: int) -> list[float]:
    """Where keys depend on how long a text becomes, nothing can be shared."""
    texts = [[*tree.stem, *branch] for branch in tree.branches]
    return [sum(found[len(tree.stem) - 1 :]) for found in score(model, texts, max_tokens)]


def _batches(trees: Sequence[Branches], max_tokens: int) -> Iterator[list[Branches]]:
    batch: list[Branches] = []
    size = 0
    for tree in trees:
        if batch and size + tree.num_tokens > max_tokens:
            yield batch
            batch, size = [], 0
        batch.append(tree)
        size += tree.num_tokens
    if batch:
        yield batch
