"""Recorded steps by the fused kernel in Triton's interpreter; unrecorded, as in `test_cuda_graphs`."""

import copy
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from kitforge.core.kernels.dispatch import DecodeSteps
from kitforge.core.kernels.fused_decode_step.triton import TritonDecodeStep
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation import device as devices
from kitforge.inference import engine as engines
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.differential.drawn import WHOLE
from tests.inference.recomputation import network

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FUSED = EngineOptions(kv_layout="paged", block_size=4, max_num_seqs=5, max_num_batched_tokens=16, fused_decode=True)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """A device that can record; counts the tokens of steps that the kernel takes."""
    seen, call = Counter[int](), TritonDecodeStep.__call__

    def watched(step: TritonDecodeStep, *given: Any, **options: Any) -> Any:
        result = call(step, *given, **options)
        seen[len(given[0]) if result is not None else 0] += 1
        return result

    monkeypatch.setattr(devices, "can_record", lambda _: True)
    # How long a step takes here decides nothing.
    monkeypatch.setattr(engines, "LONG_STEP", 1e9)
    monkeypatch.setattr(TritonDecodeStep, "__call__", watched)
    return seen


def with_kernel(name: str) -> Decoder:
    """The network with the kernel of a GPU."""
    model = copy.deepcopy(network(name, torch.float32))
    model.kernels = replace(model.kernels, fused_decode_step=DecodeSteps("triton", "cpu"))
    return model


def texts(model: Decoder, options: EngineOptions, count: int = 3) -> list[list[int]]:
    """Sampled continuations of prompts across the borders of blocks."""
    chance = random.Random(1)
    prompts = [[chance.randrange(2, 20) for _ in range(length)] for length in (3, 4, 9, 1, 6)[:count]]
    sampling = SamplingOptions(max_new_tokens=4, temperature=0.8, seed=2, ignore_eos=True)
    return [each[0].tokens for each in Engine(model, options).generate(prompts, sampling)]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("name", ["llama", "gpt2"] if WHOLE else ["llama"])
def test_the_fused_step_changes_no_text(name: str, taken: Counter[int]) -> None:
    model = with_kernel(name)
    wanted = texts(model, replace(FUSED, fused_decode=False))
    assert set(taken) <= {0}
    assert texts(model, FUSED) == wanted
    # Three texts and a row of padding.
    assert taken[4] >= 3


@pytest.mark.slow
def test_a_kernel_that_fails_leaves_the_modules(
    taken: Counter[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = with_kernel("llama")
    model.kernels = replace(model.kernels, fused_decode_step=None)
    wanted = texts(model, FUSED)
    model = with_kernel("llama")

    def fail(*_: object, **_options: object) -> None:
        raise RuntimeError("no machine code")

    monkeypatch.setattr(TritonDecodeStep, "__call__", fail)
    monkeypatch.setattr("kitforge.core.kernels.dispatch._failed", set())
    monkeypatch.setattr("kitforge.core.kernels.dispatch.ReferenceDecodeStep", lambda *_: lambda *_, **_options: None)
    assert texts(model, FUSED) == wanted
    assert sum("fused_decode_step by 'triton' failed" in each for each in caplog.messages) == 1


def test_what_a_recorded_step_reads_lives_as_long_as_it(taken: Counter[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slopes of ALiBi, say, though a step of another shape has read changed weights since."""
    monkeypatch.setattr(TritonDecodeStep, "__call__", lambda *_, **_options: None)
    model = with_kernel("bloom")
    engine = Engine(model, FUSED)
    engine.generate([[1, 2, 3]], SamplingOptions(max_new_tokens=3))
    graphs = engine._runner._cuda_graphs
    assert graphs is not None
    (first,) = graphs._graphs.values()
    assert first.kernel is not None
    with torch.no_grad():
        model.head_weight.mul_(1.01)
    engine.generate([[1, 2, 3], [4]], SamplingOptions(max_new_tokens=3))
    assert first in graphs._graphs.values() and len({id(each.kernel) for each in graphs._graphs.values()}) == 2


def test_it_is_off_until_it_has_run_on_a_gpu() -> None:
    assert not EngineOptions().fused_decode
