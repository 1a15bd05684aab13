"""The messages of a traced step are those of a real one, and counts of deep networks follow from shallow ones."""

import random
from collections import Counter
from typing import Any

import pytest

from kitforge.core.parallel.plan.work import MESSAGE_KINDS, continued
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks
from tests.distributed.step import Messages
from tests.measured_step import options_of, real_step, work_of

SHORT = {"model.num_layers": 2, "data.batch_size": 4, "data.sequence_length": 16, "trainer.micro_batch_size": 1}
STAGES = {**SHORT, "parallel.pipeline": 2, "model.num_layers": 4}
LAYOUTS: list[dict[str, Any]] = [
    {**SHORT, "parallel.data": 2},
    {**SHORT, "parallel.shard": 2},
    {**SHORT, "parallel.shard": 2, "parallel.zero_stage": 1, "precision": "bf16"},
    {**SHORT, "parallel.tensor": 2, "trainer.activation_checkpointing": "full"},
    {**SHORT, "parallel.tensor": 2, "parallel.sequence_parallel": False},
    {**SHORT, "parallel.context": 2, "trainer.activation_checkpointing": "selective"},
    {**STAGES},
    {**STAGES, "parallel.schedule": "zero_bubble_v"},
]
# An object is sent by a broadcast, which a plan leaves out: the sums of the last stage.
COUNTED = {name: kind for name, kind in MESSAGE_KINDS.items() if kind != "broadcast"}


def messages_of(_rank: int, options: Any) -> Counter[tuple[str, int, str]]:
    """The numbers and the bytes of the collectives of a second step, by kind and ranks."""
    _, run = real_step(options)
    run()
    with Messages() as messages:
        run()
    found = Counter[tuple[str, int, str]]()
    for (name, ranks), (count, size) in messages.sizes.items():
        if kind := COUNTED.get(name.partition("::")[2]):
            found.update({(kind, len(ranks), "number"): count, (kind, len(ranks), "bytes"): size})
    return found


def foreseen(options: Any, index: int) -> Counter[tuple[str, int, str]]:
    found, own = Counter[tuple[str, int, str]](), -(-options.data.batch_size // options.parallel.num_replicas)
    passes = work_of(options, index)
    traced = 1 + max(each.micro_batch for each in passes)
    for at, work in passes.items():
        # Those between the first and the last are alike.
        times = own - traced + 1 if at.micro_batch == 1 and at.kind != "U" else 1
        for message, count in work.messages.items():
            if message.kind != "broadcast":
                found[message.kind, message.ranks, "number"] += times * count
                found[message.kind, message.ranks, "bytes"] += times * work.sent[message]
    return found


@pytest.mark.slow
def test_the_messages_of_a_plan_are_those_of_the_step() -> None:
    asked = [options_of(each) for each in LAYOUTS]
    answers = ask_ranks({number: (2, messages_of, each) for number, each in enumerate(asked)})
    for number, options in enumerate(asked):
        planned = [foreseen(options, index) for index in range(options.parallel.pipeline)]
        # Ranks of one stage send alike.
        assert answers[number] == planned * (2 // len(planned)), LAYOUTS[number]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40) if WHOLE else [6])
def test_counts_of_a_deep_network_are_those_of_its_trace(seed: int) -> None:
    numbers = random.Random(seed)
    axis = numbers.choice(["shard", "tensor", "context", "data"])
    choices = {
        "model": numbers.choice(["llama_tiny", "gpt2_tiny", "llama_moe_tiny"]),
        "precision": numbers.choice(["fp32", "bf16"]),
        "trainer.activation_checkpointing": numbers.choice(["none", "selective", "full"]),
        "data.batch_size": 2 * numbers.randint(1, 3),
        "data.sequence_length": 8 * numbers.randint(1, 4),
        "trainer.micro_batch_size": numbers.choice([1, 2]),
        f"parallel.{axis}": numbers.choice([1, 2]),
    }
    deep = numbers.randint(6, 8)
    options = options_of(choices | {"model.num_layers": deep})
    found = continued(*(work_of(options, depth=depth) for depth in (3, 4, 5)), deep - 5)
    # The buckets of gradients have no line: their sizes depend on all parameters.
    assert found == work_of(options) if options.parallel.data == 1 else found in (None, work_of(options))


# The axes of messages by their kind: what FSDP sends, tokens to experts, heads of a context, sums.
AXES_OF = {
    "all_gather": {"shard", "fsdp", "expert_data", "tensor"},
    "reduce_scatter": {"shard", "fsdp", "expert_data", "tensor"},
    "all_to_all": {"expert", "context"},
    "send": {"pipeline"},
    "all_reduce": {"data", "shard", "batch", "replicas", "expert_data", "tensor", "context", "pipeline", "all ranks"},
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200) if WHOLE else [2, 4, 5])
def test_every_message_has_its_axis_and_behind_a_pass_are_those_of_fsdp_and_sums_of_gradients(seed: int) -> None:
    numbers = random.Random(seed)
    axes = numbers.sample(["data", "shard", "context", "tensor", "pipeline"], numbers.randint(1, 3))
    choices = {**SHORT, "data.batch_size": 16, **{f"parallel.{axis}": 2 for axis in axes}}
    # Experts often coincide with another axis.
    batch = 2 ** len({"data", "shard", "context"} & {*axes})
    if batch > 1 and "tensor" not in axes:
        choices |= {"model": "llama_moe_tiny", "parallel.expert": numbers.choice([2, batch])}
    found = [message for work in work_of(options_of(choices), device_type="cuda").values() for message in work.messages]
    assert all(each.axis in AXES_OF[each.kind] for each in found), {each[:4] for each in found}
    sent_by_fsdp = {("all_gather", axis) for axis in ("shard", "fsdp", "expert_data")}
    sent_by_fsdp |= {("reduce_scatter", axis) for _, axis in sent_by_fsdp}
    assert all(each[:2] in sent_by_fsdp or each.kind == "all_reduce" for each in found if each.is_hidden)
    assert all(each.is_hidden for each in found if each[:2] in sent_by_fsdp)
    assert ("parallel.expert" in choices) == any(each[:2] == ("all_to_all", "expert") for each in found)
