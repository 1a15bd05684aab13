"""A run as a training loop would leave it: noisy loss, warm-up, spikes, evaluations, samples, events."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

WriteRun = Callable[..., Path]

_CONFIG = """\
task: text_generation
seed: {seed}
precision: bf16
data:
  train: corpus.txt
  batch_size: 32
  sequence_length: 256
model:
  name: llama_tiny
optimizer:
  name: {optimizer}
  learning_rate: {rate}
trainer:
  max_steps: {num_steps}
"""


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Write a realistic run into a new folder and give its path."""

    def write(name: str = "llama_tiny", *, num_steps: int = 600, seed: int = 1, rate: float = 3e-3) -> Path:
        folder = tmp_path / name
        (folder / "samples").mkdir(parents=True)
        optimizer = "muon" if seed % 2 else "adamw"
        config = _CONFIG.format(seed=seed, rate=rate, num_steps=num_steps, optimizer=optimizer)
        (folder / "config.yaml").write_text(config)
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in _lines(num_steps, seed, rate))
        )
        for step in range(num_steps // 3, num_steps + 1, num_steps // 3):
            (folder / "samples" / f"step_{step}.json").write_text(json.dumps(_samples(step)))
        return folder

    return write


def _lines(num_steps: int, seed: int, rate: float) -> list[dict[str, object]]:
    chance = random.Random(seed)
    lines: list[dict[str, object]] = []
    num_skipped = 0
    for step in range(1, num_steps + 1):
        progress = step / num_steps
        trend = 1.5 + 0.1 * seed + 4.2 * math.exp(-14 * rate / 3e-3 * progress) + 0.5 * (1 - progress)
        is_skipped = step == int(num_steps * 0.55)
        num_skipped += is_skipped
        warmup = min(1.0, progress / 0.05)
        lines.append(
            {
                "kind": "train",
                "step": step,
                "epoch": progress * 1.4,
                "tokens": step * 8192,
                "loss": math.nan if is_skipped else trend * math.exp(chance.gauss(0, 0.035)),
                "learning_rate": rate * warmup * (0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2),
                "grad_norm": (0.4 + 2.5 * math.exp(-20 * progress)) * math.exp(chance.gauss(0, 0.3)),
                "skipped": num_skipped,
                "time/seconds": step * 0.21,
                "time/tokens_per_second": 39000 + 4000 * seed + chance.gauss(0, 1500),
                "time/step_seconds": 0.21 + abs(chance.gauss(0, 0.01)),
                "time/memory_bytes": 700e6 + 90e6 * min(1.0, progress * 20),
            }
        )
        if is_skipped:
            message = "the gradient's norm was not finite, on all ranks"
            lines.append({"kind": "event", "step": step, "event": "skipped", "message": message})
        if step % max(1, num_steps // 12) == 0:
            loss = trend * 1.03 + (progress**3) * 0.12
            lines.append({"kind": "eval", "step": step, "eval/loss": loss, "eval/perplexity": math.exp(loss)})
            lines.append({"kind": "event", "step": step, "event": "checkpoint", "message": f"checkpoints/step_{step}"})
        if step == int(num_steps * 0.7):
            lines.append({"kind": "event", "step": step, "event": "interrupted", "message": "stopped by Ctrl-C, saved"})
            lines.append(
                {"kind": "event", "step": step, "event": "resumed", "message": f"from checkpoints/step_{step}"}
            )
    return lines


def _samples(step: int) -> dict[str, object]:
    verse = "\nO, what a noble mind is here o'erthrown!\nThe courtier's, soldier's, scholar's, eye, tongue, sword.\n"
    code = "fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"
    return {"step": step, "samples": [{"prompt": "OPHELIA:", "text": verse}, {"prompt": "def ", "text": code}]}
