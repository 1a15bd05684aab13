"""Trainers for `kitforge verify --callable`: one that is right, and others that are not."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# Each fork that makes an optimizer would import it for two seconds.
import torch._dynamo
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.context import Context
from kitforge.verify.own_trainer import batches_of

Batch = dict[str, Tensor]


def loss_of(model: Any, batch: Batch) -> tuple[Tensor, int]:
    """The sum of the losses, and the number of labels."""
    documents = (batch["position_ids"] == 0).long().cumsum(1) - 1
    logits = model(batch["input_ids"], Context.packed(batch["position_ids"], documents))[:, :-1]
    labels = batch["labels"][:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, int((labels != -100).sum())


class Right:
    """Everything as it should be."""

    def train(
        self, model: nn.Module, batches: Sequence[Batch], *, micro_batches: int, folder: Path, resume: bool
    ) -> nn.Module:
        optimizer, first = torch.optim.SGD(model.parameters(), lr=0.1), 0
        newest = sorted(folder.glob("step-*.safetensors"))
        if resume and newest:
            first = int(newest[-1].name.removeprefix("step-").removesuffix(".safetensors"))
            model.load_state_dict(self.restored(load_file(newest[-1])))
        for step in range(first, len(batches)):
            self.accumulate(
                model, batches_of(batches[step], len(batches[step]["labels"]) // micro_batches), batches[step]
            )
            optimizer.step()
            optimizer.zero_grad()
            save_file(model.state_dict(), folder / "draft")
            (folder / "draft").rename(folder / f"step-{step + 1}.safetensors")
        return model

    def accumulate(self, model: nn.Module, parts: list[Batch], whole: Batch) -> None:
        for part in parts:
            (loss_of(model, part)[0] / loss_of(model, whole)[1]).backward()

    def restored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return weights

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        model.eval()
        with torch.no_grad():
            sums = [loss_of(model, batch) for batch in batches]
        return float(sum(total for total, _ in sums)) / sum(count for _, count in sums)


class Wrong(Right):
    """Means of means, no label of the last row, neighbours in a row, and weights that a checkpoint rounds."""

    def accumulate(self, model: nn.Module, parts: list[Batch], whole: Batch) -> None:
        for part in parts:
            labels = part["labels"].clone()
            labels[-1, 1:] = -100 if len(parts) == 1 else labels[-1, 1:]
            total, count = loss_of(model, part | {"labels": labels})
            (total / count / len(parts)).backward()

    def restored(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: each.bfloat16().float() for name, each in weights.items()}

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        order = torch.arange(1000)
        unaware = [
            batch | {"position_ids": order[: batch["labels"].shape[1]].expand_as(batch["labels"])} for batch in batches
        ]
        losses = [super(Wrong, self).evaluate(model, [batch]) for batch in unaware]
        return sum(losses) / len(losses)


class Odd:
    """It hangs where it trains, and says nonsense where it evaluates."""

    def train(self, *_: object, **__: object) -> None:
        time.sleep(1000)

    def evaluate(self, *_: object) -> str:
        return "fine"


class Few:
    """It has no method at all."""
