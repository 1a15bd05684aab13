"""Rows that begin alike, as the answers to one prompt do: a position of a common prefix is computed once.

Layers see the positions of all rows as one row [1, N] without repetitions and padding; attention alone sees the rows
[B, T]. The idea is that of prefix trees in serving (Zheng et al., 2024, SGLang), with gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import AttentionSpec, CausalAttend, Context, RowAttend
from kitforge.core.nn.stack import Stack
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import ModelError

# With more than this share of the positions of the rows, their selection costs as much as it saves.
SHARED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixTree:
    """The positions of rows [B, T] without repetitions: N nodes, each of which follows its parent in all its rows."""

    tokens: Tensor  # [1, N]
    positions: Tensor  # [1, N]
    nodes: Tensor  # [B, T] of the positions of the rows; 0 behind their ends
    origins: Tensor  # [N], a position of each node in the rows as one [B * T]

    def to(self, device: torch.device) -> PrefixTree:
        """The same on a device."""
        return PrefixTree(**{name: copy_to(getattr(self, name), device) for name in self.__slots__})

    def context(self) -> Context:
        """That of a forward pass of the tokens."""
        return Context(positions=self.positions, attend=SharedPrefixAttend(self))


def prefix_tree(tokens: Tensor, lengths: Sequence[int]) -> PrefixTree:
    """That of the first `lengths` tokens of rows [B, T], which are on the CPU."""
    numbers = tokens.numpy()
    rows = [numbers[row, :length] for row, length in enumerate(lengths)]
    nodes, origins = np.zeros(numbers.shape, dtype=np.int64), []
    # In this order a row shares most with the one before it. The bytes of big-endian numbers are in their order.
    before, count = -1, 0
    for row in sorted(range(len(rows)), key=lambda each: rows[each].astype(">i8").tobytes()):
        common = 0
        if before >= 0:
            shorter = min(len(rows[before]), len(rows[row]))
            differs = rows[before][:shorter] != rows[row][:shorter]
            common = int(differs.argmax()) if differs.any() else shorter
        fresh = len(rows[row]) - common
        nodes[row, :common] = nodes[before, :common]
        nodes[row, common : common + fresh] = np.arange(count, count + fresh)
        origins.append(np.arange(common, common + fresh) + row * numbers.shape[1])
        before, count = row, count + fresh
    flat = torch.from_numpy(np.concatenate(origins))
    return PrefixTree(
        tokens=tokens.reshape(1, -1)[:, flat],
        positions=(flat % numbers.shape[1]).unsqueeze(0),
        nodes=torch.from_numpy(nodes),
        origins=flat,
    )


def shares_prefixes(network: object) -> bool:
    """Whether `hidden_at` can compute common prefixes of a network once. To the compiler each tree would be a shape of
    its own, and some rotary angles depend on the length of a row. Ranks that gather keys know rows of documents."""
    if not (isinstance(network, Stack) and isinstance(network, CausalLM)):
        return False
    return not (network.is_compiled or network.gathers_keys or network.geometry.depends_on_length)


def hidden_at(network: CausalLM, tokens: Tensor, mask: Tensor) -> Tensor:
    """Hidden states [n, dim] at the positions of a mask [B, T] of tokens [B, T], row by row. Where it saves a tenth of
    them, positions of common prefixes are computed once, and those behind the last one of a row's mask not at all."""
    device, tree = network.head_weight.device, None
    if mask.is_cpu and shares_prefixes(network):
        ends = torch.where(mask, torch.arange(1, mask.shape[1] + 1), 0).amax(dim=1)
        tree = prefix_tree(tokens, ends.tolist())
    if tree is None or tree.tokens.numel() > SHARED * tokens.numel() or not tree.tokens.numel():
        return network.hidden(copy_to(tokens, device))[copy_to(mask, device)]
    rows = copy_to(tree.nodes[mask], device)
    tree = tree.to(device)
    return network.hidden(tree.tokens, tree.context())[0].index_select(0, rows)


class SharedPrefixAttend(RowAttend):
    """Causal attention of the rows of a tree for queries, keys and values [1, heads, N, head_dim] of its nodes."""

    def __init__(self, tree: PrefixTree) -> None:
        self.tree = tree
        self._inner = CausalAttend()

    def prepare(self, stream: Tensor, length: int, windows: Iterable[int | None], head_dim: int) -> None:
        """See `RowAttend`; the masks are those of the rows."""
        del length
        rows, width = self.tree.nodes.shape
        self._inner.prepare(stream.new_empty(rows, 0), width, windows, head_dim)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.bias is not None:
            raise ModelError("rows with common prefixes have no learned bias", got="a bias", expected="none")
        tree, nodes = self.tree, self.tree.nodes
        # [1, heads, N, head_dim] -> [B, heads, T, head_dim].
        rows = (each[0].transpose(0, 1).index_select(0, nodes.flatten()) for each in (query, key, value))
        queries, keys, values = (each.view(*nodes.shape, *each.shape[1:]).transpose(1, 2) for each in rows)
        mixed = self._inner(queries, keys, values, spec).transpose(1, 2).flatten(0, 1)
        return mixed.index_select(0, tree.origins).transpose(0, 1).unsqueeze(0)
