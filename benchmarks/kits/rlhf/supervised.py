"""SFT, reward model and DPO beside TRL: the network of `ppo.py`, 32 rows of 16 to 64 + 64 to 128 tokens a step.

python -m benchmarks.kits.rlhf.supervised --peer-python OTHER/bin/python [--task sft] [--precision fp32] [--launches 3]

As in `ppo.py`, from the first step to the last; a sample is a row, or a pair. The section goes to supervised.md.
"""

from typing import Any

from benchmarks.kits.rlhf.beside import (
    BATCH,
    PROMPT,
    Comparison,
    Spent,
    lists,
    main,
    products,
    run,
    seconds_and_rest,
    timed,
)
from kitforge.trainer.loop import Loop

PHASES = ("updating", "rest")
# Tokens of a response on average, without its end.
RESPONSE = 96


def rows(task: str, number: int) -> list[dict[str, Any]]:
    """Demonstrations, or pairs."""
    prompts = lists(number, 0, 16, 64)
    names = ("completion",) if task == "sft" else ("chosen", "rejected")
    columns = {name: lists(number, seed, 64, 128) for seed, name in enumerate(names, start=1)}
    return [{"prompt": prompt, **{name: next(each) for name, each in columns.items()}} for prompt in prompts]


def ours(chosen: Any) -> Spent:
    """CPU seconds from the first step to the last."""
    spent = {"updating": 0.0}
    Loop._step = timed(spent, "updating", Loop._step)  # type: ignore[method-assign]
    values = {
        "task": chosen.task,
        "precision": chosen.precision,
        "data": {"sequence_length": 512, "eval_fraction": 0.0, "batch_size": BATCH},
        "trainer": {"max_steps": chosen.episodes // BATCH, "progress": False},
        "optimizer": {"learning_rate": 3e-6},
    }
    run(values, rows(chosen.task, chosen.episodes))
    return seconds_and_rest(spent, chosen.episodes)


def floor(chosen: Any) -> float:
    """A forward and a backward pass over each response; of dpo also a pass of the reference. The head over the tokens
    that are learnt, which the reward model has none of."""
    responses = BATCH if chosen.task == "sft" else 2 * BATCH
    passes = 4 if chosen.task == "dpo" else 3
    heads = 0 if chosen.task == "reward" else passes
    return products(passes, responses * (PROMPT + RESPONSE), heads, responses * RESPONSE, chosen.precision)


if __name__ == "__main__":
    main(
        Comparison(
            module=globals(),
            heading="SFT, reward model and DPO against TRL",
            phases=PHASES,
            choices={"task": ("sft", "reward", "dpo"), "episodes": 192, "precision": "fp32"},
            ours=ours,
            floor=floor,
        )
    )
