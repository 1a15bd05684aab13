"""What fails on one rank fails on all, with the same words; nobody waits for one that will not come."""

from typing import Any

import pytest
from torch.distributed import DistBackendError

from kitforge.core.checkpoint.all_or_none import collective_try
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.errors import CheckpointError, ModelError, PeerError
from tests.core.checkpoint.sharded import Stage


def test_all_get_what_each_returns() -> None:
    assert (
        Stage(3).play(lambda world: collective_try(lambda: world.rank * 2, world.all_gather_object)) == [[0, 2, 4]] * 3
    )


def test_the_first_rank_that_fails_is_heard_by_all() -> None:
    def act(world: World) -> Any:
        def work() -> None:
            if world.rank:
                raise CheckpointError(f"rank {world.rank} cannot", got="1")

        return collective_try(work, world.all_gather_object)

    results = Stage(3).play(act)
    assert [str(result) for result in results] == ["rank 1 cannot\n  got:      1"] * 3
    assert {type(result) for result in results} == {CheckpointError}


def test_the_rank_that_fails_raises_its_own_error_with_its_cause() -> None:
    failure = ModelError("no")

    def work() -> None:
        raise failure from OSError("because")

    with pytest.raises(ModelError) as caught:
        collective_try(work, ALONE.all_gather_object, ModelError)
    assert caught.value is failure
    assert isinstance(caught.value.__cause__, OSError)


def test_a_fault_of_the_program_goes_on_where_it_is_and_is_told_elsewhere() -> None:
    def act(world: World) -> Any:
        return collective_try(lambda: 1 // world.rank, world.all_gather_object)

    first, second = Stage(2).play(act)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, CheckpointError)
    assert "not foreseen: ZeroDivisionError: integer division or modulo by zero" in str(second)


def test_a_rank_that_is_gone_is_an_error_for_people() -> None:
    def agree(_value: object) -> list[Any]:
        raise DistBackendError("Connection closed by peer")

    with pytest.raises(PeerError, match="another rank died"):
        collective_try(lambda: 1, agree)
