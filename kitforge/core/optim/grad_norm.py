"""The global gradient norm on one rank; the sum over ranks is up to `core.parallel`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.foundation.host_values import is_fake

# On CPU torch sums fp32 squares sequentially on one thread, with an error of 2e-5 over tens of millions of them. Norms
# of chunks of this size are accurate and cost hardly more. Dot products on all threads are faster on an idle machine
# (10 ms, not 17, for 42M elements), but twenty times slower when another process holds one of the cores.
CHUNK_ELEMENTS = 2**16


@dataclass(frozen=True, slots=True)
class ChunkNorms:
    """Stands for a gradient that is not there any more: the norms [chunks] of its parts."""

    norms: Tensor


def global_norm(gradients: Sequence[Tensor | ChunkNorms]) -> Tensor:
    """The Euclidean norm over all elements of `gradients`, on one device: 0-dim, fp64 if any of them is, else fp32. It
    has the same bits if some of them are `ChunkNorms`."""
    if not gradients:
        return torch.zeros(())
    here = [each for each in gradients if not isinstance(each, ChunkNorms)]
    if len(here) == len(gradients):
        norms = chunk_norms(here)
    else:
        parts = [each.norms if isinstance(each, ChunkNorms) else chunk_norms([each]) for each in gradients]
        norms = torch.cat([each.to(parts[0].device) for each in parts])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


@torch.no_grad()
def chunk_norms(gradients: Sequence[Tensor]) -> Tensor:
    """The norms [chunks] of the chunks of gradients, in at least fp32 also where these are in half precision."""
    dtype = torch.float64 if torch.float64 in {gradient.dtype for gradient in gradients} else torch.float32
    chunks = list(gradients)
    # Of a traced step, whose norm has no value, the chunks would be most of the time.
    if chunks[0].device.type == "cpu" and not is_fake(chunks[0]):
        chunks = [chunk for gradient in gradients for chunk in torch.split(gradient.reshape(-1), CHUNK_ELEMENTS)]
    return torch.stack(torch._foreach_norm(chunks, 2, dtype))
