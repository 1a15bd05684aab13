"""TRL's SFTTrainer under `kitforge verify --callable verify_trl_sft:TrlTrainer`.

Run it in an environment with trl, in this folder. Rows come with tokens and labels, so no tokenizer and no template
take part; documents that share a row are packed by TRL itself.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from kitforge import save_model


class InOrder(SFTTrainer):
    """An SFTTrainer that takes the rows in their order."""

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class TrlTrainer:
    """The protocol of `kitforge.verify.own_trainer` on TRL's SFTTrainer."""

    def train(
        self, model: nn.Module, batches: Sequence[dict[str, Tensor]], *, micro_batches: int, folder: Path, resume: bool
    ) -> nn.Module:
        """One step of SGD for each batch; a checkpoint after every step."""
        size = len(batches[0]["labels"])
        settings = {
            "per_device_train_batch_size": size // micro_batches,
            "gradient_accumulation_steps": micro_batches,
            "num_train_epochs": 1,
            "optim": "sgd",
            "learning_rate": 0.1,
            "lr_scheduler_type": "constant",
            "save_strategy": "steps",
            "save_steps": 1,
            **packing_of(batches),
        }
        trainer = prepared(model, folder, settings, train_dataset=dataset_of(batches))
        trainer.train(resume_from_checkpoint=resume and any(folder.glob("checkpoint-*")))
        return trainer.model

    def evaluate(self, model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
        """`eval_loss`, at the batch size of the first batch; several documents of a row are packed."""
        size = len(batches[0]["labels"])
        settings: dict[str, object] = {
            "per_device_eval_batch_size": size,
            **packing_of(batches),
        }
        with tempfile.TemporaryDirectory() as folder:
            trainer = prepared(model, folder, settings, eval_dataset=dataset_of(batches))
            return trainer.evaluate()["eval_loss"]


def packing_of(batches: Sequence[dict[str, Tensor]]) -> dict[str, object]:
    """The options of rows that several documents share, and of others."""
    is_packed = any(len(documents_of(batch)) > len(batch["labels"]) for batch in batches)
    return {"packing": is_packed, "max_length": max(batch["labels"].shape[1] for batch in batches)}


def prepared(model: nn.Module, folder: str | Path, settings: dict[str, object], **datasets: Dataset) -> SFTTrainer:
    """A trainer of the network as transformers runs it."""
    with tempfile.TemporaryDirectory() as stored:
        save_model(model, stored)
        network = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.float32)
    words = Tokenizer(WordLevel({f"<{number}>": number for number in range(96)}, unk_token="<0>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<0>", eos_token="<0>")
    quiet = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
    arguments = SFTConfig(output_dir=str(folder), **quiet, **settings)
    # The first argument of a Trainer without a training set is a set nobody trains on.
    given = {"train_dataset": datasets.get("eval_dataset"), **datasets}
    return InOrder(network, arguments, processing_class=tokenizer, **given)


def documents_of(batch: dict[str, Tensor]) -> list[dict[str, list[int]]]:
    """The documents of all rows, each with its tokens and labels."""
    found = []
    for row, positions in enumerate(batch["position_ids"].tolist()):
        starts = [index for index, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(positions)], strict=True):
            found.append({name: batch[name][row, start:end].tolist() for name in ("input_ids", "labels")})
    return found


def dataset_of(batches: Sequence[dict[str, Tensor]]) -> Dataset:
    """The documents of all batches."""
    return Dataset.from_list([document for batch in batches for document in documents_of(batch)])
