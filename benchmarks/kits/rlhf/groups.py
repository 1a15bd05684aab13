"""GRPO and RLOO beside TRL 1.12: the network of `ppo.py`, 8 prompts of 16 to 64 tokens, 4 answers of 128 to each.

python -m benchmarks.kits.rlhf.groups --peer-python OTHER/bin/python [--task grpo] [--precision fp32] [--launches 3]

As in `ppo.py`; both sides compare with a reference and count distinct tokens as reward. The section goes to groups.md.
"""

from typing import Any

from benchmarks.kits.rlhf.beside import BATCH, PROMPT, Comparison, Spent, lists, main, products, run, seconds_and_rest
from benchmarks.kits.rlhf.ppo import FIRST, PHASES, watched

ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {
        "rl": {"advantage": "grpo", "loss_aggregation": "seq-mean-token-mean"},
        "kl": {"apply_to": "loss", "estimator": "k3", "coef": 0.04},
    },
    "rloo": {"rl": {"advantage": "rloo", "loss_aggregation": "seq-mean-token-sum"}, "kl": {"coef": 0.04}},
}


def distinct(*, completion_tokens: list[list[int]]) -> list[float]:
    """The share of tokens that are new."""
    return [len(set(tokens)) / max(len(tokens), 1) for tokens in completion_tokens]


def ours(chosen: Any) -> Spent:
    """See `ppo.ours`."""
    spent = dict.fromkeys(PHASES[:-1], 0.0)
    watched(spent)
    shaped = ADVANTAGES[chosen.task]
    values = {
        **shaped,
        "task": chosen.task,
        "precision": chosen.precision,
        "data": {"sequence_length": 512, "eval_fraction": 0.0},
        "rl": {"prompts_per_rollout": BATCH // 4, "num_generations": 4, **shaped["rl"]},
        "rollout": {"max_new_tokens": chosen.response},
        "trainer": {"max_steps": chosen.episodes // BATCH, "progress": False},
        "optimizer": {"learning_rate": 3e-6},
    }
    run(values, [{"prompt": tokens} for tokens in lists(chosen.episodes // 4, 0, 16, 64)], reward=distinct)
    spent["scoring"] -= spent["generating"]
    return seconds_and_rest(spent, chosen.episodes - BATCH * FIRST)


def floor(chosen: Any) -> float:
    """A pass to answer, one of the reference, a forward and a backward pass of the policy."""
    written = BATCH * chosen.response
    return products(2 + 3, written + BATCH * PROMPT, 2 + 3, written, chosen.precision)


if __name__ == "__main__":
    main(
        Comparison(
            module=globals(),
            heading="GRPO and RLOO against TRL",
            phases=PHASES,
            choices={"task": ("grpo", "rloo"), "episodes": 96, "response": 128, "precision": "fp32"},
            ours=ours,
            floor=floor,
        )
    )
