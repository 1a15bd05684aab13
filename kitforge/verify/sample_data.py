"""Small made-up rows for the tasks that `kitforge verify` is asked about without data."""

from __future__ import annotations

import csv
import json
import random
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
    if task == "recommendation":
        return _write_clicks(folder / "clicks.csv")
    texts = documents(1, 48)
    pairs = [(f"{text.title()} ", answer) for text, answer in zip(texts[:24], texts[24:], strict=True)]
    rows: list[dict[str, object]] = []
    if task == DEFAULT_TASK:
        rows = [{"text": text} for text in texts]
    elif task in ("sft", "kto"):
        rows = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
        rows = rows if task == "sft" else [row | {"label": number % 2 == 0} for number, row in enumerate(rows)]
    elif task in PAIR_TASKS:
        rows = [{"prompt": prompt, "chosen": f"yes, {answer}", "rejected": "no"} for prompt, answer in pairs]
    elif task in REWARDED_TASKS:
        rows = [{"prompt": prompt} for prompt, _ in pairs]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path if rows else None


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
