"""The Triton kernels against their float64 references; on a CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from kitforge.core.kernels import dispatch, triton_runtime
from kitforge.core.kernels.dispatch import IMPLEMENTATIONS, REFERENCE, implementation
from tests.core.kernels.comparison import Call, random, relative, results

# Rows beyond the last one compute on nothing, and what they find is not written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ALL = [operation for operation, found in IMPLEMENTATIONS.items() if "triton" in found]
# Those with files of their own.
TABLES = {"embedding_bag", "embedding_bag_backward", "sparse_update", "copy_rows"}
TRITON = [operation for operation in ALL if operation not in {"paged_attention", "quantized_linear", *TABLES}]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-2, torch.float16: 3e-3}
DTYPES = list(TOLERANCE)
ANGLES = random(2, 9, 3)
# Rows and columns: one of each, no row, fewer and more than a tile of 64, powers of two and their neighbours.
SHAPES = [(1, 1), (0, 5), (5, 7), (4, 64), (3, 65), (9, 200)]


def targets_of(rows: int, vocabulary: int, ignored: int = 3) -> Tensor:
    targets = torch.randint(0, vocabulary, (rows,), generator=torch.Generator().manual_seed(rows))
    if ignored:
        targets[::ignored] = -100
    return targets


def cases(rows: int, columns: int) -> dict[str, tuple[Callable[[Any], Call], list[Tensor]]]:
    """By operation: a call of it, of tensors only, and those tensors."""
    all_targets, some_targets = targets_of(rows, columns, 0), targets_of(rows, columns)
    hidden, weight = random(rows, 6), 3 * random(columns, 6, seed=1)
    return {
        "rms_norm": (lambda op: partial(op, eps=1e-6), [random(rows, columns), random(columns)]),
        "swiglu": (lambda op: op, [random(rows, columns), random(rows, columns, seed=1)]),
        "linear_cross_entropy": (lambda op: lambda h, w: op(h, w, some_targets), [hidden, weight]),
        "linear_log_probs": (lambda op: lambda h, w: torch.stack(op(h, w, all_targets, 0.7)), [hidden, weight]),
        "rotary": (
            lambda op: lambda x: op(x, ANGLES.to(angle_dtype(x)).cos(), ANGLES.to(angle_dtype(x)).sin(), False),
            [random(2, max(rows, 1), 9, 6 + columns % 5)],
        ),
    }


def angle_dtype(input: Tensor) -> torch.dtype:
    return torch.promote_types(input.dtype, torch.float32)


def kernel(operation: str) -> Any:
    """The Triton implementation, on whatever device runs it here."""
    return dispatch._load(operation, "triton")


def check(operation: str, call: Callable[[Any], Call], inputs: list[Tensor], found: Any = None) -> float:
    """The largest difference of any result of the kernel in its dtype from the reference in float64."""
    got = results(call(found or kernel(operation)), inputs)
    wanted = results(call(getattr(REFERENCE, operation)), [each.double() for each in inputs])
    return max(relative(one, other, floor=1.0) for one, other in zip(got, wanted, strict=True))


@pytest.mark.parametrize("operation", TRITON)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_its_reference(operation: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    if dtype == torch.float16 and operation.startswith("linear"):
        assert not IMPLEMENTATIONS[operation]["triton"].accepts(*(random(2, 2).half() for _ in range(2)))
        return
    call, inputs = cases(*shape)[operation]
    rounded = [each.to(dtype) for each in inputs]
    # The gradient that comes in is rounded as well.
    assert check(operation, call, rounded) < TOLERANCE[dtype]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dim", [6, 7, 16])
def test_rotary_turns_both_layouts_and_keeps_what_is_left(interleaved: bool, batch: int, dim: int) -> None:
    cos, sin = ANGLES[:batch].cos(), ANGLES[:batch].sin()

    def call(op: Any) -> Call:
        # Heads behind tokens, as a projection leaves them, and a slice of a wider tensor.
        return lambda wide: op(wide.transpose(1, 2)[..., 2 : 2 + dim], cos, sin, interleaved)

    assert check("rotary", call, [random(2, 9, 4, dim + 3)]) < 1e-12


@pytest.mark.parametrize("operation", ["rms_norm", "swiglu"])
def test_views_are_understood(operation: str) -> None:
    call, inputs = cases(9, 40)[operation]
    views: list[tuple[Tensor, Call]] = [
        (random(9, 100), lambda wide: wide[:, 5:45]),
        (random(40, 9), lambda wide: wide.t()),
        (random(3, 9, 2, 40), lambda wide: wide.transpose(0, 2)[0]),
    ]
    for wide, view in views:
        of_view = lambda op, view=view: lambda x, y: call(op)(view(x), y)  # noqa: E731
        other = inputs[1] if operation == "rms_norm" else random(*view(wide).shape, seed=1)
        assert check(operation, of_view, [wide, other]) < 1e-12


@pytest.mark.parametrize("scale", [1e-15, 1e-4, 1e10])
def test_rms_norm_of_tiny_and_huge_rows(scale: float) -> None:
    inputs = [random(5, 70, dtype=torch.float32) * scale, random(70, dtype=torch.float32)]
    got = results(partial(kernel("rms_norm"), eps=1e-6), inputs)
    wanted = results(partial(REFERENCE.rms_norm, eps=1e-6), [each.double() for each in inputs])
    assert max(map(relative, got, wanted)) < 1e-5


@pytest.mark.parametrize("operation", ["linear_cross_entropy", "linear_log_probs"])
def test_huge_and_impossible_logits(operation: str) -> None:
    call, (hidden, weight) = cases(5, 130)[operation]
    assert check(operation, call, [hidden.float() * 1e3, weight.float()]) < 1e-4
    # A token with the logit -inf has no probability; its gradient is not NaN.
    weight[7] = 0
    hidden[:, 0], weight[7, 0] = 1, -torch.inf
    targets = torch.tensor([1, 2, 3, 4, 5])
    found = kernel(operation)
    total = found(hidden.float(), weight.float(), targets)
    assert torch.isfinite(total if torch.is_tensor(total) else torch.stack(total)).all()


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
def test_a_target_out_of_the_vocabulary_makes_its_loss_nan(target: int) -> None:
    hidden, weight, targets = random(6, 8), random(70, 8), targets_of(6, 70, 0)
    targets[2] = target
    assert torch.isnan(kernel("linear_cross_entropy")(hidden, weight, targets))
    log_probs, entropies = kernel("linear_log_probs")(hidden, weight, targets)
    assert torch.isnan(log_probs).tolist() == [number == 2 for number in range(6)]
    assert torch.isfinite(entropies).all()


def test_chunks_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    from kitforge.core.kernels.linear_cross_entropy import chunked

    for operation in ("linear_cross_entropy", "linear_log_probs"):
        call, inputs = cases(9, 200)[operation]
        whole = results(call(kernel(operation)), inputs)
        monkeypatch.setattr(chunked, "CHUNK_BYTES", 4 * 200 * 8)
        parts = results(call(kernel(operation)), inputs)
        monkeypatch.undo()
        assert max(map(relative, parts, whole)) < 1e-13


@pytest.mark.parametrize("operation", TRITON)
def test_the_same_inputs_give_the_same_bits(operation: str) -> None:
    call, inputs = cases(9, 65)[operation]
    one, other = (results(call(kernel(operation)), [each.float() for each in inputs]) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def opcheck_cases() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """By custom op: the op, and arguments of it."""
    norm, gate, turn, loss, probs = (sys.modules[kernel(name).__module__] for name in sorted_names())
    input, weight = random(5, 7).requires_grad_(), random(7).requires_grad_()
    hidden, matrix, targets = random(5, 6).requires_grad_(), random(9, 6).requires_grad_(), targets_of(5, 9)
    numbers = random(5)
    return {
        "rms_norm": (norm._forward, (input, weight, 1e-6)),
        "rms_norm_backward": (norm._backward, (random(5, 7), input.detach(), weight.detach(), random(5))),
        "swiglu": (gate._forward, (input, random(5, 7).requires_grad_())),
        "swiglu_backward": (gate._backward, (random(5, 7), random(5, 7), random(5, 7))),
        "rotary": (turn._rotate, (random(2, 4, 9, 8).requires_grad_(), ANGLES, ANGLES, True, False)),
        "linear_cross_entropy": (loss._forward, (hidden, matrix, targets, True, True)),
        "linear_log_probs": (probs._forward, (hidden, matrix, targets_of(5, 9, 0), 0.5)),
        "linear_log_probs_backward": (
            probs._backward,
            (numbers, numbers, hidden.detach(), matrix.detach(), targets_of(5, 9, 0), numbers, numbers, 0.5),
        ),
    }


def sorted_names() -> list[str]:
    return ["rms_norm", "swiglu", "rotary", "linear_cross_entropy", "linear_log_probs"]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_every_custom_op_passes_opcheck_and_is_in_this_test() -> None:
    made = opcheck_cases()
    for op, arguments in made.values():
        torch.library.opcheck(op, arguments)
    elsewhere = {f"kitforge::{name}" for name in ("paged_attention", "quantized_linear", "keep_mask", *TABLES)}
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
        call, inputs = cases(5, 7)[operation]
        own = call(kernel(operation))
        compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
        wanted, found = results(own, inputs), results(compiled, inputs)
        assert max(map(relative, found, wanted)) < 1e-12


@pytest.mark.parametrize("operation", TRITON)
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(operation: str) -> None:
    call, inputs = cases(5, 7)[operation]
    real = call(kernel(operation))(*(each.bfloat16() for each in inputs))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(kernel(operation))(*(mode.from_tensor(each.bfloat16()) for each in inputs))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_it_is_chosen_on_accelerators_alone_and_by_name() -> None:
    assert all(implementation(name, "triton", "cuda") is not None for name in ALL)
    for name in ALL:
        assert "triton" not in dispatch.available(name, "cpu")
        assert dispatch.available(name, "cuda")[0] == "triton"


def test_autocast_computes_the_loss_in_half_precision() -> None:
    hidden, weight, targets = random(5, 8).float(), random(70, 8).float(), targets_of(5, 70)
    with torch.autocast("cpu", torch.bfloat16):
        found = kernel("linear_cross_entropy")(hidden, weight, targets)
    wanted = kernel("linear_cross_entropy")(hidden.bfloat16(), weight.bfloat16(), targets)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


# Faults planted in the kernels' sources: an operation, what is replaced, and by what.
FAULTS = {
    "no mask": ("rms_norm", "stride + columns, mask=inside", "stride + columns, mask=columns < BLOCK"),
    "wrong stride": ("rms_norm", "row * stride", "row * dim"),
    "unwritten row": ("rms_norm", "for step in range(steps):", "for step in range(steps - 1):"),
    "half reduction": ("rms_norm", "tl.sum(x * x, 0) /", "tl.sum((x * x).to(tl.float16), 0).to(EXACT) /"),
    "weight gradient of one row": ("rms_norm", "total += g * normal", "total = g * normal"),
    "rotation both ways alike": ("rotary", "s = s * SIGN", "s = s"),
    "pairs of one head": ("rotary", "head * in_head", "0 * in_head"),
    "rest not kept": ("rotary", "mask=kept), mask=kept)", "mask=kept), mask=feature < 0)"),
    "sigmoid's slope": ("swiglu", "(1 + g * (1 - s))", "1"),
    "sum not rescaled": ("linear_cross_entropy", "total * tl.exp(highest - top)", "total"),
    "target kept": ("linear_cross_entropy", "tl.where(start + columns == target, 1.0, 0.0)", "0.0"),
    "ignored counted": ("linear_cross_entropy", "tl.where(target == -100, 0.0, 1.0)", "1.0"),
    "entropy not shifted": ("linear_log_probs", "(product + total * shift) *", "product *"),
    "temperature once": ("linear_log_probs", "gradient / temperature", "gradient"),
    "entropy without gradient": ("linear_log_probs", "(log_prob + entropy) * of_entropy", "0.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault: str, tmp_path: Path) -> None:
    operation, before, after = FAULTS[fault]
    source = Path(sys.modules[kernel(operation).__module__].__file__ or "").read_text()
    assert before in source
    planted = getattr(module_of(source.replace(before, after), operation, tmp_path), operation)
    worst = 0.0
    for shape in SHAPES:
        call, inputs = cases(*shape)[operation]
        # Rows within wider ones, so that what is read beside them exists and is wrong.
        wide = [functional.pad(each, (0, 64), value=7.0) for each in inputs]
        widths = [each.shape[-1] for each in inputs]
        sliced = slices_of(call, widths) if operation == "rms_norm" else call
        found = check(operation, sliced, [each.float() for each in (wide if sliced is not call else inputs)], planted)
        worst = max(worst, found)
    assert worst > 1e-4


def slices_of(call: Callable[[Any], Call], widths: list[int]) -> Callable[[Any], Call]:
    """The call, on the first columns of its inputs."""
    return lambda op: lambda *wide: call(op)(*(each[..., :width] for each, width in zip(wide, widths, strict=True)))


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
    assert dispatch.fast_path.MAX_TRITON_ROW["npu"] * 4 * 3 < 192 * 1024
    assert triton_runtime.grid(torch.device("cpu"), 100) == (3,)
    assert triton_runtime.grid(torch.device("cpu"), 0) == (1,)
