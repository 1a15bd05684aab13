"""One layer of a decoder: attention and an MLP, each with pre-norm and residual connection."""

import functools
from dataclasses import dataclass

from torch import Tensor, nn

from kitforge.core.kernels.autograd.recomputation import unread
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.attention import Attention, AttentionConfig
from kitforge.core.nn.context import Context, dropout, dropout_name_key
from kitforge.core.nn.cross_attention import CrossAttention
from kitforge.core.nn.init import unfilled_embedding
from kitforge.core.nn.mlp import MLP, MLPConfig
from kitforge.core.nn.moe import MoE, MoEConfig
from kitforge.core.nn.norm import Norm, NormKind
from kitforge.core.nn.positions import PositionEncoding
from kitforge.foundation.config import check

DROPOUT = "a probability less than 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """One pre-norm layer; with `sandwich` the output of each branch is normalized too (GLM-4-0414).

    A query layer (Zeng et al., 2021) normalizes its input first, its residual connections included, and reads its
    queries from a learned table of positions. With `post_norm` each norm stands behind its branch and the residual
    connection, as published first (Vaswani et al., 2017).
    """

    attention: AttentionConfig
    mlp: MLPConfig | MoEConfig
    norm: NormKind
    norm_eps: float
    sandwich: bool = False
    dropout: float = 0.0  # of each branch's output
    cross: AttentionConfig | None = None  # cross-attention to the output of an encoder, between attention and MLP
    post_norm: bool = False
    query_positions: int | None = None  # the rows of a query layer's table; None: no query layer

    def __post_init__(self) -> None:
        check(0 <= self.norm_eps < 1, "model.norm_eps", self.norm_eps, "0 or more, less than 1")
        check(0 <= self.dropout < 1, "model.residual_dropout", self.dropout, DROPOUT)

    @property
    def num_experts(self) -> int:
        """The experts of a mixture; 0 for an MLP."""
        return self.mlp.experts.num_experts if isinstance(self.mlp, MoEConfig) else 0


class Block(nn.Module):
    """`x += attention(norm(x)); x += cross(norm(x)); x += mlp(norm(x))` over x [B, T, dim], the second in decoders with
    an encoder. `name` tells its dropout from that of another stack's blocks."""

    def __init__(self, config: BlockConfig, layer: int, kernels: Kernels, name: str = "") -> None:
        super().__init__()
        dim = config.attention.dim
        norm = functools.partial(Norm, config.norm, dim, config.norm_eps, kernels)
        queries = config.query_positions
        self.input_norm = None if queries is None else norm()
        self.query_position = None if queries is None else unfilled_embedding(queries, dim)
        self.attention_norm = norm()
        self.attention = Attention(config.attention, layer, kernels, name)
        self.attention_out_norm = norm() if config.sandwich else None
        self.cross_norm = norm() if config.cross is not None else None
        self.cross = None if config.cross is None else CrossAttention(config.cross, layer, kernels)
        self.mlp_norm = norm()
        self.mlp = MoE(config.mlp, kernels) if isinstance(config.mlp, MoEConfig) else MLP(config.mlp, kernels)
        self.mlp_out_norm = norm() if config.sandwich else None
        self._rate, self._is_post_norm = config.dropout, config.post_norm
        self._attention_noise = dropout_name_key(f"{name}attention_out.{layer}")
        self._cross_noise = dropout_name_key(f"{name}cross_out.{layer}")
        self._mlp_noise = dropout_name_key(f"{name}mlp_out.{layer}")

    def forward(self, hidden: Tensor, positions: PositionEncoding, context: Context) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        if self._is_post_norm:
            branch = self.attention(hidden, positions, context)
            hidden = self.attention_norm.unrounded(hidden + self._finish(branch, None, self._attention_noise, context))
            return self.mlp_norm.unrounded(hidden + self._finish(self.mlp(hidden), None, self._mlp_noise, context))
        queries = None
        if self.input_norm is not None and self.query_position is not None:
            hidden = self.input_norm.unrounded(hidden)
            queries = self.query_position(positions.indices)
        branch = self.attention(self.attention_norm(hidden), positions, context, queries)
        branch = self._finish(branch, self.attention_out_norm, self._attention_noise, context)
        if self.cross is not None and self.cross_norm is not None:
            hidden, normal = self.cross_norm.add(hidden, branch)
            branch = self._finish(self.cross(normal, context), None, self._cross_noise, context)
        hidden, normal = self.mlp_norm.add(hidden, branch)
        branch = self.mlp(normal, context) if isinstance(self.mlp, MoE) else self.mlp(normal)
        # Only the sum goes on, and its gradient does not read what is added.
        return hidden + unread(self._finish(branch, self.mlp_out_norm, self._mlp_noise, context))

    def _finish(self, branch: Tensor, norm: Norm | None, name: Tensor, context: Context) -> Tensor:
        branch = branch if norm is None else norm(branch)
        return dropout(branch, self._rate, name, context.dropout)
