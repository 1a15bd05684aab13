"""Storages and depths: what a trace follows, and when memory goes on by whole periods of blocks."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.parallel.collectives import all_gather
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.plan import memory
from kitforge.core.parallel.plan.depth import extrapolate, trace_depths
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.plan.memory import MemoryTrace, StepMemory
from kitforge.core.parallel.plan.stages import num_traced, traced_ranks
from kitforge.core.parallel.schedules import Pipeline
from kitforge.foundation.host_values import is_fake
from kitforge.verify.foreseen import profiled_peak


def alike(count: int) -> Sequence[str]:
    return ["block"] * count


def with_windows(count: int) -> Sequence[str]:
    """Five blocks with a window, then one without, as in Gemma 3."""
    return ["whole" if layer % 6 == 5 else "window" for layer in range(count)]


def first_dense(count: int) -> Sequence[str]:
    return ["dense", *["sparse"] * (count - 1)]


@pytest.mark.parametrize(
    ("kinds", "num_blocks", "depths"),
    [
        (alike, 80, (3, 4, 5)),
        (alike, 5, (5,)),
        (first_dense, 48, (3, 4, 5)),
        (with_windows, 26, (8, 14, 20)),
        (with_windows, 18, (3, 8, 13)),  # each five have one without a window
        (range, 40, (40,)),
    ],
)
def test_depths_differ_by_a_period_of_blocks(kinds: object, num_blocks: int, depths: tuple[int, ...]) -> None:
    assert trace_depths(kinds, num_blocks) == depths  # type: ignore[arg-type]


def of(*sizes: int) -> dict[int, StepMemory]:
    return {
        depth: StepMemory(moments={"head": {"weights": size}}) for depth, size in zip((3, 4, 5), sizes, strict=True)
    }


def test_memory_goes_on_along_a_line() -> None:
    found = extrapolate(of(10_000, 11_000, 12_000), 80)
    assert found is not None
    assert found.peak == 87_000


def test_three_traces_that_lie_on_no_line_are_not_extended() -> None:
    assert extrapolate(of(10_000, 11_000, 12_100), 80) is None


def states(pipeline: Pipeline, rank: int, count: int) -> set[tuple[int, ...]]:
    """Every number of micro-batches that wait for a backward pass, and for one of weights, by stage of a rank."""
    waiting, seen = {(kind, stage): 0 for stage in pipeline.stages_of(rank) for kind in "BW"}, set()
    for kind, stage, _ in pipeline.passes(rank, count):
        if kind != "W":
            waiting["B", stage] += 1 if kind == "F" else -1
        if kind in "IW":
            waiting["W", stage] += 1 if kind == "I" else -1
        seen.add(tuple(waiting.values()))
    return seen


def pipelines() -> st.SearchStrategy[Pipeline]:
    plain = st.builds(Pipeline, st.integers(2, 6), st.sampled_from(["1f1b", "zero_bubble"]))
    several = st.builds(Pipeline, st.integers(2, 6), st.just("interleaved"), st.integers(2, 4))
    return plain | several | st.builds(Pipeline, st.integers(2, 6), st.just("zero_bubble_v"), st.just(2))


@given(pipelines(), st.integers(1, 150))
def test_the_micro_batches_of_a_trace_are_in_flight_as_all_of_them(pipeline: Pipeline, count: int) -> None:
    traced = num_traced(pipeline, count)
    assert traced <= max(pipeline.num_stages + 1, count if pipeline.schedule == "interleaved" else 0)
    for rank in range(pipeline.num_ranks):
        assert states(pipeline, rank, traced) == states(pipeline, rank, count)


@pytest.mark.parametrize(
    ("pipeline", "layers", "ranks"),
    [
        (Pipeline(2), [2, 2], [0, 1]),
        (Pipeline(4), [4, 4, 4, 3], [0, 1, 3]),
        (Pipeline(4), [4, 4, 7, 3], [0, 2, 3]),  # two of seven layers are more than three of four
        (Pipeline(4, "zero_bubble"), [4, 4, 5, 3], [0, 2, 3]),
        (Pipeline(3, "zero_bubble_v", 2), [2] * 6, [0, 1, 2]),
    ],
)
def test_the_ends_and_the_fullest_rank_between_are_traced(
    pipeline: Pipeline, layers: list[int], ranks: list[int]
) -> None:
    assert traced_ranks(pipeline, 16, layers) == ranks


def test_a_storage_counts_until_its_last_view_is_gone() -> None:
    trace = MemoryTrace("cpu")
    with trace:
        whole = torch.empty(100)
        view = whole[:10]
        del whole
        trace.enter("update")
        del view
        trace.enter("evaluation")
        torch.empty(25)
    sizes = {name: sum(each.values()) for name, each in trace.result().moments.items()}
    assert sizes == {"forward pass": 400, "update": 400, "evaluation": 100}


def test_a_storage_that_is_resized_without_an_operation_is_followed() -> None:
    trace = MemoryTrace("cpu")
    with trace, trace.following_resizes():
        weight = torch.empty(100)
        weight.untyped_storage().resize_(0)
        trace.enter("head")
        weight.untyped_storage().resize_(400)
        weight.untyped_storage().resize_(0)
        trace.enter("update")
    found = trace.result().moments
    assert found["head"]["gathered weights"] == sum(found["head"].values()) == 400
    assert sum(found["update"].values()) == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_tensors_have_the_cause_that_they_are_given() -> None:
    trace, layer = MemoryTrace("cpu"), nn.Linear(4, 4, bias=False)
    trace.attribute([layer.weight], "weights")
    with trace:
        trace.enter("backward pass")
        layer(torch.empty(2, 4)).sum().backward()
        assert layer.weight.grad is not None
        trace.attribute([layer.weight.grad, layer.weight.grad], "gradients")
        trace.enter("update")
        torch.empty(4, 4)
    found = trace.result().moments["update"]
    assert (found["weights"], found["gradients"], found["temporaries"]) == (64, 64, 64)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=60), st.integers(1, 80))
def test_the_course_of_memory_has_the_peak_and_its_causes_at_every_point(
    orders: list[tuple[int, int]], most: int
) -> None:
    trace, held, totals = MemoryTrace("cuda", keeps_course=True), dict[int, torch.Tensor](), list[int]()
    with pytest.MonkeyPatch.context() as patch, trace:
        patch.setattr(memory, "POINTS", most)
        before = torch.empty(30)
        trace.forget_peaks()
        totals.append(before.nbytes)
        for number, (place, size) in enumerate(orders):
            if number == len(orders) // 2:
                trace.enter("update")
            held.pop(place, None)
            totals.append(before.nbytes + sum(each.nbytes for each in held.values()))
            held[place] = torch.empty(size)
            if place == 0:
                trace.attribute([held[place]], "gradients")
            totals.append(before.nbytes + sum(each.nbytes for each in held.values()))
        found = trace.result()
    points = [sum(sizes.values()) for _, sizes in found.course]
    assert max(points) == found.peak == max(totals)
    assert len(points) <= most + 1 and {*points} <= {*totals}
    assert dict(found.by_cause) in [sizes for _, sizes in found.course]
    assert [moment for moment, _ in found.course] == sorted(moment for moment, _ in found.course)


@pytest.mark.parametrize(("device_type", "size"), [("cpu", 2000), ("cuda", 1200)])
def test_gloo_alone_gathers_into_memory_of_its_own(device_type: str, size: int) -> None:
    trace = MemoryTrace(device_type)
    with dry_world(ParallelConfig(shard=2), "fp32") as world, trace:
        assert world.mesh is not None
        all_gather(torch.empty(100), world.mesh.world, 0)
    assert trace.result().peak == size


@pytest.mark.parametrize("has_gradient", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(40, 700), (200, 200), (900, 300)])
def test_the_scores_that_threads_of_a_cpu_hold_are_those_of_the_profiler(
    queries: int, keys: int, has_gradient: bool
) -> None:
    def attend() -> None:
        lengths = (queries, keys, keys)
        rows = [torch.ones(2, length, 3, 8, requires_grad=has_gradient).transpose(1, 2) for length in lengths]
        attended = functional.scaled_dot_product_attention(rows[0], rows[1], rows[2]).transpose(1, 2)
        if has_gradient:
            torch.autograd.backward(attended, torch.ones_like(attended))

    trace = MemoryTrace("cpu")
    with dry_world(ParallelConfig(), "fp32"), trace:
        attend()
    # Sums of rows of scores are left out.
    assert trace.result().peak == pytest.approx(profiled_peak(attend), rel=0.02)


def test_a_plan_between_two_runs_changes_no_loop_over_rows_of_tables() -> None:
    before = select_table()
    with dry_world(ParallelConfig(), "fp32"):
        assert select_table().copy_rows is not before.copy_rows
        assert select_table().unique is before.unique
    assert select_table() is before


def test_what_follows_from_a_tensor_without_values_has_none() -> None:
    with dry_world(ParallelConfig(), "fp32"):
        unknown, known = torch.ones(3), torch.arange(3)
        assert not is_fake(known)
        assert is_fake(unknown)
        assert is_fake((unknown.argsort() + known).to(torch.int32))
        assert (known + 1).to(torch.int32).tolist() == [1, 2, 3]
        assert unknown[known > 0].shape == (2,)
