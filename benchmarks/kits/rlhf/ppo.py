"""PPO beside TRL 1.12: GPT-2 of 4 layers and width 256, prompts of 16 to 64 tokens, 128 new ones, one thread.

python -m benchmarks.kits.rlhf.ppo --peer-python OTHER/bin/python [--epochs 1] [--precision fp32] [--launches 3]

Both sides are launched in turn, and CPU seconds of training alone are taken; ratios are those of launches of the same
round. The section goes to ppo.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kitforge.core.parallel.lobby import Lobby
from kitforge.data.tokenizer import ByteTokenizer
from kitforge.foundation.device import describe
from kitforge.kits.rlhf import rl
from kitforge.kits.rlhf.build import STAGES
from kitforge.kits.rlhf.rollouts import answered
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.kits.rlhf.stages import Inputs
from kitforge.models.catalog import config_of
from kitforge.models.folder import build
from kitforge.trainer.loop import Loop
from kitforge.trainer.run import train

VOCAB = 1024
SHAPE = {"family": "gpt2", "vocab_size": VOCAB, "dim": 256, "num_layers": 4, "num_heads": 4, "max_length": 512}
CPU = torch.device("cpu")
TABLE = Path(__file__).with_suffix(".md")
PHASES = ("generating", "scoring", "looking", "updating", "rest")


def network(seed: int) -> torch.nn.Module:
    """A network of the shape that both sides have."""
    return build(config_of(SHAPE), device=CPU, seed=seed)


def prompts(number: int) -> Iterator[dict[str, list[int]]]:
    """Random tokens, the peer's own."""
    noise = torch.Generator().manual_seed(0)
    for length in torch.randint(16, 65, (number,), generator=noise).tolist():
        yield {"prompt": torch.randint(0, VOCAB - 2, (length,), generator=noise).tolist()}


def timed(spent: dict[str, float], phase: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, its CPU seconds added to those of its phase; also when the first began and the last ended."""

    def found(*given: Any) -> Any:
        begun = time.process_time()
        try:
            return work(*given)
        finally:
            spent["end"] = time.process_time()
            spent.setdefault("begin", begun)
            spent[phase] += spent["end"] - begun

    return found


def ours(epochs: int, episodes: int, response: int, precision: str) -> dict[str, float]:
    """CPU seconds from the first round to the last step, saving and starting left out, and of each phase in them."""
    torch.set_num_threads(1)
    judge = ScalarModel(network(2))
    judge.reset_head(3)
    spent = dict.fromkeys(PHASES, 0.0)
    rl.answered = timed(spent, "generating", answered)  # type: ignore[attr-defined]
    # The scores are those of whole answers: what answering takes beside the engine.
    rl.RLTask._answers = timed(spent, "scoring", rl.RLTask._answers)  # type: ignore[method-assign]
    rl.RLTask._looked_at = timed(spent, "looking", rl.RLTask._looked_at)  # type: ignore[method-assign]
    Loop._step = timed(spent, "updating", Loop._step)  # type: ignore[method-assign]
    values = {
        "task": "ppo",
        "device": "cpu",
        "precision": precision,
        "output_dir": str(Path(tempfile.mkdtemp()) / "run"),
        "data": {"sequence_length": 512, "validation": 0.0},
        "rl": {"prompts_per_step": 32, "epochs": epochs, "whiten_advantages": True, "missing_end_penalty": 1.0},
        "rollout": {"max_new_tokens": response, "temperature": 0.7},
        "trainer": {"max_steps": episodes // 32 * epochs, "progress": False},
        "optimizer": {"learning_rate": 3e-6},
    }
    options = STAGES["ppo"].read_options(values)
    rows = list(prompts(episodes))
    inputs = Inputs(tokenizer=ByteTokenizer(), model=network(1), train_dataset=rows, roles={"reward": judge})
    assembly = STAGES["ppo"].assemble(options, inputs, Lobby.open(options.parallel, options.device))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    spent["scoring"] -= spent["generating"]
    seconds = spent.pop("end") - spent.pop("begin")
    return {**spent, "rest": seconds - sum(spent.values()), "seconds": seconds, "episodes": episodes}


def floor(epochs: int, response: int, precision: str) -> float:
    """CPU seconds of a round's matrix products alone, those of attention left out: a pass to answer, one each of the
    reference, the critic and the reward model, and in each epoch three products a weight of the policy and the critic.
    """
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    written, read = 32 * response, 32 * (40 + response)
    layer = [(256, 768), (256, 256), (256, 1024), (1024, 256)]
    passes, updates = 4, 2 * 3 * epochs
    products = [(read, shape, 4 * (passes + updates)) for shape in layer] + [(written, (256, VOCAB), 2 + 3 * epochs)]
    total = 0.0
    for rows, (narrow, wide), times in products:
        input, weight, out = (
            torch.ones(shape, dtype=dtype) for shape in ((rows, narrow), (narrow, wide), (rows, wide))
        )
        seconds = []
        for _ in range(5):
            begun = time.process_time()
            torch.mm(input, weight, out=out)
            seconds.append(time.process_time() - begun)
        total += times * statistics.median(seconds)
    return total


def launched(command: list[str]) -> dict[str, float]:
    """What a child says of its run."""
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    found: dict[str, float] = json.loads(line.removeprefix("RESULT "))
    return found


def section(title: str, found: dict[str, list[dict[str, float]]], least: float) -> str:
    """A part of the page: medians over launches, and ratios of launches of the same round."""
    lines = [
        title,
        "",
        f"{datetime.date.today()}, {describe(CPU)}, torch {torch.__version__}. Median of "
        f"{len(found['kitforge'])} interleaved rounds. The matrix products of 32 answers alone take {least:.2f} CPU-s.",
        "",
        "| | samples/CPU-s | ours is faster | beside the products | " + " | ".join(PHASES) + " |",
        "|---|---:|---:|---:" + "|---:" * len(PHASES) + "|",
    ]
    for name, results in found.items():
        seconds = statistics.median(each["seconds"] / each["episodes"] for each in results)
        pairs = zip(results, found["kitforge"], strict=True)
        ratio = statistics.median(each["seconds"] / own["seconds"] for each, own in pairs)
        shares = [
            f"{statistics.median(each[phase] / each['seconds'] for each in results):.0%}" if phase in results[0] else ""
            for phase in PHASES
        ]
        figures = [f"{1 / seconds:.2f}", f"{ratio:.2f}x", f"{32 * seconds / least:.2f}x", *shares]
        lines.append(f"| {name} | " + " | ".join(figures) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Launch both in turn, or be the child."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--table", type=Path, default=TABLE)
    parser.add_argument("--child", action="store_true")
    chosen = parser.parse_args()
    shape = {name: str(getattr(chosen, name)) for name in ("epochs", "episodes", "response", "precision")}
    if chosen.child:
        taken = ours(chosen.epochs, chosen.episodes, chosen.response, chosen.precision)
        sys.stdout.write(f"RESULT {json.dumps(taken)}\n")
        return
    own = ["--child", *(part for name, value in shape.items() for part in (f"--{name}", value))]
    sides = {"kitforge": [sys.executable, "-m", "benchmarks.kits.rlhf.ppo", *own]}
    if chosen.peer_python:
        peer = str(Path(__file__).with_name("peer_ppo.py"))
        sides["trl 1.12.0"] = [chosen.peer_python, peer, *shape.values()]
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(chosen.launches):
        for name, command in sides.items():
            found[name].append(launched(command))
    least = floor(chosen.epochs, chosen.response, chosen.precision)
    text = section(f"PPO, epochs {chosen.epochs}, {chosen.precision}", found, least)
    sys.stdout.write(text)
    table: Path = chosen.table
    pages = table.read_text(encoding="utf-8").split("\n## ") if table.exists() else ["# PPO beside its peer\n"]
    title = text.partition("\n")[0]
    pages = [page for page in pages if page.partition("\n")[0] != title] + [text]
    table.write_text("\n## ".join(page.rstrip("\n") + "\n" for page in pages), encoding="utf-8")


if __name__ == "__main__":
    main()
