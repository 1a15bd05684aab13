"""The definition of `fused_decode_step`: a decoder over one token of each sequence, by the references of its parts."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.decode_attention.reference import decode_attention
from kitforge.core.kernels.geglu.reference import geglu
from kitforge.core.kernels.linear.reference import linear
from kitforge.core.kernels.quantized_linear.reference import GROUP, Blocks, dequantize, quantize
from kitforge.core.kernels.rms_norm.reference import rms_norm
from kitforge.core.kernels.rotary.reference import rotary as rotate
from kitforge.core.kernels.swiglu.reference import swiglu

Slabs = list[tuple[Tensor, Tensor]]
Angles = tuple[Tensor, Tensor]
# The fields of a block that are weights of linear layers.
LINEARS = ("query", "key", "value", "out", "gate", "up", "down")
# Those that have the dtype of the stream.
_STREAM_NORMS = ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """The weights of a block; None where it has none. The MLP is a SwiGLU or GeGLU, without a gate a GELU; a norm with
    a bias is LayerNorm, without one RMSNorm."""

    attention_norm: Tensor
    attention_norm_bias: Tensor | None
    query: Tensor | Blocks
    query_bias: Tensor | None
    key: Tensor | Blocks
    key_bias: Tensor | None
    value: Tensor | Blocks
    value_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor | Blocks
    out_bias: Tensor | None
    attention_out_norm: Tensor | None
    attention_out_norm_bias: Tensor | None
    mlp_norm: Tensor
    mlp_norm_bias: Tensor | None
    gate: Tensor | Blocks | None
    gate_bias: Tensor | None
    up: Tensor | Blocks
    up_bias: Tensor | None
    down: Tensor | Blocks
    down_bias: Tensor | None
    mlp_out_norm: Tensor | None
    mlp_out_norm_bias: Tensor | None

    def tensors(self) -> list[Tensor | Blocks | None]:
        """All fields, in order."""
        return [getattr(self, field.name) for field in fields(self)]


class Update(NamedTuple):
    """What a LoRA adapter adds to the output of a linear layer, `up @ down @ x`, its scale in `up`. DoRA multiplies the
    sum, without the bias, by `rescaling`."""

    down: Tensor  # [rank, in]
    up: Tensor  # [out, rank]
    rescaling: Tensor | None  # fp32 [out]

    def added(self, output: Tensor, update: Tensor, bias: Tensor | None) -> Tensor:
        """The outputs [..., out] of a layer with the update of its inputs, both in the dtype of products."""
        if self.rescaling is None:
            return output + update
        own = 0.0 if bias is None else bias.float()
        return ((output.float() + update.float() - own) * self.rescaling + own).to(output.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A decoder: blocks of equal shapes, the last norm and a head [vocab, dim]."""

    layers: tuple[BlockWeights, ...]
    scales: tuple[float, ...]  # of each layer's attention scores
    windows: tuple[int | None, ...]  # how many positions each layer sees; None: all
    norm: Tensor
    norm_bias: Tensor | None
    head: Tensor | Blocks
    head_dim: int
    norm_eps: float
    qk_norm_eps: float
    interleaved_rotary: bool
    rotations: tuple[int | None, ...]  # which of the rotations turns each layer's heads; None: none
    gate: Literal["silu", "gelu"]  # the activation of the MLPs' gates
    slopes: Tensor | None = None  # of ALiBi [heads]
    has_exact_norms: bool = False  # norms have fp32 and stay so, whatever the rest has
    bits: Literal[4, 8] | None = None  # of linear layers and head, which a step quantizes for itself; None: as they are
    # The updates of each layer's `LINEARS` by each adapter.
    adapters: tuple[tuple[dict[str, Update], ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Locations:
    """Where the tokens of a step are; all int64. Tokens of the same text are adjacent and in order."""

    starts: Tensor  # [tokens], the first slot of each token's text; -1 - n: its slots begin at `slots[n]`
    lengths: Tensor  # [tokens], how many positions it sees: those up to its own
    slots: Tensor  # [..], of all positions of texts whose slots are not consecutive
    rows: Tensor  # [rows], the tokens whose logits are computed, in order
    adapters: Tensor | None = None  # [tokens], the number of each token's adapter, -1 without one; None: of all
    # [tokens, blocks], where the positions of each token's text are, in place of `starts`; `slots` [tokens] are then
    # those that are written. A kernel that has no use for them has none on its device.
    tables: Tensor | None = None
    block_size: int = 1


class DecodeStepKernel(Protocol):
    """A decoder over the last tokens of texts, one or several of each: stream [tokens, dim], cos and sin [rotations,
    tokens, pairs] or None.

    Keys and values of the tokens are written to the slots of their positions, before any token attends. Returns the
    normalized output [tokens, dim] and logits [rows, vocab] in fp32 at least, or None where it does not take the
    tokens. Weights may have been copied by an
    earlier call: one that `rereads` sees those that have changed in place since, unless a step quantizes them.
    """

    def __call__(
        self, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, locations: Locations, *, rereads: bool = False
    ) -> tuple[Tensor, Tensor] | None: ...


class DecodeStepFactory(Protocol):
    """Makes a decode step over weights and each layer's keys and values [slots, kv_heads, head_dim].

    All but `has_exact_norms` have one dtype, fp32 or bfloat16, are contiguous and on the device of the kernel, and are
    read at their present addresses. Or, on a CPU, the weights have fp32 and the slabs bfloat16, as under autocast:
    linear layers and the norms of heads and branches compute in bfloat16, by copies of their weights; the stream and
    its norms stay in fp32.
    """

    def __call__(self, weights: DecoderWeights, slabs: list[tuple[Tensor, Tensor]]) -> DecodeStepKernel: ...


class ReferenceDecodeStep:
    """See `DecodeStepKernel`."""

    def __init__(self, weights: DecoderWeights, slabs: Slabs) -> None:
        self._dtype = slabs[0][0].dtype
        self._weights = rounded_weights(_dequantized(weights), self._dtype)
        self._slabs = slabs

    def __call__(
        self, stream: Tensor, rotary: Angles | None, locations: Locations, *, rereads: bool = False
    ) -> tuple[Tensor, Tensor]:
        weights = self._weights
        for index, layer in enumerate(weights.layers):
            normal = self._stream_norm(stream, layer.attention_norm, layer.attention_norm_bias)
            mixed = self._attended(index, normal, rotary, locations)
            branch = self._linear(index, "out", mixed, locations)
            stream = stream + _norm(branch, layer.attention_out_norm, layer.attention_out_norm_bias, weights.norm_eps)
            normal = self._stream_norm(stream, layer.mlp_norm, layer.mlp_norm_bias)
            up = self._linear(index, "up", normal, locations)
            if layer.gate is None:
                hidden = functional.gelu(up, approximate="tanh")
            else:
                gated = swiglu if weights.gate == "silu" else geglu
                hidden = gated(self._linear(index, "gate", normal, locations), up)
            branch = self._linear(index, "down", hidden, locations)
            stream = stream + _norm(branch, layer.mlp_out_norm, layer.mlp_out_norm_bias, weights.norm_eps)
        hidden = self._stream_norm(stream, weights.norm, weights.norm_bias)
        assert isinstance(weights.head, Tensor)  # of `_dequantized`
        logits = linear(hidden[locations.rows], weights.head)
        return hidden, logits.to(torch.promote_types(hidden.dtype, torch.float32))

    def _stream_norm(self, stream: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _norm(stream, weight, bias, self._weights.norm_eps).to(self._dtype)

    def _linear(self, index: int, name: str, input: Tensor, locations: Locations) -> Tensor:
        """A linear layer, with the update of each token's adapter."""
        layer, numbers = self._weights.layers[index], locations.adapters
        weight, bias = getattr(layer, name), getattr(layer, f"{name}_bias")
        output = linear(input, weight, bias)
        for number, adapter in enumerate(self._weights.adapters if numbers is not None else ()):
            if (update := adapter[index].get(name)) is not None:
                rows = numbers == number
                down, up = (each.to(self._dtype) for each in update[:2])
                output[rows] = update.added(output[rows], linear(linear(input[rows], down), up), bias)
        return output

    def _attended(self, index: int, normal: Tensor, rotary: Angles | None, locations: Locations) -> Tensor:
        weights, layer, (keys, values) = self._weights, self._weights.layers[index], self._slabs[index]

        def heads(name: str, norm: Tensor | None) -> Tensor:
            """[sequences, heads, head_dim]."""
            result = self._linear(index, name, normal, locations).view(len(normal), -1, weights.head_dim)
            return _norm(result, norm, None, weights.qk_norm_eps)

        query, key, value = heads("query", layer.query_norm), heads("key", layer.key_norm), heads("value", None)
        rotation = weights.rotations[index]
        if rotary is not None and rotation is not None:
            cos, sin = (each[rotation].unsqueeze(0) for each in rotary)
            # The sequences are one row of tokens: [1, heads, sequences, head_dim].
            query, key = (
                rotate(each.transpose(0, 1).unsqueeze(0), cos, sin, weights.interleaved_rotary)[0].transpose(0, 1)
                for each in (query, key)
            )
        seen = [_slots(locations, token) for token in range(len(query))]
        last = torch.stack([slots[-1] for slots in seen]) if seen else locations.starts
        last = last if locations.tables is None else locations.slots
        keys[last], values[last] = key, value
        scale, window, start = weights.scales[index], weights.windows[index], torch.zeros(1, dtype=torch.long)
        mixed = torch.empty_like(query)
        for token, slots in enumerate(seen):
            one, own = slice(token, token + 1), (keys[slots], values[slots])
            mixed[one] = decode_attention(
                query[one], *own, start, locations.lengths[one], window=window, scale=scale, slopes=weights.slopes
            )
        return mixed.flatten(1)


def quantized_weights(weights: DecoderWeights) -> DecoderWeights:
    """The same with the linear layers and the head quantized to `bits`."""
    bits = weights.bits
    if bits is None:
        return weights

    def quantized(weight: Tensor | Blocks) -> Blocks:
        return weight if isinstance(weight, Blocks) else Blocks(*quantize(weight, bits, GROUP if bits == 4 else None))

    return _with_matrices(weights, quantized)


def rounded_weights(weights: DecoderWeights, dtype: torch.dtype) -> DecoderWeights:
    """The same, all in `dtype` but the norms of the stream and what is quantized; copied where that is another."""

    def rounded(each: Any) -> Any:
        return each.to(dtype) if isinstance(each, Tensor) else each

    kept = (
        [name for name in BlockWeights.__dataclass_fields__ if "norm" in name]
        if weights.has_exact_norms
        else _STREAM_NORMS
    )
    names = [name for name in BlockWeights.__dataclass_fields__ if name not in kept]
    layers = tuple(
        replace(layer, **{name: rounded(getattr(layer, name)) for name in names}) for layer in weights.layers
    )
    return replace(weights, layers=layers, head=rounded(weights.head))


def _with_matrices(weights: DecoderWeights, change: Callable[[Any], Any]) -> DecoderWeights:
    layers = tuple(
        replace(layer, **{name: change(each) for name in LINEARS if (each := getattr(layer, name)) is not None})
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=change(weights.head), bits=None)


def _dequantized(weights: DecoderWeights) -> DecoderWeights:
    """The weights that a step of quantized ones multiplies with."""

    def dense(weight: Tensor | Blocks) -> Tensor:
        return dequantize(*weight).to(weights.norm.dtype) if isinstance(weight, Blocks) else weight

    return _with_matrices(quantized_weights(weights), dense)


def _slots(locations: Locations, token: int) -> Tensor:
    """The slots of the positions that a token sees."""
    start, length = int(locations.starts[token]), int(locations.lengths[token])
    if locations.tables is not None:
        positions, size = torch.arange(length), locations.block_size
        return locations.tables[token, positions // size] * size + positions % size
    return torch.arange(start, start + length) if start >= 0 else locations.slots[-1 - start :][:length]


def _norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return input
    if weight.dtype.itemsize > input.dtype.itemsize:
        return _norm(input.to(weight.dtype), weight, bias, eps).to(input.dtype)
    if bias is None:
        return rms_norm(input, weight, eps)
    return functional.layer_norm(input, weight.shape, weight, bias, eps)
