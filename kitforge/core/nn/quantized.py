"""Quantized linear layers: a copy of a network that shares all but the weights of its linear layers with the original.

Only weights are quantized: to int8 with a scale for each row, or to int4 with one for each group of features of a row;
see `quantized_linear`. On a CPU the compiled step of a decoder does so (`DecoderWeights.bits`).

Networks that have no such step run on a CPU in int8 alone, with weights of one scale per row and activations that are
quantized dynamically with one scale for all tokens of a call, to seven bits, since processors without VNNI add pairs of
products in 16 bits (torch's `fbgemm` kernels, Khudia et al., 2021). That scale does not go below 6e-5, which normalized
streams never need. So an output depends slightly on the other sequences of its batch.
"""

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.quantized_linear.reference import GROUP as STEP_GROUP
from kitforge.core.kernels.quantized_linear.reference import Blocks, QuantizedLinearKernel, quantize
from kitforge.core.nn.causal_lm import Quantizable
from kitforge.core.nn.decode_step import is_fusable
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.moe import Experts
from kitforge.foundation.errors import ModelError

Quantization = Literal["int8", "int4"]
# Features of a row that share a scale in int4 on an accelerator.
GROUP = 128


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


class WeightOnlyLinear:
    """The same with activations as they are. `group` features share a scale in int4, where they divide a row."""

    def __init__(self, kind: Quantization, kernel: QuantizedLinearKernel, group: int = GROUP) -> None:
        self.bits: Literal[4, 8] = 4 if kind == "int4" else 8  # read by the compiled step
        self._kernel = kernel
        self._group = group
        self._packed: dict[int, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`input [..., in] @ weight [out, in].T + bias`, about 0.5 % off in int8 and 10 % in int4."""
        found = self._packed.get(id(weight))
        if found is None:
            is_int4, features = self.bits == 4 and weight.shape[1] % 2 == 0, weight.shape[1]
            group = self._group if is_int4 and features % self._group == 0 else None
            found = self._packed[id(weight)] = (weight, quantize(weight, 4 if is_int4 else 8, group))
        return self._kernel(input.to(compute_dtype(input)), *found[1], bias)

    def forget(self) -> None:
        """Quantize weights again at their next call."""
        self._packed = {}


def quantize_linears(model: nn.Module, bits: Literal[4, 8]) -> None:
    """Quantize the weights of all linear layers in place; embeddings, norms and the head stay as they are. Raises
    ModelError for a mixture of experts."""
    _check_dense(model, "train without lora.bits")
    for layer in _linears(model):
        layer.quantize(bits)


def quantized_bits(model: nn.Module) -> Literal[4, 8] | None:
    """The bits of quantized linear layers; None for a model without."""
    kinds = {layer.weight.dtype for layer in _linears(model) if layer.scales is not None}
    return None if not kinds else 4 if torch.uint8 in kinds else 8


def keep_blocks(model: Decoder, blocks: Mapping[str, Callable[[], Blocks]]) -> dict[str, Tensor]:
    """Replace weights of linear layers and the head by quantized ones, read by the names of the parameters. Returns the
    other parameters."""
    left: dict[str, Tensor] = dict(model.named_parameters())
    linears = {f"{path}.weight": each for path, each in model.named_modules() if isinstance(each, Linear)}
    if model.head_name in blocks:
        left.pop("output", None)
        model.keep_head(blocks[model.head_name]())
    for name in linears.keys() & blocks.keys():
        linears[name].keep(blocks[name]())
        del left[name]
    return left


def _check_dense(model: nn.Module, fix: str) -> None:
    if any(isinstance(each, Experts) for each in model.modules()):
        message = "the experts of a mixture, most of its weights, are not quantized"
        raise ModelError(message, got="a mixture of experts", expected="a dense network", fix=fix)


def _linears(model: nn.Module) -> list[Linear]:
    return [each for each in model.modules() if isinstance(each, Linear)]


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


def quantized_copy(model: nn.Module, kind: Quantization = "int8") -> tuple[nn.Module, Int8Linear | WeightOnlyLinear]:
    """A network like `model` that shares its parameters and runs linear layers and head in int8 or int4.

    Raises ModelError for a network that is not `Quantizable` or is sharded, for a mixture of experts, and for int4 on
    CPU for one that has no compiled step or widths that no group divides.
    """
    _check_dense(model, "inference.engine.quantization=none")
    if quantized_bits(model) is not None:
        got = "a base model of QLoRA, or a GGUF file as it is stored"
        fix = "inference.engine.quantization=none, or for a file inference.dtype=fp32"
        raise ModelError("the weights are quantized already", got=got, fix=fix)
    if not isinstance(model, Quantizable) or not model.is_whole:
        raise ModelError(
            f"{kind} needs a decoder that is not sharded",
            got=f"{type(model).__name__}, perhaps sharded",
            fix="inference.engine.quantization=none",
        )
    linear: Int8Linear | WeightOnlyLinear = WeightOnlyLinear(kind, model.kernels.quantized_linear)
    if model.head_weight.device.type == "cpu":
        fault = _step_fault(cast(nn.Module, model))
        if fault is None:
            linear = WeightOnlyLinear(kind, model.kernels.quantized_linear, STEP_GROUP)
        elif kind == "int4":
            fix = "inference.engine.quantization=int8"
            raise ModelError("int4 on a CPU needs the compiled step of a decoder", got=fault, fix=fix)
        else:
            linear = Int8Linear()
    return with_linear(model, linear), linear


def _step_fault(model: nn.Module) -> str | None:
    """Why the compiled step cannot run it in int8 or int4; None: it can."""
    if not is_fusable(model):
        return f"{type(model).__name__}: not a dense decoder in fp32 or bfloat16, or numba is missing"
    weights = [("head", cast(Quantizable, model).head_weight)]
    weights += [(name, each.weight) for name, each in model.named_modules() if isinstance(each, Linear)]
    for name, weight in weights:
        if weight.shape[1] % STEP_GROUP:
            return f"{name} with {weight.shape[1]} features, no multiple of {STEP_GROUP}"
    return None


def with_linear(model: Quantizable, linear: Int8Linear | WeightOnlyLinear) -> nn.Module:
    """A network like `model` that shares its parameters and calls `linear` in linear layers and head."""
    network: Any = shared_copy(cast(nn.Module, model))
    for each in _linears(network):
        each.__dict__["_linear"] = linear
    step = model.kernels.fused_decode_step if isinstance(linear, WeightOnlyLinear) else None
    network.kernels = replace(model.kernels, linear=linear, fused_decode_step=step)
    return cast(nn.Module, network)


def shared_copy(module: nn.Module) -> nn.Module:
    """A copy of the tree of modules, over the same parameters and buffers."""
    found = copy.copy(module)
    children = module.__dict__["_modules"].items()
    found.__dict__["_modules"] = {name: child and shared_copy(child) for name, child in children}
    return found
