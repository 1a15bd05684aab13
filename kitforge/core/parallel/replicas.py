"""Replicated tensors: broadcast from the first rank, and bitwise comparison.

A tensor without a layout is whole on every rank. Only ranks with the same shard communicate; a comparison sends one
number per tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.foundation.errors import ModelError

# Words per chunk, which bounds the memory of a checksum.
CHECKSUM_WORDS = 2**20
# Odd numbers far from powers of two (Steele and Vigna, 2021): weights of words, and of groups of them.
WEIGHT, NEXT = 0x27BB2EE687B0B0FD, 0x369DEA0F31A53F85
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_same_parameters(tensors: Mapping[str, Tensor], mesh: Mesh) -> None:
    """Raise ModelError on all ranks if their networks differ in names, shapes or dtypes."""
    own = {name: f"{list(each.shape)} {str(each.dtype).removeprefix('torch.')}" for name, each in tensors.items()}
    for rank, others in enumerate(collectives.all_gather_object(own, mesh.world)):
        name = next((name for name in {**own, **others} if own.get(name) != others.get(name)), None)
        if name is not None:
            raise ModelError(
                f"ranks have built different networks: {name}",
                got=f"{others.get(name, 'nothing')} on rank {rank}, {own.get(name, 'nothing')} on rank {mesh.rank}",
                expected="the same network on every rank",
            )


def broadcast_replicas(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Copy the values of the first rank with a shard to all its replicas, in place."""
    for axis in mesh.shape:
        group = mesh.group(axis)
        alike = [each.detach() for name, each in tensors.items() if each.numel() and axis not in _axes(name, layouts)]
        if group is not None and alike:
            collectives.broadcast_(alike, group)


def replica_drift(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, list[int]]:
    """Names of the tensors whose replicas differ in any bit, each with the ranks that differ from the first rank with
    the same shard; the same result on every rank."""
    held = {name: each for name, each in tensors.items() if set(mesh.shape) - _axes(name, layouts)}
    if not held:
        return {}
    device = torch.device(mesh.device_mesh.device_type)
    sums = torch.stack([_checksum(each).to(device) for each in held.values()])
    differ = torch.zeros(len(held), dtype=torch.bool, device=device)
    for axis in mesh.shape:
        # The largest of the complements is the complement of the smallest.
        bounds = collectives.all_reduce_(torch.stack([sums, ~sums]), mesh.group(axis), collectives.MAX)
        is_copied = torch.tensor([axis not in _axes(name, layouts) for name in held], device=device)
        differ |= is_copied & (bounds[0] != ~bounds[1])
    if not float(collectives.all_reduce_(differ.any().float(), mesh.world, collectives.MAX)):
        return {}
    own = dict(zip(held, sums.tolist(), strict=True))
    seen = collectives.all_gather_object(
        [name for name, each in zip(held, differ.tolist(), strict=True) if each], mesh.world
    )
    names = [name for name in held if any(name in each for each in seen)]
    everyones = collectives.all_gather_object({name: own[name] for name in names}, mesh.world)
    return {name: _differing_ranks(name, [each[name] for each in everyones], layouts, mesh) for name in names}


def describe_drift(drift: Mapping[str, Iterable[int]]) -> str:
    """The drift as a message, of which at most eight tensors are named."""
    parts = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in list(drift.items())[:8]]
    return "; ".join(parts) + (f"; and {len(drift) - 8} more" if len(drift) > 8 else "")


def _axes(name: str, layouts: Mapping[str, Layout]) -> set[str]:
    """The mesh axes along which a tensor is sharded."""
    layout = layouts.get(name)
    return set() if layout is None else {split.axis for split in layout.splits}


def _differing_ranks(name: str, sums: list[int], layouts: Mapping[str, Layout], mesh: Mesh) -> list[int]:
    cut = sorted(_axes(name, layouts))
    first: dict[tuple[int, ...], int] = {}
    coords = [tuple(mesh.index_of(rank)[axis] for axis in cut) for rank in range(mesh.size)]
    return [rank for rank, coord in enumerate(coords) if first.setdefault(coord, sums[rank]) != sums[rank]]


def _checksum(tensor: Tensor) -> Tensor:
    """A checksum: a weighted sum of words modulo 2**64. Different bit patterns collide with probability 2**-63."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(INTEGERS[min(flat.element_size(), 8)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = (torch.arange(min(len(words), CHECKSUM_WORDS), device=tensor.device) * WEIGHT) | 1
    for part in torch.split(words, CHECKSUM_WORDS):
        total = total * NEXT + (part.long() * weights[: len(part)]).sum()
    return total
