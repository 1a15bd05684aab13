"""Meshes: who is where, and which groups there are."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ModelError
from tests.distributed.ranks import run_ranks

# The collectives with a gradient, and what they are given before and after their group.
GRADED: dict[str, tuple[tuple[Any, ...], tuple[int, ...]]] = {
    "all_gather_autograd": ((), (0,)),
    "all_gather_replicated": ((), (0,)),
    "reduce_scatter_autograd": ((), (0,)),
    "exchange_autograd": ((), (0, 1)),
    "all_to_all_autograd": (((1, 1), (1, 1)), ()),
    "all_reduce_autograd": ((), ()),
    "all_reduce_fwd": ((), ()),
    "copy_to_group": ((), ()),
}


def look(rank: int, degrees: ParallelConfig) -> dict[str, Any]:
    before = len(dist.distributed_c10d._world.pg_map)
    mesh = Mesh(degrees, "cpu")
    members = {axis: mesh.group(axis) for axis in ("data", "shard", "tensor")}
    return {
        "groups": len(dist.distributed_c10d._world.pg_map) - before,
        "index": dict(mesh.index),
        "of": [dict(mesh.grid.index_of(each)) for each in range(mesh.size)],
        "members": {axis: group and dist.get_process_group_ranks(group) for axis, group in members.items()},
        "replicas": mesh.replicas and dist.get_process_group_ranks(mesh.replicas),
        "replica": (mesh.replica, mesh.num_replicas),
    }


def test_ranks_that_talk_most_stand_next_to_one_another() -> None:
    seen = run_ranks(4, look, ParallelConfig(shard=2, tensor=2))
    assert [each["members"]["tensor"] for each in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["members"]["shard"] for each in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["replicas"] for each in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [each["replica"] for each in seen] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    for rank, each in enumerate(seen):
        assert each["of"] == [other["index"] for other in seen]
        assert each["index"] == each["of"][rank]


def test_copies_and_pieces_together_are_the_replicas() -> None:
    seen = run_ranks(4, look, ParallelConfig(data=2, shard=2))
    assert [each["replicas"] for each in seen] == [[0, 1, 2, 3]] * 4
    assert [each["replica"][0] for each in seen] == [0, 1, 2, 3]


def test_a_view_of_neighbouring_axes_has_a_group_of_its_own() -> None:
    seen = run_ranks(4, look_at_views, ParallelConfig(shard=2, context=2))
    assert [each["fsdp"] for each in seen] == [[0, 1, 2, 3]] * 4
    assert [each["context"] for each in seen] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["replicas"] for each in seen] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    # A copy for each pair, and shards over the pairs.
    assert [each["sub mesh"] for each in seen] == [[0, 1, 2, 3]] * 4
    seen = run_ranks(4, look_at_views, ParallelConfig(data=2, context=2))
    assert [(each["batch"], each["fsdp"], each["replicas"]) for each in seen] == [
        ([0, 1, 2, 3], [0, 1], [0, 2]),
        ([0, 1, 2, 3], [0, 1], [1, 3]),
        ([0, 1, 2, 3], [2, 3], [0, 2]),
        ([0, 1, 2, 3], [2, 3], [1, 3]),
    ]


def look_at_views(rank: int, degrees: ParallelConfig) -> dict[str, Any]:
    mesh = Mesh(degrees, "cpu")
    groups = {axis: mesh.group(axis) for axis in ("context", "fsdp", "replicas", "batch")}
    found: dict[str, Any] = {axis: group and dist.get_process_group_ranks(group) for axis, group in groups.items()}
    return found | {"sub mesh": mesh.sub_mesh("data", "fsdp").mesh.flatten().tolist()}


def test_an_axis_of_degree_one_costs_no_process_group() -> None:
    for seen in run_ranks(2, look, ParallelConfig(tensor=2)):
        assert seen["groups"] <= 1
        assert seen["members"]["data"] is None and seen["members"]["shard"] is None and seen["replicas"] is None


def reduce_all(rank: int) -> tuple[list[float], bool, list[int], int]:
    world = World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(data=2), "cpu"))
    sums = world.sum({"a": torch.tensor(rank + 0.5), "b": torch.tensor(2**40 + rank)})
    return (
        [float(value) for value in sums.values()],
        world.any(rank == 1),
        world.all_gather_object(rank),
        world.broadcast_object(rank),
    )


def test_a_world_sums_in_float64_and_agrees() -> None:
    assert run_ranks(2, reduce_all) == [([2.0, 2.0**41 + 1], True, [0, 1], 0)] * 2


def test_alone_a_world_is_its_own_answer() -> None:
    world = World(device=torch.device("cpu"))
    values = {"loss": torch.tensor(3)}
    assert world.sum(values) == values
    assert world.any(True) and not world.any(False)
    assert (
        world.all_gather_object("x"),
        world.broadcast_object("x"),
        world.rank,
        world.replica,
        world.num_replicas,
    ) == (["x"], "x", 0, 0, 1)


def pairs(rank: int, name: str, dim: int) -> tuple[float, float]:
    """<f(x), y> and <x, f'(y)>, each summed over the ranks, which are equal for a backward pass that is right."""
    group = Mesh(ParallelConfig(tensor=3), "cpu").group("tensor")
    generator = torch.Generator().manual_seed(rank)
    input = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator).requires_grad_()
    if name in ("all_reduce_fwd", "all_reduce_autograd", "copy_to_group"):
        output = getattr(collectives, name)(input, group)
    elif name == "exchange_autograd":
        # Of [3, 6, 4], the two dims that 3 divides; and back.
        split, joined = [(0, 1), (1, 2), (1, 0)][dim]
        output = collectives.exchange_autograd(input, group, split, joined)
    else:
        output = getattr(collectives, name)(input, group, dim)
    weight = torch.randn(output.shape, dtype=torch.float64, generator=generator)
    if name == "all_reduce_fwd":
        # Its output is the same on all ranks and is used alike by all of them, once.
        dist.all_reduce(weight, group=group)
    (gradient,) = torch.autograd.grad(output, input, weight)
    forward, backward = (output * weight).sum().detach(), (input * gradient).sum().detach()
    if name == "all_reduce_fwd":
        forward = forward / 3
    if name == "copy_to_group":
        # The inputs are copies of one tensor, and the gradient is that of the one.
        one = input.detach().clone()
        dist.broadcast(one, 0, group=group)
        forward, backward = (one * weight).sum(), (one * gradient).sum() / 3
    both = torch.stack([forward, backward])
    dist.all_reduce(both, group=group)
    return float(both[0]), float(both[1])


def refused_graphs(rank: int) -> list[str]:
    """What each collective says where a graph of its gradient is asked for."""
    group, said = Mesh(ParallelConfig(tensor=2), "cpu").group("tensor"), []
    for name, given in GRADED.items():
        input = torch.ones(2, 2, requires_grad=True)
        # As of a loss: the incoming gradient requires none.
        output = getattr(collectives, name)(input, *given[0], group, *given[1])
        with pytest.raises(ModelError) as error:
            torch.autograd.grad(output.sum(), input, create_graph=True)
        said.append(str(error.value))
    return said


def test_a_second_derivative_over_ranks_is_refused_by_all_of_them() -> None:
    for said in run_ranks(2, refused_graphs):
        assert len(said) == len(GRADED)
        assert all("create_graph=True" in words and "on one rank" in words for words in said)


def gather_rows(rank: int) -> bool:
    group = Mesh(ParallelConfig(tensor=2), "cpu").group("tensor")
    views = [collectives.all_gather(torch.ones(rows, 3, 2), group, dim) for rows in (1, 2) for dim in (0, 1, 2)]
    return any(each._is_view() for each in (*views, collectives.copy_to_group(torch.ones(2, 3), group)))


def test_what_is_gathered_is_no_view() -> None:
    assert not any(run_ranks(2, gather_rows))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("all_gather_autograd", 0),
        ("all_gather_autograd", 1),
        ("reduce_scatter_autograd", 0),
        ("reduce_scatter_autograd", 1),
        ("exchange_autograd", 0),
        ("exchange_autograd", 1),
        ("exchange_autograd", 2),
        ("all_reduce_autograd", 0),
        ("all_reduce_fwd", 0),
        ("copy_to_group", 0),
    ],
)
def test_a_backward_pass_is_the_transpose_of_the_forward_pass(name: str, dim: int) -> None:
    for forward, backward in run_ranks(3, pairs, name, dim):
        assert forward == pytest.approx(backward, abs=1e-12)
