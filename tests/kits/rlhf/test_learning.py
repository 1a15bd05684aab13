"""What `benchmarks/kits/rlhf/learning.py` claims, in small: rewards make right what demonstrations left in doubt."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kits.rlhf.learning import beginner, learnt

FEW = {"grpo": 40, "ppo": 90}


def test_rewards_teach_to_copy_by_groups_and_by_a_critic(tmp_path: Path) -> None:
    policy = beginner(str(tmp_path), 0, length=2, steps=100)
    for task, steps in FEW.items():
        choices = {"trainer.max_steps": steps}
        before, after = learnt(str(tmp_path), task, policy, 0, length=2, **choices)
        assert before < 0.8
        assert after > 0.95
