"""The ranks of the stages of one pipeline, and what they send one another."""

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.parallel import collectives

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Column:
    """A rank of each stage, in their order.

    Each direction between two stages has a group of its own: messages of a group are in one order on both ranks, which
    those of both directions together are not.
    """

    def __init__(
        self, columns: list[list[int]], rank: int, group: dist.ProcessGroup | None, device: str, timeout: float
    ) -> None:
        """`columns` are those of all ranks, which call this together; `group` is that of this rank's one. A rank that
        is on no grid has none."""
        self.num_stages = len(columns[0])
        self.device = torch.device(device)
        self.ranks = next((row for row in columns if rank in row), [])
        self.stage = self.ranks.index(rank) if self.ranks else -1
        self._group, self._ends = group, None
        self._ways: dict[tuple[int, int], dist.ProcessGroup] = {}

        def new_group(pairs: Sequence[tuple[int, int]]) -> dist.ProcessGroup | None:
            rows = [[row[low], row[high]] for row in columns for low, high in pairs]
            limit, create = datetime.timedelta(seconds=timeout), dist.new_subgroups_by_enumeration
            made: dist.ProcessGroup | None = create(rows, timeout=limit)[0]  # type: ignore[no-untyped-call]
            return made

        last = self.num_stages - 1
        for begin in (0, 1)[:last]:
            pairs = [(stage, stage + 1) for stage in range(begin, last, 2)]
            own = next((pair for pair in pairs if self.stage in pair), None)
            for way in (new_group(pairs), new_group(pairs)):
                if own is not None and way is not None:
                    self._ways[own] = way
                    own = own[1], own[0]
        if last > 1:
            self._ends = new_group([(0, last)])

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of the column."""
        assert self._group is not None
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.stage == self.num_stages - 1

    def group_of(self, stages: Sequence[int] | None) -> dist.ProcessGroup | None:
        """The group of the ranks of some stages, one of which is this rank's: all of them (None), the first and the
        last, or one, which has no group."""
        if stages is None or len(stages) == self.num_stages:
            return self.group
        assert len(stages) == 1 or tuple(stages) == (0, self.num_stages - 1), stages
        return None if len(stages) == 1 else self._ends

    def start_send(self, input: Tensor, stage: int) -> dist.Work:
        """Start to send a tensor to a neighbour; it stays as it is until `wait` of what is returned."""
        return collectives.start_send(input, self.ranks[stage], self._ways[self.stage, stage])

    def receive(self, shape: Sequence[int], dtype: torch.dtype, stage: int) -> Tensor:
        """The tensor that a neighbour sends."""
        empty = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return collectives.receive_(empty, self.ranks[stage], self._ways[stage, self.stage])

    def from_last(self, input: Tensor | None) -> Tensor:
        """A tensor of the last stage on all of them, which do not know its shape and its dtype."""
        header = torch.zeros(8, dtype=torch.int64, device=self.device)
        if input is not None:
            sizes = [_DTYPES.index(input.dtype), input.dim(), *input.shape]
            header[: len(sizes)] = torch.tensor(sizes, device=self.device)
        collectives.broadcast_([header], self.group, self.num_stages - 1)
        number, dims, *shape = header.tolist()
        own = torch.empty(shape[:dims], dtype=_DTYPES[number], device=self.device) if input is None else input
        own = own.detach().clone(memory_format=torch.contiguous_format)
        collectives.broadcast_([own], self.group, self.num_stages - 1)
        return own
