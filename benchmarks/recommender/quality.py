"""How good the recommenders are on real data, beside what is simplest.

Criteo and Avazu (samples of a few thousand rows): the AUC of five folds, paired with the logistic regression that
scikit-learn fits to the same folds over the same hashed features, five seeds. Adult: the AUC on its own test set.
Amazon: HR@10 of a SASRec among all items, beside the most popular items. The click log that is made up: how far from
the AUC of the true chances.

    python -m benchmarks.recommender.quality DATA [PART ...] [--seeds 0 1 2 3 4] [--steps 1500] [--kept FOLDER]

Parts: criteo avazu adult video beauty click_log. In FOLDER lies what is known already: another call goes on from there.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.feature_extraction import FeatureHasher
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from kitforge.api import Trainer

PARTS = ("criteo", "avazu", "adult", "video", "beauty", "click_log")
NUM_FOLDS = 5
# What a run is given beside its rows: nothing that changes what is learned.
OPTIONS: dict[str, Any] = {"trainer.progress": False, "trainer.log_every": 1000, "device": "cpu"}
Rows = list[dict[str, Any]]


def criteo(data: Path) -> tuple[Rows, str]:
    """All rows, and the name of the label."""
    names = ["label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
    rows: Rows = []
    for part in ("train", "test"):
        with gzip.open(data / "criteo_kaggle_10k" / f"{part}.tsv.gz", "rt") as file:
            rows += [dict(zip(names, line.rstrip("\n").split("\t"), strict=True)) for line in file]
    for row in rows:
        row["label"] = int(row["label"])
        row.update({name: float(row[name]) if row[name] else None for name in names[1:14]})
        row.update({name: row[name] or None for name in names[14:]})
    return rows, "label"


def avazu(data: Path) -> tuple[Rows, str]:
    """All rows, and the name of the label."""
    rows: Rows = []
    for part in ("train", "test"):
        with gzip.open(data / "avazu_9k" / f"{part}.csv.gz", "rt") as file:
            rows += list(csv.DictReader(file))
    for row in rows:
        row["click"] = int(row["click"])
    return rows, "click"


def folds(name: str, data: Path, seeds: Iterable[int], kept: Path) -> None:
    """Five folds for each seed: our AUC and that of the logistic regression."""
    rows, label = {"criteo": criteo, "avazu": avazu}[name](data)
    file = kept / f"{name}.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(each["seed"], each["fold"]) for each in found}
    for seed, fold in itertools.product(seeds, range(NUM_FOLDS)):
        if (seed, fold) in known:
            continue
        order = np.random.default_rng(seed).permutation(len(rows))
        held_out = [rows[place] for place in order[fold::NUM_FOLDS]]
        learnt = [rows[place] for number in range(NUM_FOLDS) if number != fold for place in order[number::NUM_FOLDS]]
        ours = train_clicks(learnt, held_out, seed)
        theirs = logistic(learnt, held_out, label, strength=0.05 if name == "criteo" else 0.1)
        found.append({"part": name, "seed": seed, "fold": fold, "ours": ours, "logistic": theirs})
        tell(found[-1])
        with open(file, "a", encoding="utf-8") as lines:
            lines.write(json.dumps(found[-1]) + "\n")
    gains = [each["ours"] - each["logistic"] for each in found]
    tell(
        {
            "part": name,
            "seeds": sorted({each["seed"] for each in found}),
            "ours": statistics.mean(each["ours"] for each in found),
            "logistic": statistics.mean(each["logistic"] for each in found),
            "gain": statistics.mean(gains),
            "standard_error": statistics.stdev(gains) / len(gains) ** 0.5,
            "folds_won": sum(gain > 0 for gain in gains),
            "folds": len(gains),
        }
    )


def train_clicks(kept: Any, held_out: Any, seed: int) -> float:
    """The AUC of a wide_deep trained on some rows, on others, with the schema and the options that are guessed."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, "seed": seed, "data.cache": f"{folder}/cache"}
        trainer = Trainer("recommendation", "wide_deep", kept, held_out, output_dir=f"{folder}/run", options=options)
        return trainer.train().metrics["eval/auc"]


def logistic(kept: Rows, held_out: Rows, label: str, strength: float) -> float:
    """The baseline that comes with the data: hashed features without crosses, C as it says there, and of Avazu
    without the ids and addresses of devices."""
    left_out = {label, "id", "device_id", "device_ip"}
    hasher = FeatureHasher(2**18, input_type="string", alternate_sign=False)

    def features(rows: Rows) -> Any:
        return hasher.transform(
            [[f"{name}={value}" for name, value in row.items() if name not in left_out] for row in rows]
        )

    model = LogisticRegression(C=strength, max_iter=300).fit(features(kept), [row[label] for row in kept])
    return float(roc_auc_score([row[label] for row in held_out], model.predict_proba(features(held_out))[:, 1]))


def adult(data: Path, seeds: Iterable[int]) -> None:
    """The AUC on the test set, of each seed."""
    place = data / "adult_income"
    found = [train_clicks(str(place / "train.csv.gz"), str(place / "test.csv.gz"), seed) for seed in seeds]
    tell({"part": "adult", "auc": found, "mean": statistics.mean(found), "lowest": min(found)})


def sequences(name: str, data: Path, kept: Path, num_steps: int) -> None:
    """HR@10 of the last item of every sequence among all items, beside the most popular ones."""
    source = data / f"amazon_{name}" / "interactions.txt.gz"
    taken: dict[str, list[str]] = {}
    with gzip.open(source, "rt") as file:
        for line in file:
            user, item = line.split()
            taken.setdefault(user, []).append(item)
    counts = Counter(item for items in taken.values() for item in items[:-1])
    popular = {item for item, _ in counts.most_common(10)}
    known = [items for items in taken.values() if len(items) > 1 and items[-1] in counts]
    options = OPTIONS | {
        "data.batch_size": 256,
        "data.cache": str(kept / "cache"),
        "trainer.max_steps": num_steps,
        "trainer.checkpoint_every": 250,
        "retrieval.num_negatives": 1024,
        "model.dropout": 0.3,
    }
    started = time.process_time()
    trainer = Trainer("recommendation", "sasrec", str(source), output_dir=str(kept / name), options=options)
    run = trainer.train(resume="auto")
    tell(
        {
            "part": f"amazon_{name}",
            "sasrec_hr@10": run.metrics["eval/hr@10"],
            "sasrec_ndcg@10": run.metrics["eval/ndcg@10"],
            "popularity_hr@10": sum(items[-1] in popular for items in known) / len(known),
            "num_items": len(counts),
            "steps": num_steps,
            "seconds": time.process_time() - started,  # of this call
        }
    )


def click_log() -> None:
    """The defaults on the click log: seconds, and the distance from the best AUC."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        options = {"trainer.progress": False, "device": "cpu"}
        run = Trainer("recommendation", output_dir=f"{folder}/run", options=options).train()
        gap = run.metrics["eval/best_auc"] - run.metrics["eval/auc"]
        seconds = time.perf_counter() - started
        tell({"part": "click_log", "auc": run.metrics["eval/auc"], "below_best": gap, "seconds": seconds})


def tell(record: dict[str, Any]) -> None:
    """One line of the result."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Every part that is named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    parser.add_argument("--steps", type=int, default=1500, help="of the sequences' training")
    parser.add_argument("--kept", type=Path)
    chosen = parser.parse_args()
    kept = chosen.kept or Path(tempfile.mkdtemp())
    kept.mkdir(parents=True, exist_ok=True)
    for part in chosen.parts:
        if part in ("criteo", "avazu"):
            folds(part, chosen.data, chosen.seeds, kept)
        elif part == "adult":
            adult(chosen.data, chosen.seeds)
        elif part == "click_log":
            click_log()
        else:
            sequences(part, chosen.data, kept, chosen.steps)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
