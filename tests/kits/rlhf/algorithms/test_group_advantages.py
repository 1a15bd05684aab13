from __future__ import annotations

from typing import get_args

import pytest
import torch

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.group_advantages import Baseline, group_advantages, has_reward_variance

ONE_SUCCESS = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("baseline", "wanted"),
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(baseline: Baseline, wanted: list[float]) -> None:
    assert group_advantages(ONE_SUCCESS, baseline)[0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_the_mean_of_the_others_is_the_mean_stretched() -> None:
    scores = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    others = (scores.sum(-1, keepdim=True) - scores) / 5
    assert torch.allclose(group_advantages(scores, "rloo"), scores - others, atol=1e-12, rtol=0)


@pytest.mark.parametrize("baseline", get_args(Baseline))
@pytest.mark.parametrize("size", [2, 3, 7])
def test_equal_scores_say_nothing_at_all(baseline: Baseline, size: int) -> None:
    # 0.1 added up and divided is not 0.1, and a deviation that is rounding would blow it up.
    scores = torch.full((2, size), 0.1)
    assert torch.equal(group_advantages(scores, baseline), torch.zeros(2, size))
    assert not has_reward_variance(scores).any()
    assert has_reward_variance(ONE_SUCCESS).tolist() == [[True]]


@pytest.mark.parametrize("baseline", get_args(Baseline))
def test_groups_of_one_are_refused(baseline: Baseline) -> None:
    with pytest.raises(ConfigError, match="groups of 1"):
        group_advantages(torch.zeros(3, 1), baseline)
