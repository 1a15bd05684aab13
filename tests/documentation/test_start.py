"""What a reader starts comes up at once."""

from pathlib import Path

import pytest

from tests.warm.shell import Run

SCRIPT = """
import sys
from pathlib import Path

from kitforge import Trainer

Path("text.txt").write_text("all work and no play. " * 99)
options = {"model.dim": 32, "data.sequence_length": 16, "trainer.max_steps": 1, "device": "cpu"}
for name in ("adamw", "muon"):
    Trainer("text_generation", "llama_tiny", "text.txt", options={**options, "optimizer.name": name}).train()
print(*sys.modules)
"""


@pytest.mark.slow
def test_a_run_of_one_process_does_not_import_torchs_compiler(tmp_path: Path, run: Run) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    loaded = run(["python", str(script)], tmp_path).split()
    assert "kitforge.trainer.loop" in loaded
    assert not {"torch._dynamo", "sympy", "torch.distributed.tensor"} & set(loaded)
