"""Muon: momentum with orthogonalized updates, for hidden 2-D weights.

Method and coefficients: Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon/. Scale of the update, so that AdamW's learning rate and weight decay hold
for both: Liu et al. (Moonshot AI), "Muon is Scalable for LLM Training" (arXiv 2502.16982), equation 4.
Shapes here are [rows, cols] for a weight, [num, rows, cols] for a stack, where rows <= cols after transposition.
"""

import math
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from kitforge.foundation.device import has_native_matmul
from kitforge.foundation.errors import ModelError

# Coefficients of the quintic a x + b x^3 + c x^5, chosen for the steepest slope at 0. Five steps of it bring singular
# values into about [0.7, 1.2], not to 1, which training does not notice.
A, B, C = 3.4445, -4.7750, 2.0315
NUM_STEPS = 5
# Elements in one stack of equal shapes: enough to fill the machine, few enough to keep temporaries small.
STACK_ELEMENTS = 2**22


class Matrices(Protocol):
    """Gathers and shards matrices: Muon's update needs full matrices of sharded weights."""

    def full_shape(self, shard: Tensor) -> tuple[int, ...]:
        """The full shape of the matrix of a shard."""

    def full_tensor(self, value: Tensor, shard: Tensor) -> Tensor:
        """The full matrix, all-gathered from the `value` of every rank's shard."""

    def shard_of(self, matrix: Tensor, shard: Tensor) -> Tensor:
        """This rank's shard of a full matrix."""


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay; its only state is "momentum", like the parameter.

    Each step, with gradient g of a weight of `rows` x `cols`:
    momentum = momentum + (1 - mu) (g - momentum); update = orthogonal(g + mu (momentum - g));
    weight = weight (1 - lr * weight_decay) - lr * 0.2 sqrt(max(rows, cols)) update.
    Raises ModelError for a parameter that is not 2-D.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        matrices: Matrices | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})
        self._matrices = matrices
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim != 2:
                    raise ModelError(
                        "Muon updates matrices only", got=f"a parameter {list(parameter.shape)}", expected="2 dims"
                    )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[int, int, torch.dtype, torch.device], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rows, cols = sorted(self._shape(parameter))
                    alike.setdefault((rows, cols, parameter.dtype, parameter.device), []).append(parameter)
            for (rows, cols, _, _), parameters in alike.items():
                size = max(STACK_ELEMENTS // max(rows * cols, 1), 1)
                for start in range(0, len(parameters), size):
                    self._move(parameters[start : start + size], group)

    def _move(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """One step of parameters of equal shapes up to transposition."""
        stack = torch.stack([self._update(parameter, group["momentum"]) for parameter in parameters])
        rate, decay = group["lr"], 1 - group["lr"] * group["weight_decay"]
        for parameter, update in zip(parameters, orthogonalize(stack), strict=True):
            shape = self._shape(parameter)
            standing = update.mT if shape[0] > shape[1] else update
            part = standing if self._matrices is None else self._matrices.shard_of(standing, parameter)
            parameter.mul_(decay).add_(part, alpha=-rate * 0.2 * math.sqrt(max(shape)))

    def _shape(self, parameter: Tensor) -> tuple[int, ...]:
        return tuple(parameter.shape) if self._matrices is None else self._matrices.full_shape(parameter)

    def _update(self, parameter: Tensor, mu: float) -> Tensor:
        """Update the momentum. Returns the update before orthogonalization, wide: transposed if it is tall."""
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        state["momentum"].lerp_(parameter.grad, 1 - mu)
        update = parameter.grad.lerp(state["momentum"], mu)
        matrix = update if self._matrices is None else self._matrices.full_tensor(update, parameter)
        return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonalize(stack: Tensor) -> Tensor:
    """Orthogonalize matrices [num, rows, cols], rows <= cols: singular values become about 1; zero stays zero.

    Newton-Schulz steps, in bf16 where the device has it natively, else in fp32; float64 stays itself.
    """
    dtype = stack.dtype
    if dtype != torch.float64:
        dtype = torch.bfloat16 if has_native_matmul(torch.bfloat16, stack.device.type) else torch.float32
    stack = stack.to(dtype)
    stack = stack / torch.linalg.matrix_norm(stack, keepdim=True).clamp_min(1e-7)
    # Below about 2/3 the smaller products win; bf16 rounds so coarsely that the Gram matrix would turn indefinite.
    if dtype != torch.bfloat16 and stack.shape[1] * 3 < stack.shape[2] * 2:
        return _newton_schulz_gram(stack)
    return _newton_schulz(stack)


def _newton_schulz(stack: Tensor) -> Tensor:
    """The steps X = a X + (b G + c G^2) X with G = X X^T."""
    for _ in range(NUM_STEPS):
        gram = torch.bmm(stack, stack.mT)
        stack = torch.baddbmm(stack, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), stack, beta=A)
    return stack


def _newton_schulz_gram(stack: Tensor) -> Tensor:
    """The same steps for wide matrices, on [rows, rows] alone.

    A step multiplies X by P = a I + b G + c G^2 from the left, and so G by P from both sides; P and G commute. So the
    product of all P is computed first, and X is multiplied once.
    """
    gram = torch.bmm(stack, stack.mT)
    factor = product = _polynomial(gram)
    for _ in range(NUM_STEPS - 1):
        gram = torch.bmm(torch.bmm(gram, factor), factor)
        factor = _polynomial(gram)
        product = torch.bmm(product, factor)
    return torch.bmm(product, stack)


def _polynomial(gram: Tensor) -> Tensor:
    polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
    polynomial.diagonal(dim1=-2, dim2=-1).add_(A)
    return polynomial
