"""Optimizers over rows of tables: only a row that has a gradient moves, and its state with it.

It knows no ids, ranks or files: rows, states and gradients are handed in gathered, in one order. Each operation is
rounded by itself, never fused, and no power is taken of a vector (torch's depends on the place within it), so that the
bits of a row depend neither on the rows beside it nor on the device.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseOptimizerConfig:
    """How rows of tables move. The learning rate is handed in at each step."""

    # adagrad: element by element. adam: lazy, a row that is not touched keeps its moments and its count of steps.
    name: Literal["sgd", "adagrad", "adam"] = "adagrad"
    betas: tuple[float, ...] = (0.9, 0.999)  # adam: decay of the mean and of the mean square of gradients
    eps: float = 1e-8  # adagrad, adam: added to the root
    initial_sum: float = 0.0  # adagrad: where the sum of squares starts

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range."""
        is_pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(is_pair, "sparse_optimizer.betas", list(self.betas), "two numbers from 0 to below 1")
        check(0 < self.eps < math.inf, "sparse_optimizer.eps", self.eps, "a number above 0")
        check(0 <= self.initial_sum < math.inf, "sparse_optimizer.initial_sum", self.initial_sum, "0 or more")


@runtime_checkable
class SparseModule(Protocol):
    """A module with rows that are no parameters: a step asks it for its part of the norm, then moves or forgets."""

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


class RowOptimizer(ABC):
    """A rule by which rows [n, dim] move; a state is [n, dim] or [n]."""

    @abstractmethod
    def states(
        self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """By name, the states that rows start from."""

    @abstractmethod
    def update(self, rows: Tensor, states: Mapping[str, Tensor], gradients: Tensor, rate: float) -> None:
        """Move `rows` and their `states` in place by one step at the learning rate `rate`. Every row comes once."""


def build_row_optimizer(config: SparseOptimizerConfig) -> RowOptimizer:
    """The rule that `config` names."""
    match config.name:
        case "sgd":
            return Sgd()
        case "adagrad":
            return Adagrad(config)
        case "adam":
            return LazyAdam(config)


@final
class Sgd(RowOptimizer):
    """row = row - rate * gradient. It has no state."""

    def states(
        self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """See `RowOptimizer`."""
        return {}

    @torch.no_grad()
    def update(self, rows: Tensor, states: Mapping[str, Tensor], gradients: Tensor, rate: float) -> None:
        """See `RowOptimizer`."""
        rows.sub_(gradients * rate)


@final
class Adagrad(RowOptimizer):
    """sum = sum + gradient^2; row = row - rate * gradient / (sqrt(sum) + eps). Duchi, Hazan and Singer, 2011."""

    def __init__(self, config: SparseOptimizerConfig) -> None:
        self._eps = config.eps
        self._initial_sum = config.initial_sum

    def states(
        self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """`sum` [n, dim]."""
        return {"sum": torch.full((num_rows, dim), self._initial_sum, dtype=dtype, device=device)}

    @torch.no_grad()
    def update(self, rows: Tensor, states: Mapping[str, Tensor], gradients: Tensor, rate: float) -> None:
        """See `RowOptimizer`."""
        states["sum"].add_(gradients * gradients)
        rows.sub_((gradients * rate).div_(states["sum"].sqrt().add_(self._eps)))


@final
class LazyAdam(RowOptimizer):
    """Adam (Kingma and Ba, 2015) of each row by itself: t counts the steps in which the row had a gradient.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; row = row - rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps).
    Where every row is touched in every step it is Adam itself; elsewhere Adam would move untouched rows too.
    """

    def __init__(self, config: SparseOptimizerConfig) -> None:
        self._mean_beta, self._square_beta = config.betas
        self._eps = config.eps

    def states(
        self, num_rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> dict[str, Tensor]:
        """`exp_avg` and `exp_avg_sq` [n, dim], `step` int64 [n]."""
        return {
            "exp_avg": torch.zeros(num_rows, dim, dtype=dtype, device=device),
            "exp_avg_sq": torch.zeros(num_rows, dim, dtype=dtype, device=device),
            "step": torch.zeros(num_rows, dtype=torch.int64, device=device),
        }

    @torch.no_grad()
    def update(self, rows: Tensor, states: Mapping[str, Tensor], gradients: Tensor, rate: float) -> None:
        """See `RowOptimizer`."""
        mean, square = states["exp_avg"], states["exp_avg_sq"]
        counts, places = torch.unique(states["step"].add_(1), return_inverse=True)
        mean.mul_(self._mean_beta).add_(gradients * (1.0 - self._mean_beta))
        square.mul_(self._square_beta).add_((gradients * gradients).mul_(1.0 - self._square_beta))
        mean_bias = _bias(counts, self._mean_beta, rows)[places]
        square_bias = _bias(counts, self._square_beta, rows)[places]
        rows.sub_((mean / mean_bias).mul_(rate).div_((square / square_bias).sqrt_().add_(self._eps)))


def _bias(counts: Tensor, beta: float, like: Tensor) -> Tensor:
    """1 - beta^t [n, 1] of every count t, by Python's power."""
    values = [1.0 - beta**count for count in counts.tolist()]
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)
