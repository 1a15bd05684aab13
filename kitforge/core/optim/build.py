"""One optimizer for a whole model: parameters in groups, states by name. It knows no schedule, clipping or file."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.optim.muon import Matrices, Muon
from kitforge.foundation.config import check
from kitforge.foundation.errors import CheckpointError, ConfigError, ModelError

# Names in one line of an error; the rest is counted.
LISTED = 8
Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer of parameters and its hyperparameters."""

    # adamw: decoupled weight decay. muon: Muon for 2-D weights, AdamW for experts and others. sgd: L2 in the gradient.
    name: Literal["adamw", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-4  # the peak; the schedule scales it
    weight_decay: float = 0.1  # for `decay_groups`; each group then has its own
    betas: tuple[float, ...] = (0.9, 0.95)  # AdamW: decay rates of the first and second moment
    eps: float = 1e-8  # AdamW: added to the root of the second moment
    momentum: float = 0.95  # Muon and SGD

    def __post_init__(self) -> None:
        for name, value in (("learning_rate", self.learning_rate), ("eps", self.eps)):
            check(0 < value < math.inf, f"optimizer.{name}", value, "a number above 0")
        check(0 <= self.weight_decay < math.inf, "optimizer.weight_decay", self.weight_decay, "0 or more")
        check(0 <= self.momentum < 1, "optimizer.momentum", self.momentum, "from 0 to below 1")
        is_pair = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        check(is_pair, "optimizer.betas", list(self.betas), "two numbers from 0 to below 1, for example [0.9,0.95]")


def build_optimizer(
    groups: Sequence[ParameterGroup], config: OptimizerConfig, full_matrices: Matrices | None = None
) -> Optimizer:
    """The optimizer of `config` over `groups`; `full_matrices` where their parameters are sharded.

    A group without parameters has them on other ranks, which have layers that this rank does not have. Raises
    ModelError if no rank has a trainable parameter or a name occurs twice, ConfigError for Muon without a matrix.
    """
    names = [name for group in groups for name in group.names]
    if not groups:
        raise ModelError("no parameter is trainable", fix="leave at least one parameter with requires_grad=True")
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ModelError("a parameter's name occurs twice in the groups", got=_name_list(twice))
    matrices = [group for group in groups if group.matrix] if config.name == "muon" else []
    if config.name == "muon" and not matrices:
        raise ConfigError("Muon has no parameter: there is no hidden 2-D weight", fix="optimizer.name=adamw")
    others = [group for group in groups if group not in matrices and group.names]
    matrices = [group for group in matrices if group.names]
    optimizers: list[torch.optim.Optimizer] = []
    rate, momentum = config.learning_rate, config.momentum
    if matrices:
        optimizers.append(
            _without_compile(Muon)(_as_torch(matrices), lr=rate, momentum=momentum, matrices=full_matrices)
        )

    if others and config.name == "sgd":
        optimizers.append(_without_compile(torch.optim.SGD)(_as_torch(others), lr=rate, momentum=momentum, fused=True))
    elif others:
        betas = (config.betas[0], config.betas[1])
        optimizers.append(
            _without_compile(torch.optim.AdamW)(_as_torch(others), lr=rate, betas=betas, eps=config.eps, fused=True)
        )
    return Optimizer(groups, optimizers)


class Optimizer:
    """One or two torch optimizers behind one interface. Made by `build_optimizer`.

    State tensors are named "<parameter name>.<state key>": exp_avg, exp_avg_sq and step (a float32 of its own for
    each parameter) for AdamW, momentum for Muon, momentum_buffer for SGD.
    """

    def __init__(self, groups: Sequence[ParameterGroup], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._named = [pair for group in groups for pair in zip(group.names, group.parameters, strict=True)]
        self._optimizers = tuple(optimizers)
        self._rates = [(group, float(group["lr"])) for inner in optimizers for group in inner.param_groups]
        self._owners = {
            parameter: inner for inner in optimizers for group in inner.param_groups for parameter in group["params"]
        }

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, in the order of their groups."""
        return (parameter for _, parameter in self._named)

    def step(self, scale: float) -> None:
        """Update every parameter that has a gradient, at its group's learning rate times `scale`.

        Call `init_state` before the first: torch's fused SGD fails where the first gradients do not all come at once.
        """
        for group, rate in self._rates:
            group["lr"] = rate * scale
        for inner in self._optimizers:
            inner.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for _, parameter in self._named:
            parameter.grad = None

    def init_state(self) -> None:
        """Create every state that the first step would create, with its initial values.

        torch creates states lazily. Its alternative, a step with zero gradients at learning rate 0, would count as a
        step; here states are set directly, so that parameters and counters do not change.
        """
        for _, parameter in self._named:
            owner = self._owners[parameter]
            if owner.state[parameter]:
                continue
            if isinstance(owner, torch.optim.AdamW):
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
                owner.state[parameter] = {"step": step, **moments}
            elif isinstance(owner, Muon):
                owner.state[parameter] = {"momentum": torch.zeros_like(parameter)}
            elif owner.defaults["momentum"] > 0:
                owner.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and state tensor (not a copy) of every state, in the order of the groups, then of the keys."""
        self.init_state()
        for name, parameter in self._named:
            for key, tensor in sorted(self._owners[parameter].state[parameter].items()):
                yield f"{name}.{key}", tensor

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy `tensors` into the state.

        Raises CheckpointError, before any change, for a missing or unexpected name, or for another shape or dtype.
        """
        load_states(dict(self.tensors()), tensors)


def load_states(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into states; raises as `Optimizer.load`."""
    _check_fit(own, tensors)
    for name, tensor in own.items():
        tensor.copy_(tensors[name])


def _as_torch(groups: Sequence[ParameterGroup]) -> list[dict[str, Any]]:
    return [
        {"params": list(group.parameters), "weight_decay": group.weight_decay}
        | ({} if group.learning_rate is None else {"lr": group.learning_rate})
        for group in groups
    ]


def _without_compile(kind: type[Kind]) -> type[Kind]:
    """The optimizer class without torch's compiler guards, since nothing compiles it here.

    Their first use imports the compiler: seconds of a start, more than all other imports together.
    """
    add, step = inspect.unwrap(kind.add_param_group), inspect.unwrap(kind.step)
    return type(kind.__name__, (kind,), {"add_param_group": add, "step": torch.no_grad()(step)})


def _check_fit(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    misshapen = [
        f"{name} ({_describe(given[name])}, not {_describe(tensor)})"
        for name, tensor in own.items()
        if name in given and _describe(given[name]) != _describe(tensor)
    ]
    problems = {
        "missing": sorted(own.keys() - given.keys()),
        "unexpected": sorted(given.keys() - own.keys()),
        "misshapen": misshapen,
    }
    if any(problems.values()):
        raise CheckpointError(
            "the optimizer's state does not fit",
            got="; ".join(
                f"{len(names)} {problem}: {_name_list(names)}" for problem, names in problems.items() if names
            ),
            expected=f"the {len(own)} tensors of this optimizer over this model",
            fix="resume with the optimizer and the model that were saved, or start from the weights alone",
        )


def _describe(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _name_list(names: Sequence[str]) -> str:
    shown, left = ", ".join(names[:LISTED]), len(names) - LISTED
    return f"{shown} and {left} more" if left > 0 else shown
