"""All collectives. Each function is the identity if its group is None.

The docstrings of differentiable collectives state their backward pass, where mistakes are silent. A recomputed block
keeps what they reduce or exchange, which is a shard or joins the stream; it gathers again, as a gathered tensor takes
the memory of all shards.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.recomputation import kept
from kitforge.core.parallel.turns import communicate

Group = dist.ProcessGroup | None
# torch 2.13 gave two collectives new names and warns of the old ones.
_all_gather_single = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter_single = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)
MAX = dist.ReduceOp.MAX
# Bytes of one message of a broadcast, and of memory that it takes.
BROADCAST_BYTES = 64 * 2**20


def group_size(group: Group) -> int:
    """Ranks of the group."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    """This rank in the group."""
    return 0 if group is None else dist.get_rank(group)


def all_reduce_(input: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce in place over the ranks."""
    if group is not None:
        communicate(dist.all_reduce, input, op=op, group=group)
    return input


def start_all_reduce_(input: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start an in-place all-reduce; `wait` of the returned work finishes it."""
    work: dist.Work = dist.all_reduce(input, group=group, async_op=True)
    return work


def broadcast_(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Broadcast tensors from a rank of the group, by default its first, in place; small ones are coalesced."""
    dist._broadcast_coalesced(group, list(tensors), BROADCAST_BYTES, source)


def is_dry(group: Group) -> bool:
    """Whether the group is that of a plan, which sends nothing."""
    return group is not None and dist.get_backend(group) == "fake"


def all_gather_object(value: Any, group: Group, others_if_dry: Any = None) -> list[Any]:
    """The objects of all ranks, in rank order; in a plan the own one, and `others_if_dry` unless None."""
    if group is None or is_dry(group):
        return [value] if others_if_dry is None else [value, others_if_dry]
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_object(value: Any, group: Group) -> list[Any]:
    """The objects of all ranks, in rank order, on the first rank of the group; empty on the others."""
    if group is None:
        return [value]
    values: list[Any] | None = [None] * group_size(group) if group_rank(group) == 0 else None
    dist.gather_object(value, values, group=group, group_dst=0)
    return values or []


def broadcast_object(value: Any, group: Group, source: int = 0) -> Any:
    """The object of a rank of the group, by default its first."""
    if group is None or is_dry(group):
        return value
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def send(input: Tensor, rank: int) -> None:
    """Send a tensor to a rank of the world, which calls `receive_`."""
    with _message(input, dist.get_rank(), rank):
        dist.send(input, rank)


def start_send(input: Tensor, rank: int, group: dist.ProcessGroup) -> dist.Work:
    """Start to send a tensor to a rank of the world that is in the group; `wait` of the returned work finishes it."""
    with _message(input, dist.get_rank(), rank):
        work: dist.Work | None = dist.isend(input, rank, group=group)
    assert work is not None  # this rank is in the group
    return work


def receive_(input: Tensor, rank: int, group: Group = None) -> Tensor:
    """Receive a tensor from that rank, in place."""
    with _message(input, rank, dist.get_rank()):
        dist.recv(input, rank, group=group)
    return input


def _message(input: Tensor, sender: int, receiver: int) -> record_function:
    """A span of a profile, in which gloo's own has neither ranks nor size."""
    return record_function(f"kitforge message {sender}>{receiver} {input.numel()}")


def all_gather(input: Tensor, group: Group, dim: int, *, in_turn: bool = True) -> Tensor:
    """The tensors of all ranks, of equal shapes, concatenated along `dim`. Not differentiable. `in_turn`: see
    `communicate`."""
    if group is None:
        return input
    ranks = group_size(group)
    input = input.contiguous()
    chunks = input.new_empty((ranks, *input.shape))
    flat = chunks.view(ranks * input.shape[0], *input.shape[1:])
    communicate(_all_gather_single, flat, input, group=group, in_turn=in_turn)
    joined = chunks.movedim(0, dim).contiguous()
    # Memory of its own to whoever gets it: `fully_shard` warns of a module that returns a view.
    shape = (*input.shape[:dim], ranks * input.shape[dim], *input.shape[dim + 1 :])
    whole: Tensor = torch.ops.aten._unsafe_view(joined, shape)
    return whole


def reduce_scatter(input: Tensor, group: Group, dim: int) -> Tensor:
    """This rank's shard along `dim`, whose size the degree divides, of the sum over ranks. Not differentiable."""
    if group is None:
        return input
    ranks = group_size(group)
    shape = (*input.shape[:dim], ranks, input.shape[dim] // ranks, *input.shape[dim + 1 :])
    chunks = input.reshape(shape).movedim(dim, 0).contiguous()
    own = torch.empty_like(chunks[0])
    communicate(_reduce_scatter_single, own, chunks.view(ranks * own.shape[0], *own.shape[1:]), group=group)
    return own


def all_to_all(input: Tensor, received: Sequence[int], sent: Sequence[int], group: Group) -> Tensor:
    """Send `sent[r]` rows to rank r, in order, and receive `received[r]` rows from it. Not differentiable."""
    if group is None:
        return input
    output = input.new_empty((sum(received), *input.shape[1:]))
    communicate(dist.all_to_all_single, output, input.contiguous(), list(received), list(sent), group=group)
    return output


def all_to_all_autograd(
    input: Tensor, received: Sequence[int], sent: Sequence[int], group: Group, *, keeps: bool = True
) -> Tensor:
    """`all_to_all`; backward: the rows of the gradient back to where they came from. Without `keeps` a recomputed block
    receives them again, as it gathers again."""
    if group is None:
        return input
    rows = tuple(received), tuple(sent)
    run = partial(kept, all_to_all) if keeps else all_to_all
    return _apply(input, lambda own: run(own, *rows, group), lambda grad: all_to_all(grad, *rows[::-1], group))


def exchange(input: Tensor, group: Group, split: int, joined: int, *, in_turn: bool = True) -> Tensor:
    """This rank's part along dim `split`, whose size the degree divides, of the tensors of all ranks, concatenated
    along dim `joined`. Not differentiable. `in_turn`: see `communicate`."""
    if group is None:
        return input
    sent, received = _parts(input, group_size(group), split)
    communicate(dist.all_to_all_single, received, sent, group=group, in_turn=in_turn)
    return received.movedim(0, joined).flatten(joined, joined + 1)


def _parts(input: Tensor, ranks: int, split: int) -> tuple[Tensor, Tensor]:
    """What is sent to each rank [ranks, ...], and memory for what arrives from each."""
    shape = (*input.shape[:split], ranks, input.shape[split] // ranks, *input.shape[split + 1 :])
    sent = input.reshape(shape).movedim(split, 0).contiguous()
    # gloo writes scrambled values into memory that is not contiguous, as that of `empty_like` may be.
    return sent, torch.empty_like(sent, memory_format=torch.contiguous_format)


class Exchange:
    """An `exchange` whose message runs behind what is computed between `start` and `finish`. Backward: the exchange
    back, whose message runs from the backward pass of `finish` to that of `start`."""

    def __init__(self, group: dist.ProcessGroup, split: int, joined: int) -> None:
        self._group, self._split, self._joined = group, split, joined
        self._work: dist.Work | None = None

    def start(self, input: Tensor) -> Tensor:
        """Send; the result is for `finish` alone, and has no values before."""
        return _apply(
            input, lambda own: kept(self._sent, own, self._split), lambda grad: self._arrived(grad, self._split)
        )

    def finish(self, started: Tensor) -> Tensor:
        """Wait for the message; returns what `exchange` returns."""
        return _apply(
            started, lambda own: self._arrived(own, self._joined), lambda grad: self._sent(grad, self._joined)
        )

    def _sent(self, input: Tensor, split: int) -> Tensor:
        """Without a gradient: memory [ranks, ...] into which the parts arrive."""
        sent, received = _parts(input, group_size(self._group), split)
        self._work = dist.all_to_all_single(received, sent, group=self._group, async_op=True)
        return received

    def _arrived(self, received: Tensor, joined: int) -> Tensor:
        """Without a gradient: the parts, concatenated."""
        # A recomputation has what was kept, without a message.
        if self._work is not None:
            self._work.wait()
            self._work = None
        return received.movedim(0, joined).flatten(joined, joined + 1)


def exchange_autograd(input: Tensor, group: Group, split: int, joined: int) -> Tensor:
    """`exchange`; backward: the exchange back."""
    if group is None:
        return input
    return _apply(
        input, lambda own: kept(exchange, own, group, split, joined), lambda grad: exchange(grad, group, joined, split)
    )


def all_reduce_autograd(input: Tensor, group: Group) -> Tensor:
    """The sum over ranks on all of them; backward: the sum over ranks, each of which has a part of the gradient."""
    return input if group is None else _apply(input, lambda own: _sum(own, group), lambda grad: _sum(grad, group))


def all_gather_autograd(input: Tensor, group: Group, dim: int) -> Tensor:
    """`all_gather`; backward: `reduce_scatter`, as each rank computes a partial gradient of the whole."""
    if group is None:
        return input
    return _apply(input, lambda own: all_gather(own, group, dim), lambda grad: reduce_scatter(grad, group, dim))


def all_gather_replicated(input: Tensor, group: Group, dim: int) -> Tensor:
    """`all_gather`; backward: this rank's shard of the gradient, as all ranks compute the same from the whole."""
    if group is None:
        return input
    first, length = group_rank(group) * input.shape[dim], input.shape[dim]
    return _apply(input, lambda own: all_gather(own, group, dim), lambda grad: grad.narrow(dim, first, length))


def reduce_scatter_autograd(input: Tensor, group: Group, dim: int) -> Tensor:
    """`reduce_scatter` of partial sums; backward: `all_gather`."""
    if group is None:
        return input
    return _apply(input, lambda own: kept(reduce_scatter, own, group, dim), lambda grad: all_gather(grad, group, dim))


def all_reduce_fwd(input: Tensor, group: Group) -> Tensor:
    """The sum over ranks on all of them; backward: the identity, as all ranks use it alike."""
    return input if group is None else _apply(input, lambda own: kept(_sum, own, group), lambda grad: grad)


def copy_to_group(input: Tensor, group: Group) -> Tensor:
    """The identity; backward: the sum over ranks, as each computes something else from it."""
    if group is None:
        return input
    # No view, of which `fully_shard` would warn; nobody writes into what is shared.
    copy = torch.ops.aten._unsafe_view
    return _apply(input, lambda own: copy(own, own.shape), lambda grad: _sum(grad, group))


def _sum(input: Tensor, group: Group) -> Tensor:
    return all_reduce_(input.clone(memory_format=torch.contiguous_format), group)


def _apply(input: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _Differentiable.apply(input, run, back)  # type: ignore[no-untyped-call]
    return result


class _Differentiable(torch.autograd.Function):
    """A collective, with what its backward pass makes of the gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, run: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return run(input)

    @staticmethod
    @by_hand()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None
