"""Causal attention within packed sequences: as boundaries for torch's variable-length attention, or as a dense mask.

A dense mask of a batch has B * T * T elements, and torch computes nothing less under it. Variable-length flash
attention reads the boundaries (`cu_seqlens`), skips what is masked, and shares keys between grouped queries.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.autograd.recomputation import kept_operations

# What torch's flash attention computes.
_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


class PackedMask:
    """`cu_seqlens` int32 [sequences + 1]: where sequences begin among the tokens of all rows; no sequence has more than
    `max_length` tokens. A query sees itself and the `window` - 1 keys before it. `make_dense` gives the dense mask.
    `keys` are the two numbers of the keys where queries are the last tokens of each sequence alone."""

    def __init__(
        self,
        cu_seqlens: Tensor,
        max_length: int,
        window: int | None,
        make_dense: Callable[[], Tensor],
        keys: tuple[Tensor, int] | None = None,
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_length = max_length
        self.keys = (cu_seqlens, max_length) if keys is None else keys
        self.window = window
        self._make_dense = make_dense

    @functools.cached_property
    def dense(self) -> Tensor:
        """Boolean [B or 1, 1, queries, keys]."""
        return self._make_dense()


def dense_mask(mask: Tensor | PackedMask | None) -> Tensor | None:
    """The mask as a tensor."""
    return mask.dense if isinstance(mask, PackedMask) else mask


def find_boundaries(documents: Tensor) -> tuple[Tensor, int]:
    """`cu_seqlens` and `max_length` of documents [B, T], the document of each token, on the CPU.

    torch.compile makes a graph for each shape, so there are as many sequences as the next power of two, of which the
    last are empty, and the length is rounded up to a power of two.
    """
    rows, length = documents.shape
    if documents.numel() == 0:
        return torch.zeros(2, dtype=torch.int32), 1
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([rows * length])])
    longest = int(starts.diff().max())
    padded = torch.full((_power_of_two(len(starts) - 1) + 1,), rows * length, dtype=torch.int32)
    padded[: len(starts)] = starts
    return padded, min(_power_of_two(longest), length)


def row_boundaries(rows: int, length: int, device: torch.device) -> tuple[Tensor, int]:
    """The same of rows that are one sequence each, on the device."""
    return torch.arange(rows + 1, dtype=torch.int32, device=device) * length, length


def takes_packed(input: Tensor, head_dim: int) -> bool:
    """Whether attention on the device and in the dtype of `input` runs as variable-length flash attention."""
    is_dtype, is_dim = compute_dtype(input) in _DTYPES, head_dim % 8 == 0 and head_dim <= _MAX_HEAD_DIM
    return is_dtype and is_dim and _is_packed_device(input.device.type)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, mask: PackedMask, scale: float) -> Tensor:
    """See `AttentionKernel`. Queries and keys are [B, heads, T, head_dim] of the same sequences."""
    dtype, batch = compute_dtype(query), query.shape[0]
    # A view where heads lie behind tokens in memory, as a linear layer leaves them.
    tokens = [each.to(dtype).transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    boundaries = mask.cu_seqlens, mask.keys[0], mask.max_length, mask.keys[1]
    left = -1 if mask.window is None else mask.window - 1
    attend = functools.partial(
        _varlen_attn(), scale=scale, window_size=(left, 0), enable_gqa=query.shape[1] != key.shape[1]
    )
    mixed = kept_operations(attend, *tokens, *boundaries)
    return mixed.view(batch, query.shape[2], *mixed.shape[1:]).transpose(1, 2)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _is_packed_device(kind: str) -> bool:
    """Whether torch has the operation, with windows and grouped queries, for this kind of device."""
    return kind == "cuda" and _varlen_attn() is not None


@functools.cache
def _varlen_attn() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 (not in older versions)
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= set(known) else None
