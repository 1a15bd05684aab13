"""Replicas of weights: alike from the first step on, whatever each rank built, and compared at every checkpoint."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Once for all ranks that are forked, each of which would import it.
import torch.distributed.fsdp
from torch import Tensor, nn

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.parallel import replicas
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.sharding import EXPERT, TENSOR, Sharding, ShardingRule
from kitforge.core.parallel.world import World
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.callbacks.checkpointing import CheckpointCallback
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task
from tests.distributed.ranks import run_ranks

SPLIT = Sharding(
    rules=(
        ShardingRule(module="0", splits={"weight": {TENSOR: 0}, "bias": {TENSOR: 0}}, input_layout={TENSOR: "gather"}),
        ShardingRule(module="1", splits={"weight": {TENSOR: 1}}, output_layout={TENSOR: "reduce"}),
    )
)


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.BatchNorm1d(5))
    nn.init.normal_(model[2].running_mean)
    return model


def built(rank: int, degrees: ParallelConfig) -> dict[str, Tensor]:
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu"))
    parallel = parallelize(network(rank), SPLIT if degrees.tensor > 1 else Sharding(), world)
    buffers = {name: each.clone() for name, each in parallel.model.named_buffers()}
    return buffers | {name: parallel.full_tensor(name).clone() for name in parallel.parameters()}


@pytest.mark.parametrize(
    "degrees",
    [
        ParallelConfig(data=2),
        ParallelConfig(tensor=2),
        pytest.param(ParallelConfig(shard=2), marks=pytest.mark.slow),
        pytest.param(ParallelConfig(data=2, shard=2), marks=pytest.mark.slow),
    ],
    ids=ParallelConfig.describe,
)
def test_every_rank_begins_with_the_weights_of_the_first(degrees: ParallelConfig) -> None:
    first = {**dict(network(0).named_parameters()), **dict(network(0).named_buffers())}
    for found in run_ranks(degrees.world_size, built, degrees):
        assert found.keys() == first.keys()
        for name, each in found.items():
            assert torch.equal(each, first[name].detach()), name


def others(rank: int) -> str:
    world = World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(data=2), "cpu"))
    try:
        parallelize(nn.Linear(3, 3 + rank), Sharding(), world)
    except ModelError as error:
        return str(error)
    return ""


def test_ranks_that_built_other_networks_are_told(tmp_path: Path) -> None:
    for message in run_ranks(2, others):
        assert "ranks have built different networks: weight" in message
        assert "[3, 3] float32 on rank" in message and "[4, 3] float32 on rank" in message


class Own(Task):
    def build(self, world: World) -> nn.Module:
        self.world = world
        return network(world.rank)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 100):
            rows = torch.rand(4, 5, generator=torch.Generator().manual_seed(step))
            yield [{"rows": rows[self.world.replica :: self.world.num_replicas]}]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        # Without the norm, whose statistics are those of each rank's rows.
        return {"loss": model[1](model[0](micro_batch["rows"])).square().sum()}


class Late(Own):
    """Gives the weights their values when they are laid out already, and other ones on every rank."""

    def build(self, world: World) -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.BatchNorm1d(5))
        parallelize(model, SPLIT, world).materialize(world.device)
        for each in (*model.parameters(), *model.buffers()):
            each.detach().fill_(world.rank + 1)
        return model


def late(rank: int) -> list[dict[str, float]]:
    options, found = from_dict(RunOptions, {"trainer": {"max_steps": 1}}), []
    for degrees in (ParallelConfig(data=4), ParallelConfig(data=2, tensor=2)):
        loop = Loop(Late(), options, World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu")))
        tensors = {**dict(loop.model.named_parameters()), **dict(loop.model.named_buffers())}
        found.append({name: float(each.detach().double().mean()) for name, each in tensors.items()})
    return found


def test_weights_that_are_filled_late_are_those_of_the_first_rank_as_well() -> None:
    for rank, (copies, pieces) in enumerate(run_ranks(4, late)):
        assert set(copies.values()) == {1.0}
        # Ranks 0 and 1 hold the pieces of a matrix, 2 and 3 the same ones.
        own = {"0.weight", "0.bias", "1.weight"}
        assert {name: value for name, value in pieces.items() if name in own} == dict.fromkeys(own, rank % 2 + 1)
        assert {value for name, value in pieces.items() if name not in own} == {1.0}


class Hurt(Callback):
    """Changes one number of one rank, and keeps what is noted."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.notes: list[str] = []

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step" and run.state.cursor.step == 3 and self.rank == 1:
            run.state.parallel.parameters()["0.weight"].detach().view(torch.int32)[2, 3] ^= 1
            dict(run.state.optimizer.tensors())["1.bias.exp_avg"][1] += 1
        if event.kind == "note" and event.record["event"] == "drift":
            self.notes.append(f"{event.record['step']}: {event.record['message']}")


def trained(rank: int, folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    world = World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(data=2), "cpu"))
    hurt = Hurt(rank)
    options = from_dict(RunOptions, {"trainer": {"max_steps": 6, "checkpoint_every": 2}})
    saving = CheckpointCallback(folder, save_total_limit=5, world=world)
    loop = Loop(Own(), options, world, folder=folder.parent, callbacks=[hurt, saving])
    loop.train()
    return hurt.notes, {name: each.detach().clone() for name, each in loop.state.parallel.tensors()}


def test_a_changed_bit_is_told_at_the_next_checkpoint_and_taken_back(tmp_path: Path) -> None:
    (told, first), (_, second) = run_ranks(2, trained, tmp_path / "checkpoints")
    assert len(told) == 1
    assert told[0].startswith("4: ") and "0.weight on rank 1" in told[0] and "1.bias.exp_avg on rank 1" in told[0]
    saved = dict(open_checkpoint(step_folder(tmp_path / "checkpoints", 6)).model())
    for name, each in first.items():
        assert torch.equal(each, second[name]) and torch.equal(each, saved[name]), name


def drift(rank: int, degrees: ParallelConfig, changed: list[tuple[int, str]]) -> dict[str, list[int]]:
    mesh = Mesh(degrees, "cpu")
    layouts = {
        name: Layout(shape=(8, 4))
        .split("shard", 0, degrees.shard if "shard" in name else 1)
        .split(TENSOR, 1, degrees.tensor if "tensor" in name else 1)
        .split(EXPERT, 0, degrees.expert if "expert" in name else 1)
        for name in ("shard", "tensor", "shard and tensor", "whole", "expert")
    }
    whole = torch.arange(32.0).view(8, 4)
    tensors = {name: layout.region(mesh.index).of(whole).clone() for name, layout in layouts.items()}
    tensors["beside"] = torch.tensor(True)
    for who, name in changed:
        if who == rank:
            tensors[name].view(-1)[-1:].logical_not_()
    return replicas.replica_drift(tensors, layouts, mesh)


def drifts(rank: int) -> list[dict[str, list[int]]]:
    square, experts = ParallelConfig(shard=2, tensor=2), ParallelConfig(data=4, expert=2)
    everything = [(3, name) for name in ("shard", "tensor", "shard and tensor", "whole", "beside")]
    changed = [[], everything, [(0, "whole"), (2, "shard")]]
    return [*(drift(rank, square, each) for each in changed), drift(rank, experts, [(2, "expert"), (3, "whole")])]


@pytest.mark.slow
def test_replicas_are_compared_with_those_that_hold_the_same_piece() -> None:
    for found in run_ranks(4, drifts):
        assert found[0] == {}
        # Pieces along both axes have no replicas.
        assert found[1] == {"shard": [3], "tensor": [3], "whole": [3], "beside": [3]}
        assert found[2] == {"whole": [1, 2, 3], "shard": [3]}
        # Two ranks have the first half of the experts, 0 and 2.
        assert found[3] == {"expert": [2], "whole": [3]}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]
)
def test_every_bit_and_place_counts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHECKSUM_WORDS", 8)
    values = (torch.arange(30) % 7).to(dtype)
    variants: list[Any] = [values, values.flip(0), values.roll(8)]
    for place in (0, 7, 8, 29):
        other = values.clone()
        other.view(torch.uint8)[place * other.element_size()] ^= 1
        variants.append(other)
    sums = {int(replicas._checksum(each)) for each in variants}
    assert len(sums) == len(variants)
    assert int(replicas._checksum(values.view(5, 6).t())) == int(replicas._checksum(values.view(5, 6).t().contiguous()))
    assert int(replicas._checksum(values[:0])) == 0
