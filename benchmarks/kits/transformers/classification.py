"""Sentiment of movie reviews (rt-polarity, 8,531 training rows) by LoRA on SmolLM2-135M, beside tf-idf and by seed.

    kitforge models fetch smollm2
    python -m benchmarks.kits.transformers.classification train.jsonl test.jsonl --seeds 0 1 2
    python -m benchmarks.kits.transformers.classification train.jsonl test.jsonl --runs runs/a     # of finished runs

Rows are {"text": ..., "label": 0 or 1}. One epoch, batch 16, rank 8 on all linear layers of the blocks, fp32: about 15
minutes for a seed on two cores. Writes classification.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch

LAYERS = ["query", "key", "value", "out", "gate", "up", "down"]


def train(files: tuple[str, str], seed: int) -> Path:
    """The folder of a run under that seed."""
    from kitforge import Trainer

    options = {
        "seed": seed,
        "lora.rank": 8,
        "lora.target_modules": LAYERS,
        "trainer.epochs": 1,
        "trainer.max_steps": None,
        "trainer.eval_every": 178,
    }
    return Trainer("text_classification", "smollm2", *files, options=options).train().folder


def measured(folder: Path) -> dict[str, float]:
    """The last evaluation of a run, and its minutes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    seconds = [line for line in lines if line["kind"] == "train"][-1]["time/seconds"]
    return {name: last[f"eval/{name}"] for name in ("accuracy", "f1", "loss")} | {"minutes": seconds / 60}


def tf_idf(files: tuple[str, str]) -> float:
    """Accuracy of a logistic regression on tf-idf of words and pairs of words."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    parts: list[list[dict[str, Any]]] = [
        [json.loads(line) for line in Path(name).read_text(encoding="utf-8").splitlines()] for name in files
    ]
    texts, labels = ([[row[key] for row in rows] for rows in parts] for key in ("text", "label"))
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True), LogisticRegression(C=10, max_iter=1000)
    )
    model.fit(texts[0], labels[0])
    return float(model.score(texts[1], labels[1]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, nargs="*", help="finished runs, instead of training")
    arguments = parser.parse_args()
    files = (arguments.files[0], arguments.files[1])
    found = [measured(folder) for folder in arguments.runs or [train(files, seed) for seed in arguments.seeds]]
    accuracies = [each["accuracy"] for each in found]
    spread = f" (spread {max(accuracies) - min(accuracies):.3f})" if len(found) > 1 else ""
    lines = [
        "# Sentiment of movie reviews on SmolLM2-135M",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"{len(found)} seed(s), one epoch, batch 16, LoRA of rank 8 on all linear layers.",
        "",
        "| | accuracy on 1,091 held-out rows | macro F1 | loss | minutes |",
        "|---|---|---|---|---|",
        f"| tf-idf, logistic regression | {tf_idf(files):.3f} | | | |",
    ]
    lines += [
        f"| seed {number} | {each['accuracy']:.3f} | {each['f1']:.3f} | {each['loss']:.3f} | {each['minutes']:.0f} |"
        for number, each in enumerate(found)
    ]
    lines += ["", f"Mean accuracy {statistics.mean(accuracies):.3f}{spread}."]
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
