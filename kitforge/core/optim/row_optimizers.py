"""Sparse optimizers of embedding tables: only rows with a gradient and their states are updated.

A row is one record, `[embedding | states | counters]`, which tiers and checkpoints move as a whole. This module knows
no ids, ranks or files: it defines the layout, initial values and updates of records in a slab. The loops are kernels;
with any of them, the bits of a row depend neither on the other rows nor on their number.
"""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels, select_table
from kitforge.core.kernels.sparse_update.reference import (
    LAST_STEP,
    NUM_COUNTERS,
    UPDATES,
    VISITS,
    Powers,
    UpdateRule,
    integer_view,
)
from kitforge.core.kernels.tables.indexing import check_indices
from kitforge.foundation.config import INTERNAL, check, check_choice
from kitforge.foundation.errors import ModelError
from kitforge.foundation.host_values import host_list

SparseOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerConfig:
    """The optimizer of table rows. The learning rate is an argument of each step."""

    # adagrad: elementwise. rowwise_adagrad: one sum per row, of the mean square of its gradient.
    # adam: dense Adam, which also updates rows without a gradient; here just before they are read again.
    # lazy_adam: a row without a gradient keeps its values, moments and step count.
    name: SparseOptimizerName = "adagrad"
    learning_rate: float | None = None  # the peak; None: that of the dense parameters
    betas: tuple[float, ...] = (0.9, 0.999)  # both adams: decay rates of the first and second moment
    eps: float = 1e-8  # adagrads and adams: added to the root
    initial_sum: float = 0.0  # adagrads and ftrl: initial sum of squares
    l1: float = 0.0  # ftrl: L1 strength; an element with a smaller sum of gradients is zero
    l2: float = 0.0  # ftrl: L2 strength; doubled in the formula, as in TensorFlow
    beta: float = field(default=0.0, metadata=INTERNAL)  # ftrl: added to the root in the learning rate of an element
    # All but ftrl and adam: weight decay added to the gradient, only of rows that have one.
    touched_weight_decay: float = field(default=0.0, metadata=INTERNAL)

    def __post_init__(self) -> None:
        check_choice("sparse_optimizer.name", self.name, SparseOptimizerName)
        is_pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(is_pair, "sparse_optimizer.betas", list(self.betas), "two numbers from 0 to below 1")
        rate = self.learning_rate
        check(rate is None or 0 < rate < math.inf, "sparse_optimizer.learning_rate", rate, "a number above 0")
        check(0 < self.eps < math.inf, "sparse_optimizer.eps", self.eps, "a number above 0")
        for name in ("initial_sum", "l1", "l2", "beta", "touched_weight_decay"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"sparse_optimizer.{name}", value, "0 or more")
        fix = "use l2 of ftrl" if self.name == "ftrl" else "choose lazy_adam, or leave it at 0"
        is_possible = self.touched_weight_decay == 0 or self.name not in ("ftrl", "adam")
        check(
            is_possible, "sparse_optimizer.touched_weight_decay", self.touched_weight_decay, f"0 for {self.name}", fix
        )


@runtime_checkable
class SparseModule(Protocol):
    """A module with rows that are not parameters. A step reads its gradient norm, then updates rows or skips."""

    @property
    def learning_rate(self) -> float | None:
        """The peak of its learning rate; None: that of the dense parameters."""

    def squared_norm(self) -> Tensor:
        """The squared norm of this rank's gradients, 0-dim float64."""

    def scale_gradients_(self, factor: float) -> None:
        """Multiply all gradients."""

    def step(self, rate: float) -> None:
        """Update the rows that have a gradient, at that learning rate, and drop the gradients."""

    def clear_gradients(self) -> None:
        """Drop all gradients, as in a skipped step."""


class RowLayout:
    """The columns of a record: the embedding, states by name, three integer counters.

    `last_step` is the step that the record is up to date with, `updates` counts the steps with a gradient, `visits`
    belongs to the owner of the table.
    """

    def __init__(self, dim: int, optimizer: SparseOptimizerName) -> None:
        self.dim = dim
        self.states: dict[str, slice] = {}
        column = dim
        for name, width in _state_widths(dim, optimizer).items():
            self.states[name] = slice(column, column + width)
            column += width
        self.width = column + NUM_COUNTERS
        self.last_step, self.updates, self.visits = (self.width + each for each in (LAST_STEP, UPDATES, VISITS))
        # The state that is an integer.
        self.moments_step = self.states["moments_step"].start if optimizer == "adam" else None

    @staticmethod
    def as_integers(records: Tensor) -> Tensor:
        """The memory of records [..., width] as integers of the same size."""
        return integer_view(records)


def _state_widths(dim: int, optimizer: SparseOptimizerName) -> dict[str, int]:
    match optimizer:
        case "sgd":
            return {}
        case "adagrad":
            return {"sum": dim}
        case "rowwise_adagrad":
            return {"sum": 1}
        case "adam":
            return {"exp_avg": dim, "exp_avg_sq": dim, "moments_step": 1}
        case "lazy_adam":
            return {"exp_avg": dim, "exp_avg_sq": dim}
        case "ftrl":
            return {"sum": dim, "linear": dim}


class RowOptimizer:
    """The optimizer of table rows: layout, initial states and updates of records."""

    def __init__(self, config: SparseOptimizerConfig, kernels: TableKernels | None = None) -> None:
        self.config = config
        self._kernels = kernels
        self._rule = UpdateRule(
            name=config.name,
            powers=Powers(config.betas),
            decay=config.touched_weight_decay,
            eps=config.eps,
            l1=config.l1,
            l2=config.l2,
            beta=config.beta,
        )

    def layout(self, dim: int) -> RowLayout:
        """The layout of a record of a row of that dim."""
        return RowLayout(dim, self.config.name)

    def init_states_(self, records: Tensor, layout: RowLayout) -> None:
        """Set all columns of `records` [n, width] but the embedding to their initial values."""
        records[:, layout.dim :] = 0
        if "sum" in layout.states:
            records[:, layout.states["sum"]] = self.config.initial_sum

    @property
    def moves_untouched_rows(self) -> bool:
        """Whether rows need `catch_up` before they are read."""
        return self.config.name == "adam"

    @torch.no_grad()
    def update(self, slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int) -> None:
        """Update the rows at distinct `slots` [u] of `slab` [rows, width] in place, in step `step`, counted from 1.

        Raises ModelError, before any update, for a slot out of range, and with adam for a row that is not caught up to
        the previous step.
        """
        kernels = (self._kernels or select_table(slab.device.type)).sparse_update
        check_indices(slots, len(slab), "slots of the slab")
        if self.moves_untouched_rows:
            num_behind = host_list((integer_view(slab)[slots, LAST_STEP] != step - 1).sum(), 0)
            if num_behind:
                raise ModelError(
                    "rows are not at the previous step",
                    got=f"{num_behind} at another step",
                    expected="none",
                    fix="call catch_up before rows are read",
                )
        kernels.update(slab, slots, gradients, rate, step, self._rule)

    @torch.no_grad()
    def catch_up(self, slab: Tensor, slots: Tensor, step: int, rates: Tensor) -> None:
        """Apply dense Adam's updates of rows without a gradient, before they are read after `step` steps.

        `rates` [at least step] float64 are the learning rates from the first step on. Only adam needs it; other
        optimizers ignore it. The number of calls changes no bit.
        """
        if not self.moves_untouched_rows or not step:
            return
        if len(rates) < step:
            raise ModelError(
                "rows cannot be caught up", got=f"{len(rates)} learning rates", expected=f"at least {step}"
            )
        check_indices(slots, len(slab), "slots of the slab")
        dim = (slab.shape[1] - NUM_COUNTERS - 1) // 3
        kernels = (self._kernels or select_table(slab.device.type)).sparse_update
        kernels.catch_up(slab, slots, dim, step, rates, eps=self.config.eps, powers=self._rule.powers)


def build_row_optimizer(config: SparseOptimizerConfig, kernels: TableKernels | None = None) -> RowOptimizer:
    """The optimizer of `config`, by default with the fastest installed kernels."""
    return RowOptimizer(config, kernels)
