"""Keys and values of the tokens so far, and the attention over them.

B batch, S slots, T new tokens. Rows are padded on the left, so that all rows write the same slots.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.nn.causal_lm import Geometry
from kitforge.core.nn.context import AttentionSpec, causal_mask


@final
class ContiguousCache:
    """One slab [B, kv_heads, S, head_dim] a layer for keys and one for values. Is an `Attend`.

    `starts` [B] is the first slot of each row that holds a token; slots before it are padding and never seen.
    """

    def __init__(self, geometry: Geometry, starts: Tensor, num_slots: int, dtype: torch.dtype) -> None:
        self.starts = starts
        self.num_slots = num_slots
        self.used = 0
        self._has_padding = bool(starts.any())
        self._keys: list[Tensor | None] = [None] * geometry.num_layers
        self._values: list[Tensor | None] = [None] * geometry.num_layers
        self._dtype = dtype
        self._masks: dict[int | None, Tensor | None] = {}

    def begin(self, num_tokens: int) -> Tensor:
        """Make room for that many tokens a row; returns their positions [B, T] (0 for padding)."""
        self._first, self.used = self.used, self.used + num_tokens
        self._masks = {}
        slots = torch.arange(self._first, self.used, device=self.starts.device)
        return (slots.unsqueeze(0) - self.starts.unsqueeze(1)).clamp(min=0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Write the new keys and values, attend to all that are seen; see `Attend`."""
        # Made when the first key comes, since a rank may hold only some of the heads.
        keys = self._keys[spec.layer] = self._slab(self._keys[spec.layer], key)
        values = self._values[spec.layer] = self._slab(self._values[spec.layer], value)
        keys[:, :, self._first : self.used] = key
        values[:, :, self._first : self.used] = value
        if spec.window not in self._masks:
            self._masks[spec.window] = self._mask(query.shape[2], spec.window)
        return spec.kernel(
            query,
            keys[:, :, : self.used].to(query.dtype),
            values[:, :, : self.used].to(query.dtype),
            mask=self._masks[spec.window],
            causal=False,
            scale=spec.scale,
        )

    def _slab(self, slab: Tensor | None, like: Tensor) -> Tensor:
        if slab is not None:
            return slab
        return like.new_zeros((*like.shape[:2], self.num_slots, like.shape[3]), dtype=self._dtype)

    def _mask(self, num_queries: int, window: int | None) -> Tensor | None:
        """[B or 1, 1, T, slots used]; None when every query sees every slot."""
        reaches_back = window is not None and window < self.used
        if num_queries == 1 and not self._has_padding and not reaches_back:
            return None
        slots = torch.arange(self.used, device=self.starts.device)
        queries = slots[self._first :]
        mask = causal_mask(queries, slots, window).unsqueeze(0)
        if self._has_padding:
            # A padding query may see itself, so that no row of the softmax is empty.
            itself = queries.unsqueeze(1) == slots.unsqueeze(0)
            mask = (mask & (slots >= self.starts.unsqueeze(1)).unsqueeze(1)) | itself
        return mask.unsqueeze(1)
