"""Steps of fixed shapes give what other steps give. Without a GPU they run as they are, unrecorded: all but the replay
itself is tested here."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation import device as devices
from kitforge.inference import cuda_graphs
from kitforge.inference.cuda_graphs import CudaGraphRunner
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.sequence import Sequence
from tests.core.nn.networks import CONFIGS, MIXTRAL, MIXTURES, build
from tests.inference import workload
from tests.inference.recomputation import network

PAGED = EngineOptions(kv_layout="paged", block_size=4, max_num_seqs=5, max_num_batched_tokens=16)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """A device that can record; counts the texts of recorded steps."""
    seen = Counter[int]()
    run = CudaGraphRunner.run

    def watched(recorded: CudaGraphRunner, sequences: list[Sequence]) -> torch.Tensor:
        seen[len(sequences)] += 1
        return run(recorded, sequences)

    monkeypatch.setattr(devices, "can_record", lambda _: True)
    monkeypatch.setattr(cuda_graphs, "accepts_grouped_mm", lambda *_: True)
    monkeypatch.setattr(CudaGraphRunner, "run", watched)
    return seen


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_steps_change_no_text(name: str, steps: Counter[int]) -> None:
    model = network(name)
    wanted = workload.requests(random.Random(4), model)
    workload.check(model, wanted, workload.serve(Engine(model, PAGED, stop_ids=[workload.STOP]), wanted))
    assert sum(steps.values()) > 3


def test_rows_that_fill_up_a_step_write_where_nobody_reads(steps: Counter[int]) -> None:
    engine = Engine(network("llama"), PAGED)
    engine.generate([[1, 2, 3], [4, 5], [6]], SamplingOptions(max_new_tokens=6))
    keys, _ = engine._runner.cache._slabs[0]
    assert steps[3] > 0
    assert keys[engine._runner.cache.spare_slot :].abs().sum() > 0


def test_weights_that_moved_are_found(steps: Counter[int]) -> None:
    engine = Engine(network("llama"), PAGED)
    engine.generate([[1, 2, 3]], SamplingOptions(max_new_tokens=3))
    recorded = engine._runner._cuda_graphs
    assert recorded is not None and recorded._graphs
    engine.update_weights(1)
    assert recorded._graphs
    recorded._weight_addresses = ()
    engine.update_weights(2)
    assert not recorded._graphs


def test_steps_whose_experts_wait_for_the_host_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "can_record", lambda _: True)
    assert Engine(network("llama"), PAGED)._runner._cuda_graphs is not None
    for name in MIXTURES:
        assert Engine(network(name), PAGED)._runner._cuda_graphs is None


@pytest.mark.gpu
def test_a_gpu_records_experts_in_bfloat16() -> None:
    config = replace(MIXTRAL, mlp_dim=32, max_length=64)
    model = build(config, dtype=torch.bfloat16).to(torch.accelerator.current_accelerator()).eval()
    assert_replayed(model.requires_grad_(False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "bloom", "pangu_alpha", "llama", "window", "longrope", *MIXTURES])
def test_a_gpu_replays_what_it_would_compute(name: str, dtype: torch.dtype) -> None:
    import copy

    model = copy.deepcopy(network(name, torch.float32)).to(torch.accelerator.current_accelerator(), dtype)
    assert_replayed(model)


def assert_replayed(model: Decoder) -> None:
    """The same texts with recorded steps and without."""
    options = SamplingOptions(max_new_tokens=16)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [5, 8, 9]]  # a power of two: no row is added
    recorded, plain = (
        Engine(model, EngineOptions(cuda_graphs=flag)).generate(prompts, options) for flag in (True, False)
    )
    assert [sample.tokens for (sample,) in recorded] == [sample.tokens for (sample,) in plain]
