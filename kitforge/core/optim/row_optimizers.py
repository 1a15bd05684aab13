"""Optimizers over rows of tables: only a row that has a gradient moves, and its state with it.

A row is one record, `[embedding | states | whole numbers]`, and travels whole. This module knows no ids, ranks or
files: it is handed a slab of records and says how wide they are, how they start and how they move. The loops
themselves are kernels; whichever runs, the bits of a row depend neither on the rows beside it nor on their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TableKernels, select_table
from kitforge.core.kernels.indexing import check_indices
from kitforge.core.kernels.sparse_update.reference import (
    LAST_STEP,
    NUM_COUNTERS,
    UPDATES,
    VISITS,
    Powers,
    SparseUpdate,
    integer_view,
)
from kitforge.foundation.config import check, check_name
from kitforge.foundation.errors import ModelError

SparseOptimizerName = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerConfig:
    """How rows of tables move. The learning rate is handed in at each step."""

    # adagrad: element by element. rowwise_adagrad: one sum a row, of the mean square of its gradient.
    # adam: what dense Adam does, where rows without a gradient move too; they do so just before they are read again.
    # lazy_adam: a row that is not touched rests, with its moments and its count of steps.
    name: SparseOptimizerName = "adagrad"
    learning_rate: float | None = None  # the peak; None: that of the parameters beside the table
    betas: tuple[float, ...] = (0.9, 0.999)  # both adams: decay of the mean and of the mean square of gradients
    eps: float = 1e-8  # adagrads and adams: added to the root
    initial_sum: float = 0.0  # adagrads and ftrl: where the sum of squares starts
    l1: float = 0.0  # ftrl: what a row's number must exceed, as a sum of gradients, not to be zero
    l2: float = 0.0  # ftrl: pulls to zero; doubled in the formula, as TensorFlow has it
    beta: float = 0.0  # ftrl: added to the root in the rate of an element
    # All but ftrl and adam: that multiple of the row is added to its gradient, only where it has one.
    touched_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        check_name("sparse_optimizer.name", self.name, SparseOptimizerName)
        is_pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(is_pair, "sparse_optimizer.betas", list(self.betas), "two numbers from 0 to below 1")
        rate = self.learning_rate
        check(rate is None or 0 < rate < math.inf, "sparse_optimizer.learning_rate", rate, "a number above 0")
        check(0 < self.eps < math.inf, "sparse_optimizer.eps", self.eps, "a number above 0")
        for name in ("initial_sum", "l1", "l2", "beta", "touched_weight_decay"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"sparse_optimizer.{name}", value, "0 or more")
        fix = "ftrl has l2 of its own" if self.name == "ftrl" else "choose lazy_adam, or leave it at 0"
        is_possible = self.touched_weight_decay == 0 or self.name not in ("ftrl", "adam")
        check(
            is_possible, "sparse_optimizer.touched_weight_decay", self.touched_weight_decay, f"0 for {self.name}", fix
        )


@runtime_checkable
class SparseModule(Protocol):
    """A module with rows that are no parameters: a step asks it for its part of the norm, then moves or forgets."""

    @property
    def learning_rate(self) -> float | None:
        """The peak of its learning rate; None: that of the parameters beside it."""
        ...

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared norm of all gradients, 0-dim float64."""
        ...

    def scale_gradients_(self, factor: float) -> None:
        """Multiply all gradients."""
        ...

    def step(self, rate: float) -> None:
        """Move the rows that have a gradient, at that learning rate, and let go of the gradients."""
        ...

    def clear_gradients(self) -> None:
        """Let go of all gradients, as a skipped step does."""
        ...


@final
class RowLayout:
    """Which columns of a record hold what: the embedding, then states by name, then three whole numbers.

    `last_step` is the step up to which the record is told, `updates` counts the steps in which the row had a gradient,
    `visits` belongs to whoever keeps the table.
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
        # The state that is a whole number, beside the counters.
        self.moments_step = self.states["moments_step"].start if optimizer == "adam" else None

    @staticmethod
    def as_integers(records: Tensor) -> Tensor:
        """The memory of records [..., width], read as whole numbers of the same size."""
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


@final
class RowOptimizer:
    """A rule by which rows move."""

    def __init__(self, config: SparseOptimizerConfig, kernels: TableKernels | None = None) -> None:
        self.config = config
        self._kernels = kernels
        self._powers = Powers(config.betas)

    def layout(self, dim: int) -> RowLayout:
        """How a record of a row of that many numbers is laid out."""
        return RowLayout(dim, self.config.name)

    def new_records(self, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """New records [n, width] around initial rows [n, dim]."""
        layout = self.layout(rows.shape[1])
        records = torch.zeros(len(rows), layout.width, dtype=dtype or rows.dtype, device=rows.device)
        records[:, : layout.dim] = rows
        self.init_states_(records, layout)
        return records

    def init_states_(self, records: Tensor, layout: RowLayout) -> None:
        """Set all of `records` [n, width] but the embedding to what a row starts from."""
        records[:, layout.dim :] = 0
        if "sum" in layout.states:
            records[:, layout.states["sum"]] = self.config.initial_sum

    @property
    def moves_untouched_rows(self) -> bool:
        """Whether rows have to be caught up before they are read."""
        return self.config.name == "adam"

    @torch.no_grad()
    def update(self, slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int) -> None:
        """Move the rows at distinct `slots` [u] of `slab` [rows, width] in place, in step `step`, the first being 1.

        Raises ModelError, before any row moves, for a slot that is none, and with adam for a row that has not been
        caught up to the step before.
        """
        config, kernels, decay = self.config, self._rules(slab), self.config.touched_weight_decay
        check_indices(slots, len(slab), "slots of the slab")
        self._require_caught_up(slab, slots, step - 1)
        move = (slab, slots, gradients, rate, step)
        match config.name:
            case "sgd":
                kernels.sgd(*move, decay=decay)
            case "adagrad":
                kernels.adagrad(*move, decay=decay, eps=config.eps)
            case "rowwise_adagrad":
                kernels.rowwise_adagrad(*move, decay=decay, eps=config.eps)
            case "lazy_adam":
                kernels.lazy_adam(*move, decay=decay, eps=config.eps, powers=self._powers)
            case "adam":
                kernels.adam(*move, eps=config.eps, powers=self._powers)
            case "ftrl":
                kernels.ftrl(*move, l1=config.l1, l2=config.l2, beta=config.beta)

    @torch.no_grad()
    def catch_up(self, slab: Tensor, slots: Tensor, step: int, rates: Tensor) -> None:
        """Before rows are read after `step` steps: let those that rested move as dense Adam would have moved them.

        `rates` [at least step] float64 are the learning rates of the steps from the first on. With any other optimizer
        than adam it does nothing. It need not be called in every step, and how often does not change a bit.
        """
        if not self.moves_untouched_rows or not step:
            return
        if len(rates) < step:
            raise ModelError(
                "rows cannot be caught up", got=f"{len(rates)} learning rates", expected=f"at least {step}"
            )
        check_indices(slots, len(slab), "slots of the slab")
        dim = (slab.shape[1] - NUM_COUNTERS - 1) // 3
        self._rules(slab).catch_up(slab, slots, dim, step, rates, eps=self.config.eps, powers=self._powers)

    def _require_caught_up(self, slab: Tensor, slots: Tensor, step: int) -> None:
        if not self.moves_untouched_rows:
            return
        num_behind = int((integer_view(slab)[slots, LAST_STEP] != step).sum())
        if num_behind:
            fix = "call catch_up before rows are read"
            raise ModelError(
                "rows are not where the step begins", got=f"{num_behind} elsewhere", expected="none", fix=fix
            )

    def _rules(self, slab: Tensor) -> SparseUpdate:
        return (self._kernels or select_table(slab.device.type)).sparse_update


def build_row_optimizer(config: SparseOptimizerConfig, kernels: TableKernels | None = None) -> RowOptimizer:
    """The rule that `config` names, on the fastest kernels there are."""
    return RowOptimizer(config, kernels)
