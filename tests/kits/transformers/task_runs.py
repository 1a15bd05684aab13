"""Short runs of a task over rows in memory, which its tests share."""

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.kit import RunInputs
from tests.distributed.training import TestRendezvous
from tests.trainer import tiny

# What the runs of every task have.
SHORT: dict[str, Any] = {
    "data.eval_fraction": 0.2,
    "trainer.progress": False,
    "trainer.log_every": 1,
    "optimizer.learning_rate": 1e-2,
    "device": "cpu",
}
# Of runs that nobody looks for.
_SCRATCH, _NUMBERS = tempfile.TemporaryDirectory(prefix="kitforge-runs-"), itertools.count()
AXES = ("data", "shard", "context", "tensor", "sequence_parallel")


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A jsonl file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRuns:
    """The runs of a kit with these dotted options, over `rows()` unless a run is given others."""

    kit: Any
    options: Mapping[str, Any]
    rows: Callable[[], list[dict[str, Any]]]
    inputs: Mapping[str, Any] = field(default_factory=lambda: {"processor": ByteTokenizer()})

    def begin(
        self, folder: Path | None, choices: dict[str, Any] | None = None, rendezvous: Any = None, **given: Any
    ) -> Any:
        """A run that is ready to start; `given` are inputs of the run."""
        folder = Path(_SCRATCH.name, str(next(_NUMBERS))) if folder is None else folder
        values = {**self.options, "output_dir": str(folder), **(choices or {})}
        options = self.kit.read_options(tiny.nested(values))
        inputs = RunInputs(**{"train_dataset": self.rows(), **self.inputs, **given})
        return self.kit.assemble(options, inputs, rendezvous or Rendezvous.open(options.parallel, options.device))

    def run(
        self, folder: Path | None, choices: dict[str, Any] | None = None, rendezvous: Any = None, **given: Any
    ) -> Any:
        """A run that has ended, and its metrics."""
        assembly = self.begin(folder, choices, rendezvous, **given)
        return assembly, tiny.finish(assembly)

    def ended(self, folder: Path | None, choices: dict[str, Any] | None = None, **given: Any) -> Any:
        """A run that has ended."""
        return self.run(folder, choices, **given)[0]

    def on_meshes(
        self, _rank: int, folder: Path, meshes: Sequence[ParallelConfig], choices: dict[str, Any], given: dict[str, Any]
    ) -> list[Any]:
        """Metrics and losses of a run of three steps on each mesh, as seen by one rank."""
        torch.set_num_threads(1)
        found = []
        for number, degrees in enumerate(meshes):
            mesh = {f"parallel.{axis}": getattr(degrees, axis) for axis in AXES}
            place = folder / f"{number}-{degrees.world_size}"
            wanted = choices | mesh | {"trainer.max_steps": 12, "trainer.epochs": 1}
            metrics = self.run(place, wanted, TestRendezvous(degrees), **given)[1]
            found.append((metrics, [line["loss"] for line in tiny.records(place, "train")]))
        return found
