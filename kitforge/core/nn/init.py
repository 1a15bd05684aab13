"""Initial weights as a pure function of (seed, name, block of rows), whatever the layout that holds them.

Matrices and embeddings are normal with deviation 0.02, those that write into the residual stream divided by
sqrt(2 * layers) (Radford et al., 2019); norms start at one, biases at zero.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kitforge.foundation import seed as seeds

DEVIATION = 0.02
ROWS_PER_BLOCK = 256
RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


@torch.no_grad()
def initialise(model: nn.Module, num_layers: int, seed: int) -> None:
    """Fill every parameter of a decoder in place; tied parameters are filled once."""
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        residual = name.endswith(RESIDUAL_OUTPUTS)
        deviation = DEVIATION / (2 * num_layers) ** 0.5 if residual else DEVIATION
        parameter.copy_(normal_rows(seed, name, parameter.shape, 0, parameter.shape[0]) * deviation)


def normal_rows(seed: int, name: str, shape: torch.Size, start: int, stop: int) -> Tensor:
    """Rows start..stop-1 of the standard normal fp32 matrix called `name` of the given full shape [rows, ...]."""
    blocks = [torch.empty(0, *shape[1:])]
    for block in range(start // ROWS_PER_BLOCK, -(-stop // ROWS_PER_BLOCK)):
        first = block * ROWS_PER_BLOCK
        rows = min(ROWS_PER_BLOCK, shape[0] - first)
        values = torch.randn(rows, *shape[1:], generator=seeds.generator(seed, "init", name, block))
        blocks.append(values[max(start - first, 0) : stop - first])
    return torch.cat(blocks)
