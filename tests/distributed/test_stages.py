"""Tensors that live on some stages only: norm, comparison, gathering, saving and loading by the ranks that hold them.

One launch of four ranks for all of it.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.gather import gather_to_rank_zero
from kitforge.core.checkpoint.load import load_tensors, open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel import config, replicas
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.gather import gather_full_tensor
from kitforge.core.parallel.grad_norm import global_grad_norm
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import CheckpointError
from tests.distributed.ranks import run_ranks
from tests.distributed.step import Messages, first_difference

LAYOUTS = {
    "embedding": Layout(shape=(6, 4), stages=(0, 1)).split("fsdp", 0, 2),
    "blocks.0": Layout(shape=(5, 4), stages=(0,)).split("fsdp", 0, 2),
    "blocks.1": Layout(shape=(3, 4), stages=(1,)).split("fsdp", 0, 2),
    "blocks.1.bias": Layout(shape=(3,), stages=(1,)),
    "step": Layout(shape=()),
}


def wholes() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(layout.shape, generator=generator) for name, layout in LAYOUTS.items()}


def held(mesh: Mesh) -> dict[str, Tensor]:
    regions = {name: layout.region(mesh.index) for name, layout in LAYOUTS.items()}
    return {name: region.of(wholes()[name]).clone() for name, region in regions.items() if region is not None}


def on_stages(rank: int, folder: Path) -> dict[str, Any]:
    config.UNBUILT_AXES = ()
    mesh = Mesh(ParallelConfig(pipeline=2, shard=2), "cpu")
    world, own = World(device=torch.device("cpu"), mesh=mesh), held(mesh)
    found: dict[str, Any] = {"union": mesh.union(own), "own": set(own)}
    with Messages() as messages:
        holders = {name: mesh.grid.num_holders(LAYOUTS[name], rank) for name in own}
        found["norm"] = float(global_grad_norm(own, holders, torch.zeros(()), mesh))
        found["gathered"] = {
            name: gather_full_tensor(own.get(name), layout, mesh, torch.float32) for name, layout in LAYOUTS.items()
        }
        found["drift"] = [replicas.replica_drift(own, LAYOUTS, mesh)]
        broken = {name: each + (rank if name in ("embedding", "blocks.1.bias") else 0) for name, each in own.items()}
        found["drift"].append(replicas.replica_drift(broken, LAYOUTS, mesh))
    found["order"] = messages.order
    replicas.broadcast_replicas(broken, LAYOUTS, mesh)
    found["mended"] = broken
    empty = torch.empty(0)
    to_zero = {
        name: gather_to_rank_zero(own.get(name, empty), layout, mesh.grid, rank) for name, layout in LAYOUTS.items()
    }
    found["to rank zero"] = to_zero if rank == 0 else {}
    writer = CheckpointWriter(folder, world=world)
    for step in (1, 2):
        moments = {f"{name}.exp_avg": each for name, each in own.items()}
        layouts = LAYOUTS | {f"{name}.exp_avg": layout for name, layout in LAYOUTS.items()}
        writer.save(step, model=own.items(), optimizer=moments.items(), state={}, layouts=layouts)
    # One rank has a tensor of another shape than its layout says: all of them are told, and none waits.
    wrong = own | ({"blocks.1": torch.ones(9)} if rank == 3 else {})
    with pytest.raises(CheckpointError, match="not of the shape that its layout gives to rank 3"):
        writer.save(3, model=wrong.items(), optimizer=[], state={}, layouts=LAYOUTS)
    writer.close()
    checkpoint, loaded = (
        open_checkpoint(folder / "step_2", world=world),
        {k: torch.zeros_like(v) for k, v in own.items()},
    )
    regions = {name: layout.held_region(mesh.index) for name, layout in LAYOUTS.items() if name in own}
    load_tensors(loaded, checkpoint.model(regions, set(mesh.union(own)) - own.keys()), what="model")
    found["loaded"] = all(torch.equal(loaded[name], own[name]) for name in own)
    found["groups"] = groups_of_stages(mesh)
    return found


def groups_of_stages(mesh: Mesh) -> list[tuple[str, float, tuple[str, ...]]]:
    """The groups of a critic that is on the second stage only, and of a policy on both."""
    stage = mesh.index["pipeline"]
    weights = {name: torch.nn.Parameter(torch.ones(2)) for name in ("policy.0", "policy.1", "critic")}
    of_stage = [("policy", f"policy.{stage}")] + ([("critic", "critic")] if stage == 1 else [])
    groups = [
        ParameterGroup(names=(name,), parameters=(weights[name],), weight_decay=0.1, matrix=False, part=part)
        for part, name in reversed(of_stage)
    ]
    parallel: Any = SimpleNamespace(_mesh=mesh, _local=weights)
    return [(each.part, each.weight_decay, each.names) for each in ParallelModel.local_groups(parallel, groups)]


def test_ranks_of_different_stages_agree_on_what_they_hold_together(tmp_path: Path) -> None:
    ranks = run_ranks(4, on_stages, tmp_path)
    whole = wholes()
    assert first_difference([each["order"] for each in ranks]) is None
    norm = float(torch.cat([each.flatten() for each in whole.values()]).double().norm())
    for rank, found in enumerate(ranks):
        assert set(found["union"]) == set(LAYOUTS) and found["union"] == ranks[0]["union"]
        assert found["own"] == set(LAYOUTS) - ({"blocks.1", "blocks.1.bias"} if rank < 2 else {"blocks.0"})
        assert found["norm"] == pytest.approx(norm, rel=1e-6)
        for name, each in whole.items():
            assert torch.equal(found["gathered"][name], each), name
        # Ranks 0 and 1 are the first stage, 2 and 3 the second; the bias is whole on both of the second.
        assert found["drift"] == [{}, {"embedding": [2, 3], "blocks.1.bias": [3]}]
        first = {"embedding": rank % 2, "blocks.1.bias": 2}
        for name, each in held_by(rank).items():
            assert torch.equal(found["mended"][name], each + first.get(name, 0)), name
        assert found["loaded"]
        assert [each[:2] for each in found["groups"]] == [("policy", 0.1), ("critic", 0.1)]
        assert [each[2] for each in found["groups"]] == [(f"policy.{rank // 2}",), ("critic",) if rank > 1 else ()]
    for name, each in whole.items():
        assert torch.equal(ranks[0]["to rank zero"][name], each), name
    saved = open_checkpoint(tmp_path / "step_2")
    assert {name: True for name in LAYOUTS} == {name: torch.equal(each, whole[name]) for name, each in saved.model()}
    assert {name for name, _ in saved.optimizer()} == {f"{name}.exp_avg" for name in LAYOUTS}


def held_by(rank: int) -> dict[str, Tensor]:
    place = {"pipeline": rank // 2, "fsdp": rank % 2}
    regions = {name: layout.region(place) for name, layout in LAYOUTS.items()}
    return {name: region.of(wholes()[name]) for name, region in regions.items() if region is not None}
