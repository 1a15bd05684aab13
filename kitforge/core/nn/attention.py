"""The attention layer of a block. Masks and the key-value cache are up to the `Attend` of its context."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.kernels.attention.reference import AttentionKernel, probabilities
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.context import AttentionSpec, Context, DropoutKey, dropout, dropout_name_key
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.norm import Norm
from kitforge.core.nn.positions import PositionEncoding
from kitforge.foundation.config import check, check_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Shape and options of one attention layer."""

    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None  # QK-norm: RMSNorm of query and key heads before rotation; None: off
    scale: float | None = None  # None: head_dim ** -0.5
    window: int | None = None
    dropout: float = 0.0  # of the attention weights
    interleaved_rotary: bool = False
    rotary: int | None = 0  # which of the network's rotations; None: no rotary positions in this layer (NoPE)

    def __post_init__(self) -> None:
        check_counts("model", {"dim": self.dim, "head_dim": self.head_dim, "sliding_window": self.window})
        check_counts("model", {"num_heads": self.num_heads})
        check(0 <= self.dropout < 1, "model.attention_dropout", self.dropout, "a probability less than 1")
        grouped = self.num_kv_heads > 0 and self.num_heads % self.num_kv_heads == 0
        check(grouped, "model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}")


class Attention(nn.Module):
    """Multi-head attention with grouped keys (Ainslie et al., 2023) over input [B, T, dim]."""

    def __init__(self, config: AttentionConfig, layer: int, kernels: Kernels, name: str = "") -> None:
        super().__init__()
        self.config = config
        self.query, self.key, self.value, self.out = projections(config, kernels)
        eps = config.qk_norm_eps
        self.query_norm = None if eps is None else Norm("rms", config.head_dim, eps, kernels)
        self.key_norm = None if eps is None else Norm("rms", config.head_dim, eps, kernels)
        common = config.head_dim**-0.5
        self.scale = common if config.scale is None else config.scale
        # A scale of its own multiplies the queries as a tensor: torch.compile needs a graph for each Python number.
        factor = torch.tensor(self.scale / common, dtype=torch.float64, device="cpu")
        self._factor = None if config.scale is None else factor
        self.spec = AttentionSpec(layer=layer, kernel=kernels.attention, scale=common, window=config.window)
        self._noise = dropout_name_key(f"{name}attention.{layer}")
        self.first_head = 0  # of the heads on this rank
        self._rotary = kernels.rotary

    def forward(
        self, input: Tensor, positions: PositionEncoding, context: Context, queries: Tensor | None = None
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]. `queries` [B, T, dim] are read in place of `input` where queries are made."""
        head_dim = self.config.head_dim
        query = split_heads(self.query(input if queries is None else queries), head_dim)
        key, value = [split_heads(layer(input), head_dim) for layer in (self.key, self.value)]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if positions.rotary and self.config.rotary is not None:
            cos, sin = positions.rotary[self.config.rotary]
            query = self._rotary(query, cos, sin, self.config.interleaved_rotary)
            key = self._rotary(key, cos, sin, self.config.interleaved_rotary)
        if self._factor is not None:
            query = query * self._factor
        slopes = positions.slopes
        if slopes is not None:
            slopes = slopes[self.first_head : self.first_head + query.shape[1]]
        spec = self.spec
        if self.config.dropout > 0.0 and context.dropout is not None:
            kernel = dropping_kernel(self.config.dropout, self._noise, context.dropout)
            # Only a cache reads the layer, never with dropout; reading it here would cost torch.compile a graph per
            # layer.
            spec = replace(spec, layer=-1, kernel=kernel, slopes=slopes, bias=positions.bias)
        elif slopes is not None or positions.bias is not None:
            spec = replace(spec, slopes=slopes, bias=positions.bias)
        mixed = context.attend(query, key, value, spec)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output


def projections(config: AttentionConfig, kernels: Kernels) -> tuple[Linear, Linear, Linear, Linear]:
    """The layers of queries, keys, values and the output of an attention layer."""
    dim, query_dim, kv_dim = config.dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    query, key, value = (
        Linear(dim, width, bias=config.qkv_bias, kernels=kernels) for width in (query_dim, kv_dim, kv_dim)
    )
    return query, key, value, Linear(query_dim, dim, bias=config.out_bias, kernels=kernels)


def split_heads(features: Tensor, head_dim: int) -> Tensor:
    """[B, T, heads * head_dim] -> [B, heads, T, head_dim]; a shard of the weights has fewer heads."""
    # Of a batch without rows torch infers no size.
    batch, length, width = features.shape
    return features.view(batch, length, width // head_dim, head_dim).transpose(1, 2)


def dropping_kernel(rate: float, name: Tensor, dropout_key: DropoutKey) -> AttentionKernel:
    """The definition of `attention`, with dropout of the attention weights."""

    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        weights = probabilities(query, key, **options)
        kept = dropout(weights, rate, name, dropout_key)
        return kept @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    return kernel
