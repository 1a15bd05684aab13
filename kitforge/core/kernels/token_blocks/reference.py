"""The definition of `token_blocks`, of the references of its parts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.linear.reference import linear
from kitforge.core.kernels.rms_norm.reference import rms_norm
from kitforge.core.kernels.rotary.reference import rotary as rotate
from kitforge.core.kernels.swiglu.reference import swiglu
from kitforge.core.kernels.token_attention.reference import token_attention
from kitforge.core.kernels.token_blocks.stack import Layer, Stack

Slabs = list[tuple[Tensor, Tensor]]
Angles = tuple[Tensor, Tensor]


class TokenBlocks:
    """See `dispatch.TokenBlocks`."""

    def __init__(self, stack: Stack, slabs: Slabs) -> None:
        self._stack = stack
        self._slabs = slabs

    def __call__(self, stream: Tensor, rotary: Angles | None, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """See `dispatch.TokenBlocks`."""
        stack = self._stack
        for place, layer in enumerate(stack.layers):
            normal = _norm(stream, layer.attention_norm, layer.attention_norm_bias, stack.norm_eps)
            mixed = self._attended(place, normal, rotary, starts, lengths)
            branch = linear(mixed, layer.out, layer.out_bias)
            stream = stream + _norm(branch, layer.attention_out_norm, layer.attention_out_norm_bias, stack.norm_eps)
            normal = _norm(stream, layer.mlp_norm, layer.mlp_norm_bias, stack.norm_eps)
            branch = linear(_activated(layer, normal), layer.down, layer.down_bias)
            stream = stream + _norm(branch, layer.mlp_out_norm, layer.mlp_out_norm_bias, stack.norm_eps)
        hidden = _norm(stream, stack.norm, stack.norm_bias, stack.norm_eps)
        return hidden, linear(hidden, stack.head).to(torch.promote_types(hidden.dtype, torch.float32))

    def _attended(self, place: int, normal: Tensor, rotary: Angles | None, starts: Tensor, lengths: Tensor) -> Tensor:
        stack, layer, (keys, values) = self._stack, self._stack.layers[place], self._slabs[place]

        def heads(weight: Tensor, bias: Tensor | None, norm: Tensor | None) -> Tensor:
            """[texts, heads, head_dim]."""
            found = linear(normal, weight, bias).view(len(normal), -1, stack.head_dim)
            return _norm(found, norm, None, stack.qk_norm_eps)

        query = heads(layer.query, layer.query_bias, layer.query_norm)
        key = heads(layer.key, layer.key_bias, layer.key_norm)
        value = heads(layer.value, layer.value_bias, None)
        if rotary is not None:
            query, key = (_turned(each, rotary, stack.interleaved_rotary) for each in (query, key))
        last = starts + lengths - 1
        keys[last], values[last] = key, value
        scale, window = stack.scales[place], stack.windows[place]
        mixed = token_attention(query, keys, values, starts, lengths, window=window, scale=scale)
        return mixed.flatten(1)


def _turned(heads: Tensor, angles: Angles, interleaved: bool) -> Tensor:
    """[texts, heads, head_dim], for which the texts are one row of tokens."""
    cos, sin = (each.unsqueeze(0) for each in angles)
    return rotate(heads.transpose(0, 1).unsqueeze(0), cos, sin, interleaved)[0].transpose(0, 1)


def _norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if weight is None:
        return input
    if bias is None:
        return rms_norm(input, weight, eps)
    return functional.layer_norm(input, weight.shape, weight, bias, eps)


def _activated(layer: Layer, normal: Tensor) -> Tensor:
    up = linear(normal, layer.up, layer.up_bias)
    if layer.gate is None:
        return functional.gelu(up, approximate="tanh")
    return swiglu(linear(normal, layer.gate, layer.gate_bias), up)
