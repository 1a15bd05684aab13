"""Context parallelism by keys: every rank has chunks of each row, and in attention the keys that their queries see.

Ranks send one another the keys and values of the chunks that are seen, in one message before attention; its backward
pass sends their gradients back, where those of all ranks are summed. Each chunk of a row is attended by itself: its
queries are the last of its keys, so positions, windows and slopes are as they are in a whole row.
B batch, T padded length of rows, t tokens of a row on a rank.
"""

import functools
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.attention.packed_mask import PackedMask, find_boundaries, row_boundaries, takes_packed
from kitforge.core.kernels.attention.reference import Mask
from kitforge.core.nn.context import AttentionSpec, RowAttend, causal_mask
from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import CHUNKS
from kitforge.core.parallel.row_cut import RowCut
from kitforge.foundation.device import copy_to
from kitforge.foundation.host_values import is_fake


class KeyGather(RowAttend):
    """Attention of a rank's tokens [B, heads, t, head_dim] over the keys and values of whole rows."""

    def __init__(
        self,
        cut: RowCut,
        numbers: NDArray[np.int64],
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        is_causal: bool,
        drops: bool,
    ) -> None:
        """`numbers` [B, T] are the documents of the cut. With `drops` all queries are attended at once, since
        dropout of the weights counts keys from the first of a row."""
        self._cut, self._host_documents, self._group = cut, torch.from_numpy(numbers), group
        self._is_causal, self._drops = is_causal, drops
        rank, (batch, length) = collectives.group_rank(group), numbers.shape
        # [B, CHUNKS]
        own = np.nonzero(cut.owners == rank)[1].reshape(batch, CHUNKS)
        self._own, self._size = own, (size := length // cut.owners.shape[1])
        is_same = bool((own == own[:1]).all())
        self._groups = [slice(0, batch)] if is_same else [slice(row, row + 1) for row in range(batch)]
        self.host_indices = (torch.from_numpy(own).unsqueeze(2) * size + torch.arange(size)).flatten(1)  # [B, t]
        self.indices, self._documents = copy_to(self.host_indices, device), copy_to(self._host_documents, device)
        # Every rank sends its chunks by receiving rank, row and index.
        sent = [np.nonzero(needs[np.arange(batch)[:, None], own].ravel())[0] for needs in cut.needs]
        received = [np.argwhere((cut.owners == other) & cut.needs[rank]) for other in range(len(cut.needs))]
        self._num_sent, self._num_received = [*map(len, sent)], [*map(len, received)]
        order = np.zeros(cut.owners.shape, dtype=np.int64)  # a chunk that is not seen is masked, whatever it holds
        order[tuple(np.concatenate(received).T)] = np.arange(sum(self._num_received))
        self._sent = copy_to(torch.from_numpy(np.concatenate(sent)), device)
        self._order = copy_to(torch.from_numpy(order).flatten(), device)
        # The rank of a chunk, and the number of its chunks before it.
        ranked = np.argsort(cut.owners, axis=1, kind="stable").argsort(axis=1)
        whole = (ranked // CHUNKS * batch + np.arange(batch)[:, None]) * CHUNKS + ranked % CHUNKS
        self._whole = copy_to(torch.from_numpy(whole).flatten(), device)
        self._masks: dict[tuple[int, int, int | None], Tensor | PackedMask] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        # Which keys are seen differs from batch to batch, and the compiler would make a graph for each.
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._attend)(query, key, value, spec)  # type: ignore[no-untyped-call, no-any-return]
        return self._attend(query, key, value, spec)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        whole = self._gathered(torch.cat([key, value], dim=-1))
        keys, values = (each.to(query.dtype) for each in whole.chunk(2, dim=-1))
        every = slice(None)
        if self._drops:
            distances = torch.arange(keys.shape[2], device=keys.device) - self.indices.unsqueeze(2)
            mask: Any = functools.partial(self._dense, every, every, every)
            return spec.attend(query, keys, values, mask=mask, causal=False, distances=distances)
        rows = []
        for group in self._groups:
            mixed = []
            for number in range(CHUNKS):
                tokens, span = self._span(group, number, spec.window)
                own = query[group, :, tokens]
                mask = functools.partial(self._mask, own, group, tokens, span)
                seen = (each[group, :, span] for each in (keys, values))
                mixed.append(spec.attend(own, *seen, mask=mask, causal=False))
            rows.append(torch.cat(mixed, dim=2))
        return torch.cat(rows)

    def _gathered(self, heads: Tensor) -> Tensor:
        """[B, kv_heads, t, features] of all ranks -> [B, kv_heads, T, features]; zero or another key where none of this
        rank's queries sees one."""
        batch, num_heads, _, width = heads.shape
        chunks = heads.transpose(1, 2).reshape(batch * CHUNKS, -1).index_select(0, self._sent)
        found = collectives.all_to_all_autograd(chunks, self._num_received, self._num_sent, self._group, keeps=False)
        return found.index_select(0, self._order).view(batch, -1, num_heads, width).transpose(1, 2)

    def _span(self, rows: slice, number: int, window: int | None) -> tuple[slice, slice]:
        """The tokens of a chunk on this rank, in rows where it has one index, and the span of their keys."""
        own, size = self._own[rows, number : number + 1], self._size
        first = int(np.take_along_axis(self._cut.firsts[rows], own, 1).min())
        last = int(np.take_along_axis(self._cut.lasts[rows], own, 1).max())
        first = first if window is None else max(first, int(own[0, 0]) * size + 1 - window)
        return slice(number * size, (number + 1) * size), slice(first, last)

    def _mask(self, query: Tensor, rows: slice, tokens: slice, span: slice, window: int | None) -> Mask:
        """That of a chunk, made once for all layers of a window."""
        key = rows.start, tokens.start, window
        if key not in self._masks:
            dense = functools.partial(self._dense, rows, tokens, span, window)
            if self._is_causal and takes_packed(query, query.shape[-1]):
                own, keys = packed_boundaries(self._host_documents[rows, span], self._size, query.device)
                self._masks[key] = PackedMask(*own, window, dense, keys)
            else:
                self._masks[key] = dense()
        return self._masks[key]

    def _dense(self, rows: slice, tokens: slice, span: slice, window: int | None) -> Tensor:
        """Boolean [rows, 1, queries, keys]."""
        documents, own = self._documents[rows], self.indices[rows, tokens]
        seen = documents.gather(1, own).unsqueeze(2) == documents[:, span].unsqueeze(1)
        if self._is_causal:
            seen &= causal_mask(own, torch.arange(documents.shape[1], device=own.device)[span], window)
        return seen.unsqueeze(1)

    def joined(self, output: Tensor) -> Tensor:
        """The outputs [B, t, ...] of all ranks as whole rows [B, T, ...], with their gradients."""
        whole = collectives.all_gather_autograd(output, self._group, 0)
        chunks = whole.reshape(len(self._whole), -1).index_select(0, self._whole)
        # No view, of which `fully_shard` would warn.
        rows: Tensor = torch.ops.aten._unsafe_view(chunks, (output.shape[0], -1, *output.shape[2:]))
        return rows

    def before(self, totals: Tensor) -> Tensor:
        """Of totals [B, CHUNKS, ...] of this rank's chunks, the sums of those that are before each of them in its
        row."""
        whole = self.joined(totals)
        own = copy_to(torch.from_numpy(self._own), totals.device)
        return (whole.cumsum(1) - whole)[torch.arange(len(own), device=own.device).unsqueeze(1), own]


def packed_boundaries(
    documents: Tensor, queries: int, device: torch.device
) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """`cu_seqlens` and `max_length` on the device of so many queries of each row, the last ones, and of all keys, for
    the documents [B, K] of keys, on the CPU. A sequence whose tokens are no queries has none."""
    rows, length = documents.shape
    if is_fake(documents):
        return row_boundaries(rows, queries, device), row_boundaries(rows, length, device)
    keys, longest = find_boundaries(documents)
    before = keys // length * queries + (keys % length - (length - queries)).clamp(min=0)
    return (copy_to(before, device), min(longest, queries)), (copy_to(keys, device), longest)
