"""The peer's side of `distill.py`, for an environment of its own: trl==1.16.0."""

import sys

import peer
import torch
from datasets import Dataset
from transformers import GPT2LMHeadModel
from trl import DistillationConfig, DistillationTrainer

episodes, response, precision = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

# Each prompt four times, one after the other.
rows = [{"prompt": peer.words(tokens)} for tokens in peer.lists(episodes // 4, 0, 16, 64) for _ in range(4)]
student = peer.network()
torch.manual_seed(1)
teacher = GPT2LMHeadModel(student.config)
trainer = DistillationTrainer(
    model=student,
    teacher_model=teacher,
    args=DistillationConfig(
        **peer.options(episodes, precision), max_completion_length=response, beta=1.0, shuffle_dataset=False
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=peer.tokenizer(),
)
# The first round of 32 does not count.
peer.measure(trainer, "_generate", episodes - 32)
