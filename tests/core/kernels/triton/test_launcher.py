"""Launches without Triton run the machine code that Triton would choose, with what it would give it."""

import contextlib
import importlib
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

from kitforge.core.kernels.triton import float8 as triton_float8
from kitforge.core.kernels.triton import gated as triton_gated
from kitforge.core.kernels.triton import launcher as triton_launcher
from kitforge.core.kernels.triton import moe as triton_moe
from kitforge.core.kernels.triton import norm as triton_norm
from kitforge.core.kernels.triton.launcher import RepeatedLaunch, launch_programs, specialization

NUMBERS = [-(2**63), -(2**31) - 16, -(2**31) - 1, -(2**31), -16, -1, 0, 1, 2, 15, 16, 17, 48]
NUMBERS += [2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, 2**33, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 16]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int32, torch.int64, torch.bool]


class GPUTensor(Tensor):
    """A tensor that says it is on a GPU."""

    number = 0
    is_cuda = True  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)


def tensor_of(dtype: torch.dtype = torch.float32, offset: int = 0) -> GPUTensor:
    """With the address of the 16 bytes that torch aligns to, or as many elements behind it."""
    return torch.zeros(8, dtype=dtype)[offset:].as_subclass(GPUTensor)


TENSORS = [tensor_of(dtype, offset) for dtype in DTYPES for offset in (0, 1, 4)]


def drawn(generator: random.Random) -> Any:
    return generator.choice(
        [
            generator.choice(TENSORS),
            generator.choice(NUMBERS),
            generator.choice([0.0, 1.0, 0.5]),
            generator.choice([None, True, False]),
        ]
    )


BACKEND = CUDABackend(GPUTarget("cuda", 90, 32))


def chosen_by(arguments: tuple[Any, ...]) -> str:
    """What Triton compiles for."""
    return str([native_specialize_impl(BACKEND, each, False, True, True) for each in arguments])


def test_the_key_tells_apart_what_triton_tells_apart() -> None:
    generator = random.Random(0)
    lists = [(each,) for each in (*NUMBERS, *TENSORS, 0.0, 1.0, None, True, False)]
    lists += [tuple(drawn(generator) for _ in range(3)) for _ in range(5000)]
    by_key: dict[tuple[Any, ...], str] = {}
    for each in lists:
        key = tuple(specialization(each)[0])
        assert by_key.setdefault(key, chosen_by(each)) == chosen_by(each)
    # And no more than that, so that sizes that change need no machine code again, but for what a pointer points to.
    assert len({tuple(specialization((each,))[0]) for each in range(-500, 500)}) == len(
        {chosen_by((each,)) for each in range(500)}
    )


def test_the_entry_gets_addresses_and_numbers() -> None:
    tensor = tensor_of(offset=1)
    assert specialization((tensor, 3, 0.5, None))[1] == [tensor.data_ptr(), 3, 0.5, None]


class Compiled:
    """Machine code: of a kernel, its arguments and options."""

    def __init__(self, made_for: Any, launches: list[Any]) -> None:
        self.metadata = SimpleNamespace(target=SimpleNamespace(backend="cuda"))
        self.function, self.packed_metadata = made_for, "metadata"
        self.launches = launches

    def run(self, *given: Any) -> None:
        self.launches.append(given)


def made_for(kernel: Any, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kernel.__name__, device, chosen_by(arguments), sorted(options.items(), key=str)


class Triton:
    """Triton's launches, and those of entries that it returned."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.kept: list[Any] = []
        self.device = 0

    def run(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        """In place of `JITFunction.run`."""
        assert not warmup
        self.own.append((grid, arguments, options))
        return Compiled(made_for(kernel, self.device, arguments, options), self.kept)

    @contextlib.contextmanager
    def current(self, device: torch.device) -> Any:
        before, self.device = self.device, device.index or 0
        yield
        self.device = before


def _copy_kernel(source, target, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    pass


def _other_kernel(source, target, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    pass


COPY, OTHER = JITFunction(_copy_kernel), JITFunction(_other_kernel)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Triton:
    found = Triton()
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *given, **options: found.run(kernel, *given, **options))
    monkeypatch.setattr(triton_launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(triton_launcher, "_kept", {})
    monkeypatch.setattr(triton_launcher.devices, "current", found.current)
    active = SimpleNamespace(
        get_current_device=lambda: found.device, get_current_stream=lambda device: f"stream of {device}"
    )
    monkeypatch.setattr(triton_launcher, "driver", SimpleNamespace(active=active))
    return found


def start(*arguments: Any, kernel: Any = COPY, programs: int = 3, warps: int = 4, **constants: Any) -> None:
    launch_programs(kernel, programs, arguments, num_warps=warps, constants={"BLOCK": 64, **constants})


def test_installed_triton_is_known() -> None:
    assert triton_launcher._IS_KNOWN


def test_later_launches_run_the_machine_code_that_triton_would_choose(recorded: Triton) -> None:
    generator = random.Random(1)
    tensors, sizes = [tensor_of(), tensor_of(offset=1), tensor_of(torch.float64)], [1, 2, 16, 2**31, 2**31 + 1]
    for _ in range(5000):
        source = generator.choice(tensors).as_subclass(GPUTensor)
        source.number, recorded.device = generator.randrange(2), generator.randrange(2)
        arguments = source, generator.choice([*tensors, None]), generator.choice([*sizes, 1.0]), generator.choice(sizes)
        constants = {
            "BLOCK": generator.choice([64, 128]),
            **generator.choice([{}, {"num_stages": 3}, {"launch_pdl": True}]),
        }
        kernel, warps, programs = generator.choice([COPY, OTHER]), generator.choice([4, 8]), generator.choice([1, 7])
        before = len(recorded.own), len(recorded.kept)
        start(*arguments, kernel=kernel, warps=warps, programs=programs, **constants)
        exact = tl.float64 if source.dtype == torch.float64 else tl.float32
        options = {**constants, "EXACT": exact, "num_warps": warps}
        if source.number != recorded.device or len(recorded.own) > before[0]:
            assert recorded.own[-1] == ((programs,), arguments, options)
            continue
        assert len(recorded.kept) == before[1] + 1
        values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        function = made_for(kernel, source.number, arguments, options)
        head = programs, 1, 1, f"stream of {source.number}", function, "metadata", None, None, None
        assert recorded.kept[-1] == (*head, *values, constants["BLOCK"], exact)
    assert len(recorded.kept) > 100


def test_a_repeated_launch_runs_the_machine_code_that_triton_would_choose(
    recorded: Triton, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(2)
    aligned, unaligned = [tensor_of(), tensor_of(offset=4)], [tensor_of(offset=1), tensor_of(offset=2)]
    again = RepeatedLaunch(COPY, 5, (16, 1), num_warps=4, constants={"BLOCK": 64})
    options = {"BLOCK": 64, "EXACT": tl.float32, "num_warps": 4}
    for _ in range(300):
        source, target = (generator.choice(generator.choice([aligned, aligned, unaligned])) for _ in range(2))
        recorded.device = generator.choice([0, 0, 1])
        is_watched = generator.choice([False, False, True])
        monkeypatch.setattr(COPY, "pre_run_hooks", [print] * is_watched)
        before = len(recorded.own), len(recorded.kept)
        again(source, target)
        arguments = source, target, 16, 1
        if is_watched or recorded.device != 0 or len(recorded.own) > before[0]:
            assert recorded.own[-1] == ((5,), arguments, options)
            assert (len(recorded.own), len(recorded.kept)) == (before[0] + 1, before[1])
            continue
        head = 5, 1, 1, "stream of 0", made_for(COPY, 0, arguments, options), "metadata", None, None, None
        assert recorded.kept[before[1] :] == [(*head, source.data_ptr(), target.data_ptr(), 16, 1, 64, tl.float32)]
    assert len(recorded.kept) > 100


def test_operations_repeat_no_launch_for_tensors_of_other_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[RepeatedLaunch, Any] = {}

    def check(self: RepeatedLaunch, *tensors: Tensor) -> None:
        kinds = [(each.dtype, each.device) for each in tensors]
        assert seen.setdefault(self, kinds) == kinds

    monkeypatch.setattr(RepeatedLaunch, "__call__", check)
    kinds: list[tuple[Any, Any, Any]] = list(
        itertools.product([torch.float32, torch.bfloat16, torch.float64], repeat=3)
    )
    positions, turn = torch.arange(8).view(4, 2), importlib.import_module("kitforge.core.kernels.rotary.triton")
    for one, two, three in kinds:
        rows, others = torch.zeros(4, 16, dtype=one), torch.zeros(4, 16, dtype=two)
        weight, bias, sums = (torch.zeros(16, dtype=each) for each in (two, three, three))
        moments = torch.zeros(2, 4, dtype=torch.promote_types(one, torch.float32))
        triton_norm.norm(rows, weight, None, 1e-6)
        triton_norm.norm(rows, weight, bias, 1e-6)
        triton_norm.norm_of_sum(rows, others, bias, None, 1e-6)
        triton_norm.norm_of_sum(rows, others, bias, sums, 1e-6)
        for is_layer in (False, True):
            triton_norm._backward(others, None, rows, bias, moments, is_layer)
            triton_norm._backward(others, others.to(three), rows, sums, moments, is_layer)
        triton_gated.gated(rows, others, False)
        triton_gated._backward(rows.to(three), rows, others, True)
        turn._rotate(rows.view(1, 2, 2, 16), *(torch.zeros(1, 2, 4, dtype=each) for each in (two, three)), False, False)
        triton_moe.spread(rows, positions, positions.to(two))
        triton_moe.combine(torch.zeros(8, 16, dtype=one), positions, positions.to(two))
        triton_moe.weight_gradient(rows, torch.zeros(8, 16, dtype=two), positions.to(torch.int32))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            triton_float8.round_to_float8(rows, dtype)
    assert len(seen) > 100


def num_kept(recorded: Triton, *arguments: Any, **options: Any) -> int:
    """Of two equal launches, those that Triton did not make."""
    before = len(recorded.kept)
    for _ in range(2):
        start(*arguments, **options)
    return len(recorded.kept) - before


def test_triton_makes_launches_that_a_hook_watches(recorded: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = tensor_of(), tensor_of(), 5, 2
    assert num_kept(recorded, *arguments) == 1
    runtime = triton_launcher.runtime
    for name in ("launch_enter_hook", "launch_exit_hook"):
        chain = getattr(runtime, name)
        chain.add(print)
        assert num_kept(recorded, *arguments) == 0
        chain.remove(print)
        monkeypatch.setattr(runtime, name, print)
        assert num_kept(recorded, *arguments) == 0
        monkeypatch.setattr(runtime, name, None)
        assert num_kept(recorded, *arguments) == 2
    monkeypatch.setattr(COPY, "pre_run_hooks", [print])
    assert num_kept(recorded, *arguments) == 0


def test_triton_makes_launches_whose_tensors_are_elsewhere(recorded: Triton) -> None:
    assert num_kept(recorded, tensor_of(), torch.zeros(8), 5, 2) == 0
    assert num_kept(recorded, torch.zeros(8), torch.zeros(8), 5, 2) == 0
    assert num_kept(recorded, tensor_of(), tensor_of(), 5, 2) == 1
    assert num_kept(recorded, tensor_of(), torch.zeros(8), 5, 2) == 0


def test_triton_makes_launches_of_what_is_not_known(recorded: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = tensor_of(), tensor_of(), 5, 2
    # A parameter before the constants that is given by name.
    assert num_kept(recorded, *arguments[:3], steps=2) == 0
    # What is no compiled kernel, such as one of another backend, or none where a hook has the compilation.
    monkeypatch.setattr(triton_launcher, "CompiledKernel", SimpleNamespace)
    assert num_kept(recorded, *arguments) == 0
    monkeypatch.setattr(triton_launcher, "CompiledKernel", Compiled)
    assert num_kept(recorded, *arguments) == 1
    monkeypatch.setattr(triton_launcher, "_IS_KNOWN", False)
    assert num_kept(recorded, *arguments) == 0
