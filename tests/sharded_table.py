"""A table of rows on the ranks of a group, without tiers, eviction or files: the reference of the tests."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.optim.grad_norm import global_norm
from kitforge.core.optim.row_optimizers import RowOptimizer, SparseOptimizerConfig
from kitforge.core.optim.table_protocols import ROWS, Chunk, RowShard, RowSource
from kitforge.core.parallel import collectives
from kitforge.core.parallel.table import EmbeddingExchange, owner
from kitforge.embedding_cache.keys.row_init import RowInitConfig, initial_rows
from kitforge.foundation.config import to_dict
from tests.row_records import new_records

# Room for rows before the first growth; room doubles.
FIRST_ROWS = 1024


def table_schema(config: RowInitConfig, optimizer: SparseOptimizerConfig, width: int) -> dict[str, Any]:
    """What makes records of that width rows of this table, as plain values; see `core.optim.rows.RowTable`."""
    plain = {name: getattr(config, name) for name in ("name", "dim", "seed", "initial", "init_scale")}
    dtype = str(config.dtype).removeprefix("torch.")
    return plain | {"width": width, "dtype": dtype, "optimizer": to_dict(optimizer, is_whole=True)}


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRows:
    """A `RowSource` over rows that are in memory and stay as they are."""

    schema: Mapping[str, Any]
    version: int
    chunks_by_part: Mapping[str, Chunk]  # by part
    since: int | None = None
    shard: RowShard = (0, 1)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    removed_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # ids [n]

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.chunks_by_part)

    def chunks(self, part: str = ROWS) -> Iterator[Chunk]:
        yield self.chunks_by_part[part]

    def removed(self) -> Iterator[Tensor]:
        yield self.removed_ids

    def close(self) -> None: ...


@final
class GradientAccumulator:
    """The gradients of the rows of this rank, summed over the lookups of a step."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients [m, dim] of distinct ids [m]."""
        self._parts.append((ids, gradients))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Distinct ids [m], in the order in which they came, and the gradients [m, dim] of their rows, not copied."""
        if not self._parts:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
        if len(self._parts) > 1:
            kernels = select_table()
            ids, positions = kernels.unique(torch.cat([ids for ids, _ in self._parts]))
            parts = torch.cat([part for _, part in self._parts])
            self._parts = [(ids, kernels.embedding_bag_backward(parts, positions, len(ids)))]
        return self._parts[0]

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared global norm, 0-dim float64: rows live once, so shares simply add up."""
        return global_norm([self.gradients()[1]]).double() ** 2

    def scale_(self, factor: float) -> None:
        """Scale all gradients."""
        for _, gradients in self._parts:
            gradients.mul_(factor)

    def clear(self) -> None:
        """Drop all gradients."""
        self._parts = []


@final
class ShardedTable(nn.Module):
    """An embedding over any int64 ids, with the face of `nn.Embedding` and rows on the ranks of `group`.

    Rows are no parameters: backward passes leave their gradients in `sink`, and `step` moves them. A row that never
    had a gradient takes no memory. Alone (`group` None) it communicates nothing.
    """

    def __init__(
        self,
        config: RowInitConfig,
        optimizer: RowOptimizer,
        group: collectives.Group = None,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.config = config
        self.axis = EmbeddingExchange(group)
        self._group = group
        self.sink = GradientAccumulator()
        self._optimizer = optimizer
        self._layout = optimizer.layout(config.dim)
        self._slots = select_table().hash_map(FIRST_ROWS)
        self._slab = torch.empty(FIRST_ROWS, self._layout.width, dtype=config.dtype, device=device)
        # The learning rate of each step so far: rows that rested may need them.
        self._rates: list[float] = []

    @property
    def embedding_dim(self) -> int:
        """The width of a row."""
        return self.config.dim

    def forward(self, ids: Tensor) -> Tensor:
        """The rows [..., dim] of int64 `ids` [...]; all ranks call it together, with an empty tensor for no ids."""
        vectors = self.axis.fetch(self.axis.plan(ids.reshape(-1)), self.rows_of, self.sink)
        return vectors.reshape(*ids.shape, self.config.dim)

    @torch.no_grad()
    def rows_of(self, ids: Tensor) -> Tensor:
        """The rows [m, dim] of ids [m] that live on this rank, as a copy; the owner's lookup of the axis."""
        slots = self._slots.lookup(ids.cpu()).to(ids.device)
        is_known = slots >= 0
        self._catch_up(slots[is_known])
        rows = self._slab[:, : self.config.dim].index_select(0, slots.clamp(min=0))
        if not bool(is_known.all()):
            rows[~is_known] = initial_rows(self.config, ids[~is_known])
        return rows

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move the rows that have a gradient, at that learning rate, and let go of the gradients."""
        ids, gradients = self.sink.gradients()
        if len(ids):
            slots = self._slots_of(ids)
            self._catch_up(slots)
            self._optimizer.update(self._slab, slots, gradients, rate, len(self._rates) + 1)
        self._rates.append(rate)
        self.sink.clear()

    @property
    def learning_rate(self) -> float | None:
        """See `core.optim.sparse.SparseModule`."""
        return self._optimizer.config.learning_rate

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
        ids, slots = (part.to(self._slab.device) for part in self._slots.items())
        self._catch_up(slots)
        records = self._slab[slots]
        states = {name: records[:, columns] for name, columns in self._layout.states.items()}
        return ids, records[:, : self.config.dim], states

    @property
    def schema(self) -> dict[str, Any]:
        """See `core.optim.rows.RowTable`."""
        return table_schema(self.config, self._optimizer.config, self._layout.width)

    @property
    def shard(self) -> RowShard:
        """See `core.optim.rows.RowTable`."""
        return collectives.group_rank(self._group), collectives.group_size(self._group)

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> HeldRows:
        """See `core.optim.rows.RowTable`. The rows are copied at once; none ever goes away."""
        ids, slots = self._slots.items()
        if since is not None:
            has_changed = self._layout.as_integers(self._slab)[slots, self._layout.last_step] > since
            ids, slots = ids[has_changed], slots[has_changed]
        return HeldRows(
            schema=self.schema,
            version=len(self._rates),
            since=since,
            shard=self.shard,
            state={"rates": torch.tensor(self._rates, dtype=torch.float64)},
            chunks_by_part={ROWS: (ids, self._slab[slots])},
        )

    def load_rows(self, source: RowSource) -> None:
        """See `core.optim.rows.RowTable`."""
        self.sink.clear()
        self._rates = source.state["rates"].tolist()
        self._slots = select_table().hash_map(FIRST_ROWS)
        place, num_ranks = self.shard
        for ids, rows in source.chunks():
            is_own = owner(ids, num_ranks) == place
            own, num_before = ids[is_own], len(self._slots)
            slots = torch.arange(num_before, num_before + len(own))
            self._slots.insert(own, slots)
            self._make_room(len(self._slots))
            self._slab[slots] = rows[is_own]

    def _catch_up(self, slots: Tensor) -> None:
        if self._optimizer.moves_untouched_rows:
            rates = torch.tensor(self._rates, dtype=torch.float64)
            self._optimizer.catch_up(self._slab, slots, len(self._rates), rates)

    def _slots_of(self, ids: Tensor) -> Tensor:
        """Where the rows of these distinct ids are; one that has no place yet gets one, its initial row and state."""
        slots = self._slots.lookup(ids.cpu())
        is_new = slots < 0
        new_ids, num_before = ids[is_new.to(ids.device)], len(self._slots)
        new_slots = torch.arange(num_before, num_before + len(new_ids))
        slots[is_new] = new_slots
        self._slots.insert(new_ids.cpu(), new_slots)
        self._make_room(num_before + len(new_ids))
        self._slab[num_before : num_before + len(new_ids)] = new_records(
            self._optimizer, initial_rows(self.config, new_ids)
        )
        return slots.to(ids.device)

    def _make_room(self, num_rows: int) -> None:
        room = len(self._slab)
        while room < num_rows:
            room *= 2
        if room > len(self._slab):
            self._slab = _grown(self._slab, room)


def _grown(tensor: Tensor, num_rows: int) -> Tensor:
    """The tensor with more rows; the values of the new ones are not set."""
    grown = tensor.new_empty(num_rows, *tensor.shape[1:])
    grown[: len(tensor)] = tensor
    return grown
