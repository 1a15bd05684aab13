"""Runs of the language-model task on ranks of a test: the same few steps on any mesh."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kitforge.composition import compose_config
from kitforge.core.parallel.config import AXES, ParallelConfig
from kitforge.core.parallel.world import World
from kitforge.kits.kit import RunAssembly
from kitforge.kits.transformers.build import TASKS, Inputs
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.run_folder import train

KIT = TASKS["text_generation"]


class TestRendezvous:
    """Stands for the rendezvous where the test has already joined the ranks."""

    __test__ = False

    def __init__(self, degrees: ParallelConfig, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self._degrees = degrees

    @contextmanager
    def local_rank_zero_first(self) -> Iterator[None]:
        yield

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def init_process_group(self) -> World:
        return (
            World.of_process_group(self._degrees, self.device) if dist.is_initialized() else World(device=self.device)
        )

    def check_same(self, facts: Mapping[str, str]) -> None:
        pass


class Losses(Callback):
    """Keeps the lines of the log; may end the run early."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.stop_at: int | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step" and run.state.cursor.step == self.stop_at:
            run.stop("halfway")
        if event.kind in ("log", "evaluate", "note"):
            self.lines.append(event.record)


LLAMA = {
    "model": "llama_tiny",
    "model.num_layers": 2,
    "model.dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.mlp_dim": 48,
}
MIXTURE = {
    "model": "llama_moe_tiny",
    "model.num_layers": 2,
    "model.dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.mlp_dim": 12,
    "model.experts.num_experts": 4,
    "model.experts.balance_weight": 0.1,
}
BASE = {
    "data.batch_size": 6,
    "data.sequence_length": 16,
    "data.eval_fraction": 0.2,
    "trainer.max_steps": 4,
    "trainer.eval_every": 4,
    "trainer.eval_batches": 2,
    "trainer.progress": False,
    "inference.max_new_tokens": 1,
    "optimizer.learning_rate": 1e-2,
    "device": "cpu",
}


def ready(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[RunAssembly[Any, Any], Losses]:
    """A run that is about to start in `folder`, over the text beside it."""
    told = Losses()
    given = {"data.train": str(folder / "text.txt"), "data.cache": str(folder / "cache")}
    network = {} if "model" in choices else LLAMA
    values = compose_config("text_generation", {**BASE, **network, **given, **choices}).values
    options = KIT.read_options(values)
    return KIT.assemble(options, Inputs(callbacks=[told]), TestRendezvous(options.parallel)), told


def run_training(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train; the lines of the log, and this rank's pieces of the weights."""
    torch.set_num_threads(1)
    assembly, told = ready(rank, folder, choices)
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    pieces = assembly.loop.state.parallel.parameters()
    return told.lines, {name: piece.detach().clone() for name, piece in pieces.items()}


def world_size(choices: Mapping[str, Any]) -> int:
    return math.prod(choices.get(f"parallel.{axis}", 1) for axis in AXES)


def numbers(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


def assert_log_of_one_process(lines: list[dict[str, Any]], one: list[dict[str, Any]], *exact: str) -> None:
    """Losses and norms within rounding, and the numbers of these names to the bit.

    Eight units in the last place of a loss: sums in another order differ by one, and AdamW moves a weight whose
    gradient is rounding by the whole rate, so that later losses differ by more (after SGD still by one)."""
    for name in ("loss", "eval/loss"):
        assert numbers(lines, name) == pytest.approx(numbers(one, name), rel=1e-6, abs=2e-6)
    assert numbers(lines, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)
    for name in exact:
        assert numbers(lines, name) == numbers(one, name), name


def write_text(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    words = "all work and no play makes jack a dull boy, all play and no work makes jack a mere toy. "
    (folder / "text.txt").write_text(words * 60)
