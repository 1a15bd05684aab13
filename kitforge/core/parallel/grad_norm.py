"""The global gradient norm over all ranks and mixed layouts."""

from collections.abc import Mapping

import torch
from torch import Tensor

from kitforge.core.optim.grad_norm import ChunkNorms, global_norm
from kitforge.core.parallel import collectives
from kitforge.core.parallel.mesh import Mesh


def global_grad_norm(
    gradients: Mapping[str, Tensor | ChunkNorms], num_holders: Mapping[str, int], rows: Tensor, mesh: Mesh
) -> Tensor:
    """The Euclidean norm, 0-dim float64 and the same on every rank, of gradients that are complete on their pieces and
    of table rows, which live once and whose squares on this rank are `rows`.

    The squares of a piece count by one over `num_holders`, the ranks that hold it, so one sum over the whole world is
    the sum over all distinct elements, wherever they are: a tied tensor of two stages counts once.
    """
    alike: dict[int, list[Tensor | ChunkNorms]] = {}
    for name, gradient in gradients.items():
        alike.setdefault(num_holders[name], []).append(gradient)
    squares = rows.cpu().double()
    for num, members in alike.items():
        squares = squares + global_norm(members).cpu().double() ** 2 / num
    # Not the device of the gradients: a rank without gradients takes part too.
    device = torch.device(mesh.device_mesh.device_type)
    return collectives.all_reduce_(squares.to(device), mesh.world).sqrt()
