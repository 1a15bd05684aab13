"""Decoding steps of a 134M LLaMA beside llama.cpp: fp32, bf16 and int8 (its Q8_0), the same shape, random weights.

    python -m benchmarks.inference.against_llama_cpp --peer-python OTHER/bin/python [--threads 1] [--rounds 3]

The other environment has llama-cpp-python and gguf; without it, ours runs alone. Every measurement is a process of its
own, in turn; ratios are those of one round. What is timed is a step of the engine, choice of the token and bookkeeping
included, against `llama_decode` alone. The table goes to against_llama_cpp.md.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.inference.engine_claims import LARGE, SMALLEST, network, step_seconds
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions

TABLE = Path(__file__).with_suffix(".md")
CASES = [(name, batch) for name in ("fp32", "bf16", "int8") for batch in (1, 8)]
# At most this many times the seconds of llama.cpp; None: not asked.
ASKED = {("bf16", 1): 1.0, ("bf16", 8): 1.0, ("int8", 1): 2.0}
SMOKE = {"LARGE": SMALLEST, "CASES": [("fp32", 1), ("int8", 2)], "rounds": 1}


def ours(name: str, batch: int) -> float:
    """Seconds of a step of our engine."""
    model = network("llama", LARGE)
    if name == "bf16":
        model.to(torch.bfloat16)
    engine = Engine(model, EngineOptions(max_num_seqs=batch, quantization="int8" if name == "int8" else "none"))
    step_seconds(engine, batch, 4)
    return step_seconds(engine, batch, 24)


def launched(command: list[str], threads: int) -> float | None:
    """Seconds that a process prints last; None where it dies."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return None if done.returncode else float(done.stdout.splitlines()[-1])


def row(name: str, batch: int, pairs: list[tuple[float | None, float | None]]) -> str:
    """A line of the table, from (ours, the peer's) of every round."""
    alone = [own for own, other in pairs if own is not None]
    if alone and all(other is None for _, other in pairs):
        return f"| {name} | {batch} | {1000 * statistics.median(alone):.1f} | | | |"
    whole = [(own, other) for own, other in pairs if own is not None and other is not None]
    if not whole:
        return f"| {name} | {batch} | | died | | |"
    own, other = (1000 * statistics.median(each) for each in zip(*whole, strict=True))
    ratio = statistics.median(other / own for own, other in whole)
    asked = ASKED.get((name, batch))
    verdict = "" if asked is None else f"{'met' if ratio >= 1 / asked else 'missed'}: >= {1 / asked:g}x"
    return f"| {name} | {batch} | {own:.1f} | {other:.1f} | {ratio:.2f}x | {verdict} |"


def main() -> None:
    """All measurements, or, for a process of its own, one of ours."""
    parser = CommandLine(__doc__)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse(SMOKE, globals())
    if arguments.one:
        sys.stdout.write(f"{ours(arguments.one[0], int(arguments.one[1]))}\n")
        return
    shape, threads = json.dumps(LARGE), arguments.threads
    torch.set_num_threads(threads)
    lines = [
        "# Decoding against llama.cpp",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, torch {torch.__version__}; "
        f"134M LLaMA, random weights; milliseconds of a step, median of {arguments.rounds} interleaved rounds; load "
        f"average at the start {os.getloadavg()[0]:.1f}. Above 1x we are faster.",
        "",
        "| weights | batch | ours | llama.cpp | llama.cpp / ours | target |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, batch in CASES:
        own = [sys.executable, "-m", "benchmarks.inference.against_llama_cpp", "--one", name, str(batch)]
        pairs = []
        for _ in range(arguments.rounds):
            found, other = launched(own, threads), None
            if arguments.peer_python:
                peer = [str(arguments.peer_python), "-m", "benchmarks.inference.peer_llama_cpp"]
                other = launched([*peer, shape, name, str(batch), str(threads)], threads)
            pairs.append((found, other))
        lines.append(row(name, batch, pairs))
        sys.stdout.write(lines[-1] + "\n")
        sys.stdout.flush()
    write_result(TABLE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
