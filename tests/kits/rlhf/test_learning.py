"""What `benchmarks/kits/rlhf` claims of learning and of adapters, in small."""

from pathlib import Path

import pytest

from benchmarks.kits.rlhf import adapters
from benchmarks.kits.rlhf.learning import beginner, learnt
from kitforge.data.tokenizers.loading import ByteTokenizer
from tests.trainer import tiny

FEW = {"grpo": 40, "ppo": 90}


@pytest.mark.slow
def test_rewards_teach_to_copy_by_groups_and_by_a_critic(tmp_path: Path) -> None:
    policy = beginner(str(tmp_path), 0, length=2, steps=100)
    for task, steps in FEW.items():
        choices = {"trainer.max_steps": steps}
        before, after = learnt(str(tmp_path), task, policy, 0, length=2, **choices)
        assert before < 0.8
        assert after > 0.95


def test_adapters_hold_less_than_a_sixth_of_four_networks() -> None:
    shape = tiny.GPT2 | {"dim": 128, "vocab_size": ByteTokenizer.vocab_size}
    apart, together = (adapters.roles(shape, rank)[0] for rank in (0, 2))
    assert together < 0.15 * apart
