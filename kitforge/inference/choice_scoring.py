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
from kitforge.inference.logprobs import greedy_logprobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceBatch:
    """A text and what may follow it, in tokens."""

    prefix: Sequence[int]
    continuations: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if not self.prefix or not self.continuations or not all(self.continuations):
            raise DataError("a text and its continuations have at least one token each", got="one without any")

    @property
    def num_tokens(self) -> int:
        """How many are read: the last of each branch is only predicted."""
        return len(self.prefix) + sum(len(branch) - 1 for branch in self.continuations)

    @property
    def num_positions(self) -> int:
        """Positions that the longest of the texts takes up; its last token is predicted, not read."""
        return len(self.prefix) + max(map(len, self.continuations)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScore:
    """What a model makes of one continuation."""

    logprob: float  # of all its tokens
    greedy: tuple[int, ...]  # the most likely token in the place of each

    def is_greedy(self, tokens: Sequence[int]) -> bool:
        """Whether the continuation, `tokens`, is what the model says itself."""
        return self.greedy == tuple(tokens)


@torch.no_grad()
def choice_logprobs(model: nn.Module, trees: Sequence[ChoiceBatch], max_tokens: int) -> list[list[ChoiceScore]]:
    """The score of every continuation, tree by tree. A pass has at most `max_tokens` tokens, or one tree.

    Raises DataError for a text that is longer than the model allows.
    """
    network = cast(CausalLM, model)
    limit = network.geometry.max_length
    for tree in trees:
        if tree.num_positions > limit:
            raise DataError(
                "a text is longer than the model allows", got=tree.num_positions + 1, expected=f"at most {limit + 1}"
            )
    scores: list[list[ChoiceScore]] = []
    was_training = model.training
    model.eval()
    try:
        if network.geometry.depends_on_length:
            return [_score_unpacked(network, tree) for tree in trees]
        for batch in _batches(trees, max_tokens):
            scores += _score_batch(network, batch)
    finally:
        model.train(was_training)
    return scores


@final
class TreeAttention:
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
class _PackedRow:
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


def _score_batch(network: CausalLM, trees: Sequence[ChoiceBatch]) -> list[list[ChoiceScore]]:
    row = _PackedRow()
    rows: list[int] = []
    targets: list[int] = []
    sizes: list[int] = []
    for number, tree in enumerate(trees):
        prefix = row.add(tree.prefix, number, 0, 0)
        for branch, tokens in enumerate(tree.continuations, 1):
            # The first token of a branch is predicted by the stem, each other by the one before it.
            rows += [prefix[-1], *row.add(tokens[:-1], number, branch, len(prefix))]
            targets += tokens
            sizes.append(len(tokens))
    device = network.head_weight.device
    trees_of, branches, positions = (
        torch.tensor(values, device=device) for values in (row.trees, row.branches, row.positions)
    )
    context = Context(positions=positions.unsqueeze(0), attend=TreeAttention(trees_of, branches, positions))
    hidden = network.hidden(torch.tensor([row.tokens], device=device), context)[0]
    scores = iter(_scores(network, hidden[rows], targets, sizes))
    return [[next(scores) for _ in tree.continuations] for tree in trees]


def _scores(network: CausalLM, hidden: Tensor, targets: Sequence[int], sizes: Sequence[int]) -> list[ChoiceScore]:
    """Scores of continuations that are `sizes` tokens long; all their tokens are `targets`, predicted by `hidden`."""
    logprobs, greedy = greedy_logprobs_of(network, hidden, torch.tensor(targets, device=hidden.device))
    parts = zip(torch.split(logprobs, list(sizes)), torch.split(greedy, list(sizes)), strict=True)
    return [
        ChoiceScore(logprob=values.double().sum().item(), greedy=tuple(tokens.tolist())) for values, tokens in parts
    ]


def _score_unpacked(network: CausalLM, tree: ChoiceBatch) -> list[ChoiceScore]:
    """Where keys depend on how long a text becomes, nothing can be shared."""
    scores = []
    for branch in tree.continuations:
        text = torch.tensor([[*tree.prefix, *branch[:-1]]], device=network.head_weight.device)
        hidden = network.hidden(text, Context())[0, len(tree.prefix) - 1 :]
        scores += _scores(network, hidden, branch, [len(branch)])
    return scores


def _batches(trees: Sequence[ChoiceBatch], max_tokens: int) -> Iterator[list[ChoiceBatch]]:
    batch: list[ChoiceBatch] = []
    size = 0
    for tree in trees:
        if batch and size + tree.num_tokens > max_tokens:
            yield batch
            batch, size = [], 0
        batch.append(tree)
        size += tree.num_tokens
    if batch:
        yield batch
