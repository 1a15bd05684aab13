"""The work of a step: FLOPs as torch counts them, kernels by their costs, and the line through three depths."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.costs import cost
from kitforge.core.kernels.dispatch import REFERENCE, select
from kitforge.core.parallel.plan.memory import MemoryTrace
from kitforge.core.parallel.plan.work import KERNELS, SMALL, UPDATE, Operation, Work, WorkTrace, continued, kernel_cost
from kitforge.core.parallel.schedules import Pass


def traced(device_type: str = "cpu") -> tuple[WorkTrace, MemoryTrace]:
    work = WorkTrace(device_type, "fp32", None)
    work.enter(UPDATE)
    return work, MemoryTrace(device_type, work)


SIZES = st.integers(1, 9)


@settings(deadline=None, max_examples=30)
@given(st.tuples(SIZES, SIZES, SIZES, SIZES), st.booleans(), st.booleans())
def test_the_flops_of_products_are_those_of_torchs_counter(
    sizes: tuple[int, int, int, int], has_bias: bool, is_trained: bool
) -> None:
    batch, rows, inner, width = sizes

    def step() -> None:
        weight, bias = torch.ones(width, inner, requires_grad=is_trained), torch.ones(width) if has_bias else None
        input = torch.ones(batch, rows, inner, requires_grad=True)
        hidden = torch.nn.functional.linear(input, weight, bias)
        (hidden @ hidden.mT @ torch.ones(rows, 3)).sum().backward()

    work, trace = traced()
    with trace:
        step()
    with FlopCounterMode(display=False) as counter:
        step()
    assert work.passes[UPDATE].flops == counter.get_total_flops() > 0


def test_bytes_are_those_that_are_read_and_written_and_views_are_none() -> None:
    large = torch.ones(SMALL)
    work, trace = traced()
    with trace:
        (large.view(2, -1) + large.view(2, -1)).mul_(2)
        torch.empty(SMALL).copy_(large)
        large[:10].neg()
    found = work.passes[UPDATE]
    size = large.nbytes
    assert found.operations == {Operation("", 0, 3 * size): 1, Operation("", 0, 2 * size): 2}
    assert (found.counts["launches"], found.counts["views"]) == (4, 4)


def test_tensors_of_a_list_are_counted_one_by_one() -> None:
    tensors = [torch.ones(SMALL), torch.ones(2 * SMALL)]
    work, trace = traced()
    with trace:
        torch._foreach_mul_(tensors, 2.0)
    found = work.passes[UPDATE]
    assert found.operations == {Operation("", 0, 2 * each.nbytes): 1 for each in tensors}
    assert found.counts["launches"] == 1


def test_a_gpus_kernel_is_counted_at_its_call_and_once_backward() -> None:
    input, gate = (torch.ones(64, 256, requires_grad=True) for _ in range(2))
    weight = torch.ones(256, requires_grad=True)
    work, trace = traced("cuda")
    rms_norm, swiglu = (work.counted(name, getattr(select("O1"), name)) for name in ("rms_norm", "swiglu"))
    with trace:
        output = swiglu(rms_norm(input, weight, 1e-5), gate)
    gradient = torch.ones_like(output)
    size = input.nbytes
    forward = [Operation("", 0, 2 * size + weight.nbytes), Operation("", 0, 3 * size)]
    assert work.passes[UPDATE].operations == Counter(forward)
    with trace:
        output.backward(gradient)
    backward = [Operation("", 0, 3 * size + 2 * weight.nbytes), Operation("", 0, 5 * size)]
    assert work.passes[UPDATE].operations == Counter(forward + backward)
    assert torch.is_tensor(input.grad)


def test_a_gpus_product_has_two_products_backward() -> None:
    work, trace = traced("cuda")
    query = torch.rand(1, 2, 8, 4, requires_grad=True)
    attention = work.counted("attention", select("O1").attention)
    with trace:
        output = attention(query, query, query, mask=None, causal=True, scale=1.0)
        forward = work.passes[UPDATE].flops
        output.sum().backward()
    assert forward == 4 * 2 * 4 * (8 * 9 // 2)
    assert work.passes[UPDATE].flops == 3 * forward


def call_of(operation: str, one: int, two: int, width: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rows, weight = torch.rand(one * two, 8 * width), torch.rand(8 * width)
    if operation == "attention":
        query, key = (torch.rand(one, 2, length, 8) for length in (two, two))
        return (query, key, key), {"mask": None, "causal": True, "scale": 1.0}
    if operation == "rotary":
        angles = torch.rand(1, two, 4)
        return (torch.rand(one, 2, two, 8), angles, angles, False), {}
    if operation.startswith("linear"):
        return (rows, torch.rand(40 * width, 8 * width), torch.zeros(len(rows), dtype=torch.int64)), {}
    if operation.endswith("glu"):
        return (rows, rows), {}
    return (rows, weight, *((weight,) if operation == "layer_norm" else ()), 1e-5), {}


@settings(deadline=None, max_examples=10)
@given(st.sampled_from([each for each in KERNELS if "moe" not in each]), SIZES, SIZES, SIZES)
def test_the_cost_of_a_kernel_is_that_of_the_benchmarks(operation: str, one: int, two: int, width: int) -> None:
    """The benchmarks also count what is done to each logit, which the width of a row makes small."""
    inputs, options = call_of(operation, one, two, width)
    flops, read, written = kernel_cost(operation, inputs, getattr(REFERENCE, operation)(*inputs, **options), options)
    known = cost(operation, *inputs, **options)
    assert read + written == pytest.approx(known.bytes, abs=8 * one * two)
    if flops:
        assert flops <= known.flops <= flops * (1 + 3 / (8 * width))
        assert 2 * flops <= known.backward_flops <= 2 * flops * (1 + 3 / (8 * width))
    assert known.backward_bytes == pytest.approx(2 * read + written, rel=0.6)


def test_what_is_computed_again_is_counted_apart() -> None:
    from torch.utils.checkpoint import checkpoint

    from kitforge.core.kernels.autograd.recomputation import passes

    weight = torch.ones(8, 8, requires_grad=True)

    def block(input: Tensor) -> Tensor:
        return (input @ weight).sin() @ weight

    work, trace = traced()
    with trace:
        hidden = torch.ones(4, 8, requires_grad=True)
        checkpoint(block, hidden, use_reentrant=False, context_fn=lambda: passes(keeps=False)).sum().backward()
    found = work.passes[UPDATE]
    product = 2 * 4 * 8 * 8
    assert found.flops == 2 * product + 4 * product + found.counts["recomputed"]
    assert 0 < found.counts["recomputed"] <= 2 * product


COUNTS = st.dictionaries(st.integers(0, 6), st.integers(1, 9), max_size=5)


def work_of(base: dict[int, int], slope: dict[int, int], depth: int) -> dict[Pass, Work]:
    found = Counter(
        {Operation("fp32", each, each): base.get(each, 0) + depth * slope.get(each, 0) for each in range(7)}
    )
    return {UPDATE: Work(operations=Counter({key: count for key, count in found.items() if count}))}


@given(COUNTS, COUNTS, st.integers(1, 8), st.integers(0, 90))
def test_counts_go_on_along_a_line(base: dict[int, int], slope: dict[int, int], period: int, further: int) -> None:
    depths = [3, 3 + period, 3 + 2 * period]
    found = continued(*(work_of(base, slope, depth) for depth in depths), further)
    assert found == work_of(base, slope, depths[-1] + further * period)


@pytest.mark.parametrize("bend", [1, -1])
def test_counts_on_no_line_are_not_continued(bend: int) -> None:
    bent = work_of({1: 10 + bend}, {1: 2}, 5)
    assert continued(work_of({1: 10}, {1: 2}, 3), work_of({1: 10}, {1: 2}, 4), bent, 10) is None
