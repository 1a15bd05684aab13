"""torch's own noise goes on by replica: whoever computes on the same samples draws alike, all others apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.optim.build import OptimizerConfig, build_optimizer
from kitforge.core.optim.groups import decay_groups
from kitforge.core.optim.schedules import Plateau, ScheduleConfig
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import ALONE
from kitforge.trainer.precision import GradScaler
from kitforge.trainer.state import TrainingState


@dataclass
class Ranks:
    """Stands for a world: which replica each rank is of, and what all of them have said."""

    replicas: Sequence[int]
    rank: int
    said: Sequence[Any] = ()

    device = torch.device("cpu")
    is_training = True

    @property
    def replica(self) -> int:
        return self.replicas[self.rank]

    def all_gather_object(self, value: Any) -> list[Any]:
        self.sent = value
        return list(self.said) or [(replica, value[1]) for replica in self.replicas]


def state(world: Ranks) -> TrainingState:
    model = nn.Linear(2, 2)
    groups = decay_groups(model.named_parameters(), weight_decay=0.0)
    return TrainingState(
        model=model,
        parallel=parallelize(model, Sharding(), ALONE),
        optimizer=build_optimizer(groups, OptimizerConfig(), None),
        scaler=GradScaler("fp32"),
        plateau=Plateau(ScheduleConfig()),
        world=cast(Any, world),
    )


def save(folder: Path, replicas: Sequence[int]) -> list[list[float]]:
    """Save what the ranks hold, the noise of each replica being its own; what each replica draws next."""
    said = []
    for rank in range(len(replicas)):
        torch.manual_seed(100 + replicas[rank])
        world = Ranks(replicas, rank)
        state(world).state_dict()
        said.append(world.sent)
    written = state(Ranks(replicas, 0, said))
    written.optimizer.init_state()
    writer = CheckpointWriter(folder)
    writer.save(
        1,
        model=written.parallel.tensors(),
        optimizer=written.optimizer.tensors(),
        state={"training": written.state_dict()},
    )
    writer.close()
    return [noise(100 + replica) for replica in sorted(set(replicas))]


def noise(seed: int) -> list[float]:
    # What a state draws before it is saved here: the weights of the model.
    torch.manual_seed(seed)
    nn.Linear(2, 2)
    return torch.rand(4).tolist()


def resumed(folder: Path, replicas: Sequence[int]) -> list[list[float]]:
    """What each rank draws next when it goes on."""
    drawn = []
    for rank in range(len(replicas)):
        torch.manual_seed(7)
        state(Ranks(replicas, rank)).load_checkpoint(open_checkpoint(folder / "step_1"))
        drawn.append(torch.rand(4).tolist())
    return drawn


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([0, 1], [0, 1]),
        ([0, 0, 1, 1], [0, 1]),
        ([0, 1], [0, 0]),
        ([0, 1], [0, 0, 1, 1]),
        ([0, 1, 2], [0]),
        ([0, 0, 1, 1, 2, 2], [0, 1, 2]),
    ],
    ids=str,
)
def test_each_rank_goes_on_with_the_noise_of_its_replica(tmp_path: Path, before: list[int], after: list[int]) -> None:
    expected = save(tmp_path, before)
    assert resumed(tmp_path, after) == [expected[replica] for replica in after]


def test_replicas_that_were_not_there_before_have_noise_of_their_own(tmp_path: Path) -> None:
    expected = save(tmp_path, [0, 1])
    drawn = resumed(tmp_path, [0, 1, 2, 2, 3, 4])
    assert drawn[:2] == expected
    assert drawn[2] == drawn[3]
    assert len({tuple(each) for each in drawn}) == 5
    assert drawn == resumed(tmp_path, [0, 1, 2, 2, 3, 4])
