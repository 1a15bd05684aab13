"""Weight synchronisation: training ranks gather parameters and send them to the networks of inference ranks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.world import World


@torch.no_grad()
def sync_weights(
    parallel: ParallelModel | None, target: Mapping[str, Tensor] | None, receivers: Sequence[int], world: World
) -> None:
    """Copy the trained parameters to `target`, the whole parameters of a rank, in one order on all ranks.

    The ranks that train call this together with their model, and with a target where they want one too. So do those
    `receivers` that are beside them, without a model; the n-th of these gets its part from training rank n modulo
    their number, so that no single one sends it all. What is frozen is left as it is.
    """
    apart = [rank for rank in receivers if rank >= world.num_training]
    if parallel is None:
        assert target is not None
        sender = apart.index(world.rank) % world.num_training
        for parameter in (each for each in target.values() if each.requires_grad):
            collectives.receive_(parameter.detach(), sender)
        return
    own = apart[world.rank :: world.num_training]
    if not apart and target is None:
        return
    for name in parallel.union(name for name, each in parallel.parameters().items() if each.requires_grad):
        whole = parallel.full_tensor(name).contiguous()
        for rank in own:
            collectives.send(whole, rank)
        if target is not None:
            target[name].copy_(whole)
