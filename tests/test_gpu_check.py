"""`scripts/gpu_check.py` at its sizes for a CPU, where neither Hydra nor numba nor the data extras are installed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.differential.drawn import WHOLE

ROOT = Path(__file__).parent.parent
MISSING = ("hydra", "omegaconf", "datasets", "pyarrow", "pandas", "numba", "sentencepiece", "redis")
# Python imports it at its start.
SITE = f"""
import sys
from importlib.machinery import PathFinder

class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {MISSING!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
"""


# Each kind of part once; parts that repeat them in another precision or place are run by `make prove`.
PARTS = ("kernels", "tables", "step", "sampler", "train_fp32", "wide_deep", "speed_tables", "speed_products")


@pytest.mark.slow
@pytest.mark.prove
def test_every_check_holds_on_a_cpu_without_extras(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "scripts/gpu_check.py", "--device", "cpu", "--out", str(tmp_path / "results")]
    if not WHOLE:
        command += ["--only", *PARTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = (tmp_path / "results").iterdir()
    rows = [line.strip("| ").split(" | ") for line in written.read_text().splitlines()[2:]]
    verdicts = {row[0]: row[2] for row in rows if len(row) == 3 and row[2]}
    assert set(verdicts.values()) == {"equal", "learns"}
    wanted = {"kernel paged_attention", "table adam", "sampler = trainer"}
    assert wanted | ({"deterministic, killed, resumed"} if WHOLE else set()) <= verdicts.keys()


def test_the_suite_has_what_this_test_takes_away() -> None:
    assert all(map(importlib.util.find_spec, MISSING))
