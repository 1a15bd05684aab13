"""LoRA (Hu et al., 2021) and DoRA (Liu et al., 2024): several adapters by name on one network, one or none active.

The base weights keep their names and never change, so without an active adapter it is the base network.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.linear import Linear
from kitforge.core.nn.moe import EXPERT_MATRICES, Experts
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check, check_least
from kitforge.foundation.errors import ModelError, nearest

_ADAPTERS = "adapters"
# The tensors of an adapted layer; the last of DoRA alone.
FACTORS = ("down", "up", "magnitude")
# Methods of a linear layer that an adapter adds to.
_ADAPTED_METHODS = ("forward", "without_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Kind, rank, scale and target modules of an adapter."""

    kind: Literal["lora", "dora"] = "lora"  # dora: the norm of each row of an adapted matrix is trained as well
    rank: int = 8
    alpha: float = 16.0  # the scale of the update is alpha / rank
    target_modules: tuple[str, ...] = ("query", "value")  # last names of the linear layers with an adapter

    def __post_init__(self) -> None:
        check_least("lora", self, 1, "rank")
        check(self.alpha > 0, "lora.alpha", self.alpha, "a number above 0")
        check(len(self.target_modules) > 0, "lora.targets", self.target_modules, "at least one layer's name")

    @property
    def scale(self) -> float:
        """The scale of the low-rank update."""
        return self.alpha / self.rank


class LowRank(nn.Module):
    """The update `scale * up @ down` of a matrix [out, in]; initially zero. DoRA rescales each row of the updated
    matrix to the norm `magnitude` [out], initially its own; the norm that it is divided by gets no gradient."""

    def __init__(self, weight: Tensor, config: LoraConfig) -> None:
        super().__init__()
        out_dim, in_dim = weight.shape
        self.scale = config.scale
        # Trained factors are in fp32, even if the matrix is in half precision.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.down = nn.Parameter(torch.empty(config.rank, in_dim, device=weight.device, dtype=dtype))
        self.up = nn.Parameter(torch.zeros(out_dim, config.rank, device=weight.device, dtype=dtype))
        self.magnitude = (
            nn.Parameter(torch.empty(out_dim, device=weight.device, dtype=dtype)) if config.kind == "dora" else None
        )
        self._row_norms: Tensor | None = None  # of the frozen matrix, squared [out]
        if self.magnitude is not None and not weight.is_meta:
            self.magnitude.data.copy_(row_norms(weight))

    def forward(self, input: Tensor) -> Tensor:
        """The low-rank update of an output: [..., in] -> [..., out]."""
        return functional.linear(functional.linear(input, self.down), self.up) * self.scale

    def rescaled(self, input: Tensor, output: Tensor, weight: Tensor) -> Tensor:
        """DoRA's output [..., out], from that of `weight` alone: times magnitude over the norm of each row [out].

        The norm of `weight + scale * up @ down` is expanded, so that no matrix of that size is made: |w|^2 +
        2 s (w down^T) up + s^2 up (down down^T) up.
        """
        assert self.magnitude is not None
        updated: Tensor = output + self(input).to(output.dtype)
        with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
            if self._row_norms is None:
                self._row_norms = row_norms(weight).square()
            down, up = self.down, self.up * self.scale
            cross = (functional.linear(weight.to(down.dtype), down) * up).sum(1)
            own = ((up @ (down @ down.T)) * up).sum(1)
            norms = (self._row_norms + 2 * cross + own).clamp(min=torch.finfo(down.dtype).tiny).sqrt()
        return updated * (self.magnitude / norms).to(output.dtype)

    def merged(self, weight: Tensor) -> Tensor:
        """The adapted matrix [out, in], in the dtype of the factors."""
        factors = (self.down, self.up) if self.magnitude is None else (self.down, self.up, self.magnitude)
        return merge_factors(weight, factors, self.scale)


def merge_factors(weight: Tensor, factors: Sequence[Tensor], scale: float) -> Tensor:
    """A matrix [out, in] with an adapter merged: down [rank, in], up [out, rank], and of DoRA the magnitude [out]."""
    down, up, *magnitude = factors
    updated: Tensor = weight + up @ down * scale
    return updated * (magnitude[0] / row_norms(updated)).unsqueeze(1) if magnitude else updated


def row_norms(weight: Tensor) -> Tensor:
    """The norm of each row [out] of a matrix, in fp32 or wider."""
    exact = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    norms: Tensor = torch.linalg.vector_norm(exact, dim=1)
    return norms


@torch.no_grad()
def attach(network: nn.Module, name: str, config: LoraConfig, seed: int = 0) -> None:
    """Add an adapter of that name and activate it. Its first factor is a function of seed and names, its second is
    zero. The base weights are frozen. Raises ModelError if no layer has the name of a target module."""
    layers = [(path, each) for path, each in _linears(network) if path.split(".")[-1] in config.target_modules]
    has_experts = any(isinstance(each, Experts) for each in network.modules())
    found = {path.split(".")[-1] for path, _ in layers}
    for target in config.target_modules:
        if has_experts and target in EXPERT_MATRICES:
            expected = "layers of attention: query, key, value, out"
            raise ModelError("the experts of a mixture take no adapters", got=f"target {target!r}", expected=expected)
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
                layer.__dict__[way] = _with_adapters(layer, getattr(layer, way), has_bias=way == "forward")
        adapter = LowRank(layer.dense_weight(), config)
        if not adapter.down.is_meta:
            adapter.down.copy_(initial_down(seed, name, path, adapter.down.shape))
        _adapters_of(layer)[name] = adapter
        layer.__dict__["adapter"] = name


def initial_down(seed: int, name: str, path: str, shape: torch.Size) -> Tensor:
    """The first values [rank, in] of the factor of adapter `name` that meets the input of the layer `path`."""
    noise: Tensor = torch.randn(shape, generator=seeds.generator(seed, "lora", name, path))
    return noise / math.sqrt(shape[1])


def adapter_tensors(network: nn.Module, name: str) -> dict[str, tuple[Tensor, ...]]:
    """Both factors, down [rank, in] and up [out, rank], of every layer with that adapter, by the layer's name, and of
    DoRA the magnitude [out]."""
    parameters = dict(network.named_parameters())
    found = names_of_factors(parameters, name)
    return {layer: tuple(parameters[own] for own in names) for layer, names in found.items()}


def names_of_factors(names: Iterable[str], adapter: str) -> dict[str, list[str]]:
    """The factors of `adapter_tensors` by name, of the parameters of a network in its order."""
    found: dict[str, list[str]] = {}
    for name in names:
        layer, _, factor = name.rpartition(f".{_ADAPTERS}.{adapter}.")
        if factor in FACTORS and layer:
            found.setdefault(layer, []).append(name)
    return found


def active_lora_config(network: nn.Module) -> LoraConfig | None:
    """The configuration of the active adapter; None if none is active."""
    found = _active(network)
    if not found:
        return None
    first = next(iter(found.values()))
    rank, targets = first.down.shape[0], tuple(sorted({path.split(".")[-1] for path in found}))
    kind: Literal["lora", "dora"] = "lora" if first.magnitude is None else "dora"
    return LoraConfig(kind=kind, rank=rank, alpha=first.scale * rank, target_modules=targets)


def active_adapter(network: nn.Module) -> str | None:
    """The name of the active adapter; None if none is active."""
    names = (layer.__dict__["adapter"] for _, layer in _adapted(network))
    return next((name for name in names if name is not None), None)


def owner_of(name: str) -> str:
    """The name of the linear layer that a `LowRank` of that name belongs to."""
    return name.rpartition(f".{_ADAPTERS}.")[0]


def merged_weights(network: nn.Module) -> dict[str, Tensor]:
    """The matrices [out, in] with the active adapter, by the layers' names; empty if none is active."""
    layers, active = dict(_adapted(network)), _active(network)
    return {path: each.merged(layers[path].dense_weight()) for path, each in active.items()}


@torch.no_grad()
def copy_factors(source: nn.Module, target: nn.Module) -> None:
    """Copy the factors of the active adapter of `source` to that of `target`, which has the same layers."""
    theirs = _active(source)
    for path, own in _active(target).items():
        own.load_state_dict(theirs[path].state_dict())


def _active(network: nn.Module) -> dict[str, LowRank]:
    """The active adapter of each layer that has it, by the layer's name."""
    found = ((path, _adapters_of(layer), layer.__dict__["adapter"]) for path, layer in _adapted(network))
    return {path: adapters[name] for path, adapters, name in found if name is not None and name in adapters}


def _with_adapters(layer: Linear, compute: Callable[[Tensor], Tensor], *, has_bias: bool) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:
        name, adapters = layer.__dict__["adapter"], _adapters_of(layer)
        if name not in adapters:
            return compute(input)
        if adapters[name].magnitude is None:
            output = compute(input)
            update: Tensor = adapters[name](input)
            return output + update.to(output.dtype)
        # The bias is not part of what is rescaled.
        output = adapters[name].rescaled(input, Linear.without_bias(layer, input), layer.weight)
        return output + layer.bias.to(output.dtype) if has_bias and layer.bias is not None else output

    return forward


def _adapters_of(layer: nn.Module) -> dict[str, LowRank]:
    found: dict[str, LowRank] = layer._modules[_ADAPTERS]  # type: ignore[assignment]
    return found


def _linears(network: nn.Module) -> list[tuple[str, Linear]]:
    return [(path, each) for path, each in network.named_modules() if isinstance(each, Linear)]


def _adapted(network: nn.Module) -> list[tuple[str, Linear]]:
    return [(path, each) for path, each in _linears(network) if _ADAPTERS in each._modules]
