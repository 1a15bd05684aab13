"""PPO beside TRL 1.12: GPT-2 of 4 layers and width 256, prompts of 16 to 64 tokens, 128 new ones, one thread.

python -m benchmarks.kits.rlhf.ppo --peer-python OTHER/bin/python [--epochs 1] [--precision fp32] [--launches 3]

Both sides are launched in turn, and CPU seconds of training alone are taken, from the second round on: in the first
either side loads or compiles what it needs. Ratios are those of launches of the same turn. The section goes to ppo.md.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

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
    timed,
)
from kitforge.kits.rlhf.reinforcement import rollout_collector
from kitforge.kits.rlhf.reinforcement.ppo import RolloutTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import RolloutBatch, generate_rollouts
from kitforge.kits.rlhf.reinforcement.rollout_collector import RolloutCollector
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.trainer.loop import Loop

# The first round that counts.
FIRST = 1
PHASES = ("generating", "scoring", "log-probs", "updating", "rest")


def watched(spent: Spent, clock: Callable[[], float] = time.process_time) -> None:
    """Take the time of each phase of a round, from the first that counts."""
    taken = partial(timed, spent, clock=clock)
    rollout_collector.generate_rollouts = taken("generating", generate_rollouts)  # type: ignore[attr-defined]
    # The scores are those of whole answers: what answering takes beside the engine.
    RolloutCollector._sample = taken("scoring", RolloutCollector._sample)  # type: ignore[method-assign]
    RolloutCollector._annotate = taken("log-probs", RolloutCollector._annotate)  # type: ignore[method-assign]
    Loop._step = taken("updating", Loop._step)  # type: ignore[method-assign]
    collect = RolloutTask._next_batch

    def collected(task: RolloutTask, model: nn.Module, number: int) -> RolloutBatch:
        if number == FIRST:
            spent.clear()
            spent.update(dict.fromkeys(PHASES[:-1], 0.0))
        return collect(task, model, number)

    RolloutTask._next_batch = collected  # type: ignore[method-assign, assignment]


def ours(chosen: Any) -> Spent:
    """CPU seconds from the second round to the last step, saving and starting left out, and of each phase in them."""
    judge = ValueHeadModel(network(2))
    judge.reset_head(3)
    spent = dict.fromkeys(PHASES[:-1], 0.0)
    watched(spent)
    values = {
        "task": "ppo",
        "precision": chosen.precision,
        "data": {"sequence_length": 512, "eval_fraction": 0.0},
        "rl": {
            "prompts_per_rollout": BATCH,
            "epochs": chosen.epochs,
            "whiten_advantages": True,
            "missing_eos_penalty": 1.0,
        },
        "rollout": {"max_new_tokens": chosen.response, "temperature": 0.7},
        "trainer": {"max_steps": chosen.episodes // BATCH * chosen.epochs, "progress": False},
        "optimizer": {"learning_rate": 3e-6},
    }
    run(values, [{"prompt": tokens} for tokens in lists(chosen.episodes, 0, 16, 64)], reward=judge)
    spent["scoring"] -= spent["generating"]
    return seconds_and_rest(spent, chosen.episodes - BATCH * FIRST)


def floor(chosen: Any) -> float:
    """A pass to answer, one each of the reference, the critic and the reward model, and in each epoch a forward and a
    backward pass of the policy and of the critic."""
    written = BATCH * chosen.response
    rows = written + BATCH * PROMPT
    return products(4 + 6 * chosen.epochs, rows, 2 + 3 * chosen.epochs, written, chosen.precision)


if __name__ == "__main__":
    main(
        Comparison(
            module=globals(),
            heading="PPO against TRL",
            phases=PHASES,
            choices={"epochs": 1, "episodes": 96, "response": 128, "precision": "fp32"},
            ours=ours,
            floor=floor,
        )
    )
