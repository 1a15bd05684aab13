"""On-policy distillation beside TRL: the network of `ppo.py` learns from one of its shape, 8 prompts of 16 to 64
tokens, 4 completions of 128 to each, reverse KL over the whole vocabulary.

python -m benchmarks.kits.rlhf.distill --peer-python OTHER/bin/python [--precision fp32] [--launches 3]

As in `ppo.py`. The section goes to distill.md. `--memory` prints instead what a loss of 512 to 8,192 positions over
49,152 tokens adds to the memory of the process.
"""

import multiprocessing
import resource
import sys
from typing import Any

import torch

from benchmarks.kits.rlhf.beside import (
    BATCH,
    PROMPT,
    Comparison,
    Spent,
    lists,
    main,
    network,
    products,
    run,
    seconds_and_rest,
)
from benchmarks.kits.rlhf.ppo import FIRST, PHASES, watched
from kitforge.kits.rlhf.algorithms.distillation import Divergence, Heads, linear_divergence


def ours(chosen: Any) -> Spent:
    """See `ppo.ours`."""
    spent = dict.fromkeys(PHASES[:-1], 0.0)
    watched(spent)
    values = {
        "task": "distill",
        "precision": chosen.precision,
        "data": {"sequence_length": 512, "eval_fraction": 0.0},
        "rl": {"advantage": "grpo", "prompts_per_rollout": BATCH // 4, "num_generations": 4},
        "kl": {"coef": 0.0},
        "rollout": {"max_new_tokens": chosen.response},
        "trainer": {"max_steps": chosen.episodes // BATCH, "progress": False},
        "optimizer": {"learning_rate": 3e-6},
    }
    run(values, [{"prompt": tokens} for tokens in lists(chosen.episodes // 4, 0, 16, 64)], teacher=network(2))
    spent["scoring"] -= spent["generating"]
    return seconds_and_rest(spent, chosen.episodes - BATCH * FIRST)


def floor(chosen: Any) -> float:
    """A pass to answer, one of the teacher, a forward and a backward pass of the student."""
    written = BATCH * chosen.response
    return products(2 + 3, written + BATCH * PROMPT, 2 + 3, written, chosen.precision)


def grown(positions: int, vocabulary: int = 49_152, dim: int = 576) -> float:
    """MiB that one loss with its gradients adds to the peak memory of this process, its inputs and gradients left
    out."""
    torch.set_num_threads(1)
    weight, other = (torch.randn(vocabulary, dim).mul_(0.02) for _ in range(2))
    hidden, taught = torch.randn(positions, dim, requires_grad=True), torch.randn(positions, dim)
    weight.requires_grad_()
    inputs = 2 * hidden.nbytes + 2 * weight.nbytes
    heads = Heads(student=lambda rows: rows @ weight.t(), teacher=lambda rows: rows @ other.t(), teacher_hidden=taught)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    divergence = Divergence(beta=1.0, temperature=1.0, num_ids=vocabulary)
    linear_divergence(hidden, weight, torch.ones(positions), heads, divergence)[0].backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before - inputs) / 2**20


if __name__ == "__main__":
    if "--memory" in sys.argv:
        for size in (512, 2048, 8192):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found = pool.apply(grown, (size,))
            sys.stdout.write(
                f"{size} positions: {found:.0f} MiB; logits of both: {size * 49_152 * 8 / 2**20:.0f} MiB\n"
            )
    else:
        main(
            Comparison(
                module=globals(),
                heading="On-policy distillation against TRL",
                phases=PHASES,
                choices={"episodes": 96, "response": 128, "precision": "fp32"},
                ours=ours,
                floor=floor,
            )
        )
