"""What the comparisons with TRL share: the network, launches in turn, phases, the floor of products, the page."""

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_section
from kitforge.core.nn.decoder import Decoder
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.device import describe
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from kitforge.trainer.run_folder import train

VOCAB, DIM, LAYERS = 1024, 256, 4
# Samples of a step.
BATCH = 32
# Tokens of a prompt on average.
PROMPT = 40
SMOKE = {"VOCAB": 300, "DIM": 16, "LAYERS": 1, "BATCH": 8, "launches": 1}
# Those of a smoke run, where a script has them.
SMALLEST = {"episodes": 16, "response": 4}
CPU = torch.device("cpu")
Spent = dict[str, float]


def network(seed: int) -> Decoder:
    """A network of the shape that both sides have."""
    shape = {"vocab_size": VOCAB, "dim": DIM, "num_layers": LAYERS, "num_heads": 4, "max_length": 512}
    return build(config_of({"family": "gpt2", **shape}), device=CPU, seed=seed)


def lists(number: int, seed: int, shortest: int, longest: int) -> Iterator[list[int]]:
    """Lists of random tokens, the peer's own."""
    noise = torch.Generator().manual_seed(seed)
    for length in torch.randint(shortest, longest + 1, (number,), generator=noise).tolist():
        yield torch.randint(0, VOCAB - 2, (length,), generator=noise).tolist()


def timed(
    spent: Spent, phase: str, work: Callable[..., Any], clock: Callable[[], float] = time.process_time
) -> Callable[..., Any]:
    """The same work, its seconds of the clock added to those of its phase; also when the first began and the last
    ended."""

    def found(*given: Any, **named: Any) -> Any:
        begun = clock()
        try:
            return work(*given, **named)
        finally:
            spent["end"] = clock()
            spent.setdefault("begin", begun)
            spent[phase] += spent["end"] - begun

    return found


def run(
    values: dict[str, Any],
    rows: list[dict[str, Any]],
    *,
    model: Decoder | None = None,
    threads: int = 1,
    **roles: Any,
) -> None:
    """Train a stage over rows in memory, by default from a network of the shape, on one thread."""
    torch.set_num_threads(threads)
    model = network(1) if model is None else model
    # The rows are tokens already, which the tokenizer has to know.
    tokenizer, known = ByteTokenizer(), model.config.vocab_size
    tokenizer.vocab_size, tokenizer.fingerprint = known, f"numbers below {known}"
    inputs = Inputs(processor=tokenizer, model=model, train_dataset=rows, roles=roles)
    with tempfile.TemporaryDirectory() as folder:
        options = TASKS[values["task"]].read_options(values | {"device": "cpu", "output_dir": f"{folder}/run"})
        assembly = TASKS[values["task"]].assemble(options, inputs, Rendezvous.open(options.parallel, options.device))
        train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def seconds_and_rest(spent: Spent, episodes: int) -> Spent:
    """The phases, what lies between them, and all of it."""
    seconds = spent.pop("end") - spent.pop("begin")
    return {**spent, "rest": seconds - sum(spent.values()), "seconds": seconds, "episodes": episodes}


def products(passes: float, rows: int, heads: float, read: int, precision: str) -> float:
    """CPU seconds of the matrix products alone: `passes` forward ones of all layers over `rows` tokens, and `heads`
    over the `read` tokens that reach the vocabulary. A backward pass counts twice; attention is left out."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    layer = [(DIM, 3 * DIM), (DIM, DIM), (DIM, 4 * DIM), (4 * DIM, DIM)]
    wanted = [(rows, shape, LAYERS * passes) for shape in layer] + [(read, (DIM, VOCAB), heads)]
    total = 0.0
    for height, (narrow, wide), times in wanted:
        shapes = ((height, narrow), (narrow, wide), (height, wide))
        input, weight, out = (torch.ones(shape, dtype=dtype) for shape in shapes)
        seconds = []
        for _ in range(5):
            begun = time.process_time()
            torch.mm(input, weight, out=out)
            seconds.append(time.process_time() - begun)
        total += times * statistics.median(seconds)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One script beside its peer's, which lies in the same folder, with peer_ before its name."""

    module: dict[str, Any]  # the script's globals
    heading: str
    phases: tuple[str, ...]
    # What both sides are told, in the order of the peer's arguments; the first of a tuple is the default.
    choices: Mapping[str, Any]
    ours: Callable[[Any], Spent]
    floor: Callable[[Any], float]  # CPU seconds of the products of a step's samples


def main(comparison: Comparison) -> None:
    """Launch both in turn, or be the child."""
    script = Path(comparison.module["__file__"])
    parser = CommandLine(comparison.module["__doc__"])
    parser.add_argument("--peer-python", help="an interpreter that has TRL; without one, ours runs alone")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--table", type=Path, default=script.with_suffix(".md"))
    parser.add_argument("--child", action="store_true")
    for name, usual in comparison.choices.items():
        values = usual if isinstance(usual, tuple) else None
        first = values[0] if values else usual
        parser.add_argument(f"--{name}", type=type(first), default=first, choices=values)
    smoke = SMOKE | {name: value for name, value in SMALLEST.items() if name in comparison.choices}
    chosen = parser.parse(smoke, comparison.module, globals())
    if chosen.child:
        sys.stdout.write(f"RESULT {json.dumps(comparison.ours(chosen))}\n")
        return
    if is_smoke() and "task" in comparison.choices:
        runs = [argparse.Namespace(**(vars(chosen) | {"task": task})) for task in comparison.choices["task"]]
    else:
        runs = [chosen]
    for chosen in runs:
        section = _compare(comparison, script, chosen)
        sys.stdout.write(section)
        write_section(chosen.table, comparison.heading, section)


def _compare(comparison: Comparison, script: Path, chosen: Any) -> str:
    """A part of the page: both sides, launched in turn."""
    shape = {name: str(getattr(chosen, name)) for name in comparison.choices}
    own = ["--child", *(part for name, value in shape.items() for part in (f"--{name}", value))]
    sides = {"kitforge": [sys.executable, "-m", f"benchmarks.kits.rlhf.{script.stem}", *own]}
    if chosen.peer_python:
        version = [chosen.peer_python, "-c", "import importlib.metadata as each; print(each.version('trl'))"]
        peer = f"trl {subprocess.run(version, capture_output=True, text=True, check=True).stdout.strip()}"
        sides[peer] = [chosen.peer_python, str(script.with_name(f"peer_{script.name}")), *shape.values()]
    found: dict[str, list[Spent]] = {name: [] for name in sides}
    for _ in range(chosen.launches):
        for name, command in sides.items():
            found[name].append(launched(command))
    told = ", ".join(f"{name} {value}" for name, value in shape.items() if name not in ("task", "episodes"))
    title = f"{shape.get('task', script.stem)}: {told}"
    return _section(title, found, comparison.floor(chosen), comparison.phases)


def launched(command: Sequence[str], folder: Path | None = None) -> Spent:
    """What a child, started in that folder, says of its run."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    found: Spent = json.loads(line.removeprefix("RESULT "))
    return found


def _section(title: str, found: dict[str, list[Spent]], least: float, phases: Sequence[str]) -> str:
    """A part of the page: medians over launches, and ratios of launches of the same round."""
    lines = [
        title,
        "",
        f"{datetime.date.today()}, {describe(CPU)}, torch {torch.__version__}. Median of "
        f"{len(found['kitforge'])} interleaved rounds. The matrix products of {BATCH} samples alone take "
        f"{least:.2f} CPU-s.",
        "",
        "| | samples/CPU-s | speedup of ours | time / products | " + " | ".join(phases) + " |",
        "|---|---:|---:|---:" + "|---:" * len(phases) + "|",
    ]
    for name, results in found.items():
        seconds = statistics.median(each["seconds"] / each["episodes"] for each in results)
        pairs = zip(results, found["kitforge"], strict=True)
        ratio = statistics.median(each["seconds"] / own["seconds"] for each, own in pairs)
        shares = [
            f"{statistics.median(each[phase] / each['seconds'] for each in results):.0%}" if phase in results[0] else ""
            for phase in phases
        ]
        figures = [f"{1 / seconds:.2f}", f"{ratio:.2f}x", f"{BATCH * seconds / least:.2f}x", *shares]
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join([*lines, ""])
