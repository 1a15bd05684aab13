"""A step of Wide & Deep beside its peers: batch 16,000, 5,860,000 rows, fp32 and bf16 towers, speed and memory.

    python -m benchmarks.recommender.wide_deep --peer-python PYTHON [--rounds 3] [--steps 3] [benchmark] [fp32]

Ours is the trainer's own loop over the kit's network and tables; the peers are in wide_deep_peers.py. Every round
launches each of them once, in turn; a step's time is the median over a launch, and ratios are taken within a round.
The table goes to wide_deep.md.
"""

import datetime
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from benchmarks.command_line import CommandLine, write_section
from benchmarks.recommender import clicks
from benchmarks.recommender.clicks import BATCH, NUM_DENSE, batch, sizes
from kitforge.core.parallel.world import ALONE, World
from kitforge.data.tables.columns import LabelColumn
from kitforge.foundation.device import describe, pick
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.factory import new_recommender
from kitforge.kits.recommender.features import FeatureEncoder, FeatureStatistics, Moments
from kitforge.kits.recommender.model import build_request_plan
from kitforge.kits.recommender.negatives import ClickRows
from kitforge.kits.recommender.pointwise_objective import PointwiseObjective
from kitforge.kits.recommender.schema import CategoricalFeature, FeatureSchema, NumericFeature
from kitforge.models.catalog import recommender_of
from kitforge.trainer.loop import Loop
from kitforge.trainer.task import Task

KIT = TASKS["recommendation"]

CONFIGURATIONS = {"benchmark": (16, [1024] * 7), "recipe": (80, [1024, 512, 256, 128])}
OURS = {
    "ours rowwise_adagrad": {"deep": "rowwise_adagrad", "wide": "rowwise_adagrad"},
    "ours lazy_adam + ftrl": {"deep": "lazy_adam", "wide": "ftrl"},
}
PEERS = ("sparse_adam", "adagrad", "deepctr", "fbgemm", "torchrec")
TABLE = Path(__file__).with_suffix(".md")
# Samples of a forward pass: their activations stay in the caches, and the sums are those of the whole batch.
MICRO_BATCH = 2000
SMALLEST = {"ROWS": 60_000, "BATCH": 32, "MICRO_BATCH": 32, "CONFIGURATIONS": {"benchmark": (4, [8])}}
SMOKE = SMALLEST | {"only": list(OURS), "steps": 1}


@final
class Steps(Task):
    """Batches that lie in memory, as those of the peers do."""

    def __init__(
        self, dim: int, hidden: list[int], rules: dict[str, str], precision: str, *, on: str = "cpu", **cache: int
    ) -> None:
        """On the device `on`; `cache` limits the tiers of the tables."""
        names = [f"C{place}" for place in range(len(sizes()))]
        numbers = [f"I{place}" for place in range(NUM_DENSE)]
        schema = FeatureSchema(
            label=LabelColumn(name="click"),
            numeric={name: NumericFeature(standardize=False) for name in numbers},
            categorical={
                name: CategoricalFeature(kind="integer", num_buckets=max(size, 2))
                for name, size in zip(names, sizes(), strict=True)
            },
        )
        moments = {name: Moments(mean=0.0, deviation=1.0, num_missing=0) for name in numbers}
        self._encoder = FeatureEncoder(schema, FeatureStatistics(num_rows=1, moments=moments))
        self.options = KIT.read_options(
            {
                "model": {"family": "wide_deep", "dim": dim, "hidden": hidden},
                "precision": precision,
                "device": on,
                "cache": cache,
                "tables": {kind: {"name": rule, "learning_rate": 0.01} for kind, rule in rules.items()},
                "trainer": {"max_steps": 10_000, "progress": False, "max_grad_norm": 0.0, "log_every": 100_000},
            }
        )
        self._config = recommender_of(self.options.model)
        self._objective = PointwiseObjective(build_request_plan(self._config, self._encoder), seed=0)
        self._size = MICRO_BATCH if on == "cpu" else BATCH
        self._data = [self._parts(seed) for seed in range(4)]

    def build(self, world: World) -> nn.Module:
        """See `Task`."""
        return new_recommender(self._config, self._encoder, self.options, world)

    def steps(self, model: Any, cursor: Cursor) -> Generator[list[MicroBatch]]:
        """See `Task`."""
        batches, depth = itertools.cycle(self._data), self.options.cache.prefetch_batches
        if not depth:
            yield from batches
        with closing(model.tables.prefetch(batches, depth, ids=_requests)) as fetched:
            yield from fetched

    def count(self, step: Any) -> Sums:
        """See `Task`."""
        return {"loss": torch.tensor(BATCH), "samples": torch.tensor(BATCH)}

    def loss(self, model: Any, micro_batch: MicroBatch) -> Sums:
        """See `Task`."""
        return self._objective.loss(model, micro_batch)

    def _parts(self, seed: int) -> list[MicroBatch]:
        ids, dense, labels = (torch.from_numpy(each) for each in batch(seed))
        columns = {f"C{place}": column.contiguous() for place, column in enumerate(ids.t())}
        clicks = FeatureBatch(dense=dense, ids=columns, bags={}, sequences={}, labels=labels)
        firsts = torch.arange(BATCH + 1)
        whole = ClickRows(batch=clicks, starts=firsts, positions=torch.zeros_like(firsts[1:]))
        size = self._size
        starts = range(0, BATCH, size)
        return [
            {
                **self._objective.micro_batch(whole, start, start + size),
                "samples": torch.arange(size),
                "step": 0,
            }
            for start in starts
        ]


def _requests(step: list[MicroBatch]) -> list[Any]:
    return [requests for micro_batch in step for requests in micro_batch["calls"]]


def ours(name: str, configuration: str, precision: str, num_steps: int) -> dict[str, Any]:
    """Seconds of each step of the loop after the first, and the most memory that was resident."""
    dim, hidden = CONFIGURATIONS[configuration]
    task = Steps(dim, hidden, OURS[name], precision)
    loop = Loop(task, task.options, ALONE)
    loop.model.train()
    loop.state.optimizer.init_state()
    steps = task.steps(loop.model, Cursor())
    seconds = []
    for _ in range(num_steps + 1):
        started = time.perf_counter()
        loop._step(next(steps))
        seconds.append(time.perf_counter() - started)
    return {"seconds": seconds[1:], "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def floor(configuration: str, precision: str) -> float:
    """Seconds of the tower's matrix products alone, forward and backward."""
    dim, hidden = CONFIGURATIONS[configuration]
    widths = [len(sizes()) * dim + NUM_DENSE, *hidden, 1]
    total = 0.0
    for narrow, wide in itertools.pairwise(widths):
        sizes_of = (BATCH, narrow), (wide, narrow), (BATCH, wide)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        input, weight, grad = (torch.randn(size).to(dtype) for size in sizes_of)
        back, change, out = (torch.empty(size, dtype=dtype) for size in sizes_of)
        for _ in range(2):
            started = time.perf_counter()
            torch.mm(input, weight.t(), out=out)
            torch.mm(grad, weight, out=back)
            torch.mm(grad.t(), input, out=change)
            seconds = time.perf_counter() - started
        total += seconds
    return total


def launch(name: str, configuration: str, precision: str, num_steps: int, peer_python: str) -> dict[str, Any] | None:
    """One process; None for a peer that is not installed or does not run."""
    dim, hidden = CONFIGURATIONS[configuration]
    if name in OURS:
        words = [sys.executable, "-m", "benchmarks.recommender.wide_deep", "--one", name, configuration, precision]
        words += ["--steps", str(num_steps)]
    else:
        script = str(Path(__file__).with_name("wide_deep_peers.py"))
        words = [peer_python, script, name, str(dim), ",".join(map(str, hidden)), precision, str(num_steps)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        sys.stderr.write(f"{name}: {done.stderr.strip().splitlines()[-1:]}\n")
        return None
    found: dict[str, Any] = json.loads(lines[-1])
    return {"name": name, "step": statistics.median(found["seconds"]), "megabytes": found["megabytes"]}


def main() -> None:
    """See the module."""
    parser = CommandLine(__doc__)
    parser.add_argument("configuration", nargs="?", default="benchmark", choices=CONFIGURATIONS)
    parser.add_argument("precision", nargs="?", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--one")
    parser.add_argument("--only", nargs="*", default=[*OURS, *PEERS])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse(SMOKE, globals(), vars(clicks))
    if given.one:
        found = ours(given.one, given.configuration, given.precision, given.steps)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    least = floor(given.configuration, given.precision)
    rounds: list[dict[str, dict[str, Any]]] = []
    for _ in range(given.rounds):
        rounds.append({})
        for name in given.only:
            result = launch(name, given.configuration, given.precision, given.steps, given.peer_python)
            if result is not None:
                rounds[-1][name] = result
                sys.stdout.write(f"round {len(rounds)}  {name:<24} {result['step']:.3f} s\n")
                sys.stdout.flush()
    text = section(rounds, f"{given.configuration}, {given.precision}", least)
    sys.stdout.write(text)
    write_section(TABLE, "Wide & Deep against its peers", text)


def section(rounds: list[dict[str, dict[str, Any]]], title: str, least: float) -> str:
    """A part of the page: medians over rounds, and ratios of launches of the same round."""
    lines = [
        title,
        "",
        f"{datetime.date.today()}, {describe(pick('cpu'))}, "
        f"torch {torch.__version__}. Median of {len(rounds)} interleaved rounds; batch {BATCH:,}. "
        f"The tower's matrix products alone take {least:.2f} s.",
        "",
        "| | s a step | samples/s | ours, rowwise adagrad | ours, adam and FTRL | memory MB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in rounds[0]:
        runs = [one[name] for one in rounds if name in one]
        step = statistics.median(run["step"] for run in runs)
        ratios = [
            statistics.median(one[name]["step"] / one[mine]["step"] for one in rounds if name in one) for mine in OURS
        ]
        memory = statistics.median(run["megabytes"] for run in runs)
        lines.append(
            f"| {name} | {step:.2f} | {BATCH / step:,.0f} | {ratios[0]:.2f}x | {ratios[1]:.2f}x | {memory:,.0f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
