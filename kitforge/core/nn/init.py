"""Initial weights as a pure function of (seed, name, block of rows), for every layout.

Matrices and embeddings are normal with standard deviation 0.02, divided by sqrt(2 * layers) for outputs of residual
branches (Radford et al., 2019); norms start at one, biases at zero.

A network is built on the meta device first. torch's functions for that (`nn.Embedding` with its own init, `to_empty`)
import its compiler, which takes seconds of every start; the two functions here do not.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from kitforge.foundation import seed as seeds
from kitforge.foundation.host_values import is_fake
from kitforge.foundation.types import Region

INIT_STD = 0.02
ROWS_PER_BLOCK = 256
RESIDUAL_OUTPUTS = (
    *("attention.out.weight", "cross.out.weight", "mlp.down.weight"),
    *("mlp.experts.down", "mlp.shared.down.weight"),
)


def unfilled_embedding(num: int, dim: int) -> nn.Embedding:
    """An embedding with an uninitialized weight [num, dim]."""
    return nn.Embedding(num, dim, _weight=torch.empty(num, dim))


def materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate the tensors of a model on the meta device, uninitialized."""
    model._apply(lambda tensor: tensor.new_empty(tensor.shape, device=device))  # type: ignore[no-untyped-call]


@torch.no_grad()
def init_weights(
    parameters: Iterable[tuple[str, Tensor]],
    num_layers: int,
    seed: int,
    regions: Mapping[str, Region] | None = None,
    deviations: Mapping[str, float] | None = None,
) -> None:
    """Fill a language model's parameters in place, or the shards of them in `regions`. `deviations` are standard
    deviations of a family's own, by the end of a parameter's name."""
    for name, parameter in parameters:
        if is_fake(parameter):
            continue
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        residual = name.endswith(RESIDUAL_OUTPUTS)
        deviation = INIT_STD / (2 * num_layers) ** 0.5 if residual else INIT_STD
        deviation = next((own for end, own in (deviations or {}).items() if name.endswith(end)), deviation)
        region = Region.full(parameter.shape) if regions is None else regions[name]
        start, rows = region.offset[0], region.shape[0]
        values = normal_rows(seed, name, torch.Size(region.global_shape), start, start + rows)
        for dim in range(1, values.dim()):
            values = values.narrow(dim, region.offset[dim], region.shape[dim])
        parameter.copy_(values * deviation)


def normal_rows(seed: int, name: str, shape: torch.Size, start: int, stop: int) -> Tensor:
    """Rows start..stop-1 of the standard normal fp32 matrix called `name` of the given full shape [rows, ...]."""
    blocks = [torch.empty(0, *shape[1:])]
    # The first dim of three is that of experts, whose matrices are large.
    size = 1 if len(shape) == 3 else ROWS_PER_BLOCK
    for block in range(start // size, -(-stop // size)):
        first = block * size
        rows = min(size, shape[0] - first)
        values = torch.randn(rows, *shape[1:], generator=seeds.generator(seed, "init", name, block))
        blocks.append(values[max(start - first, 0) : stop - first])
    return torch.cat(blocks)
