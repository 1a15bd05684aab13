"""Fully sharded data parallelism with torch's `fully_shard`: weights, gradients and optimizer state, ZeRO 1 to 3.

Its parameters are DTensors at rest and plain tensors in compute. Gradients are summed, never averaged: the loss is
divided by the count of the whole batch before the backward pass. In half precision weights are rounded before the
all-gather, and gradients are reduced in fp32. Importing torch's part takes half a second, so it is imported where it is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.sharding import EXPERT

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy


NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)


class FSDPUnits:
    """The FSDP units of a model: each layer of a list of layers, then the rest. Experts that ranks have a part of each
    are units of their own, over the ranks with the same part."""

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        roots: Mapping[str, Sequence[str]],
        compute_dtype: torch.dtype,
        layouts: Mapping[str, Layout],
    ) -> None:
        """`layouts` are those of the shards."""
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        policy, is_half = _policy(compute_dtype), compute_dtype.itemsize == 2
        self._stage = mesh.degrees.zero_stage
        # A pass through one of several stages ends before the gradients of others are there.
        self._sums_late = mesh.degree("data") > 1 and mesh.degrees.schedule == "1f1b"
        grid = mesh.sub_mesh("data", "fsdp")
        layers = _layers(model)
        # torch's norms compute in the dtype of their weights, which is fp32 in one process: units of their own.
        norms = [each for each in model.modules() if is_half and isinstance(each, NORMS) and list(each.parameters())]
        experts = _expert_dims(model, layouts)
        alone: set[nn.Parameter] = set()
        self._units: list[FSDPModule] = []
        if mesh.degree("expert_data") > 1:
            self._units += [_shard_experts(unit, dims, mesh, policy) for unit, dims in experts.items()]
        else:
            # No other rank has the same experts: their parameters stay as they are.
            alone.update(each for dims in experts.values() for each in dims)
        self._units += [
            fully_shard(
                unit, mesh=grid, reshard_after_forward=self._stage == 3, mp_policy=policy_of_unit, ignored_params=alone
            )
            for units, policy_of_unit in (
                (norms, _policy(torch.float32)),
                ([x for x in layers if x not in norms], policy),
            )
            for unit in units
        ]
        # Parameters outside of the blocks stay gathered after a forward pass, for the head.
        self._roots: list[FSDPModule] = [
            fully_shard(root, mesh=grid, reshard_after_forward=False, mp_policy=policy, ignored_params=alone)
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
        if mesh.degrees.stages.splits_backward or mesh.degrees.copies > 1:
            for each in self._roots:
                each.__dict__["flush"] = torch.clone
                register_fsdp_forward_method(each, "flush")  # type: ignore[arg-type]

    def micro_batch(self, is_last: bool, *, reduces: bool = True) -> None:
        """Set whether the next backward pass reduces gradients: with stage 1 the last of a step, else unless told."""
        for root in self._roots:
            if self._stage > 1 and self._sums_late:
                root.set_requires_all_reduce(is_last)
            if self._stage < 3:
                root.set_requires_gradient_sync(is_last if self._stage == 1 else reduces)
                # Weights do not change within a step, so they stay gathered.
                root.set_reshard_after_backward(is_last)

    @contextmanager
    def slices(self, device: torch.device, *, is_last: bool) -> Iterator[None]:
        """Around passes that take turns or have gradients of weights alone, of which torch's hooks, made for whole ones
        one at a time, see none: weights stay gathered, and gradients are reduced behind them."""
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        states, hooks = [unit._get_fsdp_state() for unit in self._units], list[Any]()
        for root in self._roots:
            root._get_fsdp_state()._lazy_init()
        for unit, state in zip(self._units, states, strict=True):
            unit.unshard()
            # As within a backward pass, whose recomputations the hooks leave alone.
            state._training_state = TrainingState.PRE_BACKWARD
            for each in (each for group in state._fsdp_param_groups for each in group.fsdp_params):
                weight: Any = each.unsharded_param
                if weight.requires_grad and each.reduce_dtype is not None:
                    hooks.append(weight.register_post_accumulate_grad_hook(partial(_add_unrounded, each)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for state in states:
                state._training_state = TrainingState.IDLE
        self.flush(device, is_last=is_last)

    def flush(self, device: torch.device, *, is_last: bool) -> None:
        """Reduce gradients that were added outside of a backward pass, by one of nothing, which torch ends for all
        units. In half precision the first one adds them to those in fp32, since a reduction is of one dtype."""
        for reduces in (False, True):
            self.micro_batch(is_last and reduces, reduces=reduces)
            for root in self._roots:
                root.__dict__["flush"](torch.zeros((), device=device, requires_grad=True)).backward()

    def reshard(self) -> None:
        """Reshard the parameters that a forward pass without a backward pass left gathered."""
        for unit in self._units:
            unit.reshard()

    def keep_reduced(self, keeps: bool) -> Callable[[Tensor], Tensor]:
        """Keep what the last reduction has summed, which torch rounds to the dtype at rest. Returns a function: from a
        shard's gradient, as a hook on its parameter sees it, to the same before it was rounded."""
        reduced: list[Tensor] = []

        def keep(flat: Tensor) -> None:
            reduced[:] = [flat]

        for unit in self._units:
            # torch takes None to remove a hook, which its annotation does not know.
            unit.set_all_reduce_hook(keep if keeps else None)  # type: ignore[arg-type]
        # A gradient is a view into the flat tensor of its unit, rounded or not.
        return lambda grad: torch.as_strided(reduced[0], grad.size(), grad.stride(), grad.storage_offset())

    def follow_dtypes(self) -> None:
        """Follow new memory and dtypes of the shards; public torch does so before the first pass alone."""
        for unit in self._units:
            state = unit._get_fsdp_state()
            for group in state._fsdp_param_groups:
                for parameter in group.fsdp_params:
                    parameter.reset_sharded_param()  # type: ignore[no-untyped-call]
                if state._is_root is not None:
                    group._init_mp_dtypes()


def _policy(compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """The mixed precision policy: weights are gathered in half precision; autocast handles activations."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if compute_dtype.itemsize != 2:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _add_unrounded(parameter: Any, _unsharded: Tensor) -> None:
    """Add a gradient to those of other passes in the dtype of its reduction."""
    parameter.accumulate_unsharded_grad_if_needed()
    parameter.to_accumulated_grad_if_needed()


def _restore_dtype(_module: nn.Module, _inputs: object, output: Tensor, dtype: torch.dtype) -> Tensor:
    return output.to(dtype)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local shard of a DTensor, sharing its memory. The only place that leaves DTensor."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Convert a parameter in place. Of a DTensor, `data` would leave the shard within as it is."""
    cast = parameter.detach().to(dtype)
    if local_tensor(cast) is cast:
        parameter.data = cast
    else:
        swapped = nn.Parameter(cast, parameter.requires_grad)
        torch.utils.swap_tensors(parameter, swapped)  # type: ignore[no-untyped-call]


def fsdp_layout(layout: Layout, mesh: Mesh) -> Layout:
    """The layout of a parameter whose shards `fully_shard` cuts further: along the first dim, but matrices of experts,
    of which there may be fewer than ranks, along another one where the ranks divide it alone."""
    if EXPERT not in layout.axes:
        return layout.split("fsdp", 0, mesh.degree("fsdp"))
    degree, cut = mesh.degree("expert_data"), {split.dim for split in layout.splits}
    own = layout.shape[0] // mesh.degree(EXPERT)
    fits = [dim for dim in range(1, len(layout.shape)) if dim not in cut and layout.shape[dim] % degree == 0]
    return layout.split("expert_data", 0 if own % degree == 0 or not fits else fits[0], degree)


def _shard_experts(
    experts: nn.Module, dims: Mapping[nn.Parameter, int], mesh: Mesh, policy: MixedPrecisionPolicy
) -> FSDPModule:
    """The unit of a module with matrices of experts, over the ranks that have the same experts."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    return fully_shard(
        experts,
        mesh=mesh.sub_mesh("expert_data"),
        reshard_after_forward=mesh.degrees.zero_stage == 3,
        mp_policy=policy,
        shard_placement_fn=lambda parameter: Shard(dims[parameter]),
    )


def _expert_dims(model: nn.Module, layouts: Mapping[str, Layout]) -> dict[nn.Module, dict[nn.Parameter, int]]:
    """The modules with matrices of experts, of which ranks have a part each, and the dims along which those are cut."""
    found: dict[nn.Module, dict[nn.Parameter, int]] = {}
    for name, parameter in model.named_parameters():
        if EXPERT in layouts[name].axes:
            members = found.setdefault(model.get_submodule(name.rpartition(".")[0]), {})
            members[parameter] = layouts[name].splits[-1].dim
    return found


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules of every outermost ModuleList that are on this rank."""
    lists = {f"{name}.": module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [each for name, each in lists.items() if sum(map(name.startswith, lists)) == 1]
    return [layer for layers in outer for layer in layers if layer is not None]
