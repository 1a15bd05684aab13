"""One implementation of each operation by compile level and device; a failed one is replaced by the reference."""

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import logging
import pickle
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels import dispatch
from kitforge.core.kernels.dispatch import (
    IMPLEMENTATIONS,
    REFERENCE,
    TABLE_REFERENCE,
    CompileLevel,
    DecodeSteps,
    Kernels,
    TableKernels,
    _select_table,
    implementation,
    preferred,
    select,
    select_table,
)
from kitforge.core.kernels.fused_decode_step.reference import ReferenceDecodeStep
from kitforge.core.kernels.sparse_update.reference import SparseUpdate
from kitforge.foundation.errors import ConfigError, DependencyError, DeviceError, ModelError
from tests.core.kernels.comparison import random, relative
from tests.core.kernels.test_fused_decode_step import inputs as step_inputs
from tests.core.kernels.test_fused_decode_step import stack

NAMES = [field.name for field in dataclasses.fields(Kernels)]
NAMED = [(operation, name) for operation, found in IMPLEMENTATIONS.items() for name in found]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No implementation has failed, and none has been chosen."""
    monkeypatch.setattr(dispatch, "_failed", set())
    monkeypatch.setattr(dispatch, "select", select.__wrapped__)


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == dispatch.__name__]


def test_level_zero_is_the_references() -> None:
    assert select("O0") is REFERENCE
    assert select("O0", "cuda") is REFERENCE


def test_level_one_replaces_every_reference() -> None:
    fused = select("O1")
    # These have a kernel on accelerators alone: on a CPU torch's LayerNorm is one already.
    names = set(NAMES) - {"quantized_linear", "layer_norm", "add_norm", "moe_permute", "moe_unpermute"}
    assert all(getattr(fused, name) is not getattr(REFERENCE, name) for name in names)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_level_is_the_same_each_time(level: CompileLevel, device: str) -> None:
    assert select(level, device) is select(level, device)


def test_each_device_has_implementations_of_its_own() -> None:
    assert preferred("linear", "cpu") == ["numba", "fused"]
    assert preferred("linear", "cuda") == ["fused"]
    assert preferred("linear", "cpu", "O2") == ["traceable"]
    assert preferred("rms_norm", "cpu") == ["numba", "fused"]
    assert preferred("rms_norm", "cuda") == preferred("rms_norm", "npu") == ["triton", "fused"]
    assert preferred("linear_cross_entropy", "cuda", "O2") == ["triton", "chunked"]
    here, there = select("O1", "cpu"), select("O1", "cuda")
    assert here.linear is not there.linear
    assert there.linear is implementation("linear", "fused")
    assert there.keep_mask is REFERENCE.keep_mask
    assert here.fused_decode_step == DecodeSteps("numba", "cpu")
    assert there.fused_decode_step == DecodeSteps("triton", "cuda")
    assert preferred("fused_decode_step", "npu") == []
    assert here.add_norm is None
    assert there.add_norm is not None


def test_loops_over_tables_are_compiled_where_numba_is() -> None:
    fast = select_table()
    for kind, one, other in (
        (TableKernels, fast, TABLE_REFERENCE),
        (SparseUpdate, fast.sparse_update, TABLE_REFERENCE.sparse_update),
    ):
        for field in dataclasses.fields(kind):
            assert getattr(one, field.name) is not getattr(other, field.name)


def test_loops_over_tables_are_the_references_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_table("mps") == TABLE_REFERENCE
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _select_table.__wrapped__("cpu") == TABLE_REFERENCE


def test_an_absent_fast_path_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("kitforge.foundation.log._warned", set())
    for device, command in (("cpu", "pip install numba"), ("cuda", "pip install 'kitforge[gpu]'")):
        caplog.clear()
        for _ in range(2):
            preferred("rms_norm", device)
            preferred("greedy_sample", device)
        (said,) = caplog.messages
        assert said.endswith(command) and "slower operations of torch" in said
    assert preferred("rms_norm", "mps") == ["fused"] and len(caplog.messages) == 1


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Name, default, and whether it is positional, of every parameter but `self`."""
    found = inspect.signature(function).parameters.values()
    # A protocol may forbid names that an implementation allows.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [(each.name, each.kind in positional, each.default) for each in found if each.name != "self"]


def signature_errors(found: Any, protocol: type) -> list[str]:
    """The methods of an implementation whose parameters do not begin as those of the protocol, or need more."""
    errors = []
    for name, method in vars(protocol).items():
        if not inspect.isfunction(method) or name in ("__init__", "__subclasshook__"):
            continue
        wanted = parameters(method)
        got = parameters(found if name == "__call__" else getattr(found, name))
        further = got[len(wanted) :]
        if got[: len(wanted)] != wanted or any(default is inspect.Parameter.empty for *_, default in further):
            errors.append(f"{name}{got} is not {wanted}")
    return errors


def protocol_of(operation: str) -> type:
    """The protocol of an operation: that of its field."""
    hint = typing.get_type_hints(Kernels if operation in NAMES else TableKernels)[operation]
    found: type = next(iter(typing.get_args(hint)), hint)
    return found


@pytest.mark.parametrize(("operation", "name"), [*NAMED, *((each, "reference") for each in IMPLEMENTATIONS)])
def test_every_implementation_has_the_signature_of_its_protocol(operation: str, name: str) -> None:
    found = dispatch._REFERENCES[operation] if name == "reference" else dispatch._load(operation, name)
    protocol = protocol_of(operation)
    if protocol is SparseUpdate:
        rules = [field.name for field in dataclasses.fields(SparseUpdate)]
        reference = TABLE_REFERENCE.sparse_update
        assert all(parameters(getattr(found, rule)) == parameters(getattr(reference, rule)) for rule in rules)
    else:
        assert signature_errors(found, protocol) == []


def test_a_planted_signature_is_seen() -> None:
    def reordered(input: Tensor, eps: float, weight: Tensor) -> Tensor: ...
    def longer(input: Tensor, weight: Tensor, eps: float, further: int) -> Tensor: ...

    assert signature_errors(reordered, protocol_of("rms_norm"))
    assert signature_errors(longer, protocol_of("rms_norm"))
    assert signature_errors(REFERENCE.rms_norm, protocol_of("rms_norm")) == []


def test_every_operation_is_a_folder_with_a_reference() -> None:
    operations = {*NAMES, *(field.name for field in dataclasses.fields(TableKernels))}
    assert operations == IMPLEMENTATIONS.keys()
    assert all(implementation(operation, "reference") is not None for operation in operations)


def test_an_implementation_by_name_that_cannot_run_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no such implementation .*\n  got: .*linear by 'numbra'\n.*numba, fused"):
        implementation("linear", "numbra")
    with pytest.raises(ConfigError, match="no such implementation"):
        implementation("linnear", "numba")
    with pytest.raises(DeviceError, match=r"linear by 'numba' cannot run\n  got:      device=cuda\n  expected: cpu"):
        implementation("linear", "numba", "cuda")
    few = implementation("linear", "numba")
    with pytest.raises(ModelError, match=r"linear by 'numba' does not accept .*\n  got:      \[3, 4\] torch.float64"):
        few(random(3, 4), random(5, 4))
    with torch.no_grad():
        assert few(torch.ones(3, 4), torch.ones(5, 4)).shape == (3, 5)
    monkeypatch.setitem(IMPLEMENTATIONS["linear"], "numba", broken("linear", "numba"))
    with pytest.raises(ModuleNotFoundError):
        implementation("linear", "numba")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DependencyError, match="linear by 'numba' needs the package 'numba'"):
        implementation("linear", "numba")


def broken(operation: str, name: str) -> dispatch.Implementation:
    """The implementation, of which the module is missing."""
    return dataclasses.replace(IMPLEMENTATIONS[operation][name], path="no_such_file.function")


def fail(*_: object, **_options: object) -> Tensor:
    raise RuntimeError("the compiler has failed")


@torch.no_grad()
def test_a_chosen_implementation_that_does_not_load_is_replaced_by_the_reference_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for operation in ("linear", "rms_norm"):
        monkeypatch.setitem(IMPLEMENTATIONS[operation], "numba", broken(operation, "numba"))
    input, weight = torch.randn(3, 4), torch.randn(5, 4)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            kernels = dispatch.select("O1")
            assert torch.equal(kernels.linear(input, weight), REFERENCE.linear(input, weight))
    (message,) = failures(caplog)
    assert "linear by 'numba' failed" in message
    assert "no_such_file" in message


@torch.no_grad()
def test_a_chosen_implementation_that_fails_in_a_call_is_replaced_by_the_reference_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def failing(*inputs: Tensor) -> Tensor:
        calls.append(inputs)
        return fail()

    monkeypatch.setattr("kitforge.core.kernels.linear.numba.linear", failing)
    linear = dispatch.select("O1").linear
    input, weight = torch.randn(3, 4), torch.randn(5, 4)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(linear(input, weight), REFERENCE.linear(input, weight))
        assert torch.equal(linear(input, weight), REFERENCE.linear(input, weight))
    assert len(calls) == 1
    assert len(failures(caplog)) == 1
    assert "the compiler has failed" in failures(caplog)[0]


@torch.no_grad()
def test_wrong_arguments_are_the_callers_error_and_replace_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = pytest.importorskip("kitforge.core.kernels.rms_norm.numba")
    seen = []
    original = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda *inputs: seen.append(1) or original(*inputs))
    rms_norm = dispatch.select("O1").rms_norm
    with pytest.raises(TypeError):
        rms_norm(torch.randn(3, 4), torch.randn(4), "eps")
    assert failures(caplog) == []
    rms_norm(torch.randn(3, 4), torch.randn(4), 1e-6)
    assert len(seen) == 2


@torch.no_grad()
def test_a_decode_step_that_fails_is_run_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing:
        def __init__(self, *arguments: object) -> None: ...

        __call__ = staticmethod(fail)

    pytest.importorskip("numba")
    monkeypatch.setattr("kitforge.core.kernels.fused_decode_step.numba.NumbaDecodeStep", Failing)
    weights = stack("gated", torch.float32)
    slabs, *inputs = step_inputs(2, "gated", torch.float32)
    wanted = ReferenceDecodeStep(weights, [(keys.clone(), values.clone()) for keys, values in slabs])(*inputs)
    factory = dispatch.select("O1").fused_decode_step
    assert factory is not None
    step = factory(weights, slabs)
    for _ in range(2):
        assert all(torch.equal(one, other) for one, other in zip(step(*inputs), wanted, strict=True))
    assert len(failures(caplog)) == 1


def test_a_set_of_kernels_is_copied_and_pickled_with_the_model_that_has_it() -> None:
    kernels = dataclasses.replace(select("O1"), fused_decode_step=None)
    input, weight = torch.randn(3, 4), torch.randn(5, 4)
    with torch.no_grad():
        wanted = kernels.linear(input, weight)
        for copied in (copy.deepcopy(kernels), pickle.loads(pickle.dumps(kernels))):
            assert torch.equal(copied.linear(input, weight), wanted)


def test_a_table_loop_that_does_not_load_is_replaced_by_the_reference_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(IMPLEMENTATIONS["unique"], "numba", broken("unique", "numba"))
    for _ in range(2):
        chosen = _select_table.__wrapped__("cpu")
        assert chosen.unique is TABLE_REFERENCE.unique
        assert chosen.copy_rows is not TABLE_REFERENCE.copy_rows
    assert len(failures(caplog)) == 1
    assert "unique by 'numba' failed" in failures(caplog)[0]


@torch.no_grad()
def test_a_planted_fault_of_the_fallback_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fallback the failure reaches the caller."""
    monkeypatch.setattr(dispatch, "_WithFallback", lambda _operation, _name, load, *_: load())
    monkeypatch.setattr("kitforge.core.kernels.linear.numba.linear", fail)
    with pytest.raises(RuntimeError, match="the compiler has failed"):
        dispatch.select("O1").linear(torch.randn(3, 4), torch.randn(5, 4))


SECOND: dict[str, tuple[Callable[[Kernels, Tensor], Tensor], tuple[int, ...]]] = {
    "linear": (lambda kernels, input: kernels.linear(input, random(3, 6)), (5, 6)),
    "rms_norm": (lambda kernels, input: kernels.rms_norm(input, random(6), 1e-6), (5, 6)),
    "swiglu": (lambda kernels, input: kernels.swiglu(input, input * input), (5, 6)),
    "rotary": (
        lambda kernels, input: kernels.rotary(input, random(1, 5, 3).cos(), random(1, 5, 3).sin(), False),
        (2, 2, 5, 6),
    ),
    "linear_cross_entropy": (
        lambda kernels, input: kernels.linear_cross_entropy(input, random(4, 6), torch.tensor([0, 1, 2, 3, -100])),
        (5, 6),
    ),
    "linear_log_probs": (
        lambda kernels, input: kernels.linear_log_probs(input, random(4, 6), torch.tensor([0, 1, 2, 3, 0]))[0],
        (5, 6),
    ),
}


@pytest.mark.parametrize("power", [1, 3])
@pytest.mark.parametrize("name", SECOND)
def test_a_second_derivative_is_right(name: str, power: int) -> None:
    call, shape = SECOND[name]
    found, wanted = (curvature(kernels, call, shape, power) for kernels in (select("O1"), REFERENCE))
    assert relative(found, wanted) < 1e-10


def curvature(
    kernels: Kernels, call: Callable[[Kernels, Tensor], Tensor], shape: tuple[int, ...], power: int
) -> Tensor:
    """The gradient of a function of the gradient of what the kernel returns, or of its power: the incoming gradient of
    a plain sum requires none."""
    input = random(*shape).requires_grad_()
    (gradient,) = torch.autograd.grad(call(kernels, input.tanh()).pow(power).sum(), input, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), input)[0]
