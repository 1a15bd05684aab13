"""A hand-written generation loop over our weights, as somebody would write it for one shape: projections fused, keys
and values in slabs of the final length, no batching but the one that it is given.

B texts of equal length, T tokens of a pass.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kitforge.core.nn.decoder import Decoder


class PlainLoop:
    """Greedy continuations of prompts [B, length] by a fixed number of tokens."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.head_dim = model.geometry.head_dim
        self.blocks: Any = model.blocks
        self.fused = [_fused(block.attention) for block in self.blocks]

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, num_new: int) -> list[list[int]]:
        batch, prompt = tokens.shape
        geometry = self.model.geometry
        shape = (geometry.num_layers, 2, batch, geometry.num_kv_heads, prompt + num_new, self.head_dim)
        cache = torch.zeros(shape, dtype=self.model.head_weight.dtype)
        found, used = [], 0
        for _ in range(num_new):
            stream = self._hidden(tokens, cache, used)
            used += tokens.shape[1]
            tokens = F.linear(stream[:, -1:], self.model.head_weight).argmax(-1)
            found.append(tokens)
        return torch.cat(found, dim=1).tolist()

    def _hidden(self, tokens: Tensor, cache: Tensor, used: int) -> Tensor:
        model, batch, length = self.model, *tokens.shape
        stream = model.embedding(tokens)
        positions = torch.arange(used, used + length)
        if model.position is not None:
            stream = stream + model.position(positions)
        angles = model._angles[0](positions) if model._angles else None
        for block, (weight, bias), (keys, values) in zip(self.blocks, self.fused, cache, strict=True):
            features = F.linear(_normal(block.attention_norm, stream), weight, bias)
            query, key, value = features.view(batch, length, 3, -1, self.head_dim).permute(2, 0, 3, 1, 4)
            if angles is not None:
                query, key = _turned(query, *angles), _turned(key, *angles)
            keys[:, :, used : used + length], values[:, :, used : used + length] = key, value
            seen = slice(0, used + length)
            mixed = F.scaled_dot_product_attention(query, keys[:, :, seen], values[:, :, seen], is_causal=length > 1)
            out, mlp = block.attention.out, block.mlp
            stream = stream + F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), out.weight, out.bias)
            normal = _normal(block.mlp_norm, stream)
            up = F.linear(normal, mlp.up.weight, mlp.up.bias)
            if mlp.gate is None:
                hidden = F.gelu(up, approximate="tanh")
            else:
                hidden = F.silu(F.linear(normal, mlp.gate.weight)) * up
            stream = stream + F.linear(hidden, mlp.down.weight, mlp.down.bias)
        return _normal(model.norm, stream)


def _fused(attention: Any) -> tuple[Tensor, Tensor | None]:
    layers = [attention.query, attention.key, attention.value]
    weight = torch.cat([layer.weight for layer in layers])
    return weight, None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])


def _normal(norm: Any, input: Tensor) -> Tensor:
    shape = (input.shape[-1],)
    if norm.bias is None:
        return F.rms_norm(input, shape, norm.weight, norm.eps)
    return F.layer_norm(input, shape, norm.weight, norm.bias, norm.eps)


def _turned(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = input.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(input.dtype)


Contestant = Callable[[Tensor, int], list[list[int]]]
