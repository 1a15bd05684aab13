"""CUDA graphs of decoding steps: captured once for each shape and replayed.

B sequences and M blocks of the longest one, both padded to a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.foundation import device as devices
from kitforge.inference.paged_attention import KeyValueCache, PagedAttention, PagedBatch
from kitforge.inference.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBuffers:
    """The static inputs of a captured step, filled before each replay."""

    tokens: Tensor  # [1, B]
    positions: Tensor  # [1, B]
    max_lengths: Tensor  # [1, B] final length of each sequence
    slots: Tensor  # [B]
    lengths: Tensor  # [B]
    tables: Tensor  # [B, M]


@final
class CudaGraphRunner:
    """Runs steps in which every sequence has one token. Padding rows write to the spare block of the cache."""

    def __init__(self, model: nn.Module, cache: KeyValueCache) -> None:
        self._network = cast(CausalLM, model)
        self._cache = cache
        self._graphs: dict[tuple[int, int], tuple[GraphBuffers, Callable[[], Tensor]]] = {}
        self._weight_addresses = self._addresses()

    def run(self, sequences: list[Sequence]) -> Tensor:
        """Logits [texts, vocab]."""
        num_blocks = max(sequence.num_cached // self._cache.block_size + 1 for sequence in sequences)
        shape = (1 << (len(sequences) - 1).bit_length(), 1 << (num_blocks - 1).bit_length())
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(*shape)
        buffers, replay = self._graphs[shape]
        self._fill(buffers, sequences)
        return replay()[: len(sequences)]

    def drop_graphs_of_moved_weights(self) -> None:
        """A graph reads weights at the addresses of its capture; drop all graphs if weights have moved."""
        weights = self._addresses()
        if weights != self._weight_addresses:
            self._weight_addresses, self._graphs = weights, {}

    def _capture(self, num_texts: int, num_blocks: int) -> tuple[GraphBuffers, Callable[[], Tensor]]:
        device = self._network.head_weight.device
        zeros = partial(torch.zeros, dtype=torch.long, device=device)
        buffers = GraphBuffers(
            tokens=zeros(1, num_texts),
            positions=zeros(1, num_texts),
            max_lengths=zeros(1, num_texts) + 1,
            slots=zeros(num_texts) + self._cache.spare_slot,
            lengths=zeros(num_texts) + 1,
            tables=zeros(num_texts, num_blocks),
        )

        def step() -> Tensor:
            pages = PagedBatch(first=0, tables=buffers.tables, lengths=buffers.lengths)
            attend = PagedAttention(self._cache, buffers.slots, [pages], self._network.kernels)
            context = Context(positions=buffers.positions, lengths=buffers.max_lengths, attend=attend)
            return self._network.head(self._network.hidden(buffers.tokens, context)[0])

        # The first call outside of a capture allocates the cache.
        step()
        return buffers, devices.recorded(step, device)

    def _fill(self, buffers: GraphBuffers, sequences: list[Sequence]) -> None:
        num_texts, num_blocks = buffers.tables.shape
        size, rows = self._cache.block_size, []
        for sequence in sequences:
            position, table = sequence.num_cached, sequence.block_table
            slot = table[position // size] * size + position % size
            numbers = [sequence.tokens[position], position, sequence.max_length, slot, position + 1]
            rows.append([*numbers, *pad_block_table(table, num_blocks)])
        rows += [[0, 0, 1, self._cache.spare_slot, 1] + [0] * num_blocks] * (num_texts - len(rows))
        # One host-to-device transfer for all buffers.
        filled = devices.copy_to(torch.tensor(rows), buffers.tables.device)
        columns = (buffers.tokens[0], buffers.positions[0], buffers.max_lengths[0], buffers.slots, buffers.lengths)
        for index, column in enumerate(columns):
            column.copy_(filled[:, index])
        buffers.tables.copy_(filled[:, len(columns) :])

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in cast(nn.Module, self._network).parameters())


def pad_block_table(blocks: list[int], num_blocks: int) -> list[int]:
    """The first blocks of a table, padded with its last one."""
    return (blocks + blocks[-1:] * num_blocks)[:num_blocks]
