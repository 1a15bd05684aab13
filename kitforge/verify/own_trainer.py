"""Contracts of a trainer that is not ours, against a small protocol; `examples/verify_hf_trainer.py` implements it.

A batch is a dict of int64 tensors [rows, length] as Hugging Face names them: `input_ids`; `labels`, which the trainer
shifts, -100 where a token is not to be predicted; `position_ids`, which begin anew with each document of a row.
"""

from __future__ import annotations

import importlib
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from kitforge.foundation.errors import ConfigError
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build
from kitforge.verify.contract import Contract, Measured, NotOfferedError
from kitforge.verify.killing import die_at_operation
from kitforge.verify.processes import Process
from kitforge.verify.run_equality import is_equal

Batch: TypeAlias = dict[str, Tensor]
NETWORK = LlamaConfig(vocab_size=96, dim=32, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=64, max_length=128)
ROWS, LENGTH, STEPS = 12, 24, 6
LENGTHS = (5, 13, 7, 9)  # of the documents that share a row
WEIGHT_BOUND, LOSS_BOUND = 1e-4, 1e-5
KILLS, ATTEMPTS, OPERATIONS, RUN_TIMEOUT = 2, 10, 60, 240.0


class TrainerUnderTest(Protocol):
    """What is asked of a trainer; each method is optional, and what is missing is not offered.

    def train(
        self, model: nn.Module, batches: Sequence[Batch], *, micro_batches: int, folder: Path, resume: bool
    ) -> nn.Module | Mapping[str, Tensor]:
        One optimizer step for each batch in order, its rows in `micro_batches` equal parts; a checkpoint in `folder`
        after every step. With `resume`, goes on from the newest one there, if any. Returns the trained network, or
        its weights by name. It may change `model`, or train a network made of its weights.

    def evaluate(self, model: nn.Module, batches: Sequence[Batch]) -> float:
        The mean loss in nats over all labels of all batches.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTrainer:
    """A trainer of the caller's, and the folder that its runs are in."""

    trainer: Any
    folder: Path

    def train(
        self, name: str, batches: Sequence[Batch], micro_batches: int, *, resume: bool = False
    ) -> Mapping[str, Tensor]:
        """The weights after training. Raises NotOfferedError, and TypeError for what are no weights."""
        method = self._method("train")
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        given = [dict(batch) for batch in batches]
        found = method(network(), given, micro_batches=micro_batches, folder=folder, resume=resume)
        weights = dict(found.named_parameters()) if isinstance(found, nn.Module) else found
        if (
            not isinstance(weights, Mapping)
            or not weights
            or not all(isinstance(each, Tensor) for each in weights.values())
        ):
            raise TypeError(f"train returned {type(found).__name__}, not a network or its weights by name")
        return {name: each.detach().double().cpu() for name, each in weights.items()}

    def evaluate(self, batches: Sequence[Batch]) -> float:
        """The mean loss. Raises NotOfferedError, and TypeError for what is not a number."""
        found = self._method("evaluate")(network(), [dict(batch) for batch in batches])
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not math.isfinite(found):
            raise TypeError(f"evaluate returned {found!r}, not a finite number")
        return float(found)

    def _method(self, name: str) -> Callable[..., Any]:
        method = getattr(self.trainer, name, None)
        if not callable(method):
            raise NotOfferedError(f"the trainer has no method {name!r}")
        found: Callable[..., Any] = method
        return found


def load_trainer(name: str) -> Any:
    """The object `module:object`, of a module on the path or in the current folder; a class is called without
    arguments. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigError("this names no trainer", got=name, expected="module:object")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
        return found() if isinstance(found, type) else found
    except Exception as error:
        raise ConfigError("the trainer cannot be loaded", got=f"{name}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())


def network() -> nn.Module:
    """A small LLaMA in float32, the same at each call."""
    return build(NETWORK, device=torch.device("cpu"), seed=0, level="O0")


def rows(count: int) -> Batch:
    """Rows of one document each, with a different number of labels in each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, NETWORK.vocab_size, (count, LENGTH), generator=generator)
    masked = torch.arange(count) * 5 % (LENGTH - 4)
    labels = tokens.masked_fill(torch.arange(LENGTH) <= masked.unsqueeze(1), -100)
    return {"input_ids": tokens, "labels": labels, "position_ids": torch.arange(LENGTH).expand(count, LENGTH).clone()}


def batches_of(batch: Batch, size: int) -> list[Batch]:
    """The rows in batches of that size; the last one may be smaller."""
    starts = range(0, len(batch["input_ids"]), size)
    return [{name: each[start : start + size].clone() for name, each in batch.items()} for start in starts]


def documents_alone() -> list[Batch]:
    """Documents of several lengths, a batch of one row each."""
    whole = rows(len(LENGTHS))
    alone = [{name: each[row : row + 1, :length] for name, each in whole.items()} for row, length in enumerate(LENGTHS)]
    for batch in alone:
        batch["labels"] = batch["input_ids"].clone()
        # No document is asked for its first token, which nothing of its own precedes.
        batch["labels"][:, 0] = -100
    return alone


def check_own_micro_batches(own: OwnTrainer) -> Measured:
    """Weights after three steps in two and in four micro-batches against whole batches, relative to the way."""
    batches = batches_of(rows(ROWS), 4)
    before = own.train("start", batches[:1], 1)
    whole = own.train("whole", batches, 1)
    way = max(_distance(whole, before), 1e-30)
    figure = max(_distance(own.train(f"parts_{parts}", batches, parts), whole) / way for parts in (2, 4))
    return Measured(figure=figure, bound=WEIGHT_BOUND, unit="relative to the way of the weights, float32")


def check_own_evaluation(own: OwnTrainer) -> Measured:
    """The loss of the same rows in batches of 1, 3, 5 and all."""
    losses = [own.evaluate(batches_of(rows(ROWS), size)) for size in (1, 3, 5, ROWS)]
    return Measured(figure=max(losses) - min(losses), bound=LOSS_BOUND, unit="nats, float32")


def check_own_packing(own: OwnTrainer) -> Measured:
    """The loss of documents in one row against that of each in a row of its own."""
    alone = documents_alone()
    packed = {name: torch.cat([batch[name] for batch in alone], dim=1) for name in alone[0]}
    counts = [int((batch["labels"] != -100).sum()) for batch in alone]
    losses = [own.evaluate([batch]) for batch in alone]
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    return Measured(figure=abs(own.evaluate([packed]) - mean), bound=LOSS_BOUND, unit="nats, float32")


def check_own_resume(own: OwnTrainer) -> Measured:
    """SIGKILL at drawn operations on files of the run, which lie between steps and within saves, and resumption until
    the end."""
    batches, folder, draw = batches_of(rows(STEPS * 4), 4), own.folder / "killed", random.Random(0)
    whole, kills, latest = own.train("undisturbed", batches, 1), 0, OPERATIONS

    def train(number: int) -> None:
        die_at_operation(number, folder)
        own.train("killed", batches, 1, resume=True)

    for _ in range(ATTEMPTS):
        number = draw.randrange(1, latest)
        if Process(train, number).ended(RUN_TIMEOUT):
            # It has fewer operations.
            latest = max(number, 2)
            shutil.rmtree(folder)
        # What has left nothing has nothing to resume.
        elif any(path.is_file() for path in folder.rglob("*")):
            kills += 1
        if kills == KILLS:
            break
    if not kills:
        raise NotOfferedError("the run ends before it can be killed")
    found = own.train("killed", batches, 1, resume=True)
    differing = [name for name in whole.keys() | found.keys() if not is_equal(whole.get(name), found.get(name))]
    return Measured(figure=len(differing), unit=f"of {len(whole)} tensors differ after {kills} kills")


def _distance(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    if got.keys() != wanted.keys():
        return math.inf
    return math.hypot(*(float((each - wanted[name]).norm()) for name, each in got.items()))


CONTRACTS = (
    Contract(name="micro_batches", promise="micro-batches = batch", check=check_own_micro_batches),
    Contract(name="evaluation", promise="evaluation independent of the batch size", check=check_own_evaluation),
    Contract(name="packing", promise="packed = alone", check=check_own_packing),
    Contract(name="resume", promise="killed and resumed = never killed", check=check_own_resume),
)
