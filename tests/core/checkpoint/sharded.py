"""A small state that can be cut for any mesh, a pure function of its step; and ranks played by threads."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kitforge.core.checkpoint.load import Checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.foundation.types import Region
from tests.core.checkpoint.example import assert_equal
from tests.patience import PATIENCE

# Sizes that 2, 3 and 4 do not divide, and one of which four ranks get nothing each.
SHAPES: dict[str, tuple[int, ...]] = {
    "embedding.weight": (7, 6),
    "up.weight": (10, 6),
    "down.weight": (6, 10),
    "norm.weight": (5,),
    "gate.bias": (2,),
}
CUT_BY_TENSOR = {"embedding.weight": 0, "up.weight": 0, "down.weight": 1}
TIED = ("head.weight", "embedding.weight")
BUFFER = "rotary.frequencies"


def whole_model(step: int) -> dict[str, Tensor]:
    """Every parameter and a buffer; two names are one tensor."""
    numbers = torch.Generator().manual_seed(step)
    model = {name: torch.randn(shape, generator=numbers) for name, shape in SHAPES.items()}
    model[BUFFER] = torch.randn(3, generator=numbers).bfloat16()
    model[TIED[0]] = model[TIED[1]]
    return model


def whole_optimizer(step: int) -> dict[str, Tensor]:
    """Two moments and a 0-dim counter for each parameter."""
    numbers = torch.Generator().manual_seed(1000 + step)
    states: dict[str, Tensor] = {}
    for name, shape in SHAPES.items():
        states[f"{name}.exp_avg"] = torch.randn(shape, generator=numbers)
        states[f"{name}.exp_avg_sq"] = torch.randn(shape, generator=numbers, dtype=torch.float64)
        states[f"{name}.step"] = torch.tensor(float(step))
    return states


def layouts(degrees: ParallelConfig) -> dict[str, Layout]:
    """How parameters, under one of their names, and moments are cut: along the tensor axis first, as in training."""
    found: dict[str, Layout] = {}
    for name, shape in SHAPES.items():
        layout = Layout(shape=shape)
        if name in CUT_BY_TENSOR:
            layout = layout.split("tensor", CUT_BY_TENSOR[name], degrees.tensor)
        layout = layout.split("shard", 0, degrees.shard)
        found |= dict.fromkeys((name, f"{name}.exp_avg", f"{name}.exp_avg_sq"), layout)
    return found


def regions(degrees: ParallelConfig, place: Mapping[str, int]) -> dict[str, Region]:
    """What the rank at that place has of each split tensor."""
    return {name: layout.held_region(place) for name, layout in layouts(degrees).items()}


def pieces(wholes: Mapping[str, Tensor], parts: Mapping[str, Region]) -> dict[str, Tensor]:
    """A rank's own tensors, tied as the whole ones are."""
    made: dict[int, Tensor] = {}
    result = {}
    for name, whole in wholes.items():
        if id(whole) not in made:
            made[id(whole)] = (parts[name].of(whole) if name in parts else whole).clone()
        result[name] = made[id(whole)]
    return result


def world_of(degrees: ParallelConfig) -> World:
    """This process's world, whose group is there already."""
    return World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu"))


def save(writer: CheckpointWriter, step: int, degrees: ParallelConfig, world: World, *, keep: bool = False) -> None:
    """Save this rank's share of the example of that step."""
    assert world.mesh is not None
    parts = regions(degrees, world.mesh.index)
    writer.save(
        step,
        model=pieces(whole_model(step), parts).items(),
        optimizer=pieces(whole_optimizer(step), parts).items(),
        # Only the first rank's counts.
        state={"step": step} if world.rank == 0 else {"not": {"JSON": {1, 2}}},
        keep=keep,
        layouts=layouts(degrees),
    )


def save_steps(_rank: int, root: Path, degrees: ParallelConfig, *steps: int) -> None:
    """What every rank does to save those steps; for `run_ranks`."""
    world = world_of(degrees)
    writer = CheckpointWriter(root, world=world)
    for step in steps:
        save(writer, step, degrees, world)
    writer.close()


def assert_whole(checkpoint: Checkpoint) -> None:
    """The checkpoint, read in one process, holds the example of its step to the bit."""
    assert_equal(dict(checkpoint.model()), whole_model(checkpoint.step))
    assert_equal(dict(checkpoint.optimizer()), whole_optimizer(checkpoint.step))
    assert checkpoint.state == {"step": checkpoint.step}


def assert_pieces(checkpoint: Checkpoint, degrees: ParallelConfig, place: Mapping[str, int]) -> None:
    """What the checkpoint gives to the rank at that place is cut from the example of its step, to the bit."""
    parts = regions(degrees, place)
    assert_equal(dict(checkpoint.model(parts)), pieces(whole_model(checkpoint.step), parts))
    assert_equal(dict(checkpoint.optimizer(parts)), pieces(whole_optimizer(checkpoint.step), parts))


class Stage:
    """Ranks played by threads of one process: collectives meet at a barrier and look at one another's arguments."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._rank = threading.local()
        self._table: list[Any] = [None] * size

    def play(self, act: Callable[[World], Any]) -> list[Any]:
        """What `act(world)` returns on each rank, in rank order; an exception is returned as well."""
        results: list[Any] = [None] * self.size

        def run(rank: int) -> None:
            self._rank.number = rank
            try:
                results[rank] = act(World(device=torch.device("cpu"), mesh=self._mesh(rank)))
            except Exception as error:  # noqa: BLE001 (the test looks at it)
                results[rank] = error

        with mock.patch.object(collectives, "all_gather_object", self._gather):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    def _mesh(self, rank: int) -> Any:
        return mock.Mock(spec=["rank", "size", "world"], rank=rank, size=self.size)

    def _gather(self, value: Any, _group: object) -> list[Any]:
        self._table[self._rank.number] = value
        self._barrier.wait()
        answers = list(self._table)
        self._barrier.wait()
        return answers
