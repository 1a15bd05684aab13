"""Which ranks take part when the networks that answers are drawn with are filled anew."""

from typing import Any

import pytest
import torch
from torch import nn

from kitforge.core.parallel.world import World
from kitforge.kits.rlhf.role_ranks import RoleRanksOptions
from kitforge.kits.rlhf.roles.placement import RolePlacement


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("draws", [True, False])
def test_ranks_that_train_or_draw_take_part_and_no_others(
    trains: bool, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("kitforge.kits.rlhf.roles.placement.sync_weights", lambda *given: calls.append(given))
    world = World(device=torch.device("cpu"))
    fragments = RolePlacement(RoleRanksOptions(rollout=(0, 3)), world)
    model, whole = (nn.Linear(2, 1) if each else None for each in (trains, draws))
    fragments.sync_weights(model, whole)
    assert len(calls) == (trains or draws)
    for parallel, target, ranks, _ in calls:
        assert (parallel is not None) == trains
        assert target is not None and target["weight"] is whole.weight if whole is not None else target is None
        assert ranks == (0, 3)
