"""What a step does with gradients that are complete: agree whether they are finite, clip, move the weights or skip."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from kitforge.trainer.state import TrainingState


def optimizer_step(
    state: TrainingState, lr_scale: float, learning_rate: float, max_grad_norm: float, *, is_skipped: bool = False
) -> dict[str, float]:
    """Move parameters and table rows at `rate` times their learning rates, and return `grad_norm`, the norm of all
    gradients, and `grad_norm/PART` for each of several parts.

    The norm of each part, or of all where there is one, is scaled down to `largest_norm` (0: any) or to the part's own
    bound. A norm that is not finite, which all ranks see alike, leaves everything as it was, and so does a step that
    `is_skipped`, for example because nothing was counted: moments and weight decay would move the weights otherwise.
    The gradients are gone afterwards.
    """
    tables = state.parallel.tables
    if state.scaler.scale != 1.0:
        _scale_gradients(state, 1.0 / state.scaler.scale)
    parts = _parts(state)
    norms = {part: float(state.parallel.grad_norm(names)) for part, (names, _) in parts.items()}
    norm = math.hypot(*norms.values()) if parts else float(state.parallel.grad_norm())
    is_finite = math.isfinite(norm)
    if is_finite and not is_skipped:
        if not parts and 0 < max_grad_norm < norm:
            _scale_gradients(state, max_grad_norm / norm)
        for part, (names, own) in parts.items():
            bound = max_grad_norm if own is None else own
            if 0 < bound < norms[part]:
                _scale_gradients(state, bound / norms[part], names)
        state.optimizer.step(lr_scale)
        for table in tables:
            table.step(lr_scale * (learning_rate if table.learning_rate is None else table.learning_rate))
        state.updates += 1
        state.consecutive_skips = 0
    else:
        for table in tables:
            table.clear_gradients()
        state.skipped += 1
        # Steps without anything to learn from, or that a task leaves out, are no sign of divergence.
        state.consecutive_skips += not is_finite
    state.optimizer.zero_grad()
    state.scaler.update(is_finite)
    return {"grad_norm": norm} | {f"grad_norm/{part}": each for part, each in norms.items()}


def drop_gradients(state: TrainingState, parts: Collection[str]) -> None:
    """Forget the gradients of these parts, once all ranks have summed them up, so that `update` leaves them alone."""
    for group in state.groups:
        if group.part in parts:
            for parameter in group.parameters:
                parameter.grad = None


def _parts(state: TrainingState) -> dict[str, tuple[set[str], float | None]]:
    """The names of each part's parameters and the bound of its norm; nothing where all are of one part."""
    found: dict[str, tuple[set[str], float | None]] = {}
    for group in state.groups:
        names, _ = found.setdefault(group.part, (set(), group.max_grad_norm))
        names.update(group.names)
    return found if len(found) > 1 else {}


def _scale_gradients(state: TrainingState, factor: float, names: Collection[str] | None = None) -> None:
    """All gradients, or those of the parameters of these names."""
    chosen = state.parallel.parameters() if names is not None else {}
    parameters = state.optimizer.parameters() if names is None else (chosen[name] for name in names)
    torch._foreach_mul_([each.grad for each in parameters if each.grad is not None], factor)
    for table in state.parallel.tables if names is None else ():
        table.scale_gradients_(factor)
