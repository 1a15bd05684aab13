"""The memory of a traced step is that which torch's profiler measures, and its causes sum to it."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from kitforge.core.nn.moe import Router
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.world import World
from kitforge.foundation.device import has_native_matmul
from kitforge.foundation.errors import ModelError
from kitforge.trainer.step_trace import DryStep
from kitforge.verify import foreseen
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks
from tests.measured_step import measured, options_of, step_of, traced, training_peak, world_of

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
    # Nor does it see into products in bf16, which copy their operands on processors with AMX and work in up to half a
    # megabyte on those with AVX-512 for bf16.
    is_hidden = precision == "bf16" and (model == "llama_moe_tiny" or has_native_matmul(torch.bfloat16))
    bound = 4e-2 if is_hidden else 5e-3
    assert training_peak(traced(options)) == pytest.approx(measured(0, options), rel=bound)


SHORT = {"data.sequence_length": 32, "data.batch_size": 8}
ROLLOUTS = {**SHORT, "rl.prompts_per_rollout": 4, "rollout.max_new_tokens": 16, "rl.num_generations": 2}
BERT = {"model": "bert_tiny", "model.vocab_size": 300, **SHORT}
SCHEMA = {
    "label": {"name": "y"},
    "numeric": {"I1": {}},
    "categorical": {"C1": {"num_buckets": 20_000, "kind": "integer"}, "C2": {"num_buckets": 3_000, "kind": "integer"}},
}
CLICKS = {"model": "wide_deep", "data.batch_size": 256, "data.schema": SCHEMA}
# Each task once; the first of them in the gate, which hold a reference, a critic and a teacher beside what they train.
TASKS: list[tuple[str, dict[str, Any]]] = [
    ("dpo", {**SHORT, "precision": "bf16"}),
    ("ppo", ROLLOUTS),
    ("distill", {**ROLLOUTS, "lora.rank": 2}),
    ("recommendation", CLICKS),
    ("recommendation", {**CLICKS, "data.batch_size": 2048, "cache.device_rows": 5_000}),
    ("embedding", {**BERT, "trainer.micro_batch_size": 4}),
    ("image_classification", {"model": "vit_tiny", "data.batch_size": 4}),
    ("text_classification", {**SHORT, "labels": ["a", "b", "c"]}),
    ("translation", {"model": "t5_tiny", **SHORT, "data.target_length": 16}),
    ("recommendation", {"model": "dlrm", "data.batch_size": 256, "tables.deep.name": "adam"}),
    ("sft", SHORT),
    ("reward", SHORT),
    ("kto", SHORT),
    ("orpo", SHORT),
    ("grpo", {**ROLLOUTS, "precision": "bf16"}),
    ("online_dpo", ROLLOUTS),
    ("token_classification", SHORT),
    ("masked_lm", {**BERT, "trainer.activation_checkpointing": "full"}),
    ("question_answering", {**BERT, "data.stride": 4}),
]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("task", "choices"), TASKS if WHOLE else TASKS[:7])
def test_the_peak_of_every_task_is_that_of_the_profiler(task: str, choices: dict[str, Any]) -> None:
    shallow = {} if task in ("recommendation", "image_classification") else {"model.num_layers": 2}
    options = options_of({"model": "llama_tiny", **shallow, "trainer.progress": False, **choices}, task)
    memory = traced(options)
    # Loops over rows of tables keep buffers of their own, and rows move between tiers for more than a step.
    bound = 4e-2 if task == "recommendation" else 2e-2 if "precision" in choices else 6e-3
    assert training_peak(memory) == pytest.approx(measured(0, options), rel=bound)
    assert all(sum(each.values()) <= memory.peak for each in memory.moments.values())
    assert sum(memory.by_cause.values()) == memory.peak


@pytest.mark.slow
def test_a_reference_is_frozen_and_has_no_moments() -> None:
    options = options_of({"model.num_layers": 1, **SHORT}, "dpo")
    memory, network = traced(options).moments["update"], sum(each.nbytes for each in build(options))
    assert (memory["weights"], memory["frozen weights"]) == (network, network)
    assert memory["moments"] == 2 * network + 4 * len(build(options))


@pytest.mark.slow
def test_rollouts_hold_keys_and_values_beside_the_weights() -> None:
    options = options_of({"model.num_layers": 1, **ROLLOUTS, "rollout.engine.kv_cache_bytes": 2**20}, "grpo")
    memory = traced(options)
    rollout, update = memory.moments["rollout"], memory.moments["update"]
    # A spare block follows the others.
    assert 2**20 < rollout["keys and values"] < 1.1 * 2**20
    assert [rollout[each] for each in ("weights", "frozen weights", "moments")] == [
        update[each] for each in ("weights", "frozen weights", "moments")
    ]


OFFLOADS = ("optimizer", "optimizer_and_gradients")


@pytest.mark.slow
@pytest.mark.parametrize("offload", OFFLOADS)
def test_the_peak_with_the_optimizer_on_the_host_is_that_of_the_profiler(offload: str) -> None:
    options = options_of({**SHORT, "model.num_layers": 2, "trainer.offload": offload})
    assert training_peak(traced(options)) == pytest.approx(measured(0, options), rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_lies_on_the_host_does_not_count_for_the_device(offload: str) -> None:
    whole, part = (
        traced(options_of({**SHORT, "model.num_layers": 1, **each}), device_type="cuda")
        for each in ({}, {"trainer.offload": offload})
    )
    network = whole.moments["update"]["weights"]
    assert part.moments["update"]["moments"] == 0
    assert part.moments["update"]["weights"] == network
    # Master weights, two moments and, in one mode, sums of gradients, beside three buffers of a block.
    number = 3 + (offload == "optimizer_and_gradients")
    assert number * network < part.host < (number + 3) * network
    assert whole.host == 0


@pytest.mark.slow
def test_a_table_is_counted_once_with_its_moments_and_twice_when_it_grows() -> None:
    memory, rows = traced(options_of(CLICKS, "recommendation")), 2**15
    # 16 numbers, two moments of each and three counters; of the wide part, two sums of one number.
    size = 4 * rows * (3 * 16 + 3 + 3 + 3)
    assert size < memory.moments["update"]["table rows"] < 1.1 * size
    growth = memory.moments["growth of a table"]["table rows"] - memory.moments["update"]["table rows"]
    assert growth == 4 * rows // 2 * (3 * 16 + 3)


@pytest.mark.slow
def test_a_rank_of_four_has_a_quarter_of_the_tables() -> None:
    whole, part = (
        traced(options_of({**CLICKS, **each}, "recommendation")).moments["update"]["table rows"]
        for each in ({}, {"parallel.data": 4, "cache.placement": "row"})
    )
    assert part == pytest.approx(whole / 4, rel=0.1)


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
    shared = {"model.num_layers": 2, "data.batch_size": 4, "data.sequence_length": 8}
    asked = [options_of(shared | each) for each in LAYOUTS]
    answers = ask_ranks({number: (2, measured, each) for number, each in enumerate(asked)})
    errors = [training_peak(traced(each)) / min(answers[number]) - 1 for number, each in enumerate(asked)]
    # One rank may hold a buffer longer in all of its steps, where the threads of gloo get no core.
    assert max(map(abs, errors)) < 0.01, errors


def measured_with_chosen_experts(rank: int, options: Any, wanted: int) -> int:
    """As `measured`, of tokens whose choices are experts of rank 0 but for one expert of rank 1 if there are more."""
    world = world_of(options)

    def step() -> DryStep:
        built = step_of(options, world)
        for module in built.loop.model.modules():
            if isinstance(module, Router) and module.bias is not None:
                half = len(module.bias) // 2
                module.bias.data[:half] = torch.where(torch.arange(half) < wanted, 100.0, -100.0)
        return built

    return foreseen.measured_range(step, options)[0]


@pytest.mark.slow
def test_the_peak_of_a_rank_whose_experts_get_more_rows_is_that_of_the_profiler() -> None:
    small = {"model": "llama_moe_tiny", "model.num_layers": 2, "model.experts.balance": "bias", "data.batch_size": 4}
    small |= {"parallel.data": 2, "parallel.expert": 2, "data.sequence_length": 128, "model.mlp_dim": 512}
    skews = {1.5: (4, 3), 2.0: (2, 2)}  # from top_k, and the choices that go to rank 0
    asked = {skew: options_of(small | {"model.experts.top_k": top_k}) for skew, (top_k, _) in skews.items()}
    answers = ask_ranks({skew: (2, measured_with_chosen_experts, asked[skew], skews[skew][1]) for skew in skews})
    for skew, options in asked.items():
        assert training_peak(traced(options, expert_skew=skew)) / answers[skew][0] == pytest.approx(1, abs=0.01)
        # A plan that assumes even experts falls short, as it says.
        assert training_peak(traced(options)) / answers[skew][0] < 0.95


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
    assert memory.moments["evaluation"]["gradients"] == 0
    places = [name.removeprefix("backward pass, ") for name in memory.moments if name.startswith("backward pass, ")]
    assert places == ["last block", "inner blocks", "first block", "embedding"]


@pytest.mark.slow
def test_more_micro_batches_than_three_take_no_more_memory() -> None:
    three, six = (
        options_of({"model.num_layers": 1, "data.batch_size": size, "trainer.micro_batch_size": 2}) for size in (6, 12)
    )
    assert traced(three).peak == traced(six).peak


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
        loop = step_of(options, world).loop
        assert loop.state.parallel.relays[loop.model].stages.first_trained == first


def rows_of_embedding(_rank: int, options: Any) -> int:
    world = World(device=torch.device("cpu"), mesh=Mesh(options.parallel, "cpu"))
    parallel = step_of(options, world).loop.state.parallel
    return len(parallel.parameters()["embedding.weight"])


@pytest.mark.slow
def test_ranks_that_are_forked_after_a_trace_have_shards_of_their_own() -> None:
    options = options_of({"parallel.shard": 2, "model.num_layers": 1, "data.batch_size": 2})
    traced(options)
    assert ask_ranks({"rows": (2, rows_of_embedding, options)})["rows"] == [130, 129]


def test_a_shard_of_a_trace_that_is_still_held_is_not_measured() -> None:
    with dry_world(ParallelConfig(shard=2), "fp32") as world:
        assert world.mesh is not None
        _held = DTensor.from_local(torch.empty(3), world.mesh.device_mesh["shard"])
        foreseen._held_storages(set())
