"""Rows that many ranks saved, read by any other number of ranks under any placement."""

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.world import World
from kitforge.embedding_cache.options import AdmissionOptions
from kitforge.embedding_cache.serving.table import ServedTable
from kitforge.embedding_cache.sharding.by_owner import RowWise, TableWise
from kitforge.embedding_cache.sharding.column_wise import ColumnWise
from kitforge.embedding_cache.sharding.replicated import Replicated
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import CheckpointError
from tests.core.checkpoint import rows, sharded
from tests.core.checkpoint.rows import DictTable
from tests.distributed.ranks import run_ranks
from tests.trainer import clicks, tiny

pytestmark = pytest.mark.slow

DIM = 4
NUM_STEPS = 5
COUNTED = AdmissionOptions(name="count", count=2)
ASKED = torch.tensor([*range(-3, 44), 2**63 - 1, -(2**63), 10**12])
PLACEMENTS: dict[str, Callable[[Any, Any], TableSharding]] = {
    "rows": RowWise,
    "one rank": lambda group, side: TableWise(group, side, table_owner=1),
    "columns": lambda group, side: ColumnWise(group, side, DIM),
    "all": lambda group, side: Replicated(group, side),
}


def table_of(ranks: TableSharding | None, **options: Any) -> CachedEmbedding:
    """A table whose dense Adam moves rows that rest."""
    return CachedEmbedding(
        None, DIM, optimizer="adam", init_scale=0.5, sharding=ranks, mode=None, **({"device_rows": 60} | options)
    )


def spread_of(placement: str) -> TableSharding:
    return PLACEMENTS[placement](dist.group.WORLD, dist.new_group())


def ids_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.cat([torch.randint(-2, 40, (9 + 5 * rank,), generator=generator), ASKED[-3:-1]])


def train(table: CachedEmbedding, rank: int, step: int) -> None:
    table.train()
    generator = torch.Generator().manual_seed(10 * step + rank)
    vectors = table(ids_of(rank, step))
    (vectors * torch.randn(vectors.shape, generator=generator)).sum().backward()
    table.step(0.1)


def looked_up(table: CachedEmbedding) -> Tensor:
    table.eval()
    with torch.no_grad():
        return table(ASKED).clone()


def exchange(rank: int, root: Path) -> dict[str, Tensor]:
    """Save a table of every placement, and load it under every placement. Returns what was looked up, by placement."""
    torch.set_num_threads(1)
    world = sharded.world_of(ParallelConfig(data=2))
    tables = {placement: table_of(spread_of(placement)) for placement in PLACEMENTS}
    for name, table in {**tables, "admission": table_of(spread_of("rows"), admission=COUNTED)}.items():
        writer = CheckpointWriter(root / name, world=world, keep_last=9)
        writer.attach({"table": table}, num_deltas=2)
        for step in range(1, NUM_STEPS + 1):
            train(table, rank, step)
            writer.save(step, model=[], optimizer=[], state={})
        writer.close()
    wanted = {placement: looked_up(table) for placement, table in tables.items()}
    for saved, placement in itertools.product(PLACEMENTS, PLACEMENTS):
        table = table_of(spread_of(placement), device_rows=45 if placement == "all" else None)
        open_checkpoint(root / saved / f"step_{NUM_STEPS}", world=world).load_tables({"table": table})
        assert looked_up(table).equal(wanted[saved]), (saved, placement)
    return wanted


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    root = tmp_path_factory.mktemp("tables")
    wanted, others = run_ranks(2, exchange, root)
    assert all(wanted[name].equal(others[name]) for name in wanted)
    return root, wanted


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_process_reads_what_two_saved_under_any_placement(
    saved: tuple[Path, dict[str, Tensor]], placement: str
) -> None:
    root, wanted = saved
    checkpoint = open_checkpoint(root / placement / f"step_{NUM_STEPS}")
    assert checkpoint.manifest.parent is not None
    table = table_of(None)
    checkpoint.load_tables({"table": table})
    assert looked_up(table).equal(wanted[placement])
    assert ServedTable(checkpoint.table("table"), mode=None)(ASKED).equal(wanted[placement])


def test_every_row_is_written_once(saved: tuple[Path, dict[str, Tensor]]) -> None:
    root, _ = saved
    for placement in ("rows", "one rank", "all"):
        ids = [ids for ids, _ in open_checkpoint(root / placement / "step_1").table("table").chunks()]
        assert len(torch.cat(ids)) == len(torch.cat(ids).unique())


def test_counts_of_admission_come_back(saved: tuple[Path, dict[str, Tensor]]) -> None:
    root, _ = saved
    table = table_of(None, admission=COUNTED)
    open_checkpoint(root / "admission" / "step_2").load_tables({"table": table})
    # An id that both ranks ask for in one lookup counts once.
    asked = [set(ids_of(0, step).tolist()) | set(ids_of(1, step).tolist()) for step in (1, 2)]
    keys, counts = table.rows.admission.counts()
    assert dict(zip(keys.tolist(), counts[:, 0].tolist(), strict=True)) == dict(Counter([*asked[0], *asked[1]]))


def save_as_ranks(rank: int, root: Path) -> None:
    table = DictTable(shard=(rank, 2))
    world = sharded.world_of(ParallelConfig(data=2))
    writer = CheckpointWriter(root, world=world)
    writer.attach({table.name: table}, num_deltas=2)
    for step in (1, 2, 3):
        table.change(range(step, 20 + step))
        table.remove([step + 2])
        rows.save(writer, step)
    writer.close()
    # One rank fails, and all hear of it.
    table.name = f"users{rank}"
    rows.save(writer := CheckpointWriter(root, world=world), 4)
    writer.attach({"users": table})
    rows.save(writer, 5)
    try:
        writer.close()
    except CheckpointError as error:
        assert "rank 1 saves other tables than rank 0" in str(error)
        return
    raise AssertionError


def test_each_share_takes_the_ids_it_owns_from_any_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_as_ranks, tmp_path)
    assert steps(tmp_path) == [1, 2, 3, 4]
    whole = DictTable()
    for step in (1, 2, 3):
        whole.change(range(step, 20 + step))
        whole.remove([step + 2])
    for count in (1, 2, 3):
        found: dict[int, tuple[float, ...]] = {}
        for index in range(count):
            table = DictTable(shard=(index, count))
            rows.loaded(tmp_path, 3, table)
            assert found.keys().isdisjoint(table.rows)
            found |= table.rows
        assert found == whole.rows


def test_a_share_reads_only_its_own_files(tmp_path: Path) -> None:
    run_ranks(2, save_as_ranks, tmp_path)
    checkpoint = open_checkpoint(step_folder(tmp_path, 3))
    sizes = [sum(len(ids) for ids, _ in checkpoint.table("users", (index, 2)).chunks()) for index in range(2)]
    assert min(sizes) > 0
    assert sum(sizes) == sum(len(ids) for ids, _ in checkpoint.table("users").chunks())


def train_and_resume(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    world: World = sharded.world_of(ParallelConfig(data=2))

    def make(world: World, folder: Path) -> CachedEmbedding:
        ranks = spread_of("rows")
        return CachedEmbedding(
            None, clicks.DIM, optimizer="ftrl", name="clicks", mode=None, sharding=ranks, device_rows=16, host_rows=5,
            path=str(folder / "rows"),
        )  # fmt: skip

    clicks.run(root / "whole", make, world, incremental_checkpoints=1)
    if rank == 0:
        tiny.copy_up_to(root / "whole", root / "from_4", 4)
    dist.barrier()
    clicks.run(root / "from_4", make, world, incremental_checkpoints=1, resume="auto")


def test_a_run_of_two_ranks_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    run_ranks(2, train_and_resume, tmp_path)
    clicks.assert_same(tmp_path / "from_4", tmp_path / "whole")
