"""Greedy texts of 1 to 64 prompts at once beside vLLM on a CPU, in bfloat16: a LLaMA of SmolLM2-135M's shape.

    python -m benchmarks.inference.against_vllm --peer-python OTHER/bin/python [--model FOLDER] [--rounds 3]

The head of peer_vllm.py says how to make the other environment; without it, ours runs alone. FOLDER is a Hugging Face
folder; by default the weights are random. A round starts a process of each in turn, and a ratio is of one round. The
last line sets a step of the engine beside its linear layers alone, by the step's own product and packed panels, all
layers one after another (packed_products.py). The result goes to against_vllm.md.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.inference.engine_claims import network
from kitforge import load_model, save_model
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions

TABLE = Path(__file__).with_suffix(".md")
SHAPE: dict[str, Any] = {
    "dim": 576,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "mlp_dim": 1536,
    "vocab_size": 49152,
    "max_length": 2048,
    "tie_embeddings": True,
}
COUNTS, PROMPT, NEW = [1, 4, 16, 64], 52, 64
# At least this many times vLLM's tokens a second.
ASKED = {1: 1.5, 4: 1.15, 16: 1.0, 64: 1.0}
FLAGS = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx2")
_TINY = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 64, "vocab_size": 1024}
SMOKE = {"SHAPE": _TINY | {"max_length": 64}, "COUNTS": [1, 3], "PROMPT": 5, "NEW": 4, "rounds": 1}


def ours(folder: str) -> dict[str, float]:
    """Tokens a second by the number of prompts; of the largest, seconds of a step and of its products."""
    model = load_model(folder, dtype="bf16")
    assert isinstance(model, Decoder)
    found: dict[str, float] = {}
    options = SamplingOptions(max_new_tokens=NEW, ignore_eos=True)
    for count in COUNTS:
        prompts = [[1 + (7 * place + 31 * text) % 999 for place in range(PROMPT)] for text in range(count)]
        engine = Engine(model, EngineOptions(prefix_cache=False))
        engine.generate(prompts[:4], SamplingOptions(max_new_tokens=2))
        best = 0.0
        for _ in range(2):
            start = time.perf_counter()
            engine.generate(prompts, options)
            best = max(best, count * NEW / (time.perf_counter() - start))
        found[str(count)] = best
    for prompt in prompts:
        engine.submit(prompt, options)
    steps = []
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
    # The longest steps are those of the prompts.
    return found | {"step": statistics.median(steps), "products": products(model, len(prompts))}


def products(model: Decoder, rows: int) -> float:
    """Seconds of the products of so many rows with all linear layers and the head, as a step of the engine runs them,
    and of nothing else."""
    from benchmarks.inference.packed_products import packed_seconds

    weights = [each.weight for each in model.modules() if isinstance(each, Linear)]
    return packed_seconds([*weights, model.head_weight], rows)


def launched(command: list[str], threads: int) -> dict[str, float]:
    """What a process prints last, as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
        return {}
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def row(name: str, asked: float, rounds: list[tuple[dict[str, float], dict[str, float]]]) -> str:
    """A line of the table: a name in what was measured, the ratio asked for, and (ours, the peer's) of every round."""
    own = [mine[name] for mine, _ in rounds]
    other = [peer[name] for _, peer in rounds if peer]
    line = f"| {name} | {statistics.median(own):.0f} |"
    if not other:
        return f"{line} | | |"
    ratio = statistics.median(mine[name] / peer[name] for mine, peer in rounds if peer)
    verdict = f"{'met' if ratio >= asked else 'missed'}: >= {asked:g}x"
    return f"{line} {statistics.median(other):.0f} | {ratio:.2f}x | {verdict} |"


def features() -> str:
    """Those of the processor that matter for products."""
    info = Path("/proc/cpuinfo")
    known = info.read_text(encoding="utf-8").split() if info.exists() else []
    return ", ".join(flag for flag in FLAGS if flag in known)


def main() -> None:
    """All rounds, or, for a process of its own, one of ours."""
    parser = CommandLine(__doc__)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one")
    arguments = parser.parse(SMOKE, globals())
    threads = arguments.threads
    torch.set_num_threads(threads)
    if arguments.one:
        sys.stdout.write(f"{json.dumps(ours(arguments.one))}\n")
        return
    with tempfile.TemporaryDirectory() as memory:
        folder = arguments.model or Path(memory)
        if not arguments.model:
            save_model(network("llama", SHAPE), folder, dtype="bfloat16")
        rounds = []
        for _ in range(arguments.rounds):
            own = launched([sys.executable, "-m", "benchmarks.inference.against_vllm", "--one", str(folder)], threads)
            other: dict[str, float] = {}
            if arguments.peer_python:
                peer = [str(arguments.peer_python), "-m", "benchmarks.inference.peer_vllm", str(folder)]
                other = launched([*peer, *map(str, (PROMPT, NEW, threads, *COUNTS))], threads)
            rounds.append((own, other))
    step, product = (1000 * statistics.median(mine[name] for mine, _ in rounds) for name in ("step", "products"))
    lines = [
        "# Generation against vLLM on a CPU",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))} ({features()}), torch {torch.__version__}, "
        f"{arguments.model.name if arguments.model else 'random weights'}, bfloat16, prompts of {PROMPT} tokens, {NEW} "
        f"new ones; tokens a second, median of {arguments.rounds} interleaved rounds; load average at the start "
        f"{os.getloadavg()[0]:.1f}. Above 1x we are faster.",
        "",
        "| prompts | ours | vLLM | ours / vLLM | target |",
        "|---:|---:|---:|---:|---|",
        *(row(str(count), ASKED.get(count, 1.0), rounds) for count in COUNTS),
        "",
        f"A step of {COUNTS[-1]} texts takes {step:.1f} ms, its products {product:.1f} ms: {step / product:.2f}x "
        "(target: at most 1.6x).",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    write_result(TABLE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
