"""The Triton kernels against their float64 references; on a CPU, in Triton's interpreter."""

import importlib.util
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kitforge.core.kernels import dispatch
from kitforge.core.kernels.autograd import mixed_precision
from kitforge.core.kernels.dispatch import IMPLEMENTATIONS, REFERENCE, implementation
from kitforge.core.kernels.linear_cross_entropy import vocabulary
from kitforge.core.kernels.triton import accepts
from kitforge.core.kernels.triton import gated as triton_gated
from kitforge.core.kernels.triton import logits as triton_logits
from kitforge.core.kernels.triton import norm as triton_norm
from kitforge.core.kernels.triton import runtime as triton_runtime
from tests.core.kernels.comparison import Call, in_parts, random, relative, results
from tests.core.kernels.operations import EDGES, OPERATIONS, Draw, error

# Rows beyond the last one compute on nothing, and what they find is not written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ALL = [operation for operation, found in IMPLEMENTATIONS.items() if "triton" in found]
TRITON = [operation for operation in ALL if operation in OPERATIONS and operation != "quantized_linear"]
TABLES = {"embedding_bag", "embedding_bag_backward", "sparse_update", "copy_rows", "unique", "hash_map"}


def targets_of(rows: int, vocabulary: int, ignored: int = 3) -> Tensor:
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(rows))
    if ignored:
        targets[::ignored] = -100
    return targets


def case_of(operation: str, rows: int = 5, columns: int = 7, choice: int = 0) -> tuple[Call, list[Tensor]]:
    """A call of the kernel of tensors only, and those tensors."""
    case = OPERATIONS[operation](Draw(lead=(rows,), width=columns), Random(choice))
    return case.call(kernel(operation)), case.inputs


def kernel(operation: str) -> Any:
    """The Triton implementation, on whatever device runs it here."""
    return dispatch._load(operation, "triton")


@pytest.mark.parametrize("operation", ["linear_cross_entropy", "linear_log_probs"])
def test_huge_and_impossible_logits(operation: str) -> None:
    hidden, weight, targets = 1e3 * random(5, 6).float(), random(130, 6, seed=1).float(), targets_of(5, 130, 0)
    own, exact = (
        results(lambda *given, op=op: op(*given, targets)[0] if "log" in operation else op(*given, targets), inputs)  # type: ignore[misc]
        for op, inputs in (
            (kernel(operation), [hidden, weight]),
            (getattr(REFERENCE, operation), [hidden.double(), weight.double()]),
        )
    )
    assert max(map(partial(relative, floor=1.0), own, exact)) < 1e-4
    # A token with the logit -inf has no probability; its gradient is not NaN.
    weight[7] = 0
    hidden[:, 0], weight[7, 0] = 1, -torch.inf
    targets = torch.tensor([1, 2, 3, 4, 5])
    found = kernel(operation)
    total = found(hidden.float(), weight.float(), targets)
    assert torch.isfinite(total if torch.is_tensor(total) else torch.stack(total)).all()


@pytest.fixture
def one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread launches at a time: the interpreter keeps the number of the program in a global."""
    lock, launch = threading.Lock(), triton_logits.launch_grid

    def locked(*arguments: Any, **options: Any) -> None:
        with lock:
            launch(*arguments, **options)

    monkeypatch.setattr(triton_logits, "launch_grid", locked)


@pytest.mark.parametrize("operation", ["linear_cross_entropy", "linear_log_probs"])
def test_vocabulary_shards(operation: str, one_launch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = random(7, 6), random(130, 6), targets_of(7, 130, 3 if "entropy" in operation else 0)
    temperature = () if operation == "linear_cross_entropy" else (0.7,)

    def run(op: Any, *leaves: Tensor, shard: vocabulary.VocabularyShard | None = None) -> list[Tensor]:
        found = op(*leaves, targets, *temperature, shard=shard)
        found = found if torch.is_tensor(found) else torch.stack(found)
        upstream = random(*found.shape, seed=99)
        return [found.detach(), *torch.autograd.grad(found, leaves, upstream)]

    wanted = run(getattr(REFERENCE, operation), hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    # Whole, and in chunks of three rows.
    for name, chunk in (
        ("triton", vocabulary.CHUNK_BYTES),
        ("chunked", vocabulary.CHUNK_BYTES),
        ("chunked", 3 * 130 * 8),
    ):
        monkeypatch.setattr(vocabulary, "CHUNK_BYTES", chunk)
        op = dispatch._load(operation, name)
        whole = run(op, hidden.clone().requires_grad_(), weight.clone().requires_grad_())
        # Uneven shards, the last of them empty.
        shards = in_parts(
            [70, 1, 59, 0],
            weight,
            lambda own, shard, op=op: run(op, hidden.clone().requires_grad_(), own, shard=shard),  # type: ignore[misc]
        )
        results_, of_hidden, of_weight = zip(*shards, strict=True)
        sharded = [results_[2], torch.stack(of_hidden).sum(0), torch.cat(of_weight)]
        for found in (whole, sharded):
            assert max(map(relative, found, wanted)) < 1e-12


@pytest.mark.parametrize("name", ["triton", "chunked"])
def test_a_target_that_no_shard_holds_makes_the_loss_infinite(name: str, one_launch: None) -> None:
    hidden, weight, targets = random(3, 6), random(9, 6), torch.tensor([1, 9, 2])
    losses = in_parts(
        [5, 4],
        weight,
        lambda own, shard: dispatch._load("linear_cross_entropy", name)(hidden, own, targets, shard=shard),
    )
    log_probs = in_parts(
        [5, 4], weight, lambda own, shard: dispatch._load("linear_log_probs", name)(hidden, own, targets, shard=shard)
    )
    assert all(torch.isposinf(each) for each in losses)
    assert all(torch.isneginf(each[0]).tolist() == [False, True, False] for each in log_probs)


def test_a_whole_block_of_impossible_tokens_is_left_out() -> None:
    logits = torch.cat([torch.full((2, 70), -torch.inf), random(2, 130).float()], 1)
    found = vocabulary.merge_statistics(triton_logits.statistics(logits, torch.tensor([80, 199]), 1.0)[None])
    wanted = logits.log_softmax(-1)
    torch.testing.assert_close(found[0], wanted[[0, 1], [80, 199]])
    torch.testing.assert_close(found[1], -(wanted.exp() * wanted.clamp(min=-1e9)).sum(-1))


def test_ignored_rows_count_nothing_though_they_are_nan() -> None:
    hidden, weight = random(6, 8, dtype=torch.float32), random(70, 8, dtype=torch.float32)
    targets = targets_of(6, 70)
    hidden[targets == -100] = torch.nan
    leaf = hidden.clone().requires_grad_()
    loss = kernel("linear_cross_entropy")(leaf, weight, targets)
    (gradient,) = torch.autograd.grad(loss, leaf)
    kept = targets != -100
    assert torch.equal(gradient[~kept], torch.zeros_like(gradient[~kept]))
    assert relative(loss.detach(), REFERENCE.linear_cross_entropy(hidden[kept], weight, targets[kept])) < 1e-6


@pytest.mark.parametrize("target", [-1, 70, 10**12])
def test_a_target_out_of_the_vocabulary_makes_its_loss_infinite(target: int) -> None:
    hidden, weight, targets = random(6, 8), random(70, 8), targets_of(6, 70, 0)
    targets[2] = target
    assert torch.isposinf(kernel("linear_cross_entropy")(hidden, weight, targets))
    log_probs, entropies = kernel("linear_log_probs")(hidden, weight, targets)
    assert torch.isneginf(log_probs).tolist() == [number == 2 for number in range(6)]
    assert torch.isfinite(entropies).all()


def test_chunks_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for operation in ("linear_cross_entropy", "linear_log_probs"):
        call, inputs = case_of(operation, 9, 200)
        whole = results(call, inputs)
        monkeypatch.setattr(vocabulary, "CHUNK_BYTES", 4 * 200 * 8)
        parts = results(call, inputs)
        monkeypatch.undo()
        assert max(map(relative, parts, whole)) < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("operation", TRITON)
def test_the_same_inputs_give_the_same_bits(operation: str) -> None:
    call, inputs = case_of(operation, 9, 65)
    one, other = (results(call, [each.float() for each in inputs]) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def opcheck_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By custom op: the op, and arguments of it."""
    turn = sys.modules[kernel("rotary").__module__]
    input, weight = random(5, 7).requires_grad_(), random(7).requires_grad_()
    logits, targets = random(5, 9), targets_of(5, 9)
    return {
        "norm": (triton_norm.norm, (input, weight, random(7).requires_grad_(), 1e-6)),
        "norm_of_sum": (
            triton_norm.norm_of_sum,
            (input, random(5, 7).requires_grad_(), weight, random(7).requires_grad_(), 1e-6),
        ),
        "norm_backward": (triton_norm._backward, (random(5, 7), None, input.detach(), random(7), random(1, 5), False)),
        "gated": (triton_gated.gated, (input, random(5, 7).requires_grad_(), True)),
        "gated_backward": (triton_gated._backward, (random(5, 7), random(5, 7), random(5, 7), False)),
        "rotary": (turn._rotate, (random(2, 4, 9, 8).requires_grad_(), *[random(2, 9, 3)] * 2, True, False)),
        "logits_statistics": (triton_logits.statistics, (logits, targets, 0.7)),
        "logits_gradient_": (triton_logits.gradient_, (logits, targets, random(4, 5), 0.7)),
    }


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_custom_op_passes_opcheck_and_is_in_this_test() -> None:
    made = opcheck_cases()
    for op, arguments in made.values():
        torch.library.opcheck(op.op, arguments)
    elsewhere = {
        f"kitforge::{name}"
        for name in ("paged_attention", "quantized_linear", "round_to_float8", "add_wide_product", *TABLES)
    }
    elsewhere |= {"kitforge::keep_mask", "kitforge::keep_mask_at"}
    elsewhere |= {f"kitforge::moe_{name}" for name in ("spread", "combine", "weight_gradient")}
    elsewhere |= {"kitforge::grouped_linear", "kitforge::grouped_linear_backward"}
    compiled_loops = {name for name in registered() if name.endswith("_numba")}
    assert {f"kitforge::{name}" for name in made} == set(registered()) - elsewhere - compiled_loops


def registered() -> Iterator[str]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("kitforge::"):
            yield name.partition(".")[0]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_compiler_traces_them_without_a_break() -> None:
    for operation in TRITON:
        own, inputs = case_of(operation)
        compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
        wanted, found = results(own, inputs), results(compiled, inputs)
        assert max(map(relative, found, wanted)) < 1e-12


@pytest.mark.parametrize("operation", TRITON)
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(operation: str) -> None:
    call, inputs = case_of(operation)
    real = call(*(each.bfloat16() for each in inputs))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(*(mode.from_tensor(each.bfloat16()) for each in inputs))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_it_is_chosen_on_accelerators_alone_and_by_name() -> None:
    assert all(implementation(name, "triton", "cuda") is not None for name in ALL)
    for name in ALL:
        assert "triton" not in dispatch.preferred(name, "cpu")
        assert dispatch.preferred(name, "cuda")[0] == "triton"


def test_autocast_computes_the_loss_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever the products of this processor.
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.bfloat16, True)
    hidden, weight, targets = random(5, 8).float(), random(70, 8).float(), targets_of(5, 70)
    with torch.autocast("cpu", torch.bfloat16):
        found = kernel("linear_cross_entropy")(hidden, weight, targets)
    wanted = kernel("linear_cross_entropy")(hidden.bfloat16(), weight.bfloat16(), targets)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


# Where the kernels of an operation are, if not beside it.
SHARED = {
    **dict.fromkeys(("linear_cross_entropy", "linear_log_probs"), triton_logits),
    **dict.fromkeys(("rms_norm", "layer_norm", "add_norm"), triton_norm),
    **dict.fromkeys(("swiglu", "geglu"), triton_gated),
}
# Faults planted in the kernels' sources: an operation, what is replaced, and by what.
FAULTS = {
    "no mask": ("rms_norm", "stride + columns, mask=inside", "stride + columns, mask=columns < FEATURES"),
    "wrong stride": ("rms_norm", "following * stride", "following * dim"),
    "unwritten row": ("rms_norm", "for _ in range(steps):", "for _ in range(steps - 1):"),
    "half reduction": ("rms_norm", "tl.sum(x * x, 1", "tl.sum((x * x).to(tl.float16), 1"),
    "weight gradient of some programs": ("rms_norm", "range(0, programs, PARTS)", "range(0, programs - 1, PARTS)"),
    "weight gradient of one row": ("rms_norm", "of_weight += g * normal", "of_weight = g * normal"),
    "bias gradient of one row": ("layer_norm", "of_bias += g", "of_bias = g"),
    "mean of padding": (
        "layer_norm",
        "tl.where(inside, x - mean, 0)\n            tl.store",
        "x - mean\n            tl.store",
    ),
    "mean without gradient": ("layer_norm", " - level / dim", ""),
    "residual not added": ("add_norm", "x += tl.load", "x += 0 * tl.load"),
    "gradient of the sum lost": ("add_norm", "slope += other", "slope += 0 * other"),
    "rotation both ways alike": ("rotary", "s = s * SIGN", "s = s"),
    "pairs of one head": ("rotary", "head * in_head", "0 * in_head"),
    "rest not kept": ("rotary", "mask=kept), mask=kept)", "mask=kept), mask=kept & (rest < 0))"),
    "sigmoid's slope": ("swiglu", "bend = g * s * (1 - s)", "bend = 0 * g"),
    "cubic slope": ("geglu", "3 * _CUBIC", "_CUBIC"),
    "no cubic": ("geglu", "x * (_LINEAR + _CUBIC * x * x)", "x * _LINEAR"),
    "sum not rescaled": ("linear_cross_entropy", "total = total * tl.exp(shift)", "total = total"),
    "target kept": ("linear_cross_entropy", "gradient += tl.where", "gradient += 0 * tl.where"),
    "entropy not shifted": ("linear_log_probs", "(product + total * shift) *", "product *"),
    "temperature once": ("linear_log_probs", "gradient / divisor", "gradient"),
    "entropy without gradient": ("linear_log_probs", "(log_prob + entropy) * of_entropy", "0.0"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation, before, after = FAULTS[fault]
    own = sys.modules[kernel(operation).__module__]
    holder = SHARED.get(operation, own)
    source = Path(holder.__file__ or "").read_text()
    assert before in source
    module = module_of(source.replace(before, after), operation, tmp_path)
    planted = getattr(module, operation, kernel(operation))
    for name in vars(own).keys() & vars(module).keys() if holder is not own else ():
        if getattr(own, name) is getattr(holder, name):
            monkeypatch.setattr(own, name, getattr(module, name))

    draws = [replace(edge, dtype=torch.float32, choice=choice) for choice in range(3) for edge in EDGES]
    assert any((error(operation, "triton", draw, planted) or 0) > 1e-4 for draw in draws)


def module_of(source: str, name: str, folder: Path) -> ModuleType:
    """A module of this source, whose custom ops have names of their own."""
    path = folder / f"planted_{abs(hash(source))}.py"
    path.write_text(source.replace('"kitforge::', f'"planted_{abs(hash(source))}::'))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # Triton reads the source of a kernel through its module
    spec.loader.exec_module(made)
    return made


def test_an_ascend_core_gets_smaller_tiles_and_as_many_programs_as_it_has_cores() -> None:
    npu = triton_runtime._NPU
    assert npu.tile_elements < 4096
    assert accepts.MAX_TRITON_ROW["npu"] * 4 * 3 < 192 * 1024
    assert triton_runtime.grid(torch.device("cpu"), 100) == (3,)
    assert triton_runtime.grid(torch.device("cpu"), 0) == (1,)
