"""The norm over ranks, as one rank sees it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kitforge.core.parallel import collectives
from kitforge.core.parallel.grad_norm import global_grad_norm
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout


def mesh(device_type: str) -> Any:
    return SimpleNamespace(device_mesh=SimpleNamespace(device_type=device_type), world=None)


def test_a_rank_without_gradients_adds_its_zero_on_the_device_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def all_reduce(input: torch.Tensor, _group: Any) -> torch.Tensor:
        sent.append(input)
        return torch.ones(())

    monkeypatch.setattr(collectives, "all_reduce_", all_reduce)
    global_grad_norm({}, {}, torch.zeros((), dtype=torch.float64), mesh("meta"))
    assert [each.device.type for each in sent] == ["meta"]


def test_pieces_count_as_often_as_they_are_held() -> None:
    layouts = {"cut": Layout(shape=(4,)).split("fsdp", 0, 2), "whole": Layout(shape=(1,))}
    holders = {name: Grid({"shard": 2}).num_holders(layout, 1) for name, layout in layouts.items()}
    gradients = {"cut": torch.tensor([3.0, 0.0]), "whole": torch.tensor([4.0])}
    norm = global_grad_norm(gradients, holders, torch.tensor(7.0, dtype=torch.float64), mesh("cpu"))
    assert float(norm) ** 2 == pytest.approx(9 + 16 / 2 + 7)
