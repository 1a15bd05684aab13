"""From one arrangement of tensors over the ranks of a world to another, in memory.

For training that hands its weights to inference, or a run that changes its degrees. `plan` is arithmetic that every
rank does alike, for all; each then carries out its own part. On one process the result is what was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import final

import torch
from torch import Tensor

from kitforge.core.checkpoint.agreement import together
from kitforge.core.checkpoint.arrangement import Arrangement, Ranks
from kitforge.core.checkpoint.boxes import cut, num_elements, overlap, within
from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region

CHUNK_BYTES = 2**28


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A part of a tensor that one rank gives to another, or has itself."""

    name: str
    region: Region
    source: int
    target: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Route:
    """A part that a rank needs, and the ranks that have it."""

    target: int
    region: Region
    holders: tuple[int, ...]


def plan(source: Arrangement, target: Arrangement) -> tuple[Transfer, ...]:
    """What goes from where to where, so that every rank gets its pieces of `target`.

    A rank takes what it has itself from itself, and the rest from those that have given least so far. The result is
    the same on all ranks. Raises ModelError when the tensors or the worlds of the two are not the same.
    """
    _check_same(source, target)
    given = [0] * source.ranks.size
    routes: dict[tuple[Layout, Layout], list[_Route]] = {}
    transfers = []
    for name in sorted(target.layouts):
        layouts = source.layouts[name], target.layouts[name]
        if layouts not in routes:
            routes[layouts] = list(_routes(name, *layouts, source.ranks, target.ranks))
        for route in routes[layouts]:
            rank = route.target if route.target in route.holders else _nearest(route, given)
            if rank != route.target:
                given[rank] += num_elements(route.region)
            transfers.append(Transfer(name=name, region=route.region, source=rank, target=route.target))
    return tuple(transfers)


def reshard(
    tensors: Mapping[str, Tensor],
    source: Arrangement,
    target: Arrangement,
    *,
    world: World = ALONE,
    chunk_bytes: int = CHUNK_BYTES,
) -> dict[str, Tensor]:
    """This rank's pieces of `target`, from its pieces of `source`; a rank that has no place in one has none there.

    All ranks of the world call it. A piece that is the same in both is the very tensor that was given; the others are
    new. Beside pieces, a rank holds no more than twice `chunk_bytes` at a time.
    Raises ModelError on all ranks when the tensors of one are not exactly those of `source`.
    """
    given = together(lambda: _check_given(tensors, source, world), world.agree, ModelError)
    dtypes = _dtypes(given)
    transfers = plan(source, target)
    exchange = _Exchange(tensors, source, target, dtypes, world)
    for transfer in transfers:
        if transfer.source == transfer.target == world.rank:
            exchange.keep(transfer)
    passing = [transfer for transfer in transfers if transfer.source != transfer.target]
    for chunk in _chunks(passing, dtypes, chunk_bytes):
        exchange.run(chunk)
    return exchange.pieces


@final
class _Exchange:
    """One rank's part of a plan."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        source: Arrangement,
        target: Arrangement,
        dtypes: Mapping[str, torch.dtype],
        world: World,
    ) -> None:
        self._tensors = tensors
        self._world = world
        self._group = None if world.mesh is None else world.mesh.world
        self._given = _regions(source, world.rank)
        self._wanted = _regions(target, world.rank)
        # A piece that stays what it is stays where it is.
        self._same = {name for name, region in self._wanted.items() if self._given.get(name) == region}
        self.pieces = {
            name: tensors[name]
            if name in self._same
            else torch.empty(region.shape, dtype=dtypes[name], device=world.device)
            for name, region in self._wanted.items()
        }

    def keep(self, transfer: Transfer) -> None:
        """Copy what this rank has itself."""
        if transfer.name not in self._same:
            self._into(transfer).copy_(self._out_of(transfer))

    def run(self, chunk: Iterable[Transfer]) -> None:
        """Send and receive, together with all other ranks, the transfers of a chunk; all are of one size of element."""
        rank, size = self._world.rank, collectives.size(self._group)
        sent: list[list[Tensor]] = [[] for _ in range(size)]
        received: list[list[Tensor]] = [[] for _ in range(size)]
        for transfer in chunk:
            if transfer.source == rank:
                sent[transfer.target].append(self._out_of(transfer))
            if transfer.target == rank:
                received[transfer.source].append(self._into(transfer))
        num_sent, num_received = ([sum(each.nbytes for each in peer) for peer in ends] for ends in (sent, received))
        # Bytes pass through every backend, whatever dtypes it knows.
        message = torch.empty(sum(num_sent), dtype=torch.uint8, device=self._world.device)
        for source, place in zip(chain(*sent), _places(message, chain(*sent)), strict=True):
            place.copy_(source)
        answer = collectives.all_to_all(message, num_received, num_sent, self._group)
        for target, place in zip(chain(*received), _places(answer, chain(*received)), strict=True):
            target.copy_(place)

    def _out_of(self, transfer: Transfer) -> Tensor:
        return within(transfer.region, self._given[transfer.name]).of(self._tensors[transfer.name].detach())

    def _into(self, transfer: Transfer) -> Tensor:
        return within(transfer.region, self._wanted[transfer.name]).of(self.pieces[transfer.name])


def _regions(arrangement: Arrangement, rank: int) -> dict[str, Region]:
    found = {name: arrangement.ranks.region(layout, rank) for name, layout in arrangement.layouts.items()}
    return {name: region for name, region in found.items() if region is not None}


def _places(message: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Views of the bytes of a message, one after another, with the dtypes and shapes of the tensors."""
    start = 0
    for tensor in tensors:
        yield message[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += tensor.nbytes


def _chunks(
    transfers: Iterable[Transfer], dtypes: Mapping[str, torch.dtype], chunk_bytes: int
) -> Iterator[list[Transfer]]:
    """Transfers in portions in which no rank gives or takes more than `chunk_bytes`, and elements have one size.

    With one size every part of a message starts at a multiple of it, so that it can be looked at in its own dtype.
    """
    by_size: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_size.setdefault(dtypes[transfer.name].itemsize, []).append(transfer)
    for element_bytes, members in sorted(by_size.items()):
        chunk: list[Transfer] = []
        loads: dict[tuple[str, int], int] = {}
        for part in _parts(members, chunk_bytes // element_bytes):
            num_bytes = num_elements(part.region) * element_bytes
            ends = ("gives", part.source), ("takes", part.target)
            if chunk and any(loads.get(end, 0) + num_bytes > chunk_bytes for end in ends):
                yield chunk
                chunk, loads = [], {}
            chunk.append(part)
            loads |= {end: loads.get(end, 0) + num_bytes for end in ends}
        yield chunk


def _parts(transfers: Iterable[Transfer], num_most: int) -> Iterator[Transfer]:
    for transfer in transfers:
        yield from (replace(transfer, region=region) for region in cut(transfer.region, num_most))


def _routes(name: str, before: Layout, after: Layout, givers: Ranks, takers: Ranks) -> Iterator[_Route]:
    pieces = givers.pieces(before)
    for wanted in takers.pieces(after):
        shared = [(piece.holders, overlap(piece.region, wanted.region)) for piece in pieces]
        found = [(holders, region) for holders, region in shared if region is not None]
        if sum(num_elements(region) for _, region in found) != num_elements(wanted.region):
            raise ModelError(f"no rank has all of tensor {name!r}", got=before, expected=f"{wanted.region} on some")
        for target in wanted.holders:
            yield from (_Route(target=target, region=region, holders=holders) for holders, region in found)


def _nearest(route: _Route, given: Sequence[int]) -> int:
    return min(route.holders, key=lambda rank: (given[rank], abs(rank - route.target)))


def _check_same(source: Arrangement, target: Arrangement) -> None:
    """Nothing is dropped on the way, and nothing made up."""
    if source.ranks.size != target.ranks.size:
        raise ModelError(
            "tensors pass between ranks of one world", got=target.ranks.size, expected=f"{source.ranks.size} ranks"
        )
    shapes = [{name: layout.shape for name, layout in each.layouts.items()} for each in (source, target)]
    if shapes[0] != shapes[1]:
        raise ModelError("the tensors before and after are not the same", got=_difference(shapes[1], shapes[0]))


def _check_given(tensors: Mapping[str, Tensor], source: Arrangement, world: World) -> dict[str, torch.dtype]:
    """The dtypes of a rank's tensors, when these are exactly its pieces of `source`."""
    size = 1 if world.mesh is None else world.mesh.size
    if source.ranks.size != size:
        raise ModelError("the arrangement is one of another world", got=source.ranks.size, expected=f"{size} ranks")
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: region.shape for name, region in _regions(source, world.rank).items()}
    if given != expected:
        raise ModelError(
            f"rank {world.rank} does not give the tensors of its arrangement", got=_difference(given, expected)
        )
    return {name: tensor.dtype for name, tensor in tensors.items()}


def _dtypes(given: Sequence[Mapping[str, torch.dtype]]) -> dict[str, torch.dtype]:
    """The dtype of every tensor, from the ranks that have a piece of it; all ranks find the same."""
    dtypes: dict[str, torch.dtype] = {}
    for name, dtype in (item for each in given for item in each.items()):
        if dtypes.setdefault(name, dtype) != dtype:
            raise ModelError(f"ranks have tensor {name!r} in two dtypes", got=dtype, expected=dtypes[name])
    return dtypes


def _difference(got: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> str:
    words = {
        "missing": sorted(expected.keys() - got.keys()),
        "not expected": sorted(got.keys() - expected.keys()),
        "of another shape": sorted(
            f"{name} {list(got[name])}, not {list(expected[name])}"
            for name in got.keys() & expected.keys()
            if got[name] != expected[name]
        ),
    }
    return "; ".join(
        f"{len(names)} {word} ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})"
        for word, names in words.items()
        if names
    )
