"""A network and a loss of one's own on several ranks, with a table whose rows live on all of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.keys.row_init import RowInitConfig
from kitforge.foundation.config import from_dict
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task
from tests.distributed.ranks import run_ranks
from tests.sharded_table import ShardedTable

ROWS = 12


class Clicks(nn.Module):
    """Rows of a table through two layers."""

    def __init__(self, world: World) -> None:
        super().__init__()
        group = None if world.mesh is None else world.mesh.world
        optimizer = build_row_optimizer(SparseOptimizerConfig(name="adagrad"))
        self.table = ShardedTable(RowInitConfig(name="clicks", dim=4, dtype=torch.float64), optimizer, group)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 1)])

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.layers
        return second(torch.tanh(first(self.table(ids).sum(1))))


class ClickTask(Task):
    """Each rank takes its share of twelve rows a step; the shares are not all of one size."""

    def build(self, world: World) -> nn.Module:
        self.world = world
        torch.manual_seed(3)
        return Clicks(world).double()

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 1000):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 9, (ROWS, 3), generator=generator) * 10**12
            targets = torch.randn(ROWS, 1, generator=generator, dtype=torch.float64)
            replica, replicas = self.world.replica, self.world.num_replicas
            mine = slice(ROWS * replica**2 // replicas**2, ROWS * (replica + 1) ** 2 // replicas**2)
            yield [{"ids": ids[mine], "targets": targets[mine]}]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return {"loss": ((model(micro_batch["ids"]) - micro_batch["targets"]) ** 2).sum()}


def train(rank: int, degrees: ParallelConfig) -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = Mesh(degrees, "cpu") if degrees.world_size > 1 else None
    values = {"trainer": {"max_steps": 6, "max_grad_norm": 0.5}, "optimizer": {"learning_rate": 0.1}}
    loop = Loop(ClickTask(), from_dict(RunOptions, values), World(device=torch.device("cpu"), mesh=mesh))
    metrics = loop.train()
    parallel = loop.state.parallel
    ids, rows, states = loop.model.table.rows()
    return {
        "loss": metrics["loss"],
        "weights": {name: parallel.full_tensor(name).clone() for name in parallel.parameters()},
        "rows": {int(id): (row, state) for id, row, state in zip(ids, rows, states["sum"], strict=True)},
        "samples": loop.state.cursor.samples,
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [ParallelConfig(data=2), ParallelConfig(shard=2), ParallelConfig(data=3)],
    ids=lambda each: each.describe(),
)
def test_ranks_with_a_table_equal_one_process(degrees: ParallelConfig, tmp_path: Path) -> None:
    one = train(0, ParallelConfig())
    many = run_ranks(degrees.world_size, train, degrees)
    rows = {id: pair for outcome in many for id, pair in outcome["rows"].items()}
    assert sum(len(outcome["rows"]) for outcome in many) == len(rows) == len(one["rows"])
    for outcome in many:
        assert outcome["samples"] == one["samples"] == 6 * ROWS
        assert outcome["loss"] == pytest.approx(one["loss"], abs=1e-10)
        for name, weight in outcome["weights"].items():
            torch.testing.assert_close(weight, one["weights"][name], rtol=0, atol=1e-10)
    for id, (row, state) in one["rows"].items():
        torch.testing.assert_close(rows[id][0], row, rtol=0, atol=1e-10)
        torch.testing.assert_close(rows[id][1], state, rtol=0, atol=1e-10)
