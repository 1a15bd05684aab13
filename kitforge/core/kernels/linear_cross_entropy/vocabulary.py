"""What the losses over a vocabulary share: chunks of logits and shards of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.triton.ops import triton_op
from kitforge.foundation.errors import ModelError

# Bytes of logits of one chunk. On a CPU: enough for full speed of the products, few enough for its caches.
CHUNK_BYTES = 32 * 2**20
# On an accelerator: with a vocabulary of 2**17 in bfloat16 a product has 4096 rows, which its matrix units need. Each
# chunk also reads and writes the sum of the gradients of the weight in fp32, as many bytes as these.
ACCELERATOR_CHUNK_BYTES = 2**30
# Matrix units take this many rows of a product at a time.
_TILE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """Marks `weight` as a vocabulary-parallel shard, with the collective that gathers the results of all shards."""

    first: int  # the vocabulary index of the first row
    max_rows: int  # rows of the largest shard, so that all ranks make as many exchanges
    gather: Callable[[Tensor], Tensor]  # all-gathers a tensor, stacked in a new first dim


def chunks(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> list[slice]:
    """Slices of rows whose logits [rows, width] have about as many bytes as a chunk on that device."""
    num_bytes = CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES
    rows = max(1, num_bytes // (max(width, 1) * dtype.itemsize))
    rows -= rows % _TILE_ROWS if rows > _TILE_ROWS else 0
    return [slice(start, start + rows) for start in range(0, num_rows, rows)]


def exact_logits(hidden: Tensor, weight: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Logits [rows, vocab] of the references, in fp32 at least. Raises ModelError for a shard."""
    if shard is not None:
        raise ModelError("the reference of a loss takes no shard of the vocabulary", got="a shard", expected="None")
    logits = functional.linear(hidden, weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def merge_statistics(statistics: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-probs of the targets, the entropies and the logsumexps [rows], from the statistics [shards, 4, rows].

    Those of a shard are, by row: the maximum m of the logits x, the sum of exp(x - m), the sum of exp(x - m) (x - m),
    and the logit of the target, -inf in the shards that do not hold it.
    """
    highest, sums, products, targets = statistics.unbind(1)
    top = highest.amax(dim=0)
    below = torch.where(sums > 0, highest - top, 0)
    total = (sums * below.exp()).sum(dim=0)
    normalizers = total.log() + top
    mean = ((products + sums * below) * below.exp()).sum(dim=0) / total
    return targets.amax(dim=0) - normalizers, total.log() - mean, normalizers


def add_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """`total += gradient.T @ hidden`, fused where the dtypes and the device allow."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), hidden)
    elif total.is_cuda and total.dtype == torch.float32:
        _add_wide_product(total, gradient, hidden)
    else:
        total += gradient.t() @ hidden


@triton_op("kitforge::add_wide_product", mutates_args=("total",))
def _add_wide_product(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    """The same of a total in fp32 and factors in half precision, whose product is neither rounded nor written."""
    torch.addmm(total, gradient.t(), hidden, out_dtype=total.dtype, out=total)


@_add_wide_product.register_fake
def _(total: Tensor, gradient: Tensor, hidden: Tensor) -> None:
    del total, gradient, hidden
