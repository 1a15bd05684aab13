"""Every family trains, is evaluated, resumes and predicts on a device that is not the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.api import pipeline
from kitforge.embedding_cache import cache as embedding_cache
from tests.differential.drawn import WHOLE
from tests.kits.recommender.runs import FAMILIES, numbers, run
from tests.kits.recommender.test_pipeline import rows
from tests.other_device import DEVICE, OnDevice, other_device

CACHES: dict[str, dict[str, Any]] = {
    "whole": {"cache.prefetch_batches": 0},
    "small": {"cache.device_rows": 40, "cache.prefetch_batches": 2, "cache.policy": "lfu"},
}
THERE = {"device": str(DEVICE)}
# In the gate one that scores, one that attends, and both that retrieve.
SAMPLE = ("wide_deep", "din", "two_tower", "sasrec")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(
    ("family", "cache"),
    [(name, ("whole", "small")[at % 2]) for at, name in enumerate(FAMILIES) if WHOLE or name in SAMPLE],
)
def test_a_family_runs_there_as_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, cache: str) -> None:
    monkeypatch.setattr(embedding_cache, "DEVICE_IDS", 40)
    # There the dict takes the place of a map in the memory of the device, so that whole tables plan there.
    monkeypatch.setattr(embedding_cache, "DictHashMap", None)
    choices = {**CACHES[cache], "trainer.max_steps": 4}
    told, wanted = run(tmp_path / "here", family, choices)
    with other_device(monkeypatch):
        run(tmp_path / "there", family, choices | THERE, stop_at=2)
        resumed, found = run(tmp_path / "there", family, choices | THERE | {"resume": "auto"})
    assert any(isinstance(value, OnDevice) for value in found.values())
    for name, value in found.items():
        here = value.held if isinstance(value, OnDevice) else value
        # Whole numbers in the bits of floats are subnormal ones.
        torch.testing.assert_close(here, wanted[name], rtol=1e-4, atol=1e-5)
    assert numbers(resumed, "eval/loss")[-1] == pytest.approx(numbers(told, "eval/loss")[-1], rel=1e-5)
    samples = [{"items": [3, 4, 5]}] if family == "sasrec" else rows(5)
    answers = []
    for device in ("cpu", DEVICE.type):
        with other_device(monkeypatch):
            opened = pipeline("recommendation", model=tmp_path / "there", options={"device": device})
            if family in ("two_tower", "sasrec"):
                answers.append(opened.retrieve(samples[0], k=3))
            else:
                answers.append(opened(samples))
    for one, other in zip(*answers, strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_tensors_of_two_devices_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.ones(3)
    with other_device(monkeypatch) as device:
        there = torch.arange(3, device=device)
        assert (there + torch.tensor(1) + 2).tolist() == [3, 4, 5]
        assert there[torch.tensor([2])].device == device
        assert (here + there.to("cpu")).device == here.device
        for mixed in (lambda: here + there, lambda: torch.cat([here, there]), lambda: here[there]):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises((RuntimeError, TypeError)):
            there.numpy()
