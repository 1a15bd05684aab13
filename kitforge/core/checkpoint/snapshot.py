"""A snapshot of all tensors in CPU memory. Training waits for the copy, so it runs at memory bandwidth."""

import json
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.all_or_none import AllGather, collective_try
from kitforge.core.checkpoint.manifest import Part, plain
from kitforge.core.checkpoint.shard_ownership import assign_shards
from kitforge.core.checkpoint.state_tensors import detach_tensors
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.device import synchronize
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.types import Region

# Up to this size torch copies on the calling thread, and quickest of all.
SMALL_BYTES = 2**17
# Large enough to make the hand-over between threads cheap, small enough to give all of them equal work.
CHUNK_BYTES = 2**21

CopyChunk = tuple[NDArray[np.uint8], NDArray[np.uint8]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensors:
    """The tensors of a snapshot: names as they were given, those that are tied to another one, and of the rest the
    layout and the dtype of each as a whole."""

    names: dict[Part, list[str]]
    aliases: dict[str, str]
    wholes: dict[str, tuple[Layout, torch.dtype]]


class Snapshot:
    """A snapshot in CPU buffers that the next snapshot reuses.

    Each rank copies the shards that it owns, without communication unless ranks have different tensors.
    """

    def __init__(self, grid: Grid | None = None, rank: int = 0, agree: AllGather | None = None) -> None:
        """`agree` where ranks have different tensors, as stages of a pipeline have: all take a snapshot together."""
        self._grid = grid
        self._rank = rank
        self._agree = agree
        self._owned: set[str] = set()
        self.step = 0
        self.state = b""
        self.state_tensors: dict[str, Tensor] = {}
        # Names as they were given; a name in `aliases` has no buffer of its own.
        self.names: dict[Part, list[str]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        # Of many ranks: what every tensor is as a whole, by name. Equal on all of them.
        self.wholes: dict[str, tuple[Layout, torch.dtype]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank's share of a checkpoint takes, headers and manifest aside."""
        tensors = (*self.buffers.values(), *self.state_tensors.values())
        return sum(each.nbytes for each in tensors) + len(self.state)

    def region(self, name: str) -> Region:
        """The region of a buffer in its tensor."""
        found = None if self._grid is None else self._grid.region(self.wholes[name][0], self._rank)
        return Region.full(self.buffers[name].shape) if found is None else found

    def take(
        self,
        step: int,
        *,
        model: Iterable[tuple[str, Tensor]],
        optimizer: Iterable[tuple[str, Tensor]],
        state: Mapping[str, Any],
        layouts: Mapping[str, Layout] = {},
    ) -> None:
        """Copy all tensors and the state as they are now; `layouts` has the layouts of split tensors.

        Raises CheckpointError for a name given twice, a tensor without values or not of the shape that its layout
        gives to this rank, or state that neither JSON nor safetensors can hold.
        """
        self.step = step
        sources: dict[str, Tensor] = {}
        collect = partial(self._collect, sources, model, optimizer, state, layouts)
        found = collect() if self._agree is None else _union(collective_try(collect, self._agree))
        self.names, self.aliases = found.names, found.aliases
        if self._grid is not None:
            # Names, shapes and layouts stay the same from step to step, so ownership is computed once.
            if list(found.wholes.items()) != list(self.wholes.items()):
                tensors = [(layout, dtype.itemsize) for layout, dtype in found.wholes.values()]
                is_owned = assign_shards(tensors, self._grid, self._rank)
                self._owned = {name for name, own in zip(found.wholes, is_owned, strict=True) if own}
                self.wholes = found.wholes
            sources = {name: source for name, source in sources.items() if name in self._owned}
        self.buffers = {name: _buffer(self.buffers.get(name), source) for name, source in sources.items()}
        _copy([(self.buffers[name], source) for name, source in sources.items()])
        for device in {source.device for source in sources.values()}:
            synchronize(device)

    def _collect(
        self,
        sources: dict[str, Tensor],
        model: Iterable[tuple[str, Tensor]],
        optimizer: Iterable[tuple[str, Tensor]],
        state: Mapping[str, Any],
        layouts: Mapping[str, Layout],
    ) -> _Tensors:
        """Sort this rank's tensors into `sources`, and check that they are what their layouts say."""
        # The state of a run is the first rank's.
        self.state, self.state_tensors = b"", {}
        if self._rank == 0:
            self.state = json.dumps(plain(detach_tensors(state, self.state_tensors), "state"), indent=1).encode()
        aliases: dict[str, str] = {}
        # Tied tensors are tied within the model; the optimizer has no reason to share memory with it.
        names: dict[Part, list[str]] = {
            "model": _collect(model, sources, aliases),
            "optimizer": _collect(optimizer, sources, aliases),
        }
        # Tied tensors have the layout of either name.
        known, wholes = dict(layouts), {}
        for alias, owner in aliases.items():
            if alias in layouts and known.setdefault(owner, layouts[alias]) != layouts[alias]:
                raise CheckpointError(f"the tied tensors {owner!r} and {alias!r} are given different layouts")
        for name, source in sources.items():
            layout = known.get(name) or Layout(shape=tuple(source.shape))
            if self._grid is not None:
                region = self._grid.region(layout, self._rank)
                if region is None or region.shape != tuple(source.shape):
                    raise CheckpointError(
                        f"tensor {name!r} is not of the shape that its layout gives to rank {self._rank}",
                        got=list(source.shape),
                        expected=None if region is None else list(region.shape),
                    )
            elif layout.splits:
                raise CheckpointError(f"tensor {name!r} is split, but one rank saves alone", got=layout)
            wholes[name] = (layout, source.dtype)
        return _Tensors(names=names, aliases=aliases, wholes=wholes)


def _union(ranks: Sequence[_Tensors]) -> _Tensors:
    """The tensors of all ranks, in one order."""
    union = _Tensors(names={}, aliases={}, wholes={})
    for rank, each in enumerate(ranks):
        for part, names in each.names.items():
            union.names[part] = list(dict.fromkeys((*union.names.get(part, ()), *names)))
        for name, whole in each.wholes.items():
            if union.wholes.setdefault(name, whole) != whole:
                raise CheckpointError(
                    f"rank {rank} has another tensor {name!r} than the ranks before it",
                    got=whole,
                    expected=union.wholes[name],
                )
        union.aliases.update(each.aliases)
    return union


def _collect(tensors: Iterable[tuple[str, Tensor]], sources: dict[str, Tensor], aliases: dict[str, str]) -> list[str]:
    """Sort tensors into `sources`, and into `aliases` those that are the very same memory; returns all names."""
    names: list[str] = []
    owners: dict[Hashable, str] = {}
    # Tensors made on the way, e.g. a step counter, must live until they are copied, or a later one takes their address.
    for name, tensor in tensors:
        safetensors_file.check_storable(name, tensor)
        if name in sources or name in aliases:
            raise CheckpointError(f"two tensors are called {name!r}", expected="distinct names")
        names.append(name)
        memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.setdefault(memory if tensor.numel() else tensor, name)
        if owner == name:
            sources[name] = tensor.detach()
        else:
            aliases[name] = owner
    return names


def _buffer(last: Tensor | None, source: Tensor) -> Tensor:
    """The buffer of the last snapshot where it fits, so that memory is mapped once."""
    # A CUDA device copies at full speed to page-locked memory only.
    is_pinned = source.device.type == "cuda"
    alike = (source.shape, source.dtype)
    if last is not None and (last.shape, last.dtype) == alike and (not is_pinned or last.is_pinned()):
        return last
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=is_pinned)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; devices may still be at it on return.

    torch's own copy makes its threads meet once a tensor, which costs several times the copy itself when other
    processes want the cores too. Here they meet once.
    """
    chunks: list[CopyChunk] = []
    for target, source in pairs:
        is_plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_complex()
        if is_plain and source.nbytes > SMALL_BYTES:
            to, of = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (target, source))
            parts = [slice(start, start + CHUNK_BYTES) for start in range(0, len(of), CHUNK_BYTES)]
            chunks += [(to[each], of[each]) for each in parts]
        else:
            target.copy_(source, non_blocking=True)
    # All threads draw from one iterator, so that one which the system holds up leaves its share to the others.
    remaining = iter(chunks)
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as threads:
        others = [threads.submit(_run_copies, remaining) for _ in range(num_threads - 1)]
        _run_copies(remaining)
        for other in others:
            other.result()


def _run_copies(chunks: Iterator[CopyChunk]) -> None:
    for to, of in chunks:
        np.copyto(to, of)
