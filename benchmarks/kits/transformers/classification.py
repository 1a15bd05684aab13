"""Sentiment of movie reviews (rt-polarity, 8,531 training rows) by LoRA on SmolLM2-135M, beside tf-idf and by seed.

    kitforge models fetch smollm2
    python -m benchmarks.kits.transformers.classification train.jsonl test.jsonl --seeds 0 1 2
    python -m benchmarks.kits.transformers.classification train.jsonl test.jsonl --runs runs/a     # of finished runs

Rows are {"text": ..., "label": 0 or 1}. One epoch, batch 16, rank 8 on all linear layers of the blocks, fp32: about 15
minutes for a seed on two cores. Writes classification.md.
"""

import datetime
import json
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from benchmarks.kits.transformers.small_model import write_small_model

LAYERS = ["query", "key", "value", "out", "gate", "up", "down"]


OPTIONS: dict[str, Any] = {
    "lora.rank": 8,
    "lora.target_modules": LAYERS,
    "trainer.epochs": 1,
    "trainer.max_steps": None,
    "trainer.eval_every": 178,
}
SMOKE = {"OPTIONS": OPTIONS | {"lora.rank": 2, "data.batch_size": 8}, "files": None, "seeds": [0]}


def train(files: Sequence[str], seed: int, model: Path | str = "smollm2", folder: str | None = None) -> Path:
    """The folder of a run under that seed: `folder`, or where runs go."""
    from kitforge import Trainer

    return (
        Trainer("text_classification", model, *files, output_dir=folder, options={**OPTIONS, "seed": seed})
        .train()
        .folder
    )


def measured(folder: Path) -> dict[str, float]:
    """The last evaluation of a run, and its minutes."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    seconds = [line for line in lines if line["kind"] == "train"][-1]["time/seconds"]
    return {name: last[f"eval/{name}"] for name in ("accuracy", "f1", "loss")} | {"minutes": seconds / 60}


def tf_idf(files: Sequence[str]) -> float:
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


def smoke() -> None:
    """A run over a few rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"text": ("a good film", "a bad film")[number % 2], "label": number % 2} for number in range(32)]
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(measured(train([str(file)] * 2, 0, write_small_model(Path(folder)), f"{folder}/run")))


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("files", nargs=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, nargs="*", help="finished runs, instead of training")
    arguments = parser.parse(SMOKE, globals())
    if is_smoke():
        smoke()
        return
    files = arguments.files
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
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
