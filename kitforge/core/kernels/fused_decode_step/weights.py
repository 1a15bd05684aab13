"""What a stack of blocks is to `fused_decode_step`: its weights, by name, and its sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """The weights of a block; None where it has none. Without a gate it is a GELU between `up` and `down`, else a
    SwiGLU; norms without a bias are RMSNorm, those with one LayerNorm."""

    attention_norm: Tensor
    attention_norm_bias: Tensor | None
    query: Tensor
    query_bias: Tensor | None
    key: Tensor
    key_bias: Tensor | None
    value: Tensor
    value_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    attention_out_norm: Tensor | None
    attention_out_norm_bias: Tensor | None
    mlp_norm: Tensor
    mlp_norm_bias: Tensor | None
    gate: Tensor | None
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    mlp_out_norm: Tensor | None
    mlp_out_norm_bias: Tensor | None

    def tensors(self) -> list[Tensor | None]:
        """All of them, in order."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """Blocks of equal shapes, a norm and a head [vocab, dim]."""

    layers: tuple[BlockWeights, ...]
    scales: tuple[float, ...]  # of each layer's attention scores
    windows: tuple[int | None, ...]  # how many positions each layer sees; None: all
    norm: Tensor
    norm_bias: Tensor | None
    head: Tensor
    head_dim: int
    norm_eps: float
    qk_norm_eps: float
    interleaved_rotary: bool
