"""Evaluation on several ranks takes no more rows at once than training does, and finds the loss of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.trainer.run_folder import train
from tests.distributed.ranks import run_ranks
from tests.distributed.training import ready, write_text
from tests.kits.recommender import runs

CHOICES: dict[str, Any] = {
    "data.batch_size": 7,
    "trainer.max_steps": 1,
    "trainer.eval_batches": 3,
    "inference.max_new_tokens": 1,
}


def seen(rank: int, folder: Path, output: Path, choices: dict[str, Any]) -> tuple[dict[str, set[int]], float]:
    """How many rows forward passes had in training and in evaluation, and the loss that evaluation found."""
    torch.set_num_threads(1)
    assembly, told = ready(rank, folder, {**CHOICES, "output_dir": str(output), **choices})
    network, rows = assembly.loop.model, {"train": set[int](), "eval": set[int]()}
    hidden = network.hidden

    def watched(tokens: torch.Tensor, context: Any = None) -> torch.Tensor:
        # Samples of the report are generated through a cache, a few rows of their own.
        if tokens.shape[1] == 16:
            rows["train" if network.training else "eval"].add(len(tokens))
        return hidden(tokens, context)

    network.__dict__["hidden"] = watched
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return rows, next(line["eval/loss"] for line in told.lines if "eval/loss" in line)


@pytest.mark.slow
def test_evaluation_has_the_rows_of_training(tmp_path: Path) -> None:
    write_text(tmp_path)
    _, alone = seen(0, tmp_path, tmp_path / "alone", {})
    for size, most in ((None, 4), (3, 3), (7, 4)):
        folder = tmp_path / f"by {size}"
        for rows, loss in run_ranks(2, seen, tmp_path, folder, {"parallel.data": 2, "trainer.micro_batch_size": size}):
            assert max(rows["eval"]) == most >= max(rows["train"])
            assert loss == pytest.approx(alone, abs=1e-6)


def recommender(rank: int, folder: Path) -> tuple[int, int]:
    torch.set_num_threads(1)
    choices = {"parallel.data": 2, "trainer.max_steps": 1, "data.batch_size": 33}
    assembly, _ = runs.ready(folder, "wide_deep", choices)
    network, rows = assembly.loop.model, {True: 0, False: 0}

    def watched(_module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        rows[network.training] = max(rows[network.training], output.shape[0])

    network.register_forward_hook(watched)
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return rows[True], rows[False]


@pytest.mark.slow
def test_so_has_that_of_a_recommender(tmp_path: Path) -> None:
    assert run_ranks(2, recommender, tmp_path) == [(16, 17), (17, 17)]
