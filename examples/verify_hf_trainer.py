"""Hugging Face's Trainer under `kitforge verify --callable verify_hf_trainer:HuggingFaceTrainer`.

Run it in an environment with transformers and accelerate, in this folder. The network is the same LLaMA, written as a
Hugging Face folder and loaded by transformers.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from kitforge import save_model


def loaded(model: nn.Module) -> nn.Module:
    """The network as transformers runs it."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, folder)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def stacked(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of rows of equal length."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def rows_of(batches: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The rows of all batches."""
    return [
        {name: each[row] for name, each in batch.items()} for batch in batches for row in range(len(batch["labels"]))
    ]


class InOrder(Trainer):
    """A Trainer that takes the rows in their order."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class HuggingFaceTrainer:
    """The protocol of `kitforge.verify.own_trainer` on transformers' Trainer, with the settings that suit it best."""

    def train(
        self, model: nn.Module, batches: Sequence[dict[str, Tensor]], *, micro_batches: int, folder: Path, resume: bool
    ) -> nn.Module:
        """One step of SGD for each batch; a checkpoint after every step."""
        size = len(batches[0]["labels"])
        arguments = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=size // micro_batches,
            gradient_accumulation_steps=micro_batches,
            num_train_epochs=1,
            optim="sgd",
            learning_rate=0.1,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = InOrder(loaded(model), arguments, train_dataset=rows_of(batches), data_collator=stacked)
        trainer.train(resume_from_checkpoint=resume and any(folder.glob("checkpoint-*")))
        return trainer.model

    def evaluate(self, model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
        """`eval_loss`, at the batch size of the first batch."""
        with tempfile.TemporaryDirectory() as folder:
            size = len(batches[0]["labels"])
            arguments = TrainingArguments(
                output_dir=folder,
                per_device_eval_batch_size=size,
                use_cpu=True,
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            )
            trainer = InOrder(loaded(model), arguments, eval_dataset=rows_of(batches), data_collator=stacked)
            return trainer.evaluate()["eval_loss"]
