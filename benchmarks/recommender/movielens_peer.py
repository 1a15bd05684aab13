"""RecBole's SASRec on a folder of events, under the interpreter that has it.

    python movielens_peer.py FOLDER OPTIONS     # prints one line of JSON

FOLDER holds NAME/NAME.inter, where NAME is FOLDER's own. OPTIONS: a JSON object of RecBole's options. RecBole's
`quick_start` wants ray, which nothing here does; its checkpoints hold objects, which torch reads when it is told to.
"""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from recbole.config import Config
from recbole.data import create_dataset, data_preparation
from recbole.model.sequential_recommender.sasrec import SASRec
from recbole.trainer import Trainer
from recbole.utils import init_seed


def main(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.load = functools.partial(torch.load, weights_only=False)
    given = {
        "data_path": str(folder),
        "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
        "USER_ID_FIELD": "user_id",
        "ITEM_ID_FIELD": "item_id",
        "TIME_FIELD": "timestamp",
        "train_neg_sample_args": None,
        "loss_type": "CE",
        "eval_args": {"split": {"LS": "valid_and_test"}, "group_by": "user", "order": "TO", "mode": "full"},
        "metrics": ["Hit", "NDCG"],
        "topk": [10],
        "valid_metric": "NDCG@10",
        "use_gpu": False,
        "show_progress": False,
        "checkpoint_dir": str(folder / "saved"),
        **options,
    }
    config = Config(model="SASRec", dataset=folder.name, config_dict=given)
    init_seed(config["seed"], True)
    train, valid, test = data_preparation(config, create_dataset(config))
    model = SASRec(config, train.dataset)
    trainer, start = Trainer(config, model), time.perf_counter()
    epochs: list[int] = []
    trainer.fit(
        train,
        valid,
        verbose=False,
        saved=True,
        show_progress=False,
        callback_fn=lambda epoch, _score: epochs.append(epoch),
    )
    seconds = time.perf_counter() - start
    found = trainer.evaluate(test, load_best_model=True, show_progress=False)
    record = {"hr@10": float(found["hit@10"]), "ndcg@10": float(found["ndcg@10"]), "epochs": len(epochs)}
    parameters = sum(weight.numel() for weight in model.parameters())
    print(json.dumps({**record, "seconds": round(seconds, 1), "rows": len(train.dataset), "parameters": parameters}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
