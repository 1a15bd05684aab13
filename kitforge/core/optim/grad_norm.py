"""The global gradient norm on one rank; the sum over ranks is up to `core.parallel`."""

from collections.abc import Sequence

import torch
from torch import Tensor

# On CPU torch sums fp32 squares sequentially on one thread, with an error of 2e-5 over tens of millions of them. Norms
# of chunks of this size are accurate and cost hardly more. Dot products on all threads are faster on an idle machine
# (10 ms, not 17, for 42M elements), but twenty times slower when another process holds one of the cores.
CHUNK_ELEMENTS = 2**16


@torch.no_grad()
def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of `gradients`, on one device: 0-dim, fp64 if any of them is, else fp32."""
    if not gradients:
        return torch.zeros(())
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    chunks = list(gradients)
    if chunks[0].device.type == "cpu":
        chunks = [chunk for gradient in gradients for chunk in torch.split(gradient.reshape(-1), CHUNK_ELEMENTS)]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(chunks, 2, dtype)))
    return norm
