"""Whole rounds of GRPO at SmolLM2-135M's shape: 16 prompts of 16 to 64 tokens, 8 answers of 64 to each, one update.

python -m benchmarks.kits.rlhf.rounds [--older CHECKOUT] [--peer-python OTHER/bin/python] [--launches 2]

CHECKOUT is a folder with another version of this repository that has this script, OTHER an environment with TRL. All
are launched in turn; seconds of the clock are taken from the second round on. Ratios are those of launches of the same
turn. The section goes to rounds.md.
"""

import datetime
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, write_section
from benchmarks.inference.against_vllm import SHAPE, features
from benchmarks.kits.rlhf.beside import CPU, Spent, launched, lists, run, seconds_and_rest
from benchmarks.kits.rlhf.groups import ADVANTAGES, distinct
from benchmarks.kits.rlhf.ppo import PHASES, watched
from kitforge.foundation.device import describe
from kitforge.models.catalog import config_of
from kitforge.models.loading import build

PROMPTS, ANSWERS, NEW = 16, 8, 64
NETWORK = SHAPE | {"max_length": 512}
TABLE = Path(__file__).with_suffix(".md")
_TINY = {"dim": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_dim": 64, "vocab_size": 1024}
SMOKE = {"PROMPTS": 2, "ANSWERS": 2, "NEW": 4, "NETWORK": _TINY | {"max_length": 512}, "launches": 1}


def ours(chosen: Any) -> Spent:
    """Seconds of the rounds after the first, and of each phase in them."""
    spent = dict.fromkeys(PHASES[:-1], 0.0)
    watched(spent, time.perf_counter)
    values = {
        **ADVANTAGES["grpo"],
        "task": "grpo",
        "precision": chosen.precision,
        "data": {"sequence_length": 512, "eval_fraction": 0.0},
        "rl": {"prompts_per_rollout": PROMPTS, "num_generations": ANSWERS, **ADVANTAGES["grpo"]["rl"]},
        "rollout": {"max_new_tokens": NEW},
        "trainer": {"max_steps": chosen.rounds + 1, "progress": False},
        "optimizer": {"learning_rate": 3e-6},
    }
    model = build(config_of({"family": "llama", **NETWORK}), device=CPU, seed=1)
    rows = [{"prompt": tokens} for tokens in lists(PROMPTS * (chosen.rounds + 1), 0, 16, 64)]
    run(values, rows, model=model, threads=chosen.threads, reward=distinct)
    spent["scoring"] -= spent["generating"]
    return seconds_and_rest(spent, chosen.rounds)


def main() -> None:
    """Launch all sides in turn, or be the child."""
    parser = CommandLine(__doc__)
    parser.add_argument("--older", type=Path, help="a checkout of another version, measured beside this one")
    parser.add_argument("--peer-python", help="an interpreter that has TRL")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="rounds of a launch that count")
    parser.add_argument("--launches", type=int, default=2)
    parser.add_argument("--child", action="store_true")
    chosen = parser.parse(SMOKE, globals())
    if chosen.child:
        sys.stdout.write(f"RESULT {json.dumps(ours(chosen))}\n")
        return
    own = ["--child", "--precision", chosen.precision, "--threads", str(chosen.threads), "--rounds", str(chosen.rounds)]
    here, command = Path.cwd(), [sys.executable, "-m", "benchmarks.kits.rlhf.rounds", *own]
    sides = {"kitforge": (command, here)}
    if chosen.older:
        sides["older"] = command, chosen.older
    if chosen.peer_python:
        peer = Path(__file__).with_name("peer_rounds.py")
        given = {"shape": NETWORK, "prompts": PROMPTS, "answers": ANSWERS, "new": NEW}
        told = given | {name: getattr(chosen, name) for name in ("precision", "threads", "rounds")}
        sides["trl"] = [chosen.peer_python, str(peer), json.dumps(told)], here
    load = os.getloadavg()[0]
    found: dict[str, list[Spent]] = {name: [] for name in sides}
    for _ in range(chosen.launches):
        for name, (command, folder) in sides.items():
            found[name].append(launched(command, folder))
    section = _section(chosen, found, load)
    sys.stdout.write(section)
    write_section(TABLE, "Rounds of GRPO at 135M parameters", section)


def _section(chosen: Any, found: dict[str, list[Spent]], load: float) -> str:
    """A part of the page: seconds of a round and of its phases, medians over launches, and ratios of the same turn."""
    lines = [
        f"{chosen.precision}, {chosen.threads} threads, {describe(CPU)}",
        "",
        f"{datetime.date.today()} ({features()}), torch {torch.__version__}; {PROMPTS} x {ANSWERS} answers of {NEW} "
        f"tokens; seconds of a round, median of {len(found['kitforge'])} launches in turn of {chosen.rounds} rounds; "
        f"load average at the start {load:.1f}.",
        "",
        "| | round | speedup of ours | " + " | ".join(PHASES) + " |",
        "|---|---:|---:" + "|---:" * len(PHASES) + "|",
    ]
    for name, results in found.items():
        pairs = zip(results, found["kitforge"], strict=True)
        ratio = statistics.median(each["seconds"] / own["seconds"] for each, own in pairs)
        cells = [f"{_of_a_round(results, 'seconds'):.1f}", f"{ratio:.2f}x"]
        cells += [f"{_of_a_round(results, phase):.1f}" if phase in results[0] else "" for phase in PHASES]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _of_a_round(results: list[Spent], name: str) -> float:
    return statistics.median(each[name] / each["episodes"] for each in results)


if __name__ == "__main__":
    main()
