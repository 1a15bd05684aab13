"""CUDA graphs of decoding steps: captured once for each shape and replayed.

B sequences and M blocks of the longest one, both padded to a power of two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from kitforge.core.kernels.fused_decode_step.reference import Locations
from kitforge.core.kernels.grouped_linear.fused import accepts_grouped_mm
from kitforge.core.kernels.grouped_linear.reference import grouped_linear
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.nn.decode_step import FusedDecodeStep
from kitforge.core.nn.moe import Experts
from kitforge.foundation import device as devices
from kitforge.inference.paged_attention import KeyValueCache, PagedAttention, PagedBatch
from kitforge.inference.sequence import Sequence

# Tokens [texts] for a number of a step and its logits [texts, vocab].
Sampler = Callable[[int, Tensor], Tensor]
# The inputs of a text before its block table: its token, the position of that, its final length, the slot of the cache
# that is written, and the length up to and with the token.
_NUM_COLUMNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A captured step and its static inputs [B, 5 + M], filled before each replay."""

    inputs: Tensor
    replay: Callable[[], Tensor]
    rows: npt.NDArray[np.int64]  # the inputs on the host
    tables: list[list[int]]  # the block table that each row has
    kernel: object  # a fused step, which must live as long as it is replayed


def can_record_steps(model: nn.Module) -> bool:
    """Whether the device supports CUDA graphs, and neither a product of experts nor a stage waits for the host."""
    if not devices.can_record(cast(CausalLM, model).head_weight.device) or getattr(model, "layers", None) is not None:
        return False
    experts = [each for each in model.modules() if isinstance(each, Experts)]
    if any(each.kernels.grouped_linear is grouped_linear for each in experts):
        return False
    matrices = (matrix for each in experts for matrix in (each.gate, each.up, each.down))
    return all(accepts_grouped_mm(each.flatten(0, 1), each) for each in matrices)


class CudaGraphRunner:
    """Runs steps in which every sequence has one token, with `fuses` in one fused step where the kernels have one.
    Padding rows write to the spare block of the cache."""

    def __init__(self, model: nn.Module, cache: KeyValueCache, *, fuses: bool = False) -> None:
        self._network = cast(CausalLM, model)
        self._cache = cache
        self._fused = FusedDecodeStep(model, cache.layer) if fuses else None
        self._graphs: dict[tuple[int, int], RecordedStep] = {}
        self._weight_addresses = self._addresses()

    def run(self, sequences: list[Sequence], num_steps: int = 1, sample: Sampler | None = None) -> Tensor:
        """Logits [texts, vocab] of the last of some steps. `sample` gives the tokens [texts] that follow the logits of
        a step before it, by its number, and the next step reads them on the device. A text that has its full length
        earlier takes part as a padding row."""
        ends = (max(each.num_cached + 1, min(each.num_cached + num_steps, each.max_length - 1)) for each in sequences)
        num_blocks = -(-max(ends) // self._cache.block_size)
        shape = (1 << (len(sequences) - 1).bit_length(), 1 << (num_blocks - 1).bit_length())
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(*shape)
        step = self._graphs[shape]
        self._fill(step, sequences)
        logits = step.replay()[: len(sequences)]
        if sample is None or num_steps == 1:
            return logits
        columns = devices.copy_to(torch.from_numpy(self._later_columns(step, num_steps)), logits.device)
        for number, own in enumerate(columns):
            tokens = sample(number, logits)
            step.inputs[:, 1:_NUM_COLUMNS] = own
            step.inputs[: len(tokens), 0] = tokens
            logits = step.replay()[: len(sequences)]
        return logits

    def drop_graphs_of_moved_weights(self) -> None:
        """A graph reads weights at the addresses of its capture; drop all graphs if weights have moved."""
        weights = self._addresses()
        if weights != self._weight_addresses:
            self._weight_addresses, self._graphs = weights, {}
            if self._fused is not None:
                self._fused.forget()

    def _capture(self, num_texts: int, num_blocks: int) -> RecordedStep:
        device = self._network.head_weight.device
        rows = np.zeros((num_texts, _NUM_COLUMNS + num_blocks), dtype=np.int64)
        rows[:] = self._spare_row(num_blocks)
        inputs, every = torch.tensor(rows, device=device), torch.arange(num_texts, device=device)

        def step() -> Tensor:
            # One transfer fills all inputs; kernels want each in one piece.
            columns = inputs[:, :_NUM_COLUMNS].t().contiguous().unsqueeze(1)
            tokens, positions, max_lengths, slots, lengths = columns
            pages = PagedBatch(first=0, tables=inputs[:, _NUM_COLUMNS:].contiguous(), lengths=lengths[0])
            if self._fused is not None:
                context = Context(positions=positions, lengths=max_lengths)
                where = {"starts": slots[0], "slots": slots[0], "lengths": lengths[0], "tables": pages.tables}
                locations = Locations(rows=every, block_size=self._cache.block_size, **where)
                result = self._fused(tokens, context, locations)
                if result is not None:
                    return result[1]
            attend = PagedAttention(self._cache, slots[0], [pages], self._network.kernels)
            context = Context(positions=positions, lengths=max_lengths, attend=attend)
            return self._network.head(self._network.hidden(tokens, context)[0])

        # The first call outside of a capture allocates the cache.
        step()
        replay, kernel = devices.recorded(step, device), None if self._fused is None else self._fused.kernel
        return RecordedStep(inputs=inputs, replay=replay, rows=rows, tables=[[]] * num_texts, kernel=kernel)

    def _fill(self, step: RecordedStep, sequences: list[Sequence]) -> None:
        rows, tables, size = step.rows, step.tables, self._cache.block_size
        num_blocks = rows.shape[1] - _NUM_COLUMNS
        numbers = []
        for index, sequence in enumerate(sequences):
            position, table = sequence.num_cached, sequence.block_table
            slot = table[position // size] * size + position % size
            numbers.append((sequence.tokens[position], position, sequence.max_length, slot, position + 1))
            if tables[index] != table:
                rows[index, _NUM_COLUMNS:] = pad_block_table(table, num_blocks)
                tables[index] = table.copy()
        rows[: len(sequences), :_NUM_COLUMNS] = numbers
        rows[len(sequences) :] = self._spare_row(num_blocks)
        tables[len(sequences) :] = [[]] * (len(tables) - len(sequences))
        step.inputs.copy_(devices.copy_to(torch.from_numpy(rows), step.inputs.device))

    def _later_columns(self, step: RecordedStep, num_steps: int) -> npt.NDArray[np.int64]:
        """The inputs [steps - 1, B, 4] of the steps after the one that is filled in, but for their tokens."""
        size, index = self._cache.block_size, np.arange(len(step.rows))
        positions = step.rows[:, 1] + np.arange(1, num_steps)[:, None]
        lengths = np.broadcast_to(step.rows[:, 2], positions.shape)
        goes_on = positions + 1 < lengths
        positions = np.where(goes_on, positions, 0)
        slots = step.rows[index, _NUM_COLUMNS + positions // size] * size + positions % size
        slots = np.where(goes_on, slots, self._cache.spare_slot)
        return np.stack([positions, lengths, slots, positions + 1], axis=-1)

    def _spare_row(self, num_blocks: int) -> list[int]:
        """The inputs of a row without a text."""
        return [0, 0, 1, self._cache.spare_slot, 1] + [0] * num_blocks

    def _addresses(self) -> tuple[int, ...]:
        return tuple(parameter.data_ptr() for parameter in cast(nn.Module, self._network).parameters())


def pad_block_table(blocks: list[int], num_blocks: int) -> list[int]:
    """The first blocks of a table, padded with its last one."""
    return (blocks + blocks[-1:] * num_blocks)[:num_blocks]
