"""Small made-up rows for the tasks that `kitforge verify` is asked about without data."""

import csv
import json
import random
from pathlib import Path

from kitforge.kits.registry import DEFAULT_TASK, RLHF_TASKS

WORDS = ("sun", "moon", "river", "stone", "sings", "sleeps", "over", "under", "the", "a", "old", "café", "夜")
PAIR_TASKS = ("reward", "dpo", "ipo", "orpo", "simpo")
# The columns of tasks that learn from two texts.
TEXT_COLUMNS = dict.fromkeys(("translation", "summarization"), ("source", "target"))
TEXT_COLUMNS |= {"embedding": ("positive", "anchor"), "question_answering": ("question", "context")}
# Tasks whose rewards need a function, which no default names.
REWARDED_TASKS = tuple(task for task in RLHF_TASKS if task not in (*PAIR_TASKS, "sft", "kto"))
REWARD = "lowercase"


def documents(seed: int, count: int) -> list[str]:
    """Short documents of one to nine words."""
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 9))) for _ in range(count)]


def write_sample(task: str, folder: Path) -> Path | None:
    """Rows for a task below `folder`; None for a task that has no sample, one of another package."""
    if task == "recommendation":
        return _write_clicks(folder / "clicks.csv")
    if task == "image_classification":
        return _write_images(folder / "images")
    texts = documents(1, 48)
    pairs = [(f"{text.title()} ", answer) for text, answer in zip(texts[:24], texts[24:], strict=True)]
    rows: list[dict[str, object]] = []
    if task in (DEFAULT_TASK, "masked_lm"):
        rows = [{"text": text} for text in texts]
    elif task in ("sft", "kto"):
        rows = [{"prompt": prompt, "completion": answer} for prompt, answer in pairs]
        rows = rows if task == "sft" else [row | {"label": number % 2 == 0} for number, row in enumerate(rows)]
    elif task in PAIR_TASKS:
        rows = [{"prompt": prompt, "chosen": f"yes, {answer}", "rejected": "no"} for prompt, answer in pairs]
    elif task in REWARDED_TASKS:
        # In `distill` the policy itself, with a hint, is the teacher.
        rows = [{"prompt": prompt, "teacher_prompt": f"old {prompt}"} for prompt, _ in pairs]
    elif task == "text_classification":
        rows = [{"text": text, "label": text.split()[0]} for text in texts]
    elif task == "token_classification":
        words = [text.split() for text in texts]
        rows = [{"tokens": each, "tags": ["B-LONG" if len(word) > 4 else "O" for word in each]} for each in words]
    elif task in TEXT_COLUMNS:
        first, second = TEXT_COLUMNS[task]
        rows = [{first: text, second: text.title()} for text in texts]
        # The last word is the answer to every question.
        rows = [row | {"answers": [str(row["context"]).split()[-1]]} if "context" in row else row for row in rows]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path if rows else None


def _write_images(folder: Path) -> Path:
    """Small pictures of two labels in folders named by them: of low values, and of high ones."""
    draw = random.Random(3)
    for number in range(24):
        label = ("dark", "bright")[number % 2]
        pixels = bytes(draw.randrange(128) + 128 * (number % 2) for _ in range(8 * 8 * 3))
        path = folder / label / f"{number}.ppm"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"P6 8 8 255\n" + pixels)
    return folder


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
