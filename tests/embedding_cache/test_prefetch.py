"""The loop over `prefetch`: left early, failing, evaluated in between, accumulated over, and fed with other tensors."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kitforge.embedding_cache.options import PolicyOptions
from kitforge.embedding_cache.pins import LookupHandle, PinRegistry
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import ConfigError, DataError
from tests.embedding_cache.training import batches, bits, largest_batch
from tests.patience import PATIENCE

DIM = 4


def table_of(device_rows: int | None = None, **options: object) -> CachedEmbedding:
    return CachedEmbedding(None, DIM, optimizer="lazy_adam", device_rows=device_rows, **options)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "embedding prefetch"]


def assert_idle(table: CachedEmbedding) -> None:
    assert table.rows.pins.open_lookups() == []
    assert table.rows.pins._num_waiting == 0
    assert not table.rows.prefetched._lookups
    assert not threads()


def step(table: CachedEmbedding, ids: Tensor) -> Tensor:
    answer = table(ids)
    (answer - 1).square().sum().backward()
    table.step(0.1)
    return answer.detach()


@pytest.mark.parametrize("policy", ["lru", "lookahead"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_loop_left_early_leaves_nothing_behind_and_can_go_on(depth: int, policy: str) -> None:
    cut, whole = table_of(largest_batch() + 1, policy=PolicyOptions(name=policy)), table_of()
    given = batches()
    first = []
    for number, ids in enumerate(cut.prefetch(given, depth)):
        first.append(step(cut, ids))
        if number == 6:
            break
    assert_idle(cut)
    rest = [step(cut, ids) for ids in cut.prefetch(given[7:], depth)]
    assert_idle(cut)
    for got, ids in zip([*first, *rest], given, strict=True):
        assert torch.equal(bits(got), bits(step(whole, ids)))


def test_a_loop_that_was_never_begun_starts_no_thread() -> None:
    table = table_of(40)
    loop = table.prefetch(batches(), 2)
    assert not threads()
    del loop
    assert_idle(table)


def test_an_error_of_the_batches_comes_where_the_batch_would_have_come() -> None:
    def failing() -> Iterator[Tensor]:
        yield from batches()[:3]
        raise OSError("no more lines")

    table, seen = table_of(40), 0
    with pytest.raises(OSError, match="no more lines"):
        for ids in table.prefetch(failing(), 2):
            step(table, ids)
            seen += 1
    assert seen == 3
    assert_idle(table)


def test_an_error_of_planning_reaches_the_loop() -> None:
    table = CachedEmbedding(5, DIM, device_rows=4)
    with pytest.raises(DataError, match="not in the table"):
        for ids in table.prefetch([torch.tensor([[1]]), torch.tensor([[7]])], 2):
            step(table, ids)
    assert_idle(table)


def test_an_evaluation_in_between_changes_nothing() -> None:
    plain, evaluated = table_of(largest_batch() + 1), table_of(largest_batch() + 1)
    given, other = batches(), torch.arange(60).view(15, 4)
    expected = [step(plain, ids) for ids in plain.prefetch(given, 2)]
    got = []
    for ids in evaluated.prefetch(given, 2):
        got.append(step(evaluated, ids))
        with torch.no_grad():
            evaluated(other)
            evaluated(given[len(got) % len(given)])
    assert all(torch.equal(bits(one), bits(two)) for one, two in zip(got, expected, strict=True))
    assert_idle(evaluated)


def test_micro_batches_of_one_step_may_need_more_than_the_tier_holds() -> None:
    # The planner cannot wait for a step that waits for its last micro-batch.
    small, whole = table_of(largest_batch() + 1), table_of()
    given = [batches()[number : number + 3] for number in (0, 5, 10)]
    for pieces in small.prefetch(given, 2, ids=lambda pieces: pieces):
        for table in (small, whole):
            for ids in pieces:
                table(ids).square().sum().backward()
            table.step(0.1)
    flat = [ids for pieces in given for ids in pieces]
    assert all(torch.equal(bits(small(ids)), bits(whole(ids))) for ids in flat)
    assert small.stats().overflow_rows > 0
    small.clear_gradients()


def test_micro_batches_may_be_taken_one_by_one() -> None:
    small, whole = table_of(largest_batch() + 1), table_of()
    for number, ids in enumerate(small.prefetch(batches(), 1)):
        for table in (small, whole):
            table(ids).square().sum().backward()
            if number % 3 == 2:
                table.step(0.1)
    assert all(torch.equal(bits(small(ids)), bits(whole(ids))) for ids in batches())


def test_a_batch_that_is_not_trained_on_lets_its_rows_go() -> None:
    table = table_of(largest_batch() + 1)
    for number, ids in enumerate(table.prefetch((ids.clone() for ids in batches()), 2)):
        if number % 2:
            step(table, ids)
        del ids
    assert_idle(table)


def test_a_view_of_the_ids_is_known_and_changed_ids_are_planned_anew() -> None:
    table, other = table_of(largest_batch() + 1), table_of()
    for number, ids in enumerate(table.prefetch(batches(), 2)):
        if number == 5:
            ids[0] = 12345
        before = table.stats().lookups
        assert torch.equal(bits(step(table, ids.view(-1, 4))), bits(step(other, ids)))
        if number != 5:
            assert table.stats().lookups <= before + 2
    assert_idle(table)


@pytest.mark.parametrize("mode", ["sum", None])
def test_a_view_in_another_order_is_planned_anew(mode: str | None) -> None:
    ahead, plain = (table_of(64, mode=mode) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    given = [torch.randint(200, (4, 4), generator=generator) for _ in range(6)]
    views = (Tensor.t, lambda ids: ids.t().contiguous().view(4, 4), lambda ids: ids.view(2, 8), lambda ids: ids.flip(0))
    for number, ids in enumerate(ahead.prefetch([ids.clone() for ids in given], 2)):
        asked, wanted = (views[number % len(views)](each) for each in (ids, given[number]))
        assert torch.equal(bits(step(ahead, asked)), bits(step(plain, wanted)))
    del ids, asked
    assert_idle(ahead)


def test_labels_are_not_taken_for_ids() -> None:
    table = table_of(40)
    batch = [torch.tensor([[1, 2]]), torch.tensor([0.5])]
    with pytest.raises(DataError, match=r"got: +float32[\s\S]*prefetch\(batches, ids="):
        next(table.prefetch([batch], 1))
    [ids, _] = next(table.prefetch([batch], 1, ids=lambda batch: batch[0]))
    assert ids is batch[0]


def test_planning_waits_for_training_when_the_tier_is_full() -> None:
    table = table_of(largest_batch() + 1)
    for ids in table.prefetch(batches(), 4):
        threading.Event().wait(0.005)
        step(table, ids)
    stats = table.stats()
    assert stats.waits > 0
    assert stats.overflow_rows == 0


def test_a_row_that_two_threads_ask_for_stays_for_the_later_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that trains is held up between its number and its rows; the other would overtake it if it could."""
    table, ids = table_of(40), torch.tensor([[5]])
    numbered, planned = threading.Event(), threading.Event()
    open_lookup = PinRegistry.open

    def slow(register: PinRegistry, handle: LookupHandle) -> None:
        open_lookup(register, handle)
        if threading.current_thread() is threading.main_thread():
            numbered.set()
            planned.wait(0.3)

    def ahead() -> None:
        numbered.wait(PATIENCE)
        table.rows.prefetch(ids)
        planned.set()

    monkeypatch.setattr(PinRegistry, "open", slow)
    thread = threading.Thread(target=ahead)
    thread.start()
    with torch.no_grad():
        table(torch.tensor([[5]]))
    thread.join(PATIENCE)
    [[later]] = ([each.handle for each in queue] for queue in table.rows.prefetched._lookups.values())
    assert int(table.rows.device.index.last_use[later.slots]) == later.number


def test_no_look_ahead_is_a_plain_loop() -> None:
    table = table_of(40)
    given = batches()
    assert all(got is ids for got, ids in zip(table.prefetch(given, 0), given, strict=True))
    with pytest.raises(ConfigError, match="prefetch_batches"):
        next(table.prefetch(given, -1))


def test_batches_that_are_no_ids_need_a_function() -> None:
    table = table_of(40)
    with pytest.raises(DataError, match="needs the ids"):
        next(table.prefetch([{"ids": 1}], 1, ids=lambda batch: [batch["ids"]]))
