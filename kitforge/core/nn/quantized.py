"""int8 linear layers: a copy of a network that shares all but the weights of its linear layers with the original.

Weights are quantized symmetrically with one scale per row. Activations are quantized dynamically with one scale for all
tokens of a call, to seven bits, since processors without VNNI add pairs of products in 16 bits (torch's `fbgemm`
kernels, Khudia et al., 2021). That scale does not go below 6e-5, which normalized streams never need. So an output
depends slightly on the other sequences of its batch.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from kitforge.core.kernels.mixed_precision import compute_dtype
from kitforge.core.nn.causal_lm import Quantizable
from kitforge.core.nn.linear import Linear
from kitforge.foundation.errors import DeviceError, ModelError


@final
class Int8Linear:
    """`dispatch.LinearKernel` over quantised copies of the weights that it is called with, each made when it is first
    seen.

    `forget` drops the copies after the weights have changed.
    """

    def __init__(self) -> None:
        self._packed: dict[int, tuple[Tensor, Any]] = {}

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`input [..., in] @ weight [out, in].T + bias`, about 1 % off."""
        if not input.numel():
            return input.new_zeros((*input.shape[:-1], len(weight)))
        # The weight is kept with its copy, so that no other weight gets its id.
        found = self._packed.get(id(weight))
        if found is None:
            found = self._packed[id(weight)] = (weight, pack(weight))
        output: Tensor = torch.ops.quantized.linear_dynamic(input.float(), found[1], True)
        output = output.to(compute_dtype(input))
        return output if bias is None else output + bias.to(output.dtype)

    def forget(self) -> None:
        """Quantize weights again at their next call."""
        self._packed = {}


def pack(weight: Tensor) -> Any:
    """The weight [out, in] quantized to int8 and packed for the processor."""
    exact = weight.detach().float()
    scales = exact.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny).double() / 127
    zeros = torch.zeros(len(exact), dtype=torch.long)
    with warnings.catch_warnings():
        # torch deprecates quantized tensors, but has no replacement as fast on CPU.
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        rounded = torch.quantize_per_channel(exact, scales, zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(rounded, None)


def int8_copy(model: nn.Module) -> tuple[nn.Module, Int8Linear]:
    """A network like `model` that shares its parameters and runs linear layers and head in int8.

    Raises ModelError for a network that is not `Quantizable` or is sharded, and DeviceError on a device other than CPU.
    """
    if not isinstance(model, Quantizable) or not model.is_whole:
        raise ModelError(
            "int8 needs a decoder that is not sharded",
            got=f"{type(model).__name__}, perhaps sharded",
            fix="inference.engine.quantization=none",
        )
    if model.head_weight.device.type != "cpu":
        raise DeviceError("int8 weights run on CPU only", got=model.head_weight.device, expected="device=cpu")
    linear = Int8Linear()
    network: Any = _shared(model, linear)
    network.kernels = replace(model.kernels, linear=linear, fused_decode_step=None)
    return network, linear


def _shared(module: nn.Module, linear: Int8Linear) -> nn.Module:
    """A copy of the tree of modules, over the same parameters and buffers."""
    found = copy.copy(module)
    children = module.__dict__["_modules"].items()
    found.__dict__["_modules"] = {name: child and _shared(child, linear) for name, child in children}
    if isinstance(found, Linear):
        found.__dict__["_linear"] = linear
    return found
