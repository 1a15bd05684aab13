"""Log-likelihood of several continuations of one prefix, for multiple-choice benchmarks. N tokens of a pass in one row.

The prefix is computed once for all its continuations: these follow it in the row, and a tree mask hides them from one
another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import AttentionSpec, Context, causal_mask
from kitforge.foundation.errors import DataError
from kitforge.inference.logprobs import eval_mode, greedy_logprobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceBatch:
    """A prefix and its possible continuations, as tokens."""

    prefix: Sequence[int]
    continuations: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if not self.prefix or not self.continuations or not all(self.continuations):
            raise DataError("prefix and continuations need at least one token each", got="an empty one")

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass; the last token of each continuation is only predicted."""
        return len(self.prefix) + sum(len(branch) - 1 for branch in self.continuations)

    @property
    def num_positions(self) -> int:
        """Positions of the longest sequence in the forward pass, without its last token."""
        return len(self.prefix) + max(map(len, self.continuations)) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceScore:
    """The score of one continuation."""

    logprob: float  # sum over its tokens
    greedy: tuple[int, ...]  # the most likely token at each position

    def is_greedy(self, tokens: Sequence[int]) -> bool:
        """Whether greedy decoding yields the continuation, `tokens`."""
        return self.greedy == tuple(tokens)


@torch.no_grad()
def choice_logprobs(model: nn.Module, trees: Sequence[ChoiceBatch], max_tokens: int) -> list[list[ChoiceScore]]:
    """The score of every continuation, tree by tree. A pass has at most `max_tokens` tokens, or one tree.

    Raises DataError for a sequence that is longer than the model allows.
    """
    network = cast(CausalLM, model)
    limit = network.geometry.max_length
    for tree in trees:
        if tree.num_positions > limit:
            message = "a sequence is longer than the model allows"
            raise DataError(message, got=tree.num_positions + 1, expected=f"at most {limit + 1}")
    batches: list[list[ChoiceBatch]] = []
    size = 0
    for tree in trees:
        if batches and size + tree.num_tokens <= max_tokens:
            batches[-1].append(tree)
        else:
            batches.append([tree])
            size = 0
        size += tree.num_tokens
    with eval_mode(model):
        if network.geometry.depends_on_length:
            return [_score_unpacked(network, tree) for tree in trees]
        return [scores for batch in batches for scores in _score_batch(network, batch)]


class TreeAttention:
    """Tree attention over packed choices. Is an `Attend`. A token attends to earlier positions of its own tree: to the
    prefix (branch 0) and to its own branch."""

    def __init__(self, trees: Tensor, branches: Tensor, positions: Tensor) -> None:
        same_tree = trees.unsqueeze(1) == trees.unsqueeze(0)
        is_open = (branches.unsqueeze(0) == 0) | (branches.unsqueeze(1) == branches.unsqueeze(0))
        self._seen = same_tree & is_open
        self._positions = positions
        # Branches share positions, so that the row of a token is not its position.
        self._distances = positions - positions.unsqueeze(1)
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend under the tree mask; see `Attend`."""
        return spec.attend(query, key, value, mask=self._mask, causal=False, distances=self._distances)

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            self._masks[window] = self._seen & causal_mask(self._positions, self._positions, window)
        return self._masks[window]


def _score_batch(network: CausalLM, trees: Sequence[ChoiceBatch]) -> list[list[ChoiceScore]]:
    packed: list[tuple[int, int, int, int]] = []  # token, tree, branch and position
    rows: list[int] = []
    targets: list[int] = []
    sizes: list[int] = []
    for number, tree in enumerate(trees):
        packed += [(token, number, 0, position) for position, token in enumerate(tree.prefix)]
        end, last = len(tree.prefix), len(packed) - 1
        for branch, tokens in enumerate(tree.continuations, 1):
            # The prefix predicts the first token of a branch, and each token the next one.
            rows += [last, *range(len(packed), len(packed) + len(tokens) - 1)]
            packed += [(token, number, branch, position) for position, token in enumerate(tokens[:-1], end)]
            targets += tokens
            sizes.append(len(tokens))
    columns = torch.tensor(packed, device=network.head_weight.device).t().contiguous()
    row, trees_of, branches, positions = columns
    context = Context(positions=positions.unsqueeze(0), attend=TreeAttention(trees_of, branches, positions))
    hidden = network.hidden(row.unsqueeze(0), context)[0]
    scores = iter(_scores(network, hidden[rows], targets, sizes))
    return [[next(scores) for _ in tree.continuations] for tree in trees]


def _scores(network: CausalLM, hidden: Tensor, targets: Sequence[int], sizes: Sequence[int]) -> list[ChoiceScore]:
    """Scores of continuations of `sizes` tokens; `targets` are all their tokens, predicted by `hidden`."""
    logprobs, greedy = greedy_logprobs_of(network, hidden, torch.tensor(targets, device=hidden.device))
    parts = zip(torch.split(logprobs, list(sizes)), torch.split(greedy, list(sizes)), strict=True)
    return [
        ChoiceScore(logprob=values.double().sum().item(), greedy=tuple(tokens.tolist())) for values, tokens in parts
    ]


def _score_unpacked(network: CausalLM, tree: ChoiceBatch) -> list[ChoiceScore]:
    """One pass for each continuation: keys that depend on the length of a sequence cannot be shared."""
    scores = []
    for branch in tree.continuations:
        text = torch.tensor([[*tree.prefix, *branch[:-1]]], device=network.head_weight.device)
        hidden = network.hidden(text, Context())[0, len(tree.prefix) - 1 :]
        scores += _scores(network, hidden, branch, [len(branch)])
    return scores
