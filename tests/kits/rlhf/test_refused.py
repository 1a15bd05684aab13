"""What a stage cannot have is refused before anything is trained, in words that name it."""

from pathlib import Path
from typing import Any

import pytest

from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.rlhf.build import TASKS
from tests.kits.rlhf import runs
from tests.kits.rlhf.reinforcement.test_environment import Calculator

Choices = dict[str, Any]
PTX = {"roles": {"reward": runs.letters, "ptx": [{"text": "so it is "}]}}
# Options of a stage, and the words; the name of the first option where none are given.
OPTIONS: dict[str, list[tuple[Choices, str | None]]] = {
    "sft": [
        ({"data.sequence_length": 1024}, "max_length"),
        ({"data.on_too_long": "cut"}, "on_too_long"),
    ],
    "ipo": [({"preference.label_smoothing": 0.1}, "label_smoothing")],
    "kto": [({"data.batch_size": 1}, "at least 2")],
    "ppo": [
        ({"rollout.temperature": 0.0}, "temperature"),
        ({"python_tests.timeout": float("inf")}, None),
        ({"rl.num_minibatches": 3}, "divisor of 4 completions"),
        ({"rl.advantage": "rloo"}, "at least 2"),
        ({"importance_sampling.mode": "mask"}, "rl.old_logprobs=recompute"),
        ({"rl.filter_zero_variance_groups": True}, "without groups"),
        ({"data.sequence_length": 8}, "too long"),
        ({"rl.max_tokens_per_microbatch": 31}, "sequence_length=32"),
        ({"rl.max_tokens_per_microbatch": 64, "trainer.micro_batch_size": 2}, "micro_batch_size"),
        ({"rollout.max_staleness": 1}, r"max_staleness.*\n.*got: +1"),
        ({"ptx.coef": 0.1}, "ptx.data"),
        ({"ptx.data": "x.jsonl"}, "ptx.coef"),
    ],
    "grpo": [
        ({"critic.learning_rate": 1e-3}, "(?s)option 'critic'.*rl.advantage=grpo, which has no critic"),
        ({"role_ranks.rollout": [1, 2]}, "no axis split = 1 ranks and 2 beside"),
    ],
    # Whitening removes the teacher's term (SkyRL #2256), and a group's mean makes it relative.
    "distill": [
        ({"distill.top_k": 8}, None),
        ({"distill.reward_coef": 1.0}, None),
        ({"rl.advantage": "gae"}, None),
        ({"rl.whiten_advantages": True}, None),
        ({"rl.target_kl": 0.1}, None),
        ({"kl.coef": 0.1}, None),
        ({"parallel.context": 2}, None),
    ],
    "online_dpo": [
        ({"preference.loss": "simpo"}, None),
        ({"rl.num_generations": 1}, None),
        ({"rl.advantage": "reinforce"}, None),
        ({"rl.advantage": "gae"}, None),
        ({"kl.coef": 0.1}, None),
        ({"kl.measure": True}, None),
        ({"rl.num_minibatches": 3}, None),
        ({"parallel.context": 2}, None),
    ],
}
NOTHING = r"(?s){} has no data to train on.*{}.*recipe=rlhf_tiny"
COLUMNS = {"sft": "prompt and completion", "dpo": "chosen and rejected", "kto": "label", "grpo": "prompt"}
# What else a stage is given.
GIVEN: list[tuple[str, Choices, dict[str, Any], str]] = [
    *((stage, {}, {"train_dataset": None}, NOTHING.format(stage, columns)) for stage, columns in COLUMNS.items()),
    ("ppo", {}, {"roles": {}}, "has no reward"),
    ("ppo", {}, PTX, "ptx.coef"),
    (
        "grpo",
        {"role_ranks.reward": [0]},
        {"roles": {"environment": Calculator}},
        r"role_ranks\.reward.*\n.*\n.*the environment computes the rewards",
    ),
]


@pytest.mark.parametrize(
    ("stage", "choices", "given", "words"),
    [*((stage, choices, {}, words) for stage in OPTIONS for choices, words in OPTIONS[stage]), *GIVEN],
)
def test_what_a_stage_cannot_have_is_refused(
    stage: str, choices: Choices, given: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError), match=words or next(iter(choices))):
        runs.begin(stage, tmp_path / "run", choices, **given)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", ["dpo", "ppo"])
def test_texts_of_any_length_are_not_cut_themselves(stage: str) -> None:
    options = TASKS[stage].read_options({"task": stage, "parallel": {"tensor": 2}})
    with pytest.raises(ConfigError, match=r"parallel\.sequence"):
        TASKS[stage].check_parallel(options)
