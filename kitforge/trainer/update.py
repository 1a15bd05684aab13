"""What a step does with gradients that are complete: agree whether they are finite, clip, move the weights or skip."""

from __future__ import annotations

import math

import torch

from kitforge.trainer.state import TrainingState


def update(
    state: TrainingState, rate: float, learning_rate: float, largest_norm: float, *, is_empty: bool = False
) -> float:
    """Move parameters and table rows at `rate` times their learning rates, and return the norm of all gradients.

    A norm above `largest_norm` (0: any) is scaled down to it. One that is not finite, which all ranks see alike, leaves
    everything as it was, and so does a step that `is_empty`, in which nothing was counted: there is no gradient to
    follow, and moments and weight decay would move the weights all the same. The gradients are gone afterwards.
    """
    tables = state.parallel.tables
    if state.scaler.scale != 1.0:
        _multiply(state, 1.0 / state.scaler.scale)
    norm = float(state.parallel.norm())
    is_finite = math.isfinite(norm)
    if is_finite and not is_empty:
        if 0 < largest_norm < norm:
            _multiply(state, largest_norm / norm)
        state.optimizer.step(rate)
        for table in tables:
            table.step(rate * (learning_rate if table.learning_rate is None else table.learning_rate))
        state.updates += 1
        state.consecutive_skips = 0
    else:
        for table in tables:
            table.clear_gradients()
        state.skipped += 1
        # Steps without anything to learn from are no sign of divergence.
        state.consecutive_skips += not is_finite
    state.optimizer.zero_grad()
    state.scaler.update(is_finite)
    return norm


def _multiply(state: TrainingState, factor: float) -> None:
    gradients = [parameter.grad for parameter in state.optimizer.parameters() if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
    for table in state.parallel.tables:
        table.scale_gradients_(factor)
