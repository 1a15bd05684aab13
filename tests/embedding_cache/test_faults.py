"""Faults planted one at a time, each of which some cache has had: the exactness suite must see every one."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.eviction.policy import LruPolicy
from kitforge.embedding_cache.keys.row_init import RowInitializer
from kitforge.embedding_cache.keys.slot_map import SlotMap
from kitforge.embedding_cache.pins import LookupHandle, PinRegistry, PrefetchedLookups
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.embedding_cache.tiers.write_behind import WriteBehindStore
from kitforge.foundation.errors import ModelError
from tests.embedding_cache import training
from tests.embedding_cache.training import DIM, Case, assert_same_bits, build, outcome, train, uncached
from tests.patience import PATIENCE

# The tightest capacity, since with room to spare a broken cache may pass.
TIGHT = Case(optimizer="lazy_adam", depth=2, tiers="file", spare=0.0)


def training_falls_behind(patch: pytest.MonkeyPatch) -> None:
    """Each lookup of the training waits until the one after it is planned, which a quick training need not see."""
    place, forward = CacheManager.ensure_resident, training.CachedEmbedding.forward
    num_planned, num_computed = 0, 0

    def counting(*arguments: Any) -> Any:
        nonlocal num_planned
        answer = place(*arguments)
        num_planned += 1
        return answer

    def late(*arguments: Any) -> Tensor:
        nonlocal num_computed
        num_computed += 1
        latest = time.monotonic() + PATIENCE
        while num_planned < min(num_computed + 1, training.NUM_STEPS) and time.monotonic() < latest:
            time.sleep(0.001)
        return forward(*arguments)

    patch.setattr(CacheManager, "ensure_resident", counting)
    patch.setattr(training.CachedEmbedding, "forward", late)


def evict_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A row may leave when the batch being planned does not need it, though one on its way does."""

    def may_go(planner: CacheManager, slots: Tensor, done: int) -> Tensor:
        newest = int(planner.device.index.last_use.max())
        return planner.device.index.is_used[slots] & (planner.device.index.last_use[slots] < newest)

    patch.setattr(CacheManager, "_is_evictable", may_go)
    training_falls_behind(patch)


def fetch_before_pending_write(patch: pytest.MonkeyPatch) -> None:
    """A read goes to the file while the row is still on its way there."""
    write = FileStore.write

    def slow_write(store: FileStore, keys: Tensor, rows: Tensor) -> None:
        time.sleep(0.003)
        write(store, keys, rows)

    patch.setattr(FileStore, "write", slow_write)
    patch.setattr(WriteBehindStore, "_read_pending", lambda store, keys, out: torch.zeros(len(keys), dtype=torch.bool))


def state_of_the_slot(patch: pytest.MonkeyPatch) -> None:
    """A new row inherits the optimizer state of the row that had its slot before."""
    bring = DeviceTier.insert

    def careless(device: DeviceTier, keys: Tensor, rows: Tensor, dirty: Tensor) -> Tensor:
        before = device.slab.clone()
        slots = bring(device, keys, rows, dirty)
        was_used = before[slots].isfinite().all(1) & (before[slots].abs() < 1e6).all(1)
        device.slab[slots[was_used], DIM : 3 * DIM] = before[slots[was_used], DIM : 3 * DIM]
        return slots

    patch.setattr(DeviceTier, "insert", careless)


def rows_begin_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """Initial rows come from one stream of random numbers."""
    stream = torch.Generator().manual_seed(0)
    fill = RowInitializer.fill

    def in_order(initial: RowInitializer, keys: Tensor, out: Tensor) -> None:
        fill(initial, keys, out)
        out[:, :DIM] = torch.randn(len(keys), DIM, generator=stream)

    patch.setattr(RowInitializer, "fill", in_order)


def zeros_are_missing(patch: pytest.MonkeyPatch) -> None:
    """A row whose embedding is zero is taken for one that is not there."""

    def seeing(read: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def of(store: RowStore, keys: Tensor, out: Tensor) -> Tensor:
            return read(store, keys, out) & out[:, :DIM].any(1)

        return of

    for store in (FileStore, WriteBehindStore):
        patch.setattr(store, "read", seeing(store.read))


def rows_never_come_back(patch: pytest.MonkeyPatch) -> None:
    """A dirty row that leaves is dropped as if it were clean."""
    patch.setattr(HostStore, "put", lambda *_: None)
    leave = DeviceTier.evict

    def clean(device: DeviceTier, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, rows, dirty = leave(device, slots)
        return keys, rows, torch.zeros_like(dirty)

    patch.setattr(DeviceTier, "evict", clean)


def nothing_comes_back_from_the_device(patch: pytest.MonkeyPatch) -> None:
    """Of rows that change places, those that leave the device are not written to the host tier."""

    def one_way(one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
        one[at] = other[to]

    kernels = replace(select_table(), swap_rows=one_way)
    patch.setattr("kitforge.embedding_cache.tiers.device.select_table", lambda *_: kernels)


def marks_stay_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Of rows that change places, the bits that say which have changed stay, so that one goes below for nothing and
    another does not."""
    exchange = HostStore.exchange

    def careless(host: HostStore, places: Tensor, above: DeviceTier, slots: Tensor) -> None:
        dirty = above.is_dirty[slots].clone(), host._dirty[places].clone()
        exchange(host, places, above, slots)
        above.is_dirty[slots], host._dirty[places] = dirty

    patch.setattr(HostStore, "exchange", careless)


def numbers_stay_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """Of rows that change places, those that leave are still looked for on the device."""
    exchange = SlotMap.exchange

    def careless(first: SlotMap, slots: Tensor, second: SlotMap, places: Tensor) -> None:
        leaving = first.keys_at(slots)
        exchange(first, slots, second, places)
        first._locations.insert(leaving, slots)

    patch.setattr(SlotMap, "exchange", careless)


def the_newest_leave(patch: pytest.MonkeyPatch) -> None:
    """Whoever leaves may be a row of the lookup that is being planned, since those that came are not pinned."""
    patch.setattr(CacheManager, "_is_evictable", lambda planner, slots, done: torch.ones(len(slots), dtype=torch.bool))
    patch.setattr(LruPolicy, "victims", lambda policy, num, may_go: policy._index.used().flip(0)[:num])


def plan_reads_values(patch: pytest.MonkeyPatch) -> None:
    """Values are copied when a lookup is planned instead of when it is computed."""
    place = CacheManager.ensure_resident
    stale: dict[int, Tensor] = {}

    def copying(planner: CacheManager, number: int, keys: Tensor) -> Any:
        slots = place(planner, number, keys)
        stale[id(slots)] = planner.device.slab[slots].clone()
        return slots

    patch.setattr(CacheManager, "ensure_resident", copying)
    training_falls_behind(patch)
    pool = training.CachedEmbedding._pool

    def answer(table: Any, ticket: Any, query: Any) -> Tensor:
        table.rows.device.slab[ticket.slots, :DIM] = stale[id(ticket.slots)][:, :DIM]
        return pool(table, ticket, query)

    patch.setattr(training.CachedEmbedding, "_pool", answer)


FAULTS: dict[Callable[[pytest.MonkeyPatch], None], Case] = {
    evict_in_flight: TIGHT,
    fetch_before_pending_write: TIGHT,
    state_of_the_slot: TIGHT,
    rows_begin_in_order_of_arrival: TIGHT,
    zeros_are_missing: replace(TIGHT, optimizer="ftrl"),
    rows_never_come_back: replace(TIGHT, tiers="host"),
    nothing_comes_back_from_the_device: replace(TIGHT, tiers="host"),
    numbers_stay_where_they_are: replace(TIGHT, tiers="host"),
    the_newest_leave: replace(TIGHT, tiers="host"),
    plan_reads_values: replace(TIGHT, spare=2.0),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_changes_what_comes_out(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = FAULTS[fault]
    expected = uncached(case.optimizer)
    fault(monkeypatch)
    # Some rows are so wrong that a kernel refuses them.
    with build(case, tmp_path) as table, pytest.raises((AssertionError, ModelError)):
        assert_same_bits(outcome(table, train(table, case)), expected)


def test_without_a_fault_the_same_cases_pass(tmp_path: Path) -> None:
    for number, case in enumerate(dict.fromkeys(FAULTS.values())):
        with build(case, tmp_path / str(number)) as table:
            assert_same_bits(outcome(table, train(table, case)), uncached(case.optimizer))


@pytest.mark.parametrize("fault", [None, marks_stay_where_they_are])
def test_marks_lost_where_rows_change_places_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are looked at in between are on the device and unchanged, which rows of the training never are."""
    if fault is not None:
        fault(monkeypatch)
    case, outputs = replace(TIGHT, tiers="host_file", depth=0), []
    with build(case, tmp_path) as table:
        for step, ids in enumerate(training.batches()):
            outputs.append(table(ids))
            training.loss_of(outputs[-1], step).backward()
            table.step(training.rate(step))
            with torch.no_grad():
                for other in training.batches()[5 * step % 7 :: 7]:
                    table(other)
        with pytest.raises(AssertionError) if fault else nullcontext():
            assert_same_bits(outcome(table, outputs), uncached(case.optimizer))


def forget_unused_tickets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefetchedLookups, "cancel_all", lambda _: None)


def is_planned(handle: LookupHandle | None) -> bool:
    return handle is not None and len(handle.slots) > 0


def forget_failed_lookups(patch: pytest.MonkeyPatch) -> None:
    close = PinRegistry.close
    patch.setattr(
        PinRegistry,
        "close",
        lambda register, number: close(register, number) if is_planned(register._open.get(number)) else None,
    )


@pytest.mark.parametrize("fault", [None, forget_unused_tickets, forget_failed_lookups])
def test_pins_lost_on_an_exception_are_seen(
    fault: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        fault(monkeypatch)
    fetch, batches = training.TwoLevelStore.fetch, training.batches()
    with build(Case(spare=2.0), tmp_path) as table:
        with pytest.raises(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
            training_falls_behind(patch)
            for number, ids in enumerate(table.prefetch(batches, 2)):
                table(ids).sum().backward()
                table.clear_gradients()
                if number == 4:
                    raise ZeroDivisionError

        def failing(tiers: Any, keys: Tensor, out: Tensor) -> Tensor:
            raise OSError("the disk is gone")

        monkeypatch.setattr(training.TwoLevelStore, "fetch", failing)
        with pytest.raises(OSError, match="the disk is gone"):
            table(torch.arange(8).view(2, 4))
        monkeypatch.setattr(training.TwoLevelStore, "fetch", fetch)
        assert (table.rows.pins.open_lookups() == []) == (fault is None)
