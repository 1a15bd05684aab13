"""How good the recommenders are on real data by default, compared with simple models.

Criteo and Avazu (samples of a few thousand rows): AUC and log loss on ten folds of the training rows, paired with a
logistic regression (scikit-learn) and with LightGBM trained on the same folds; then on the test rows, five seeds.
Adult: the AUC on its own test set. Amazon: HR@10 of a SASRec among all items, compared with the most popular items.
The click log that is made up: how far from the AUC of the true chances.
Families: log loss and AUC of every family by default on the test rows of Criteo, Avazu and Adult, median and range of
three seeds, compared with the log loss of the constant that predicts the base rate of the training rows.

    python -m benchmarks.recommender.quality DATA [PART ...] [--seeds 0 1 2 3 4] [--families wide_deep deepfm]
        [--steps 1500] [--kept FOLDER]

Parts: criteo avazu adult video beauty click_log families. In FOLDER lies what is known already: another call goes on
from there.
lightgbm is needed for criteo and avazu: pip install lightgbm.
"""

import argparse
import csv
import gzip
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge.api import Trainer

PARTS = ("criteo", "avazu", "adult", "video", "beauty", "click_log", "families")
FAMILIES = ("wide_deep", "deepfm", "dcn_v2", "dlrm")
NUM_FOLDS = 10
# The two-sided 95 % quantile of Student's t with nine degrees of freedom.
T_95 = 2.262
NUMBERS_OF_ADULT = ("age", "fnlwgt", "education_num", "capital_gain", "capital_loss", "hours_per_week")
# What a run is given beside its rows: nothing that changes what is learned.
OPTIONS: dict[str, Any] = {"trainer.progress": False, "trainer.log_every": 1000, "device": "cpu"}
# What a smoke run adds.
SMALLER: dict[str, Any] = {}
PEERS = ("logistic", "lightgbm")
SMOKE = {
    "SMALLER": {"trainer.max_steps": 1, "trainer.eval_batches": 1, "model.dim": 4, "model.dropout": 0.0},
    **{"PEERS": (), "NUM_FOLDS": 2, "FAMILIES": ("wide_deep", "dlrm"), "data": None, "seeds": [0]},
}
Rows = list[dict[str, Any]]


def criteo(data: Path, part: str) -> tuple[Rows, str]:
    """The rows of a part, and the name of the label."""
    names = ["label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
    with gzip.open(data / "criteo_kaggle_10k" / f"{part}.tsv.gz", "rt") as file:
        rows: Rows = [dict(zip(names, line.rstrip("\n").split("\t"), strict=True)) for line in file]
    for row in rows:
        row["label"] = int(row["label"])
        row.update({name: float(row[name]) if row[name] else None for name in names[1:14]})
        row.update({name: row[name] or None for name in names[14:]})
    return rows, "label"


def avazu(data: Path, part: str) -> tuple[Rows, str]:
    """The rows of a part, and the name of the label."""
    with gzip.open(data / "avazu_9k" / f"{part}.csv.gz", "rt") as file:
        rows: Rows = list(csv.DictReader(file))
    for row in rows:
        row["click"] = int(row["click"])
    return rows, "click"


def census(data: Path, part: str) -> tuple[Rows, str]:
    """The rows of a part of Adult, and the name of the label."""
    with gzip.open(data / "adult_income" / f"{part}.csv.gz", "rt") as file:
        rows: Rows = [{**row, "income": int(row["income"].startswith(">50K"))} for row in csv.DictReader(file)]
    for row in rows:
        row.update({name: float(row[name]) for name in NUMBERS_OF_ADULT})
    return rows, "income"


# How the rows of a log are read.
ROWS = {"criteo": criteo, "avazu": avazu, "adult": census}


def clicks(name: str, data: Path, seeds: Iterable[int], families: Sequence[str], kept: Path) -> None:
    """Ten folds of the training rows, then the test rows by every seed: each family, and what it is compared with."""
    read = ROWS[name]
    (rows, label), (test, _) = read(data, "train"), read(data, "test")
    file = kept / f"{name}.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {(each["model"], each["on"], each["number"]) for each in found}
    order = np.random.default_rng(0).permutation(len(rows))
    parts = [[rows[place] for place in order[fold::NUM_FOLDS]] for fold in range(NUM_FOLDS)]
    jobs = [(model, "fold", fold) for fold in range(NUM_FOLDS) for model in (*PEERS, *families)]
    jobs += [(model, "test", seed) for seed in seeds for model in families]
    jobs += [(model, "test", 0) for model in PEERS]
    for model, on, number in jobs:
        if (model, on, number) in known:
            continue
        others = [row for fold, part in enumerate(parts) if fold != number for row in part]
        learnt, held_out = (others, parts[number]) if on == "fold" else (rows, test)
        if model == "logistic":
            scores = logistic(name, learnt, held_out, label)
        elif model == "lightgbm":
            scores = boosted(learnt, held_out, label)
        else:
            scores = train_clicks(model, learnt, held_out, 0 if on == "fold" else number)
        found.append({"part": name, "model": model, "on": on, "number": number, **scores})
        tell(found[-1])
        write_result(file, "".join(json.dumps(each) + "\n" for each in found))
    compare(name, found)


def compare(name: str, found: Sequence[dict[str, Any]]) -> None:
    """For every model: means, and by the folds its paired difference from the first one, the logistic regression, with
    the half width of the 95 % interval (Student's t, nine degrees of freedom)."""
    first = found[0]["model"]
    for model in dict.fromkeys(each["model"] for each in found):
        record: dict[str, Any] = {"part": name, "model": model}
        for metric in ("auc", "log_loss"):
            by_fold = {(each["model"], each["number"]): each[metric] for each in found if each["on"] == "fold"}
            own = [by_fold[model, fold] for fold in range(NUM_FOLDS)]
            gains = [by_fold[model, fold] - by_fold[first, fold] for fold in range(NUM_FOLDS)]
            width = T_95 * statistics.stdev(gains) / NUM_FOLDS**0.5
            record[metric] = f"{statistics.mean(own):.4f} ({statistics.mean(gains):+.4f} +- {width:.4f})"
            test = [each[metric] for each in found if (each["model"], each["on"]) == (model, "test")]
            record[f"test_{metric}"] = f"{statistics.mean(test):.4f} ({min(test):.4f} to {max(test):.4f})"
        tell(record)


def train_clicks(model: str, learnt: Any, held_out: Any, seed: int) -> dict[str, float]:
    """AUC and log loss of a family trained on some rows, on others, with the schema and the options that are chosen."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, **SMALLER, "seed": seed, "data.cache": f"{folder}/cache"}
        trainer = Trainer("recommendation", model, learnt, held_out, output_dir=f"{folder}/run", options=options)
        found = trainer.train().metrics
        return {"auc": found["eval/auc"], "log_loss": found["eval/loss"]}


def logistic(name: str, learnt: Rows, held_out: Rows, label: str) -> dict[str, float]:
    """A logistic regression over hashed values, numbers by the logarithm of their size. Its strength was
    chosen on these very folds."""
    from sklearn.feature_extraction import FeatureHasher
    from sklearn.linear_model import LogisticRegression

    hasher = FeatureHasher(2**18, input_type="string", alternate_sign=False)

    def features(rows: Rows) -> Any:
        return hasher.transform(
            [[f"{key}={sized_value(value)}" for key, value in row.items() if key not in (label, "id")] for row in rows]
        )

    strength = {"criteo": 0.05, "avazu": 0.1}[name]
    model = LogisticRegression(C=strength, max_iter=300).fit(features(learnt), [row[label] for row in learnt])
    return scores_of(held_out, label, model.predict_proba(features(held_out))[:, 1])


def sized_value(value: Any) -> str:
    """A number by twice the logarithm of its size, anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    return str(int(math.copysign(2 * math.log2(abs(value) + 1), value)))


def boosted(learnt: Rows, held_out: Rows, label: str) -> dict[str, float]:
    """LightGBM over numbers and over values seen twice as categories; the best of 100 to 300 rounds and of 7 and 15
    leaves on these very folds was much the same for 100 and 200 rounds of 15 leaves."""
    import lightgbm

    names = [name for name in learnt[0] if name not in (label, "id", "hour")]
    columns: list[Any] = []
    categories = []
    for place, name in enumerate(names):
        if any(isinstance(row[name], float) for row in learnt):
            columns.append(None)
            continue
        counts = Counter(row[name] for row in learnt).most_common(2000)
        columns.append({value: number for number, (value, count) in enumerate(counts) if count > 1})
        categories.append(place)

    def matrix(rows: Rows) -> Any:
        cells = [
            [
                row[name] if column is None else column.get(row[name])
                for name, column in zip(names, columns, strict=True)
            ]
            for row in rows
        ]
        return np.array(cells, dtype=np.float64)

    options = {
        "objective": "binary",
        "num_leaves": 15,
        "learning_rate": 0.03,
        "feature_fraction": 0.5,
        "bagging_fraction": 0.8,
        "bagging_freq": 1,
        "cat_smooth": 20,
        "num_threads": 1,
        "verbose": -1,
    }
    labels = [row[label] for row in learnt]
    rounds = 200 if len(categories) < len(names) else 100
    data = lightgbm.Dataset(matrix(learnt), labels, categorical_feature=categories)
    return scores_of(held_out, label, lightgbm.train(options, data, rounds).predict(matrix(held_out)))


def scores_of(rows: Rows, label: str, chances: Any) -> dict[str, float]:
    """AUC and log loss of the chances that were told."""
    from sklearn.metrics import log_loss, roc_auc_score

    labels = [row[label] for row in rows]
    return {"auc": float(roc_auc_score(labels, chances)), "log_loss": float(log_loss(labels, chances))}


def adult(data: Path, seeds: Iterable[int]) -> None:
    """The AUC on the test set, of each seed."""
    place = data / "adult_income"
    files = (str(place / "train.csv.gz"), str(place / "test.csv.gz"))
    found = [train_clicks("wide_deep", *files, seed)["auc"] for seed in seeds]
    tell({"part": "adult", "auc": found, "mean": statistics.mean(found), "lowest": min(found)})


def families(data: Path, seeds: Sequence[int], models: Sequence[str], kept: Path) -> None:
    """Each family by default on the test rows of three logs: median and range over the seeds of log loss and AUC, and
    the log loss of the constant."""
    file = kept / "families.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for name in ("criteo", "avazu", "adult"):
        (rows, label), (test, _) = (ROWS[name](data, part) for part in ("train", "test"))
        # Avazu has no number, which DLRM needs.
        for model in (each for each in models if (name, each) != ("avazu", "dlrm")):
            known = {each["seed"]: each for each in found if (each["part"], each["model"]) == (name, model)}
            for seed in (each for each in seeds if each not in known):
                known[seed] = {"part": name, "model": model, "seed": seed, **train_clicks(model, rows, test, seed)}
                found.append(known[seed])
                write_result(file, "".join(json.dumps(each) + "\n" for each in found))
            record = {"part": name, "rows": len(rows), "test_rows": len(test), "model": model, "seeds": list(seeds)}
            for metric in ("log_loss", "auc"):
                values = [known[seed][metric] for seed in seeds]
                record[metric] = f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"
            tell({**record, "constant_log_loss": round(constant_log_loss(rows, test, label), 4)})


def constant_log_loss(learnt: Rows, held_out: Rows, label: str) -> float:
    """The log loss of the base rate of some rows on others."""
    rate = statistics.mean(row[label] for row in learnt)
    share = statistics.mean(row[label] for row in held_out)
    return -(share * math.log(rate) + (1 - share) * math.log(1 - rate))


def sequences(name: str, data: Path, kept: Path, num_steps: int | None) -> None:
    """HR@10 of the last item of every sequence among all items, compared with the most popular ones. None: by default,
    without an option."""
    source = data / f"amazon_{name}" / "interactions.txt.gz"
    taken: dict[str, list[str]] = {}
    with gzip.open(source, "rt") as file:
        for line in file:
            user, item = line.split()
            taken.setdefault(user, []).append(item)
    counts = Counter(item for items in taken.values() for item in items[:-1])
    popular = {item for item, _ in counts.most_common(10)}
    known = [items for items in taken.values() if len(items) > 1 and items[-1] in counts]
    options = OPTIONS | {"data.cache": str(kept / "cache"), "trainer.checkpoint_every": 250}
    if num_steps is not None:
        options |= {"data.batch_size": 256, "trainer.max_steps": num_steps}
        options |= {"retrieval.num_negatives": 1024, "model.dropout": 0.3}
    options |= SMALLER
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
        options = {"trainer.progress": False, "device": "cpu", **SMALLER}
        run = Trainer("recommendation", output_dir=f"{folder}/run", options=options).train()
        gap = run.metrics["eval/best_auc"] - run.metrics["eval/auc"]
        seconds = time.perf_counter() - started
        tell({"part": "click_log", "auc": run.metrics["eval/auc"], "below_best": gap, "seconds": seconds})


def write_sample(data: Path) -> None:
    """A few rows in every file that the parts read."""
    tables: dict[str, list[list[Any]]] = {}
    for part in ("train", "test"):
        tables[f"criteo_kaggle_10k/{part}.tsv.gz"] = [
            [number % 2, *(number + place / 2 for place in range(13)), *(f"{number % 3:08x}" for _ in range(26))]
            for number in range(40)
        ]
        clicks = [[number, number % 2, 14102100, f"site{number % 3}"] for number in range(40)]
        tables[f"avazu_9k/{part}.csv.gz"] = [["id", "click", "hour", "site_id"], *clicks]
        people = [[*(n + place / 2 for place in range(6)), "ab"[n % 2], ("<=50K", ">50K")[n % 2]] for n in range(40)]
        tables[f"adult_income/{part}.csv.gz"] = [[*NUMBERS_OF_ADULT, "workclass", "income"], *people]
    for name in ("video", "beauty"):
        events = [[user, (user + place) % 15] for user in range(20) for place in range(5)]
        tables[f"amazon_{name}/interactions.txt.gz"] = events
    for name, rows in tables.items():
        separator = {"tsv": "\t", "csv": ",", "txt": " "}[name.split(".")[1]]
        text = "".join(separator.join(map(str, row)) + "\n" for row in rows)
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_bytes(gzip.compress(text.encode()))


def tell(record: dict[str, Any]) -> None:
    """One line of the result."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Every part that is named, or all."""
    parser = CommandLine(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--seeds", type=int, nargs="+", help="0 1 2 3 4 by default; of families: 0 1 2")
    parser.add_argument("--families", nargs="+", help="wide_deep by default; of the part families: all")
    parser.add_argument("--steps", type=int, help="of the sequences' training, with the options that were tuned for it")
    parser.add_argument("--kept", type=Path)
    chosen = parser.parse(SMOKE, globals())
    with tempfile.TemporaryDirectory() as folder:
        kept = chosen.kept or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        if is_smoke():
            chosen.data = Path(folder)
            write_sample(chosen.data)
        for part in chosen.parts:
            run(part, chosen, kept)


def run(part: str, chosen: argparse.Namespace, kept: Path) -> None:
    """One part."""
    seeds = chosen.seeds or range(5)
    if part in ("criteo", "avazu"):
        clicks(part, chosen.data, seeds, chosen.families or ["wide_deep"], kept)
    elif part == "adult":
        adult(chosen.data, seeds)
    elif part == "families":
        families(chosen.data, chosen.seeds or range(3), chosen.families or FAMILIES, kept)
    elif part == "click_log":
        click_log()
    else:
        sequences(part, chosen.data, kept, chosen.steps)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
