"""The optimizer step: check that gradients are finite, clip by norm, update parameters and table rows, or skip."""

import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from kitforge.foundation.host_values import host_list
from kitforge.trainer.state import TrainingState


def optimizer_step(
    state: TrainingState,
    lr_scale: float,
    learning_rate: float,
    max_grad_norm: float,
    *,
    sums: Mapping[str, Tensor] = MappingProxyType({}),
    is_skipped: bool = False,
) -> tuple[dict[str, float], dict[str, float]]:
    """Update parameters and table rows with `lr_scale` times their learning rates. Returns `grad_norm`, the norm of all
    gradients, with `grad_norm/PART` for each of several parts, and the values of `sums`: all of them come from the
    device in one transfer, the only one of a step.

    Gradients are clipped to `max_grad_norm` (0: no clipping), each part to its own bound if it has one. With a
    non-finite norm, which all ranks see alike, or with `is_skipped`, nothing changes: neither weights nor moments.
    Gradients are cleared in both cases.
    """
    tables = state.parallel.tables
    if state.scaler.scale != 1.0:
        state.parallel.scale_gradients(1.0 / state.scaler.scale)
    parts = _parts(state)
    norm_tensors = {part: state.parallel.grad_norm(names) for part, (names, _) in parts.items()}
    values = _to_floats([*norm_tensors.values(), *sums.values()])
    norms = dict(zip(norm_tensors, values, strict=False))
    norm = math.hypot(*norms.values())
    is_finite = math.isfinite(norm)
    if is_finite and not is_skipped:
        for part, (names, own) in parts.items():
            bound = max_grad_norm if own is None else own
            if 0 < bound < norms[part]:
                state.parallel.scale_gradients(bound / norms[part], names)
        state.optimizer.step(lr_scale)
        for table in tables:
            table.step(lr_scale * (learning_rate if table.learning_rate is None else table.learning_rate))
        state.updates += 1
        state.consecutive_skips = 0
    else:
        for table in tables:
            table.clear_gradients()
        state.skipped += 1
        # Steps that the task skips are no sign of divergence.
        state.consecutive_skips += not is_finite
    state.optimizer.zero_grad()
    state.scaler.update(is_finite)
    by_part = {f"grad_norm/{part}": each for part, each in norms.items()} if len(parts) > 1 else {}
    return {"grad_norm": norm} | by_part, dict(zip(sums, values[len(norms) :], strict=True))


def _to_floats(scalars: Sequence[Tensor]) -> list[float]:
    """The values of tensors [], those of one device in one transfer."""
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(scalars):
        by_device.setdefault(each.device, []).append(index)
    values = [0.0] * len(scalars)
    for indices in by_device.values():
        stacked = torch.stack([scalars[index].double() for index in indices])
        # Of a step that is only traced the norm is finite, and more than any bound: its gradients are clipped.
        read = host_list(stacked, [1e30] * len(indices))
        for index, value in zip(indices, read, strict=True):
            values[index] = value
    return values


def drop_gradients(state: TrainingState, parts: Collection[str]) -> None:
    """Drop the reduced gradients of these parts, so that `optimizer_step` does not update them."""
    for group in state.groups:
        if group.part in parts:
            state.parallel.drop_gradients(group.names)


def _parts(state: TrainingState) -> dict[str, tuple[set[str] | None, float | None]]:
    """Parameter names and maximal gradient norm of each part; of one part alone no names: all gradients, also those of
    table rows."""
    found: dict[str, tuple[set[str], float | None]] = {}
    for group in state.groups:
        names, _ = found.setdefault(group.part, (set(), group.max_grad_norm))
        names.update(group.names)
    if len(found) > 1:
        return {**found}
    return {part: (None, own) for part, (_, own) in found.items()} or {"": (None, None)}
