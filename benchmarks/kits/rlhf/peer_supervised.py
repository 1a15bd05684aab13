"""The peer's side of `supervised.py`, for an environment of its own: trl==1.12.0."""

import sys

import peer
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

task, episodes, precision = sys.argv[1], int(sys.argv[2]), sys.argv[3]
names = ("completion",) if task == "sft" else ("chosen", "rejected")
columns = {"prompt": peer.lists(episodes, 0, 16, 64)}
columns |= {name: peer.lists(episodes, seed, 64, 128) for seed, name in enumerate(names, start=1)}
# A space keeps the last word of a prompt and the first of a response apart.
rows = [
    {name: ("" if name == "prompt" else " ") + peer.words(tokens) for name, tokens in zip(columns, row, strict=True)}
    for row in zip(*columns.values(), strict=True)
]
trainers = {"sft": (SFTTrainer, SFTConfig), "reward": (RewardTrainer, RewardConfig), "dpo": (DPOTrainer, DPOConfig)}
trainer_class, config_class = trainers[task]
extra = {"ref_model": peer.network()} if task == "dpo" else {}
trainer = trainer_class(
    model=peer.network(is_scalar=task == "reward"),
    args=config_class(**peer.options(episodes, precision), max_length=512),
    train_dataset=Dataset.from_list(rows),
    processing_class=peer.tokenizer(),
    **extra,
)
peer.measure(trainer, None, episodes)
