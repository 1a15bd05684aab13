"""Decoding steps beside llama.cpp on the same GGUF files of random weights: F32, BF16, Q8_0 and Q4_0, a 134M LLaMA.

    python -m benchmarks.inference.against_llama_cpp --peer-python OTHER/bin/python [--threads 2] [--rounds 3]

The other environment has llama-cpp-python, built here with `CMAKE_ARGS=-DGGML_NATIVE=ON pip install --no-binary
llama-cpp-python llama-cpp-python`; without it, ours runs alone. Where its AMX code dies of an illegal instruction, as
that of 0.3.36 did, build it with `-mno-amx-int8 -mno-amx-tile -mno-amx-bf16` in `CFLAGS` and `CXXFLAGS`. Every
measurement is a process of its own, in turn; ratios are those of one round. What is timed is a step of the engine,
choice of the token and bookkeeping included, against `llama_decode` alone. The table goes to against_llama_cpp.md.
"""

import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.inference.against_vllm import features
from benchmarks.inference.engine_claims import LARGE, SMALLEST, step_seconds
from benchmarks.inference.random_gguf import write_random
from kitforge import load_model
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions

TABLE = Path(__file__).with_suffix(".md")
KINDS, BATCHES = ["F32", "BF16", "Q8_0", "Q4_0"], [1, 8]
# At least this many times as fast as llama.cpp.
ASKED = {("BF16", 1): 1.0, ("BF16", 8): 1.0, ("Q8_0", 1): 0.9, ("Q4_0", 1): 0.9}
SMOKE = {"LARGE": SMALLEST, "KINDS": ["F32", "Q4_0"], "BATCHES": [2], "rounds": 1}


def ours(path: str, batch: int) -> float:
    """Seconds of a step of our engine."""
    engine = Engine(load_model(path, dtype="auto"), EngineOptions(max_num_seqs=batch))
    step_seconds(engine, batch, 12)
    return step_seconds(engine, batch, 24)


def launched(command: list[str], threads: int) -> float | None:
    """Seconds that a process prints last; None where it dies."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return None if done.returncode else float(done.stdout.splitlines()[-1])


def measured(path: Path, batch: int, threads: int, peer: Path | None) -> tuple[float | None, float | None]:
    """Seconds of ours and of the peer, each in a process of its own."""
    case = [str(path), str(batch)]
    own = launched([sys.executable, "-m", "benchmarks.inference.against_llama_cpp", "--one", *case], threads)
    command = [str(peer), "-m", "benchmarks.inference.peer_llama_cpp", *case, str(threads)]
    return own, None if peer is None else launched(command, threads)


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
    verdict = "" if asked is None else f"{'met' if ratio >= asked else 'missed'}: >= {asked:g}x"
    return f"| {name} | {batch} | {own:.1f} | {other:.1f} | {ratio:.2f}x | {verdict} |"


def main() -> None:
    """All measurements, or, for a process of its own, one of ours."""
    parser = CommandLine(__doc__)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=2)
    arguments = parser.parse(SMOKE, globals())
    if arguments.one:
        sys.stdout.write(f"{ours(arguments.one[0], int(arguments.one[1]))}\n")
        return
    threads = arguments.threads
    torch.set_num_threads(threads)
    lines = [
        "# Decoding against llama.cpp",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))} ({features()}), torch "
        f"{torch.__version__}; 134M LLaMA, random weights; milliseconds of a step, median of {arguments.rounds} "
        f"interleaved rounds; load average at the start {os.getloadavg()[0]:.1f}. Above 1x we are faster.",
        "",
        "| weights | batch | ours | llama.cpp | llama.cpp / ours | target |",
        "|---|---:|---:|---:|---:|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in KINDS:
            path = Path(folder) / f"{name}.gguf"
            write_random(path, LARGE, name)
            for batch in BATCHES:
                pairs = [measured(path, batch, threads, arguments.peer_python) for _ in range(arguments.rounds)]
                lines.append(row(name, batch, pairs))
                sys.stdout.write(lines[-1] + "\n")
                sys.stdout.flush()
            path.unlink()
    write_result(TABLE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
