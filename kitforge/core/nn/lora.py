"""LoRA (Hu et al., 2021): several adapters by name on one network, of which one or none is active.

The base weights keep their names and never change, so without an active adapter it is the base network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.linear import Linear
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check
from kitforge.foundation.errors import ModelError, nearest

_ADAPTERS = "adapters"
# Methods of a linear layer that an adapter adds to.
_ADAPTED_METHODS = ("forward", "without_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Rank, scale and target modules of an adapter."""

    rank: int = 8
    alpha: float = 16.0  # the scale of the update is alpha / rank
    target_modules: tuple[str, ...] = ("query", "value")  # last names of the linear layers with an adapter

    def __post_init__(self) -> None:
        check(self.rank > 0, "lora.rank", self.rank, "a whole number of at least 1")
        check(self.alpha > 0, "lora.alpha", self.alpha, "a number above 0")
        check(len(self.target_modules) > 0, "lora.targets", self.target_modules, "at least one layer's name")

    @property
    def scale(self) -> float:
        """The scale of the low-rank update."""
        return self.alpha / self.rank


@final
class LowRank(nn.Module):
    """The update `scale * up @ down` of a matrix [out, in]; initially zero."""

    def __init__(self, weight: Tensor, config: LoraConfig) -> None:
        super().__init__()
        out_dim, in_dim = weight.shape
        self.scale = config.scale
        # Trained factors are in fp32, even if the matrix is in half precision.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.down = nn.Parameter(torch.empty(config.rank, in_dim, device=weight.device, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(out_dim, config.rank, device=weight.device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return functional.linear(functional.linear(input, self.down), self.up) * self.scale

    def delta(self) -> Tensor:
        """The update of the matrix [out, in]."""
        return self.up @ self.down * self.scale


@torch.no_grad()
def attach(network: nn.Module, name: str, config: LoraConfig, seed: int = 0) -> None:
    """Add an adapter of that name and activate it. Its first factor is a function of seed and names, its second is
    zero. The base weights are frozen. Raises ModelError if no layer has the name of a target module."""
    layers = [(path, each) for path, each in _linears(network) if path.split(".")[-1] in config.target_modules]
    found = {path.split(".")[-1] for path, _ in layers}
    for target in config.target_modules:
        if target not in found:
            known = {path.split(".")[-1] for path, _ in _linears(network)}
            raise ModelError(f"no linear layer is called {target!r}", fix=nearest(target, known))
    for own, parameter in network.named_parameters():
        if f".{_ADAPTERS}." not in own:
            parameter.requires_grad_(False)
    for path, layer in layers:
        if _ADAPTERS not in layer._modules:
            layer.add_module(_ADAPTERS, nn.ModuleDict())
            for way in _ADAPTED_METHODS:
                layer.__dict__[way] = _with_adapters(layer, getattr(layer, way))
        adapter = LowRank(layer.weight, config)
        noise = torch.randn(adapter.down.shape, generator=seeds.generator(seed, "lora", name, path))
        adapter.down.copy_(noise / layer.weight.shape[1] ** 0.5)
        _adapters_of(layer)[name] = adapter
        layer.__dict__["adapter"] = name


@contextmanager
def using(network: nn.Module, name: str | None) -> Iterator[None]:
    """Within the block the adapter of that name is active, or none; afterwards the previous one."""
    before = [(layer, layer.__dict__["adapter"]) for _, layer in _adapted(network)]
    if name is not None and not any(name in _adapters_of(layer) for layer, _ in before):
        known = {each for layer, _ in before for each in _adapters_of(layer)}
        raise ModelError(f"the network has no adapter {name!r}", fix=nearest(name, known) if known else None)
    try:
        for layer, _ in before:
            layer.__dict__["adapter"] = name
        yield
    finally:
        for layer, earlier in before:
            layer.__dict__["adapter"] = earlier


@torch.no_grad()
def merge(network: nn.Module, name: str) -> None:
    """Merge an adapter into the base weights and remove all adapters."""
    for _, layer in _adapted(network):
        if name in _adapters_of(layer):
            layer.weight.add_(_adapters_of(layer)[name].delta())
        del layer._modules[_ADAPTERS]
        for attribute in (*_ADAPTED_METHODS, "adapter"):
            del layer.__dict__[attribute]


def adapter_tensors(network: nn.Module, name: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors, down [rank, in] and up [out, rank], of every layer with that adapter, by the layer's name."""
    return {
        path: (_adapters_of(layer)[name].down, _adapters_of(layer)[name].up)
        for path, layer in _adapted(network)
        if name in _adapters_of(layer)
    }


def config_of(network: nn.Module) -> LoraConfig | None:
    """The configuration of the active adapter; None if none is active."""
    found = _active(network)
    if not found:
        return None
    rank, scale = next((each.down.shape[0], each.scale) for each in found.values())
    targets = tuple(sorted({path.split(".")[-1] for path in found}))
    return LoraConfig(rank=rank, alpha=scale * rank, target_modules=targets)


def owner_of(name: str) -> str:
    """The name of the linear layer that a `LowRank` of that name belongs to."""
    return name.rpartition(f".{_ADAPTERS}.")[0]


def deltas(network: nn.Module) -> dict[str, Tensor]:
    """The updates of the active adapter to matrices [out, in], by the layers' names; empty if none is active."""
    return {path: each.delta() for path, each in _active(network).items()}


@torch.no_grad()
def copy_factors(source: nn.Module, target: nn.Module) -> None:
    """Copy the factors of the active adapter of `source` to that of `target`, which has the same layers."""
    theirs = _active(source)
    for path, own in _active(target).items():
        own.down.copy_(theirs[path].down)
        own.up.copy_(theirs[path].up)


def _active(network: nn.Module) -> dict[str, LowRank]:
    """The active adapter of each layer that has it, by the layer's name."""
    found = ((path, _adapters_of(layer), layer.__dict__["adapter"]) for path, layer in _adapted(network))
    return {path: adapters[name] for path, adapters, name in found if name is not None and name in adapters}


def _with_adapters(layer: Linear, compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        output, name = compute(input), layer.__dict__["adapter"]
        return output if name not in _adapters_of(layer) else output + _adapters_of(layer)[name](input).to(output.dtype)

    return forward


def _adapters_of(layer: nn.Module) -> dict[str, LowRank]:
    found: dict[str, LowRank] = layer._modules[_ADAPTERS]  # type: ignore[assignment]
    return found


def _linears(network: nn.Module) -> list[tuple[str, Linear]]:
    return [(path, each) for path, each in network.named_modules() if isinstance(each, Linear)]


def _adapted(network: nn.Module) -> list[tuple[str, Linear]]:
    return [(path, each) for path, each in _linears(network) if _ADAPTERS in each._modules]
