"""Fully sharded data parallelism with torch's `fully_shard`: weights, gradients and optimizer state, ZeRO 1 to 3.

Its parameters are DTensors at rest and plain tensors in compute. Gradients are summed, never averaged: the loss is
divided by the count of the whole batch before the backward pass. In half precision weights are rounded before the
all-gather, and gradients are reduced in fp32. Importing torch's part takes half a second, so it is imported where it is
used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from kitforge.core.parallel.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


@final
class FSDPUnits:
    """The FSDP units of a model: each layer of a list of layers, then the rest."""

    def __init__(
        self, model: nn.Module, mesh: Mesh, roots: Mapping[str, Sequence[str]], compute_dtype: torch.dtype
    ) -> None:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        policy, is_half = _policy(compute_dtype), compute_dtype.itemsize == 2
        self._stage = mesh.degrees.zero_stage
        self._has_copies = mesh.degree("data") > 1
        grid = mesh.sub_mesh("data", "fsdp")
        layers = _layers(model)
        # torch's norms compute in the dtype of their weights, which is fp32 in one process: units of their own.
        norms = [each for each in model.modules() if is_half and isinstance(each, NORMS) and list(each.parameters())]
        self._units: list[FSDPModule] = [
            fully_shard(unit, mesh=grid, reshard_after_forward=self._stage == 3, mp_policy=policy_of_unit)
            for units, policy_of_unit in (
                (norms, _policy(torch.float32)),
                ([x for x in layers if x not in norms], policy),
            )
            for unit in units
        ]
        # Parameters outside of the blocks stay gathered after a forward pass, for the head.
        self._roots: list[FSDPModule] = [
            fully_shard(root, mesh=grid, reshard_after_forward=False, mp_policy=policy)
            for root in map(model.get_submodule, roots)
        ]
        self._units += self._roots
        for module in model.modules():
            if is_half and isinstance(module, nn.Embedding):
                # What is looked up is not a product: it begins the stream, which is fp32 in one process.
                module.register_forward_hook(partial(_restore_dtype, dtype=module.weight.dtype))
        for unit in self._units:
            # gloo has no scaled sum; without this order torch asks it for one.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)
        for name, ways in roots.items():
            for way in ways:
                register_fsdp_forward_method(model.get_submodule(name), way)

    def micro_batch(self, is_last: bool) -> None:
        """Set whether the next backward pass reduces gradients."""
        for root in self._roots:
            if self._stage == 1:
                root.set_requires_gradient_sync(is_last)
            elif self._has_copies:
                root.set_requires_all_reduce(is_last)
            if self._stage < 3:
                # Weights do not change within a step, so they stay gathered.
                root.set_reshard_after_backward(is_last)

    def reshard(self) -> None:
        """Reshard the parameters that a forward pass without a backward pass left gathered."""
        for unit in self._units:
            unit.reshard()


def _policy(compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The mixed precision policy: weights are gathered in half precision; autocast handles activations."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if compute_dtype.itemsize != 2:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _restore_dtype(_module: nn.Module, _inputs: object, output: Tensor, dtype: torch.dtype) -> Tensor:
    return output.to(dtype)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory. The only place that leaves DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules of every outermost ModuleList."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [
        module for name, module in lists if not any(name.startswith(f"{other}.") for other, _ in lists if other != name)
    ]
    return [layer for layers in outer for layer in layers]
