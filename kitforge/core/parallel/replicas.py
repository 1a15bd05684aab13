"""Replicated tensors: broadcast from the first rank, and bitwise comparison.

A tensor without a layout is whole on every rank. Only ranks with the same shard communicate; a comparison sends one
number per tensor.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region

# Words per chunk, which bounds the memory of a checksum.
CHECKSUM_WORDS = 2**20
# Odd numbers far from powers of two (Steele and Vigna, 2021): weights of words, and of groups of them.
WEIGHT, NEXT = 0x27BB2EE687B0B0FD, 0x369DEA0F31A53F85


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
    for axis in _axes(mesh):
        group, alike = mesh.group(axis), []
        for name, each in tensors.items():
            layout = _layout(name, each, layouts)
            if axis not in mesh.grid.copied_axes(layout) or not each.numel():
                continue
            if axis == "pipeline" and layout.stages is not None:
                _broadcast_to_stages(each.detach(), layout.stages, mesh)
            else:
                alike.append(each.detach())
        if group is not None and alike:
            collectives.broadcast_(alike, group)


def replica_drift(tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], mesh: Mesh) -> dict[str, list[int]]:
    """Names of the tensors whose replicas differ in any bit, each with the ranks that differ from the first rank with
    the same shard; the same result on every rank. A rank that does not hold a tensor takes part in the comparison."""
    copied = {name: mesh.grid.copied_axes(_layout(name, each, layouts)) for name, each in tensors.items()}
    held = mesh.union(name for name, axes in copied.items() if axes)
    if not held:
        return {}
    device = torch.device(mesh.device_mesh.device_type)
    least = torch.full((), torch.iinfo(torch.int64).min, device=device)
    own = {name: _checksum(tensors[name]).to(device) for name in held if name in tensors}
    sums, complements = (
        torch.stack([(~own[name] if negate else own[name]) if name in own else least for name in held])
        for negate in (False, True)
    )
    differ = torch.zeros(len(held), dtype=torch.bool, device=device)
    for axis in _axes(mesh):
        # The largest of the complements is the complement of the smallest.
        bounds = collectives.all_reduce_(torch.stack([sums, complements]), mesh.group(axis), collectives.MAX)
        is_copied = torch.tensor([axis in copied.get(name, ()) for name in held], device=device)
        differ |= is_copied & (bounds[0] != ~bounds[1])
    if not float(collectives.all_reduce_(differ.any().float(), mesh.world, collectives.MAX)):
        return {}
    seen = collectives.all_gather_object(
        [name for name, each in zip(held, differ.tolist(), strict=True) if each], mesh.world
    )
    names = [name for name in held if any(name in each for each in seen)]
    values = {name: int(own[name]) for name in names if name in own}
    parts = {name: _layout(name, tensors[name], layouts).held_region(mesh.index) for name in values}
    everyones = collectives.all_gather_object({name: (parts[name], values[name]) for name in values}, mesh.world)
    return {name: _differing_ranks([each.get(name) for each in everyones]) for name in names}


def _axes(mesh: Mesh) -> list[str]:
    """The axes along which ranks may hold replicas, in one order on all ranks."""
    axes = dict.fromkeys((*mesh.shape, "expert_data", "expert"))
    return [axis for axis in axes if mesh.degree(axis) > 1 and (axis in mesh.shape or mesh.degree("expert") > 1)]


def _layout(name: str, tensor: Tensor, layouts: Mapping[str, Layout]) -> Layout:
    found = layouts.get(name)
    return Layout(shape=tuple(tensor.shape)) if found is None else found


def _broadcast_to_stages(tensor: Tensor, stages: tuple[int, ...], mesh: Mesh) -> None:
    """Send a tensor of some stages from the first of them to the others."""
    ranks = next(row for row in mesh.grid.groups("pipeline") if mesh.rank in row)
    first, *others = (ranks[stage] for stage in stages)
    if mesh.rank != first:
        tensor.copy_(collectives.receive_(torch.empty_like(tensor, memory_format=torch.contiguous_format), first))
        return
    for rank in others:
        collectives.send(tensor.contiguous(), rank)


def _differing_ranks(held: list[tuple[Region, int] | None]) -> list[int]:
    """The ranks whose checksum is not that of the first rank with the same region."""
    first: dict[Region, int] = {}
    return [
        rank for rank, each in enumerate(held) if each is not None and first.setdefault(each[0], each[1]) != each[1]
    ]


def _checksum(tensor: Tensor) -> Tensor:
    """A checksum: a weighted sum of words modulo 2**64. Different bit patterns collide with probability 2**-63."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[min(flat.element_size(), 8)])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = (torch.arange(min(len(words), CHECKSUM_WORDS), device=tensor.device) * WEIGHT) | 1
    for part in torch.split(words, CHECKSUM_WORDS):
        total = total * NEXT + (part.long() * weights[: len(part)]).sum()
    return total
