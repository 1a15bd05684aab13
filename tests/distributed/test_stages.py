"""Tensors that live on some stages only: norm, comparison, gathering, saving and loading by the ranks that hold them.

One launch of four ranks for all of it.
"""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.gather import gather_to_rank_zero
from kitforge.core.checkpoint.load import load_tensors, open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.lora import LoraConfig, attach, merged_weights
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel import replicas
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.expert_load import LOAD, load_of, move_biases
from kitforge.core.parallel.gather import FullMatrices, gather_full_tensor
from kitforge.core.parallel.grad_norm import global_grad_norm
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.micro_batches import run_micro_batches
from kitforge.core.parallel.parallelize import ParallelModel, parallelize
from kitforge.core.parallel.weight_sync import sync_weights
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import CheckpointError
from kitforge.kits.language_model import SaveAdapter, save_language_model
from kitforge.models.loading import build_on_meta, load
from kitforge.models.sharding import sharding_of_network
from kitforge.trainer.callbacks.callback import Event
from tests.distributed.ranks import ask_ranks
from tests.distributed.stages import IGNORED, Case, TokenLoss, micro_batches
from tests.distributed.step import ALL, Messages, first_difference

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
    mesh = Mesh(ParallelConfig(pipeline=2, shard=2), "cpu")
    world, own = World(device=torch.device("cpu"), mesh=mesh), held(mesh)
    found: dict[str, Any] = {"union": mesh.union(own, LAYOUTS), "own": set(own)}
    name = f"blocks.{mesh.index['pipeline']}"
    matrices = FullMatrices({own[name]: LAYOUTS[name]}, mesh)
    found["matrix"] = name, matrices.full_tensor(own[name], own[name])
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
    parallel: Any = SimpleNamespace(mesh=mesh, _local=weights)
    return [(each.part, each.weight_decay, each.names) for each in ParallelModel.local_groups(parallel, groups)]


def stage_of(family: str, world: World, adapt: Any = lambda _model: None) -> Any:
    """The stage of this rank, with the weights of one process."""
    model = build_on_meta(ALL[family], "O1").double()
    adapt(model)
    parallel = parallelize(model, sharding_of_network(model), world)
    parallel.materialize(world.device)
    pieces = parallel.parameters()
    init_weights(pieces.items(), 2, 0, {name: parallel.region(name) for name in pieces})
    return model.train(), parallel


def world_of(**degrees: Any) -> World:
    return World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(pipeline=2, **degrees), "cpu"))


def load_of_stages(_rank: int) -> dict[str, Any]:
    """The load of experts of which the first stage has none, and the bias that it moves."""
    world = world_of(data=2)
    assert world.mesh is not None
    own = ALL["qwen3_moe"]
    experts = replace(own.experts, balance="bias", bias_rate=0.5)
    ALL["biased"] = replace(own, dense_layers=(0, 1), experts=experts)
    model, parallel = stage_of("biased", world, lambda model: model.blocks[2].register_buffer("seen", torch.ones(3)))
    case = Case(family="biased", degrees={"data": 2}, micro_batches=2)
    step = list(micro_batches(case, world.replica, world.num_replicas))
    load = run_micro_batches(parallel, TokenLoss(), step, 1.0, nullcontext)[LOAD]
    assert load_of(parallel, is_composed=False) == {}
    assert float(parallel.grad_norm()) > 0
    biases = {name: each for name, each in parallel.parameters().items() if name.endswith("router.bias")}
    before = {name: each.detach().clone() for name, each in biases.items()}
    move_biases(parallel, world.sum({LOAD: load})[LOAD])
    seen = parallel.layouts["blocks.2.seen"], "blocks.2.seen" in dict(parallel.tensors())
    counted = sum(int((each["targets"] != IGNORED).sum()) for each in step)
    moved = {name: biases[name].detach() - before[name] for name in biases}
    return {"seen": seen, "load": load, "moved": moved, "counted": counted}


def adapters_of_stages(rank: int, folder: Path) -> None:
    """Saves the adapter, which no layer of the first stage has, and the network with it merged."""
    world = world_of(shard=2)
    model, parallel = stage_of("glm", world, adapt_second_layer)
    fill_adapter(parallel)
    state = SimpleNamespace(parallel=parallel, is_consistent=True)
    run: Any = SimpleNamespace(state=state, model=model, world=world, folder=folder, log_event=pytest.fail)
    tokenizer: Any = SimpleNamespace(save=lambda _folder: None)
    SaveAdapter(lambda model: (model, "own", None), "base", tokenizer).on_event(Event(kind="end"), run)
    save_language_model(model, folder / "merged", None, "float32")


def adapt_second_layer(model: Any) -> None:
    attach(model, "own", LoraConfig(rank=2, target_modules=("query", "down")))
    for layer in (model.blocks[0].attention.query, model.blocks[0].mlp.down):
        del layer._modules["adapters"]


def fill_adapter(parallel: ParallelModel) -> None:
    """Values of an adapter that are the same whole, however it is cut."""
    for name, each in parallel.parameters().items():
        if ".adapters." in name:
            region = parallel.region(name)
            numbers = torch.arange(math.prod(region.global_shape), dtype=each.dtype).view(region.global_shape)
            each.detach().copy_(region.of((numbers / 7).sin()))


def synced(rank: int) -> dict[str, Tensor]:
    """Two stages send their weights to two ranks that have the network whole."""
    world = World.of_process_group(ParallelConfig(pipeline=2), torch.device("cpu"))
    if world.is_training:
        model, parallel = stage_of("llama", world)
        sync_weights(parallel, None, (2, 3), world)
        return {}
    whole = dict(build_on_meta(ALL["llama"], "O1").double().to_empty(device="cpu").named_parameters())
    sync_weights(None, whole, (2, 3), world)
    return {name: each.detach() for name, each in whole.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, list[Any]]:
    folder = tmp_path_factory.mktemp("stages")
    questions = {"tensors": (4, on_stages, folder), "loads": (4, load_of_stages), "synced": (4, synced)}
    return ask_ranks(questions | {"adapters": (4, adapters_of_stages, folder)}) | {"folder": [folder]}


def test_the_load_of_experts_is_that_of_all_stages(ranks: dict[Any, list[Any]]) -> None:
    for found in ranks["loads"]:
        # Each token with a loss, of two micro-batches, has three choices of five experts.
        assert found["load"].shape == (1, 6)
        assert int(found["load"].sum()) == 3 * found["counted"] > 0
    assert all(torch.equal(ranks["loads"][rank]["load"], ranks["loads"][rank + 2]["load"]) for rank in (0, 1))
    assert all(not found["moved"] for found in ranks["loads"][:2])
    total = ranks["loads"][0]["load"][0, :-1] + ranks["loads"][1]["load"][0, :-1]
    towards = 0.5 * (total.mean() - total).sign()
    for found in ranks["loads"][2:]:
        assert list(found["moved"]) == ["blocks.2.mlp.router.bias"]
        assert torch.equal(found["moved"]["blocks.2.mlp.router.bias"], towards)


def test_every_rank_knows_the_buffers_of_all_stages(ranks: dict[Any, list[Any]]) -> None:
    of_second = Layout(shape=(3,), stages=(1,))
    assert [found["seen"] for found in ranks["loads"]] == [(of_second, rank > 1) for rank in range(4)]


def test_an_adapter_of_one_stage_is_saved_and_merged_by_all(ranks: dict[Any, list[Any]], tmp_path: Path) -> None:
    alone, parallel = stage_of("glm", World(device=torch.device("cpu")), adapt_second_layer)
    fill_adapter(parallel)
    merged, folder = merged_weights(alone), ranks["folder"][0]
    assert set(merged) == {"blocks.1.attention.query", "blocks.1.mlp.down"}
    wanted = dict(alone.named_parameters()) | {f"{name}.weight": each for name, each in merged.items()}
    for name, each in load(folder / "merged", device=torch.device("cpu")).named_parameters():
        assert torch.allclose(each.double(), wanted[name], atol=1e-6), name
    state = SimpleNamespace(parallel=parallel, is_consistent=True)
    world = World(device=torch.device("cpu"))
    run: Any = SimpleNamespace(state=state, model=alone, world=world, folder=tmp_path, log_event=pytest.fail)
    tokenizer: Any = SimpleNamespace(save=lambda _folder: None)
    SaveAdapter(lambda model: (model, "own", None), "base", tokenizer).on_event(Event(kind="end"), run)
    for file in sorted((tmp_path / "adapter").iterdir()):
        assert file.read_bytes() == (folder / "adapter" / file.name).read_bytes()


def test_weights_of_stages_arrive_under_their_own_names(ranks: dict[Any, list[Any]]) -> None:
    alone, _ = stage_of("llama", World(device=torch.device("cpu")))
    for found in ranks["synced"][2:]:
        assert all(torch.equal(found[name], each) for name, each in alone.named_parameters())


def test_ranks_of_different_stages_agree_on_what_they_hold_together(ranks: dict[Any, list[Any]]) -> None:
    check_agreement(ranks["tensors"], ranks["folder"][0])


def check_agreement(ranks: list[dict[str, Any]], folder: Path) -> None:
    whole = wholes()
    assert first_difference([each["order"] for each in ranks]) is None
    norm = float(torch.cat([each.flatten() for each in whole.values()]).double().norm())
    for rank, found in enumerate(ranks):
        assert found["union"] == list(LAYOUTS)
        name, matrix = found["matrix"]
        assert torch.equal(matrix, whole[name])
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
    saved = open_checkpoint(folder / "step_2")
    assert {name: True for name in LAYOUTS} == {name: torch.equal(each, whole[name]) for name, each in saved.model()}
    assert {name for name, _ in saved.optimizer()} == {f"{name}.exp_avg" for name in LAYOUTS}


def held_by(rank: int) -> dict[str, Tensor]:
    place = {"pipeline": rank // 2, "fsdp": rank % 2}
    regions = {name: layout.region(place) for name, layout in LAYOUTS.items()}
    return {name: region.of(wholes()[name]) for name, region in regions.items() if region is not None}
