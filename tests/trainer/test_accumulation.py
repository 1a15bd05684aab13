"""However a batch is split into micro-batches, the weights move the same; float64 shows it to the last digits."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.parallel.world import World
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.loop import Loop
from kitforge.trainer.task import Task
from kitforge.verify.learning import GRADIENT_STEP
from tests.trainer import tiny

BATCH = 4
PLAIN = GRADIENT_STEP | {"data.batch_size": BATCH, "trainer.max_steps": None}
DOCUMENTS = {"data.train": "documents.jsonl", "data.eval_fraction": 0.2}


class Doubled(Task):
    """A task in float64 some of whose samples are masked."""

    def __init__(self, task: Task, masked: Collection[int]) -> None:
        self.task, self.masked = task, masked

    def build(self, world: World) -> nn.Module:
        return self.task.build(world).double()

    def num_steps(self, epochs: float) -> int | None:
        return self.task.num_steps(epochs)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in self.task.steps(model, cursor):
            yield [self._mask(micro_batch) for micro_batch in step]

    def _mask(self, micro_batch: MicroBatch) -> MicroBatch:
        targets = micro_batch["targets"].clone()
        targets[[sample in self.masked for sample in micro_batch["samples"].tolist()]] = -100
        return {**micro_batch, "targets": targets}

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        return self.task.count(step)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return self.task.loss(model, micro_batch)


def weights(folder: Path, corpus: Path, choices: dict[str, Any], masked: Collection[int] = ()) -> Tensor:
    """All weights after a run, laid end to end."""
    assembly = tiny.begin(folder, corpus, PLAIN | choices)
    options = dataclasses.replace(assembly.options, output_dir=None)
    loop = Loop(Doubled(assembly.loop.task, masked), options, World(device=torch.device("cpu")))
    loop.train()
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


def distance(folder: Path, corpus: Path, choices: dict[str, Any], *sizes: int, masked: Collection[int] = ()) -> float:
    """How far micro-batches of one of the sizes lead from the whole batch at most, relative to the way."""
    started = weights(folder, corpus, choices | {"trainer.max_steps": 1, "optimizer.learning_rate": 1e-30})
    whole = weights(folder, corpus, choices, masked)
    way = float((whole - started).norm())
    assert way > 0.01
    split = [weights(folder, corpus, choices | {"trainer.micro_batch_size": size}, masked) for size in sizes]
    return max(float((each - whole).norm()) for each in split) / way


CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "llama": ({"model": tiny.LLAMA}, ()),
    "gpt2 with dropout": ({"model": tiny.GPT2 | tiny.DROPOUT}, ()),
    "packed documents": (DOCUMENTS, ()),
    "a micro-batch without a target": ({}, (1, 2)),
    "a first step without a target": ({}, (0, 1, 2, 3)),
    "a last step without a target": ({}, (4, 5, 6, 7)),
    "clipping, which sees the whole batch": ({"trainer.max_grad_norm": 0.1}, ()),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * ("model" in CASES[case][0])) for case in CASES]
)
def test_micro_batches_equal_the_batch(tmp_path: Path, corpus: Path, case: str) -> None:
    choices, masked = CASES[case]
    assert distance(tmp_path, corpus, choices | {"trainer.max_steps": 2}, 1, 3, masked=masked) < 1e-12


def test_the_last_smaller_batch_of_an_epoch_is_divided_by_what_it_holds(tmp_path: Path, corpus: Path) -> None:
    # 128 tokens a row: few rows, and no multiple of the batch.
    choices = {"data.sequence_length": 128, "data.batch_size": 16, "trainer.epochs": 1.0}
    steps = tiny.begin(tmp_path, corpus, PLAIN | choices).loop.task.steps(nn.Module(), Cursor())
    sizes = [sum(len(part["tokens"]) for part in step) for step in steps]
    assert sizes[:-1] == [16] * (len(sizes) - 1)
    assert 0 < sizes[-1] < 16
    assert distance(tmp_path, corpus, choices, 3) < 1e-12
