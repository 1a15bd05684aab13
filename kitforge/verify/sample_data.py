"""Small made-up rows for the tasks that `kitforge verify` is asked about without data."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

from kitforge.kits.registry import DEFAULT_TASK, RLHF_TASKS

WORDS = ("sun", "moon", "river", "stone", "sings", "sleeps", "over", "under", "the", "a", "old", "café", "夜")
PAIR_TASKS = ("reward", "dpo", "ipo", "orpo", "simpo")
# Tasks whose rewards need a function, which no default names.
REWARDED_TASKS = tuple(task for task in RLHF_TASKS if task not in (*PAIR_TASKS, "sft", "kto"))
REWARD = "lowercase"


def documents(seed: int, count: int) -> list[str]:
    """Short documents of one to nine words."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 9))) for _ in range(count)]


def write_sample(task: str, folder: Path) -> Path | None:
    """Rows for a task in a file below `folder`; None for a task that has no sample."""
    texts = documents(1, 48)
    prompts = [f"{text.title()} " for text in texts[:24]]
    if task == DEFAULT_TASK:
        return _write_rows(folder / "documents.jsonl", ({"text": text} for text in texts))
    if task == "sft":
        rows = zip(prompts, texts[24:], strict=True)
        return _write_rows(folder / "demonstrations.jsonl", ({"prompt": one, "completion": two} for one, two in rows))
    if task in PAIR_TASKS:
        pairs = [{"prompt": one, "chosen": f"yes, {two}", "rejected": "no"} for one, two in zip(prompts, texts[24:])]  # noqa: B905
        return _write_rows(folder / "pairs.jsonl", pairs)
    if task in REWARDED_TASKS:
        return _write_rows(folder / "prompts.jsonl", ({"prompt": prompt} for prompt in prompts))
    return _write_clicks(folder / "clicks.csv") if task == "recommendation" else None


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def _write_clicks(path: Path) -> Path:
    """400 rows of a click log, whose label follows user and item."""
    draw = random.Random(2)
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("label", "user", "item", "category", "price"))
        for _ in range(400):
            user, item = draw.randrange(60), draw.randrange(40)
            label = int(draw.random() < (0.7 if (user + item) % 3 == 0 else 0.2))
            table.writerow((label, f"u{user}", f"i{item}", f"c{item % 7}", f"{draw.random():.3f}"))
    return path
