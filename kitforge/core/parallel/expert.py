"""Expert parallelism: every rank has a part of the experts of each block, and the tokens come to them.

The ranks of data x shard x context are divided into groups of `expert` ranks. The router of each rank routes its own
tokens. The rows of their choices, in the order of the experts, go to the ranks of these experts by an all-to-all, a
grouped product is computed over what arrived, and another all-to-all brings the results back, where they are weighted
and added as on one rank (Lepikhin et al., 2021, "GShard"). Nothing is dropped and nothing is padded: an exchange of
counts comes first.

All ranks of a group take part in each pass of each mixture, also those without a token and those whose experts no
token chose: their products have no rows, and their gradients are zero. The backward pass of an exchange is the exchange
back, so an expert has the gradient of all tokens of its group, and the sum over `expert_data` makes it that of the
batch. R rows, E experts.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kitforge.core.kernels.autograd.recomputation import kept
from kitforge.core.kernels.moe_permute.reference import Permutation, permutation_of
from kitforge.core.nn.moe import Experts
from kitforge.core.parallel import collectives
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.sharding import EXPERT
from kitforge.foundation.host_values import EXPERT_SKEW, host_list


def exchange_experts(model: nn.Module, mesh: Mesh) -> None:
    """Let the experts of a model, of whose matrices this rank has its part, compute the tokens of all their ranks."""
    group = mesh.group(EXPERT)
    assert group is not None
    for module in model.modules():
        if isinstance(module, Experts):
            # Set past nn.Module's own bookkeeping, which takes attributes for modules and parameters.
            module.__dict__["products"] = TokenExchange(module, module.products, group)


class TokenExchange:
    """`Experts.products` of the experts of all ranks: rows go to the ranks of their experts and come back."""

    def __init__(
        self, experts: Experts, products: Callable[[Tensor, Tensor], Tensor], group: dist.ProcessGroup
    ) -> None:
        """`products` are those of this rank's experts."""
        self._experts = experts
        self._products = products
        self._group = group
        self._ranks = collectives.group_size(group)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        """See `Experts.products`: rows [R, dim], ends [E] of the experts of all ranks."""
        arriving = kept(_exchange_counts, ends, self._group)
        last = ends.view(self._ranks, -1)[:, -1].long()
        # The rows sent to each rank, and received from each, in one wait for the device.
        counts = torch.stack([last.diff(prepend=last.new_zeros(1)), arriving.sum(1)])
        usual = len(rows) // self._ranks
        arrive = int(usual * min(EXPERT_SKEW.get(), self._ranks))
        sent, received = host_list(counts, [[usual] * self._ranks, [arrive] * self._ranks])
        own = len(ends) // self._ranks
        # What arrives is in the order of the ranks that sent it, and of each in the order of the experts.
        expert_of_row = torch.arange(own, device=rows.device).repeat(self._ranks)
        expert_of_row = expert_of_row.repeat_interleave(arriving.flatten(), output_size=sum(received))
        order = permutation_of(expert_of_row.unsqueeze(1), own)
        arrived = collectives.all_to_all_autograd(rows[: sum(sent)], received, sent, self._group)
        permute = self._experts.kernels.moe_permute
        found = permute(self._products(permute(arrived, order), order.ends), _inverse(order))
        results = collectives.all_to_all_autograd(found, sent, received, self._group)
        dropped = len(rows) - len(results)
        return torch.cat([results, results.new_zeros(dropped, results.shape[1])]) if dropped else results


def _exchange_counts(ends: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of each rank of the group, the rows that it sends to each of this rank's experts: int64 [ranks, E / ranks]."""
    counts = ends.long().diff(prepend=ends.new_zeros(1).long())
    # So small that two slices would rather hide the message of tokens, which follows.
    return collectives.exchange(counts.view(collectives.group_size(group), -1), group, 0, 0, in_turn=False)


def _inverse(order: Permutation) -> Permutation:
    """The way back of an order of rows with one expert each."""
    return Permutation(positions=order.tokens.unsqueeze(1), tokens=order.positions.flatten(), ends=order.ends)
