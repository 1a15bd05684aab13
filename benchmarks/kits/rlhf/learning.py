"""PPO, GRPO and RLOO learn to copy: three letters, told in noise, are to come back as they were.

python -m benchmarks.kits.rlhf.learning [--seeds 0 1 2]

Each seed begins with a policy that saw demonstrations in which every second letter is any letter; the rewards make it
right. The presets as they are, but for the learning rate, which is that of a network of 80,000 weights.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from kitforge import Run, Trainer

LETTERS = "abcd"
SHAPE = {"family": "llama", "dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 128}
COMMON: dict[str, Any] = {
    "device": "cpu",
    "trainer.progress": False,
    "data.sequence_length": 16,
    "data.validation": 0.0,
}
GROUPS = {"rl.prompts_per_step": 8, "rl.samples_per_prompt": 8, "trainer.max_steps": 100}
ROUNDS: dict[str, dict[str, Any]] = {
    "ppo": {"rl.prompts_per_step": 64, "trainer.max_steps": 300},
    "grpo": GROUPS,
    "rloo": GROUPS,
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


def main() -> None:
    """A line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    torch.set_num_threads(1)
    sys.stdout.write("| task | seed | reward before | after | CPU seconds |\n|---|---|---|---|---|\n")
    for seed in parser.parse_args().seeds:
        with tempfile.TemporaryDirectory() as folder:
            policy = beginner(folder, seed)
            for task in ROUNDS:
                begun = time.process_time()
                before, after = learnt(folder, task, policy, seed)
                taken = time.process_time() - begun
                sys.stdout.write(f"| {task} | {seed} | {before:.3f} | {after:.3f} | {taken:.1f} |\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
