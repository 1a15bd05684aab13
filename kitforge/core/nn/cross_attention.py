"""Cross-attention of a decoder to the output of an encoder. B batch, S source length, T target length."""

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.attention import AttentionConfig, dropping_kernel, projections, split_heads
from kitforge.core.nn.context import Context, dropout_name_key
from kitforge.foundation.errors import ModelError


class CrossAttention(nn.Module):
    """Queries of the stream [B, T, dim] attend to keys and values of `context.source`, which a cache keeps."""

    def __init__(self, config: AttentionConfig, layer: int, kernels: Kernels) -> None:
        super().__init__()
        self.config = config
        self.query, self.key, self.value, self.out = projections(config, kernels)
        self.scale = config.head_dim**-0.5 if config.scale is None else config.scale
        self._layer = layer
        self._kernel = kernels.attention
        self._noise = dropout_name_key(f"cross.{layer}")

    def forward(self, input: Tensor, context: Context) -> Tensor:
        """[B, T, dim] -> [B, T, dim]."""
        source, head_dim = context.source, self.config.head_dim
        kept = None if source is None else source.keys.get(self._layer)
        if source is None or (kept is None and source.states is None):
            raise ModelError(
                "a decoder with cross-attention needs a source", fix="pass Context(source=EncoderInput(...))"
            )
        query = split_heads(self.query(input), head_dim)
        if kept is None:
            states = source.states
            kept = split_heads(self.key(states), head_dim), split_heads(self.value(states), head_dim)
            if source.keeps_keys:
                source.keys[self._layer] = kept
        kernel, dropout_key = self._kernel, context.dropout
        if dropout_key is not None and self.config.dropout > 0.0:
            kernel = dropping_kernel(self.config.dropout, self._noise, dropout_key)
        mask, documents = None, source.documents
        if documents is not None:
            # [B, T or 1, S]: a token attends to the source of its own document; padding without one to anything.
            own = torch.zeros_like(documents[:, :1]) if context.documents is None else context.documents
            seen = documents.unsqueeze(1) == own.unsqueeze(2)
            mask = (seen | ~seen.any(dim=-1, keepdim=True)).unsqueeze(1)
        mixed = kernel(query, *kept, mask=mask, causal=False, scale=self.scale)
        output: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return output
