"""Faults of the expert axis, planted for as long as a `with` lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kitforge.core.nn import moe
from kitforge.core.nn.context import Context
from kitforge.core.parallel import expert
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout
from tests.distributed.step import FAULTS, Case

PAIR = ParallelConfig(data=2, expert=2)
COPIES = ParallelConfig(data=4, expert=2)
WITH_TENSOR = ParallelConfig(data=2, expert=2, tensor=2)


class _Divided(torch.autograd.Function):
    """The identity, whose backward pass divides."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, parts: int) -> Tensor:
        ctx.parts = parts
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.parts, None


def _divided_by_the_ranks() -> Any:
    """Gradients of experts as means over the ranks that send them tokens."""
    original = moe.Experts.products

    def products(self: moe.Experts, rows: Tensor, ends: Tensor) -> Tensor:
        names = moe.EXPERT_MATRICES
        whole = {name: getattr(self, name) for name in names}
        divided = {name: _Divided.apply(each, 2) for name, each in whole.items()}  # type: ignore[no-untyped-call]
        with mock.patch.dict(self._parameters, divided):
            return original(self, rows, ends)

    return mock.patch.object(moe.Experts, "products", products)


def _summed_over_all_ranks() -> Any:
    """Gradients of experts as sums over all ranks, as of what every rank has."""
    return mock.patch.object(Grid, "sum_axis", lambda self, layout: "batch")


def _counted_once_each() -> Any:
    """A norm in which copies of experts count as often as they are held."""
    original = Grid.num_holders

    def num_holders(self: Grid, layout: Layout, rank: int) -> int:
        return 1 if "expert" in layout.axes else original(self, layout, rank)

    return mock.patch.object(Grid, "num_holders", num_holders)


def _back_in_the_order_of_arrival() -> Any:
    """Results of experts that are sent back in their order instead of that in which their rows came."""
    return mock.patch.object(expert, "_inverse", lambda order: _identity(len(order.tokens), order))


def _identity(size: int, order: Any) -> Any:
    places = torch.arange(size)
    return order._replace(positions=places.unsqueeze(1), tokens=places)


def _balanced_by_the_own_experts() -> Any:
    """A balance whose weight is that of the part of the experts on a rank."""
    original = moe.MoE._balanced

    def balanced(self: moe.MoE, output: Tensor, routing: Any, kept: Tensor, context: Context) -> Tensor:
        assert context.loss_weight is not None
        part = len(self.experts.up) / self.config.experts.num_experts
        return original(
            self, output, routing, kept, dataclasses.replace(context, loss_weight=context.loss_weight * part)
        )

    return mock.patch.object(moe.MoE, "_balanced", balanced)


def _no_gradient_through_the_exchange() -> Any:
    """Rows whose gradients do not find the way back to the tokens' ranks."""
    original = expert.collectives.all_to_all_autograd
    return mock.patch.object(
        expert.collectives, "all_to_all_autograd", lambda rows, *given: original(rows, *given).detach().requires_grad_()
    )


# Faults of the expert axis, each with a step that shows it.
EXPERT_FAULTS: dict[str, tuple[Case, Callable[[], Any]]] = {
    "a gradient divided by the ranks that send tokens": (Case(family="mixtral_4", degrees=PAIR), _divided_by_the_ranks),
    "a gradient summed over ranks with other experts": (Case(family="mixtral_4", degrees=PAIR), _summed_over_all_ranks),
    "a norm that counts copies of experts": (Case(family="mixtral_4", degrees=COPIES), _counted_once_each),
    "results in the order of arrival": (Case(family="qwen3_8", degrees=PAIR), _back_in_the_order_of_arrival),
    "a balance by the rank's own experts": (Case(family="mixtral_4", degrees=PAIR), _balanced_by_the_own_experts),
    "an exchange without a way back": (Case(family="mixtral_4", degrees=PAIR), _no_gradient_through_the_exchange),
    "a router's gradient that is not summed": (
        Case(family="mixtral_4", degrees=WITH_TENSOR),
        FAULTS["a router's gradient that is not summed"],
    ),
    "a balance that every tensor rank adds": (
        Case(family="mixtral_4", degrees=WITH_TENSOR),
        FAULTS["a balance that every tensor rank adds"],
    ),
    "a balance of each rank by itself": (
        Case(family="mixtral_4", degrees=PAIR),
        FAULTS["a balance of each rank by itself"],
    ),
    "copies of experts that do not sum": (Case(family="mixtral_4", degrees=COPIES), FAULTS["copies that do not sum"]),
}
