"""The ranks of the stages of one pipeline, and what they send one another."""

import datetime
import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.schedules import Pipeline

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Column:
    """A rank of each index along `pipeline`, in their order, with one stage or several.

    Each direction between two ranks has a group of its own, for streams and for gradients: messages of a group are in
    one order on both ranks, which all of them together are not. What stays on a rank is handed over.
    """

    def __init__(
        self,
        columns: list[list[int]],
        rank: int,
        group: dist.ProcessGroup | None,
        device: str,
        timeout: float,
        pipeline: Pipeline,
    ) -> None:
        """`columns` are those of all ranks, which call this together; `group` is that of this rank's one. A rank that
        is on no grid has none."""
        self.pipeline = pipeline
        self.device = torch.device(device)
        self.ranks = next((row for row in columns if rank in row), [])
        self.index = self.ranks.index(rank) if self.ranks else -1
        self.last = pipeline.rank_of(pipeline.num_stages - 1)
        self._group, self._ends = group, None
        self._ways: dict[tuple[bool, tuple[int, int]], dist.ProcessGroup] = {}
        self._here: dict[tuple[int, int], deque[Tensor]] = {}

        def new_group(pairs: Sequence[tuple[int, int]]) -> dist.ProcessGroup | None:
            rows = [sorted((row[low], row[high])) for row in columns for low, high in pairs]
            limit, create = datetime.timedelta(seconds=timeout), dist.new_subgroups_by_enumeration
            made: dist.ProcessGroup | None = create(rows, timeout=limit)[0]  # type: ignore[no-untyped-call]
            return made

        ranks = [pipeline.rank_of(stage) for stage in range(pipeline.num_stages)]
        for pairs in _apart(itertools.pairwise(ranks)):
            own = next((pair for pair in pairs if self.index in pair), None)
            for is_forward in (True, False):
                if (way := new_group(pairs)) is not None and own is not None:
                    self._ways[is_forward, own] = way
                    self._meet(own, way)
        if pipeline.num_ranks > 2:
            self._ends = new_group([(0, pipeline.num_ranks - 1)])

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of the column."""
        assert self._group is not None
        return self._group

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.index == self.last

    def group_of(self, indices: Sequence[int] | None) -> dist.ProcessGroup | None:
        """The group of the ranks at some indices, one of which is this rank's: all of them (None), the first and the
        last, or one, which has no group."""
        if indices is None or len(indices) == self.pipeline.num_ranks:
            return self.group
        assert len(indices) == 1 or tuple(indices) == (0, self.pipeline.num_ranks - 1), indices
        return None if len(indices) == 1 else self._ends

    def start_send(self, input: Tensor, source: int, target: int) -> dist.Work | None:
        """Start to send a tensor of a stage to the one behind or before it; it stays as it is until `wait` of what is
        returned, if anything."""
        way = self._way(source, target)
        if way is None:
            self._here.setdefault((source, target), deque()).append(input)
            return None
        return collectives.start_send(input, self.ranks[self.pipeline.rank_of(target)], way)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, target: int) -> Tensor:
        """The tensor that a stage sends to one of this rank."""
        way = self._way(source, target)
        if way is None:
            return self._here[source, target].popleft()
        empty = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return collectives.receive_(empty, self.ranks[self.pipeline.rank_of(source)], way)

    def _meet(self, pair: tuple[int, int], way: dist.ProcessGroup) -> None:
        """Send a first message, for which NCCL makes a communicator and lets both ranks wait: now, since in the order
        of passes they could wait in a ring."""
        first, others = torch.zeros(1, device=self.device), self.ranks[sum(pair) - self.index]
        if self.index == min(pair):
            collectives.start_send(first, others, way).wait()
        else:
            collectives.receive_(first, others, way)

    def _way(self, source: int, target: int) -> dist.ProcessGroup | None:
        """The group of messages between two stages; None if both are on this rank."""
        low, high = (self.pipeline.rank_of(stage) for stage in sorted((source, target)))
        return None if low == high else self._ways[source < target, (low, high)]

    def from_last(self, input: Tensor | None, shape_if_fake: Sequence[int], dtype_if_fake: torch.dtype) -> Tensor:
        """A tensor of the last stage on all of them, which do not know its shape and its dtype, but in a plan."""
        header = torch.zeros(8, dtype=torch.int64, device=self.device)
        if input is not None:
            sizes = [_DTYPES.index(input.dtype), input.dim(), *input.shape]
            header[: len(sizes)] = torch.tensor(sizes, device=self.device)
        collectives.broadcast_([header], self.group, self.last)
        known = [_DTYPES.index(dtype_if_fake), len(shape_if_fake), *shape_if_fake]
        number, dims, *shape = known if dist.get_backend(self.group) == "fake" else header.tolist()
        own = torch.empty(shape[:dims], dtype=_DTYPES[number], device=self.device) if input is None else input
        own = own.detach().clone(memory_format=torch.contiguous_format)
        collectives.broadcast_([own], self.group, self.last)
        return own


def _apart(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The distinct pairs of two ranks, in as few lists as are needed for one to have each rank once at most."""
    lists: list[list[tuple[int, int]]] = []
    for pair in dict.fromkeys(pair for pair in pairs if pair[0] != pair[1]):
        fits = (each for each in lists if not any(set(pair) & set(other) for other in each))
        free = next(fits, None)
        if free is None:
            lists.append([pair])
        else:
            free.append(pair)
    return lists
