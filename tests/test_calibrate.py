"""What `kitforge plan calibrate` prints is a cluster that `kitforge plan` finds and takes times from."""

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kitforge.cli import calibrate
from kitforge.cli.plan import plan
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.plan import calibrate as measures
from kitforge.core.parallel.plan.step_time import Speed
from kitforge.core.parallel.plan.work import Message
from kitforge.foundation.errors import ConfigError


@pytest.mark.slow
def test_a_calibration_is_a_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measures, "PRODUCTS", measures.PRODUCTS[:2])
    monkeypatch.setattr(measures, "ATTENTION", measures.ATTENTION[:1])
    monkeypatch.setattr(measures, "MESSAGES", measures.MESSAGES[:2])
    monkeypatch.setattr(measures, "MESSAGE_RUNS", 2)
    monkeypatch.setattr(measures, "BUDGET", 0.0)
    monkeypatch.setattr(calibrate, "BUDGET", 0.0)
    monkeypatch.setattr(calibrate, "STEPS", calibrate.STEPS[:2])
    assert plan(["calibrate", "device=cpu"]) == 0
    folder = tmp_path / "configs" / "cluster"
    folder.mkdir(parents=True)
    (folder / "here.yaml").write_text(capsys.readouterr().out)
    small = ["model=llama_tiny", "tokenizer=byte", "model.num_layers=1", "data.batch_size=2", "parallel.tensor=2"]
    assert plan([*small, "cluster=here"]) == 0
    assert re.search(r"communication over tensor.*tokens/s", capsys.readouterr().out, re.DOTALL)


def test_the_measured_link_is_the_one_that_its_messages_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that knows the formula of a plan, latency and bandwidth of each kind come back."""
    speed = Speed(peak_tflops={}, memory_gb_per_s=1.0, launch_us=1.0, link_latency_us=30.0, link_gb_per_s=7.0)
    kinds, names = dict[Any, str](), iter(("all_reduce", "all_gather", "reduce_scatter", "all_to_all"))

    def once(function: Any, _device: torch.device) -> float:
        kind = kinds.get(function.func) or kinds.setdefault(function.func, next(names))
        size = function.args[0].nbytes
        return speed.message_seconds(Message(kind, "tensor", 4, False), 1, size, ParallelConfig(tensor=4))

    monkeypatch.setattr(measures, "_once", once)
    monkeypatch.setattr(measures, "MESSAGES", (2**12, 2**16, 2**20))
    monkeypatch.setattr(measures.collectives, "group_size", lambda _group: 4)
    found = measures.measured_link(cast(Any, None), torch.device("cpu"))
    assert set(found["link_by_kind"]) == set(kinds.values())
    for fit in ((found["link_latency_us"], found["link_gb_per_s"]), *found["link_by_kind"].values()):
        assert fit == pytest.approx((30.0, 7.0), rel=1e-2)


def test_a_calibration_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks=N, device=NAME"):
        plan(["calibrate", "cluster=h100"])
    with pytest.raises(ConfigError, match="at least 1"):
        plan(["calibrate", "ranks=0"])
