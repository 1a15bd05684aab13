"""An embedding table in memory whose rows live on all ranks of the table axis. It knows no tier, file or schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from kitforge.core.optim.sparse import RowOptimizer
from kitforge.core.parallel import collectives
from kitforge.core.parallel.table import GAMMA, GradientSink, TableAxis, mix, shifted
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check

# Room for rows before the first growth; room doubles.
FIRST_ROWS = 1024
# Eight numbers of 16 bits have this mean and this deviation as a sum.
SUM_MEAN = 8 * (2**16 - 1) // 2
SUM_DEVIATION = math.sqrt(8 * (2**32 - 1) / 12)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableConfig:
    """What a table is. Its rows start as a pure function of seed, name and id."""

    name: str  # tables of different names start from different rows
    dim: int
    seed: int = 0
    initial: Literal["normal", "uniform"] = "normal"
    spread: float = 0.01  # normal: the deviation. uniform: the bound, from -spread to spread
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        check(self.dim >= 1, "table.dim", self.dim, "a whole number of at least 1")
        check(0 <= self.spread < math.inf, "table.spread", self.spread, "0 or more")


def initial_rows(config: TableConfig, ids: Tensor) -> Tensor:
    """The rows [n, dim] that `ids` [n] start from: the same bits on every device, whatever ids stand beside them.

    Each id seeds a SplitMix64 of its own. A normal value is the sum of eight 16-bit numbers, which needs no function
    that devices round differently; it lies within 4.9 deviations, and its kurtosis is 2.85, not 3.
    """
    streams = mix(ids + seeds.key(config.seed, "table", config.name)).unsqueeze(1)
    columns = torch.arange(config.dim, device=ids.device)
    if config.initial == "uniform":
        unit = shifted(mix(streams + columns * GAMMA), 11).double() * 2.0**-52 - 1.0
    else:
        outputs = [mix(streams + place * GAMMA) for place in (2 * columns, 2 * columns + 1)]
        parts = [(output >> num_bits) & 0xFFFF for output in outputs for num_bits in (0, 16, 32, 48)]
        unit = (torch.stack(parts).sum(0) - SUM_MEAN).double() / SUM_DEVIATION
    return (unit * config.spread).to(config.dtype)


@final
class ShardedTable(nn.Module):
    """An embedding over any int64 ids, with the face of `nn.Embedding` and rows on the ranks of `group`.

    Rows are no parameters: backward passes leave their gradients in `sink`, and `step` moves them. A row that never
    had a gradient takes no memory. Alone (`group` None) it communicates nothing.
    """

    def __init__(
        self,
        config: TableConfig,
        optimizer: RowOptimizer,
        group: collectives.Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.axis = TableAxis(group)
        self.sink = GradientSink()
        self._optimizer = optimizer
        self._device = torch.device(device)
        self._slots: dict[int, int] = {}
        self._rows = torch.empty(FIRST_ROWS, config.dim, dtype=config.dtype, device=device)
        self._states = optimizer.states(FIRST_ROWS, config.dim, config.dtype, device)

    @property
    def embedding_dim(self) -> int:
        """The width of a row."""
        return self.config.dim

    def forward(self, ids: Tensor) -> Tensor:
        """The rows [..., dim] of int64 `ids` [...]; all ranks call it together, with an empty tensor for no ids."""
        vectors = self.axis.lookup(ids.reshape(-1), self.rows_of, self.sink)
        return vectors.reshape(*ids.shape, self.config.dim)

    @torch.no_grad()
    def rows_of(self, ids: Tensor) -> Tensor:
        """The rows [m, dim] of ids [m] that live on this rank, as a copy; the owner's lookup of the axis."""
        slots = self._vector([self._slots.get(id, -1) for id in ids.tolist()])
        rows = self._rows.index_select(0, slots.clamp(min=0))
        is_new = slots < 0
        if bool(is_new.any()):
            rows[is_new] = initial_rows(self.config, ids[is_new])
        return rows

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move the rows that have a gradient, at that learning rate, and let go of the gradients."""
        ids, gradients = self.sink.gradients()
        if len(ids):
            slots = self._slots_of(ids)
            rows = self._rows[slots]
            states = {name: state[slots] for name, state in self._states.items()}
            self._optimizer.update(rows, states, gradients, rate)
            self._rows[slots] = rows
            for name, state in self._states.items():
                state[slots] = states[name]
        self.sink.clear()

    def squared_norm(self) -> Tensor:
        """See `core.optim.sparse.SparseModule`."""
        return self.sink.squared_norm()

    def scale_gradients_(self, factor: float) -> None:
        """See `core.optim.sparse.SparseModule`."""
        self.sink.scale_(factor)

    def clear_gradients(self) -> None:
        """See `core.optim.sparse.SparseModule`."""
        self.sink.clear()

    def rows(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Of the rows that live here and have ever moved: ids in ascending order, rows and states, as copies."""
        ids = sorted(self._slots)
        slots = self._vector([self._slots[id] for id in ids])
        states = {name: state[slots] for name, state in self._states.items()}
        return self._vector(ids), self._rows[slots], states

    def _slots_of(self, ids: Tensor) -> Tensor:
        """Where the rows of these distinct ids are; one that has no place yet gets one, its initial row and state."""
        num_before = len(self._slots)
        slots = self._vector([self._slots.setdefault(id, len(self._slots)) for id in ids.tolist()])
        self._make_room(len(self._slots))
        is_new = slots >= num_before
        new_slots, new_ids = slots[is_new], ids[is_new]
        self._rows[new_slots] = initial_rows(self.config, new_ids)
        fresh = self._optimizer.states(len(new_ids), self.config.dim, self.config.dtype, self._device)
        for name, state in self._states.items():
            state[new_slots] = fresh[name]
        return slots

    def _vector(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _make_room(self, num_rows: int) -> None:
        room = len(self._rows)
        while room < num_rows:
            room *= 2
        if room > len(self._rows):
            self._rows = _grown(self._rows, room)
            self._states = {name: _grown(state, room) for name, state in self._states.items()}


def _grown(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with more rows; the values of the new ones are not set."""
    grown = tensor.new_empty(num_rows, *tensor.shape[1:])
    grown[: len(tensor)] = tensor
    return grown
