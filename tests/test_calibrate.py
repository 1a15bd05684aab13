"""What `kitforge plan calibrate` prints is a cluster that `kitforge plan` finds and takes times from."""

import re
from pathlib import Path

import pytest

from kitforge.cli import calibrate
from kitforge.cli.plan import plan
from kitforge.core.parallel.plan import calibrate as measures
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


def test_a_calibration_of_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranks=N, device=NAME"):
        plan(["calibrate", "cluster=h100"])
    with pytest.raises(ConfigError, match="at least 1"):
        plan(["calibrate", "ranks=0"])
