"""A run that takes a second, for tests of the command line and of the front door."""

from pathlib import Path
from typing import Any

TEXT = "".join(f"ROMEO: line {number} of a play, and little of it is said aloud.\n" for number in range(120))
OPTIONS: dict[str, Any] = {
    "model.dim": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.mlp_dim": 64,
    "data.sequence_length": 32,
    "data.batch_size": 4,
    "data.num_workers": 1,
    "trainer.max_steps": 3,
    "trainer.progress": False,
    "inference.max_new_tokens": 4,
    "device": "cpu",
}
ARGUMENTS = [f"{name}={value}" for name, value in OPTIONS.items()]
# What remains when the network comes from a folder.
WITHOUT_MODEL = {name: value for name, value in OPTIONS.items() if not name.startswith("model.")}


def write_run(folder: Path, **changes: Any) -> Path:
    """Train a small llama in `folder`, with changes to its options; the run's own folder."""
    from kitforge.api import Trainer

    (folder / "corpus.txt").write_text(TEXT)
    options = {**OPTIONS, "data.cache": str(folder / "cache"), "trainer.eval_first": True, **changes}
    trainer = Trainer(
        "text_generation", "llama_tiny", folder / "corpus.txt", output_dir=folder / "runs" / "bard", options=options
    )
    return trainer.train().folder
