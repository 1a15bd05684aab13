"""Rewards teach a policy to copy, and pairs teach a reward model what was preferred; writes learning.md.

python -m benchmarks.kits.rlhf.learning [--seeds 0 1 2]

Copying: three letters, told in noise, are to come back as they were. Each seed begins with a policy that saw
demonstrations in which every second letter is any letter; PPO, GRPO and RLOO make it right. Preferences: of two words
the one with more "a" is preferred with odds that grow with the difference, so that the truth itself is right about only
some of the pairs. The presets as they are, but for the learning rate, which is that of a network of 80,000 weights.
"""

import datetime
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge import Run, Trainer
from kitforge.foundation.device import describe

TABLE = Path(__file__).with_suffix(".md")

LETTERS = "abcd"
SHAPE = {"family": "llama", "dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 128}
COMMON: dict[str, Any] = {
    "device": "cpu",
    "trainer.progress": False,
    "data.sequence_length": 16,
    "data.eval_fraction": 0.0,
}
GROUPS = {"rl.prompts_per_rollout": 8, "rl.num_generations": 8, "trainer.max_steps": 100}
ROUNDS: dict[str, dict[str, Any]] = {
    "ppo": {"rl.prompts_per_rollout": 64, "trainer.max_steps": 300},
    "grpo": GROUPS,
    "rloo": GROUPS,
}
STEPS = {"sft": 200, "reward": 90}
PAIRS = 1500
SMOKE = {
    "ROUNDS": {
        "ppo": {"rl.prompts_per_rollout": 4, "trainer.max_steps": 1},
        **dict.fromkeys(("grpo", "rloo"), GROUPS | {"rl.num_generations": 2, "trainer.max_steps": 1}),
    },
    **{"STEPS": {"sft": 1, "reward": 1}, "PAIRS": 64, "seeds": [0]},
}


def places_right(*, completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """The share of places that hold the letter wanted; what is too long or too short has more places."""
    return [
        sum(map(str.__eq__, text, wanted)) / max(len(text), len(wanted))
        for text, wanted in zip(completions, answer, strict=True)
    ]


def prompts(length: int) -> list[dict[str, str]]:
    """All words of that many letters."""
    words = map("".join, itertools.product(LETTERS, repeat=length))
    return [{"prompt": f"{word}=", "answer": word} for word in words]


def noisy(length: int, noise: random.Random) -> list[dict[str, str]]:
    """Demonstrations in which half of the letters were drawn anew."""
    rows = prompts(length) * 16
    return [
        {
            "prompt": row["prompt"],
            "completion": "".join(noise.choice((letter, noise.choice(LETTERS))) for letter in row["answer"]),
        }
        for row in rows
    ]


def beginner(folder: str, seed: int, length: int = 3, steps: int = 200) -> Run:
    """A policy that knows what an answer looks like, and half of what is right."""
    values = {f"model.{name}": value for name, value in SHAPE.items()}
    values |= COMMON | {"seed": seed, "output_dir": f"{folder}/sft", "data.batch_size": 32}
    values |= {"trainer.max_steps": steps, "optimizer.learning_rate": 3e-3}
    return Trainer("sft", None, noisy(length, random.Random(seed)), options=values).train()


def learnt(folder: str, task: str, policy: Run, seed: int, length: int = 3, **choices: Any) -> tuple[float, float]:
    """The mean reward of fresh answers to all prompts, before and after."""
    rows = prompts(length)
    values = COMMON | ROUNDS[task] | {"seed": seed, "output_dir": f"{folder}/{task}", "optimizer.learning_rate": 1e-3}
    values |= {"rollout.max_new_tokens": length + 1, **choices}
    learner = Trainer(task, policy, rows, rows, roles={"reward": places_right}, options=values)
    before = learner.evaluate()["eval/reward"]
    return before, learner.train().metrics["eval/reward"]


def planted(noise: random.Random, number: int) -> tuple[list[dict[str, str]], float]:
    """Pairs, and about how many of them the truth is right."""
    rows: list[dict[str, str]] = []
    sure = 0
    while len(rows) < number:
        left, right = ("".join(noise.choice("ab") for _ in range(6)) for _ in range(2))
        further = left.count("a") - right.count("a")
        if not further:
            continue
        chosen, rejected = (left, right) if noise.random() < 1 / (1 + math.exp(-further)) else (right, left)
        rows.append({"prompt": "", "chosen": chosen, "rejected": rejected})
        sure += chosen.count("a") > rejected.count("a")
    return rows, sure / number


def preferred(folder: str, seed: int, number: int = 1500) -> tuple[float, float]:
    """The accuracies on held-out pairs of the truth and of a reward model."""
    noise = random.Random(seed)
    (train, _), (held_out, truth) = planted(noise, number), planted(noise, number)
    values = {f"model.{name}": value for name, value in SHAPE.items()}
    values |= COMMON | {"seed": seed, "output_dir": f"{folder}/reward", "data.batch_size": 32}
    values |= {"trainer.max_steps": STEPS["reward"], "optimizer.learning_rate": 3e-3}
    return truth, Trainer("reward", None, train, held_out, options=values).train().metrics["eval/rewards/accuracy"]


def rows(seed: int) -> Iterator[tuple[str, float, float, float, str]]:
    """What was learnt, from what to what, in how many CPU seconds, and what was asked."""
    with tempfile.TemporaryDirectory() as folder:
        policy = beginner(folder, seed, steps=STEPS["sft"])
        for task in ROUNDS:
            begun = time.process_time()
            before, after = learnt(folder, task, policy, seed)
            verdict = "met" if after > 0.95 else "missed"
            yield f"{task}, reward", before, after, time.process_time() - begun, f"{verdict}: 0.95"
        begun = time.process_time()
        truth, found = preferred(folder, seed, PAIRS)
        verdict = "met" if found > truth - 0.01 else "missed"
        yield (
            "reward, accuracy",
            0.5,
            found,
            time.process_time() - begun,
            f"{verdict}: {truth:.3f} of the truth less 0.01",
        )


def main() -> None:
    """A line for each run."""
    parser = CommandLine(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    torch.set_num_threads(1)
    lines = ["| task | seed | before | after | CPU seconds | target |", "|---|---:|---:|---:|---:|---|"]
    for seed in parser.parse(SMOKE, globals()).seeds:
        for name, before, after, taken, asked in rows(seed):
            lines.append(f"| {name} | {seed} | {before:.3f} | {after:.3f} | {taken:.1f} | {asked} |")
            sys.stdout.write(lines[-1] + "\n")
            sys.stdout.flush()
    where = f"{datetime.date.today()}, {describe(torch.device('cpu'))}."
    write_result(TABLE, "\n".join(["# Learning on synthetic tasks", "", where, "", *lines]) + "\n")


if __name__ == "__main__":
    main()
