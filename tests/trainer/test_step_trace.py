"""The memory of a traced step is that which torch's profiler measures, and its causes sum to it."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ModelError
from kitforge.kits.registry import kit_of
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks
from tests.measured_step import measured, options_of, step_of, traced, training_peak

MODELS = ("llama_tiny", "gpt2_tiny", "llama_moe_tiny")
PRODUCT = list(itertools.product(MODELS, ("fp32", "bf16"), ("none", "selective", "full"), (12, 4)))
# One of each value; `prove` takes the whole product.
SAMPLE = [PRODUCT[0], PRODUCT[15], PRODUCT[22], PRODUCT[35]]


def choices(model: str, precision: str, recompute: str, rows: int) -> dict[str, Any]:
    """One micro-batch of 12 rows, or three of four."""
    network = {"model": model, "model.num_layers": 3, "data.batch_size": 12, "precision": precision}
    return network | {"trainer.activation_checkpointing": recompute, "trainer.micro_batch_size": rows}


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("model", "precision", "recompute", "rows"), PRODUCT if WHOLE else SAMPLE)
def test_the_peak_of_one_rank_is_that_of_the_profiler(model: str, precision: str, recompute: str, rows: int) -> None:
    options = options_of(choices(model, precision, recompute, rows))
    # A mixture's rows in bf16 are cast within an operation that the trace does not see into, of which plans warn.
    # Nor does it see into products in bf16 on AMX, which copy their operands.
    is_hidden = precision == "bf16" and (model == "llama_moe_tiny" or torch.cpu._is_amx_tile_supported())
    bound = 3e-2 if is_hidden else 5e-3
    assert training_peak(traced(options)) == pytest.approx(measured(0, options), rel=bound)


# Of short rows weights and gradients are the most. `benchmarks.parallel.plan` has more layouts, and longer rows.
LAYOUTS: list[dict[str, Any]] = [
    {"parallel.shard": 2},
    {"parallel.shard": 2, "trainer.activation_checkpointing": "full", "precision": "bf16"},
    {"parallel.shard": 2, "parallel.zero_stage": 2, "trainer.micro_batch_size": 1},
    {"parallel.tensor": 2, "precision": "bf16"},
    {"parallel.context": 2, "parallel.context_by": "keys"},
]
# Of as many micro-batches as rows. The last one is trained by a loss that gives no `inputs`, so stages take turns.
PIPELINES: list[dict[str, Any]] = [
    {"parallel.schedule": "1f1b"},
    {"parallel.schedule": "zero_bubble_v", "trainer.activation_checkpointing": "full"},
    {"parallel.schedule": "1f1b", "model": "gpt2_tiny"},
]


@pytest.mark.slow
def test_the_peak_of_a_rank_of_two_is_that_of_the_profiler() -> None:
    shared = {"model.num_layers": 3, "data.batch_size": 4, "data.sequence_length": 8}
    asked = [options_of(shared | each) for each in LAYOUTS]
    answers = ask_ranks({number: (2, measured, each) for number, each in enumerate(asked)})
    errors = [training_peak(traced(each)) / min(answers[number]) - 1 for number, each in enumerate(asked)]
    # One rank may hold a buffer longer in all of its steps, where the threads of gloo get no core.
    assert max(map(abs, errors)) < 0.01, errors


@pytest.mark.slow
def test_the_peak_of_each_rank_of_a_pipeline_is_that_of_the_profiler() -> None:
    shared = {"model.num_layers": 4, "data.batch_size": 4, "trainer.micro_batch_size": 1, "parallel.pipeline": 2}
    asked = [options_of(shared | each) for each in PIPELINES]
    relays = {number: number == len(asked) - 1 for number in range(len(asked))}
    answers = ask_ranks({number: (2, measured, each, relays[number]) for number, each in enumerate(asked)})
    errors = [
        training_peak(traced(each, index, by_relay=relays[number])) / answers[number][index] - 1
        for number, each in enumerate(asked)
        for index in range(2)
    ]
    assert max(map(abs, errors)) < 0.01, errors


@pytest.mark.slow
def test_bytes_at_rest_have_their_causes_and_gradients_are_counted_once() -> None:
    options = options_of({"model.num_layers": 3, "precision": "bf16", "data.batch_size": 2})
    memory, network = traced(options), sum(each.nbytes for each in build(options))
    update = memory.moments["update"]
    assert (update["weights"], update["gradients"]) == (network, network)
    # Two moments of each weight, and a step of four bytes of each parameter.
    assert update["moments"] == 2 * network + 4 * len(build(options))
    assert sum(memory.by_cause.values()) == memory.peak


@pytest.mark.slow
def test_more_micro_batches_than_two_take_no_more_memory() -> None:
    two, six = (
        options_of({"model.num_layers": 3, "data.batch_size": size, "trainer.micro_batch_size": 2}) for size in (4, 12)
    )
    assert traced(two).peak == traced(six).peak


def build(options: Any) -> list[torch.nn.Parameter]:
    from kitforge.models.catalog import config_of
    from kitforge.models.loading import build_on_meta

    return list(build_on_meta(config_of(options.model)).parameters())


def test_a_network_that_reads_a_value_is_refused_at_its_line() -> None:
    with (
        pytest.raises(ModelError, match=r"test_step_trace\.py:\d+ calls aten\._local_scalar_dense"),
        dry_world(ParallelConfig(), "fp32"),
        FakeTensorMode(),
    ):
        torch.ones(3).sum().item()


def test_a_dry_world_leaves_no_process_group_behind() -> None:
    with dry_world(ParallelConfig(data=2, tensor=2), "bf16") as world:
        assert (world.num_replicas, world.rank, world.precision) == (2, 0, "bf16")
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize(("frozen", "first"), [((), 0), (("embedding.weight", "blocks.0.*"), 1)])
def test_a_later_rank_of_a_pipeline_is_told_where_training_begins(frozen: tuple[str, ...], first: int) -> None:
    options = options_of({"model.num_layers": 2, "parallel.pipeline": 2, "data.batch_size": 2})
    options = dataclasses.replace(options, freeze=frozen)
    with dry_world(options.parallel, "fp32", 1) as world:
        network = step_of(options, world, by_relay=False).network
        assert parallel_model_of(network, world).relays[network].stages.first_trained == first


def rows_of_embedding(_rank: int, options: Any) -> int:
    world = World(device=torch.device("cpu"), mesh=Mesh(options.parallel, "cpu"))
    parallel = parallel_model_of(kit_of("text_generation").plan(options).step(world, 1).network, world)
    parallel.materialize(world.device)
    return len(parallel.parameters()["embedding.weight"])


@pytest.mark.slow
def test_ranks_that_are_forked_after_a_trace_have_shards_of_their_own() -> None:
    options = options_of({"parallel.shard": 2, "model.num_layers": 1, "data.batch_size": 2})
    traced(options)
    assert ask_ranks({"rows": (2, rows_of_embedding, options)})["rows"] == [130, 129]
