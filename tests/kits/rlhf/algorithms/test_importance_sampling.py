from __future__ import annotations

import pytest
import torch

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.importance_sampling import ImportanceSamplingOptions, importance_weights

OLD = torch.tensor([[0.0, 1.0, -2.0, float("nan")]], dtype=torch.float64, requires_grad=True)
BEHAVIOUR = torch.zeros(1, 4, dtype=torch.float64)
MASK = torch.tensor([[True, True, True, False]])


def found(**options: object) -> list[float]:
    weights = importance_weights(OLD, BEHAVIOUR, MASK, ImportanceSamplingOptions(**options))  # type: ignore[arg-type]
    assert weights is not None
    assert not weights.requires_grad
    return weights[0].tolist()


def test_truncated_ratios_stay_within_the_bounds() -> None:
    assert found(mode="truncate", min=0.5, max=2.0) == [1.0, 2.0, 0.5, 1.0]


def test_masked_tokens_count_for_nothing() -> None:
    assert found(mode="mask", min=0.5, max=2.0) == [1.0, 0.0, 0.0, 1.0]


def test_a_sequence_has_the_product_of_its_ratios() -> None:
    ratio = float(torch.tensor(-1.0, dtype=torch.float64).exp())
    assert found(mode="truncate", level="sequence", max=2.0) == pytest.approx([ratio] * 4)
    assert found(mode="mask", level="sequence", min=0.5) == [0.0] * 4


def test_a_geometric_mean_does_not_grow_with_the_length() -> None:
    ratio = float(torch.tensor(-1 / 3, dtype=torch.float64).exp())
    assert found(mode="truncate", level="geometric", max=2.0) == pytest.approx([ratio] * 4)
    assert found(mode="mask", level="geometric", min=0.5) == pytest.approx([ratio] * 4)


def test_none_corrects_nothing() -> None:
    assert importance_weights(OLD, BEHAVIOUR, MASK, ImportanceSamplingOptions()) is None


@pytest.mark.parametrize("wrong", [{"min": 1.5}, {"max": 0.9}])
def test_bounds_that_leave_one_out_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="importance_sampling"):
        ImportanceSamplingOptions(**wrong)  # type: ignore[arg-type]
