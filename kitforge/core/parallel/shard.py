"""The shard axis: torch's `fully_shard` cuts weights, gradients and optimizer state over ranks, ZeRO stages 1 to 3.

Its parameters are DTensors at rest and plain tensors in compute. Gradients are summed, never averaged: the loss is
divided by the count of the whole batch before the backward pass. Importing it takes half a second, which one process
should not pay, so that it is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, final

from torch import Tensor, nn

from kitforge.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@final
class ShardedUnits:
    """The units of a model that are gathered and let go together: each layer of a list of layers, then the rest."""

    def __init__(self, model: nn.Module, mesh: Mesh, roots: Mapping[str, Sequence[str]]) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        self._stage = mesh.degrees.zero
        self._has_copies = mesh.degree("data") > 1
        grid = mesh.sub_mesh("data", "shard")
        self._units: list[FSDPModule] = [
            fully_shard(unit, mesh=grid, reshard_after_forward=self._stage == 3) for unit in _layers(model)
        ]
        # What is outside of the blocks stays gathered after a forward pass, so that the head can follow.
        self._roots: list[FSDPModule] = [
            fully_shard(model.get_submodule(name), mesh=grid, reshard_after_forward=False) for name in roots
        ]
        self._units += self._roots
        for unit in self._units:
            # gloo has no scaled sum; without this order torch asks it for one.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
        for name, ways in roots.items():
            for way in ways:
                register_fsdp_forward_method(model.get_submodule(name), way)

    def micro_batch(self, is_last: bool) -> None:
        """Say what the coming backward pass has to communicate."""
        for root in self._roots:
            if self._stage == 1:
                root.set_requires_gradient_sync(is_last)
            elif self._has_copies:
                root.set_requires_all_reduce(is_last)
            if self._stage < 3:
                # Within a step the weights do not change, so that they need not be gathered again.
                root.set_reshard_after_backward(is_last)

    def rest(self) -> None:
        """Cut again what a forward pass without a backward pass has left gathered."""
        for unit in self._units:
            unit.reshard()


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's piece of a tensor at rest, sharing its memory: the one gate out of DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: nn.Module) -> list[nn.Module]:
    """The members of every list of modules that is not inside another such list."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [
        module for name, module in lists if not any(name.startswith(f"{other}.") for other, _ in lists if other != name)
    ]
    return [layer for layers in outer for layer in layers]
