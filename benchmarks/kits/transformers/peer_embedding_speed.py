"""sentence-transformers on the folder of `embedding_speed.py`: when each step ends, by the wall's clock and the
processor's, as a line of JSON.

OTHER/bin/python peer_embedding_speed.py FOLDER PAIRS STEPS THREADS
"""

import json
import os
import sys
import time
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from datasets import load_dataset  # type: ignore[import-not-found, unused-ignore]
from sentence_transformers import (  # type: ignore[import-not-found, unused-ignore]
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)


class Watch(transformers.TrainerCallback):
    """The times at which steps end."""

    def __init__(self) -> None:
        self.at: list[tuple[float, float]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.at.append((time.perf_counter(), time.process_time()))


def main() -> None:
    folder, pairs, steps, threads = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(threads)
    transformer = models.Transformer(f"{folder}/model")
    model = SentenceTransformer(modules=[transformer, models.Pooling(transformer.get_word_embedding_dimension())])
    rows = load_dataset("json", data_files=f"{folder}/pairs.jsonl", split="train", cache_dir=f"{folder}/cache")
    watch = Watch()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=f"{folder}/peer",
        per_device_train_batch_size=pairs,
        max_steps=steps,
        learning_rate=5e-5,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    loss = losses.MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=rows, loss=loss, callbacks=[watch]).train()
    sys.stdout.write(f"RESULT {json.dumps(watch.at)}\n")


if __name__ == "__main__":
    main()
