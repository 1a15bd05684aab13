import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kitforge.foundation import device
from kitforge.foundation.errors import DeviceError


def test_auto_picks_a_device_that_is_here() -> None:
    assert device.pick("auto").type == device.available()[-1]
    assert device.pick("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "npu", "mps", "tpu"])
def test_an_absent_device_says_which_are_here(name: str) -> None:
    if name in device.available():
        pytest.skip(f"{name} is here")
    with pytest.raises(DeviceError, match=r"(?s)no .* device here.*expected:\s+auto or cpu"):
        device.pick(name)


def test_a_process_uses_the_accelerator_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[torch.device]()
    monkeypatch.setattr(torch.accelerator, "set_device_index", used.append)
    for name in ("cpu", "cuda:1", "npu:2"):
        device.use(SimpleNamespace(type=name.partition(":")[0], index=name))  # type: ignore[arg-type]
    assert [each.index for each in used] == ["cuda:1", "npu:2"]


def test_random_state_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.device("cpu")
    state = device.random_state(here)
    first = torch.rand(3)
    # A run that began on a GPU has a state of its generator as well.
    monkeypatch.delattr("torch.cuda.set_rng_state")
    device.set_random_state(state | {"cuda": torch.zeros(16, dtype=torch.uint8)}, here)
    assert torch.equal(first, torch.rand(3))


@pytest.mark.slow
def test_peak_memory_counts_bytes() -> None:
    before = device.peak_memory(torch.device("cpu"))
    block = torch.ones(64 * 2**20)
    assert device.peak_memory(torch.device("cpu")) >= before
    assert device.peak_memory(torch.device("cpu")) > block.nbytes


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_peak_memory_knows_the_unit_of_each_system(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.sys, "platform", platform)
    monkeypatch.setattr(device.resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=5000))
    assert device.peak_memory(torch.device("cpu")) == 5000 * unit


@pytest.mark.slow
def test_a_stand_in_for_an_npu_is_found_and_picked() -> None:
    """Huawei's adapter registers its backend under torch.npu; a renamed private backend stands in for it."""
    program = (
        "import torch, types\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "torch._register_device_module('npu', types.SimpleNamespace(is_available=lambda: True))\n"
        "from kitforge.foundation import device\n"
        "assert device.available()[-1] == 'npu', device.available()\n"
        "assert device.pick('auto') == torch.device('npu')\n"
        "assert device.describe(torch.device('npu')) == 'npu'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_freed_memory_is_kept_where_the_allocator_allows() -> None:
    assert isinstance(device.keep_malloc_arenas(), bool)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_bounded_over_bf16_steps_of_different_lengths() -> None:
    """The most that is live within 16 steps, and within the 32 after them."""
    program = (
        "import ctypes, random, resource, torch\n"
        "from kitforge.core.kernels.linear_cross_entropy.chunked import linear_cross_entropy\n"
        "from kitforge.foundation import device\n"
        "trim = getattr(ctypes.CDLL(None), 'malloc_trim', lambda _: None)\n"
        "draw, weight = random.Random(0), torch.nn.Parameter(torch.randn(32768, 64) * 0.02)\n"
        "optimizer, seen = torch.optim.AdamW([weight]), []\n"
        "for rows in draw.sample(range(20, 200), 48):\n"
        "    hidden, targets = torch.randn(rows, 64, requires_grad=True), torch.randint(0, 32768, (rows,))\n"
        "    with torch.autocast('cpu', torch.bfloat16):\n"
        "        loss = linear_cross_entropy(hidden, weight, targets)\n"
        "    loss.backward(), optimizer.step(), optimizer.zero_grad()\n"
        "    trim(0), seen.append(int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() / 2**20)\n"
        "print(max(seen[16:]) - max(seen[:16]))\n"
    )
    # Set for the processes of this one when it imported the package.
    inherited = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    own = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, done.stderr
    assert (grown := float(done.stdout)) < 40, f"{grown:.0f} MiB more are live after 16 steps"


def test_determinism_does_not_load_the_compiler_but_tells_one_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", told.append)
    monkeypatch.delitem(sys.modules, "torch._inductor.config", raising=False)
    for enabled in (True, False):
        device.set_deterministic(enabled)
        assert torch.are_deterministic_algorithms_enabled() == enabled
    assert not told and "torch._inductor.config" not in sys.modules
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    for enabled in (True, False):
        device.set_deterministic(enabled)
    assert told == [True, False]


def test_free_host_memory_is_part_of_what_the_host_has() -> None:
    assert 0 < device.free_host_memory() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_host_that_does_not_tell_its_memory_has_none_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    assert device.free_host_memory() == 0


def test_the_limit_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n",
        "memory.max": "5000\n",
        "memory.current": "2000\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda path: files[path.name])
    assert device.free_host_memory() == 3000
    files["memory.max"] = "max\n"
    assert device.free_host_memory() == 4000 * 1024
