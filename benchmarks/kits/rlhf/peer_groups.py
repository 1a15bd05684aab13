"""The peer's side of `groups.py`, for an environment of its own: trl==1.12.0 and requests."""

import sys

import peer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

task, episodes, response, precision = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]


def distinct(completion_ids, **_):
    """The share of tokens that are new."""
    return [len(set(tokens)) / max(len(tokens), 1) for tokens in completion_ids]


rows = [{"prompt": peer.words(tokens)} for tokens in peer.lists(episodes // 4, 0, 16, 64)]
trainer_class, config_class = (GRPOTrainer, GRPOConfig) if task == "grpo" else (RLOOTrainer, RLOOConfig)
trainer = trainer_class(
    model=peer.network(),
    reward_funcs=distinct,
    args=config_class(
        **peer.options(episodes, precision), num_generations=4, max_completion_length=response, beta=0.04
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=peer.tokenizer(),
)
# The first round of 32 does not count.
peer.measure(trainer, "_generate", episodes - 32)
