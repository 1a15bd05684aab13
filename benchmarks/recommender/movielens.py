"""SASRec on MovieLens-100K beside RecBole's, and the most popular items: full ranking of the last item of every user.

    python -m benchmarks.recommender.movielens DATA KEPT [--peer PYTHON] [--seeds 0 1 2]

DATA holds ml-100k.inter, as it lies in the wheel of recbole (recbole/dataset_example/ml-100k). PYTHON is an interpreter
with recbole (movielens.md says with what); without one, ours runs alone. Events of one second are ordered by their
rows, for both. The last item of a user is for the test, the one before it for RecBole's early stopping; ours is not
trained on it either. What is known already lies in the file KEPT, one JSON object a line: another call goes on from
there. One thread each, one run at a time.
"""

import csv
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge.api import Trainer
from kitforge.foundation.log import logger

_log = logger(__name__)
DIM, NUM_LAYERS, LENGTH, DROPOUT = 64, 2, 20, 0.2
PEER = Path(__file__).with_name("movielens_peer.py")
PEER_OPTIONS: dict[str, Any] = {
    "hidden_size": DIM,
    "inner_size": DIM,
    "n_layers": NUM_LAYERS,
    "n_heads": 1,
    "MAX_ITEM_LIST_LENGTH": LENGTH,
    "hidden_dropout_prob": DROPOUT,
    "attn_dropout_prob": DROPOUT,
    "learning_rate": 0.001,
    "train_batch_size": 256,
    "epochs": 12,
    "stopping_step": 2,
}
# Rates, size of a batch and passes are the defaults, without early stopping.
OPTIONS: dict[str, Any] = {
    "model.dim": DIM,
    "model.num_layers": NUM_LAYERS,
    "model.max_length": LENGTH,
    "model.dropout": DROPOUT,
}
SMOKE = {
    "OPTIONS": OPTIONS
    | {"model.dim": 8, "model.num_layers": 1, "model.dropout": 0.0, "trainer.max_steps": 1, "data.batch_size": 8},
    **{"data": None, "kept": Path("not-written.jsonl"), "seeds": [0]},
}


def prepare(source: Path, folder: Path) -> tuple[Path, Path]:
    """All events by user and time, and the same without the last one of each user."""
    with open(source, encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    events = sorted((int(row[0]), float(row[3]), number, row[1]) for number, row in enumerate(rows))
    (folder / "ml").mkdir()
    paths = folder / "ml" / "ml.inter", folder / "train.inter"
    for path, held_out in zip(paths, (0, 1), strict=True):
        kept = (
            events
            if not held_out
            else [one for one, next_ in zip(events, events[1:], strict=False) if one[0] == next_[0]]
        )
        places = {event[2]: place for place, event in enumerate(events)}
        lines = [f"{user}\t{item}\t{places[number]}\n" for user, _, number, item in kept]
        path.write_text("user_id:token\titem_id:token\ttimestamp:float\n" + "".join(lines), encoding="utf-8")
    return paths


def ours(test: Path, train: Path, seed: int) -> dict[str, Any]:
    """A run by default, scored on the last items."""
    shared = {"data.cache": str(test.parent / "cache"), "trainer.progress": False, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, **shared, "seed": seed}
        start = time.perf_counter()
        Trainer("recommendation", "sasrec", str(train), output_dir=f"{folder}/run", options=options).train()
        seconds = time.perf_counter() - start
        again = {**shared, "checkpoint": f"{folder}/run"}
        found = Trainer("recommendation", eval_dataset=str(test), options=again).evaluate()
        steps = [json.loads(line)["step"] for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    names = ("hr@10", "ndcg@10", "popularity_hr@10")
    return {name: found[f"eval/{name}"] for name in names} | {"seconds": round(seconds, 1), "steps": max(steps)}


def recbole(python: str, folder: Path, seed: int) -> dict[str, Any]:
    """The best epoch of RecBole's by the items before the last ones, scored on the last ones, in another process."""
    command = [python, str(PEER), str(folder), json.dumps({**PEER_OPTIONS, "seed": seed})]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


def write_sample(folder: Path) -> None:
    """A few events of a few users."""
    events = [f"{user}\t{(user + place) % 15}\t5\t{place}\n" for user in range(12) for place in range(6)]
    (folder / "ml-100k.inter").write_text("user_id\titem_id\trating\ttimestamp\n" + "".join(events), encoding="utf-8")


def main() -> None:
    """Run what is not known yet, and log a line of the table for each model."""
    parser = CommandLine(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("kept", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse(SMOKE, globals())
    torch.set_num_threads(1)
    found = [json.loads(line) for line in given.kept.read_text().splitlines()] if given.kept.exists() else []
    models = ["ours", *(["recbole"] if given.peer else [])]
    with tempfile.TemporaryDirectory() as scratch:
        if is_smoke():
            given.data = Path(scratch)
            write_sample(given.data)
        test, train = prepare(given.data / "ml-100k.inter", Path(scratch))
        for seed in given.seeds:
            for model in models:
                if any((each["model"], each["seed"]) == (model, seed) for each in found):
                    continue
                scores = ours(test, train, seed) if model == "ours" else recbole(given.peer, test.parent, seed)
                found.append({"model": model, "seed": seed, **scores})
                write_result(given.kept, "".join(json.dumps(each) + "\n" for each in found))
    for model in dict.fromkeys(each["model"] for each in found):
        cells = []
        for name in ("hr@10", "ndcg@10", "seconds"):
            values = [each[name] for each in found if each["model"] == model]
            cells.append(f"{statistics.mean(values):.4g} ({min(values):.4g} to {max(values):.4g})")
        _log.warning("| %s | %s |", model, " | ".join(cells))


if __name__ == "__main__":
    main()
