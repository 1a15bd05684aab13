"""A table at a step boundary: read while the training goes on, as deltas, and laid into tables of other tiers."""

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.embedding_cache.changes import ChangeTracker
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions
from kitforge.embedding_cache.snapshot import TableSnapshot
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.foundation.errors import CheckpointError, ConfigError
from tests.embedding_cache.training import (
    NUM_STEPS,
    Case,
    assert_same_bits,
    batches,
    bits,
    build,
    loss_of,
    outcome,
    rate,
    rows_of,
    train,
    uncached,
)

CASES = [
    Case(optimizer="adagrad", tiers="whole"),
    Case(optimizer="adagrad", tiers="file", depth=4),
    Case(optimizer="adam", tiers="host_file", depth=2, policy="lfu"),
    Case(optimizer="ftrl", tiers="host", depth=1),
]


def steps(table: CachedEmbedding, case: Case, first: int, last: int) -> list[Tensor]:
    outputs = []
    for step, ids in enumerate(table.prefetch(batches()[first:last], case.depth), first):
        answer = table(ids)
        loss_of(answer, step).backward()
        table.step(rate(step))
        outputs.append(answer.detach().clone())
    return outputs


def read_while_training(table: CachedEmbedding, case: Case) -> tuple[Tensor, Tensor]:
    """A snapshot after half of the steps, read by another thread while the others are made."""
    steps(table, case, 0, NUM_STEPS // 2)
    source, read = table.begin_snapshot(), []

    def slowly() -> None:
        for ids, rows in source.chunks():
            read.append((ids.clone(), rows.clone()))
            time.sleep(0.002)

    reader = threading.Thread(target=slowly)
    reader.start()
    steps(table, case, NUM_STEPS // 2, NUM_STEPS)
    reader.join()
    ids, rows = (torch.cat(parts) for parts in zip(*read, strict=True))
    assert len(torch.unique(ids)) == len(ids)
    return ids[ids.argsort()], rows[ids.argsort()]


def same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(bits(one[1]), bits(other[1]))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_snapshot_is_of_its_boundary_whatever_happens_while_it_is_read(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kitforge.embedding_cache.snapshot.CHUNK_ROWS", 8)
    with build(case, tmp_path / "a") as still, build(case, tmp_path / "b") as moving:
        steps(still, case, 0, NUM_STEPS // 2)
        expected = rows_of(still.begin_snapshot())
        assert same(read_while_training(moving, case), expected)
        assert not moving.rows.changes.observers
        assert rows_of(moving.begin_snapshot())[0].shape == uncached(case.optimizer).ids.shape


def test_without_copy_on_write_the_boundary_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitforge.embedding_cache.snapshot.CHUNK_ROWS", 8)
    case = Case(tiers="file", depth=2)
    with build(case, tmp_path / "a") as still, build(case, tmp_path / "b") as moving:
        steps(still, case, 0, NUM_STEPS // 2)
        expected = rows_of(still.begin_snapshot())
        monkeypatch.setattr(ChangeTracker, "notify", lambda *_: None)
        assert not same(read_while_training(moving, case), expected)


@pytest.mark.parametrize("other", ["whole", "host", "file"])
@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_a_run_cut_in_two_equals_one_that_was_not_in_any_tiers(case: Case, other: str, tmp_path: Path) -> None:
    second = Case(optimizer=case.optimizer, tiers=other, depth=case.depth)
    with build(case, tmp_path / "a") as first_half, build(second, tmp_path / "b") as rest:
        outputs = steps(first_half, case, 0, NUM_STEPS // 2)
        rest(torch.arange(40).view(10, 4))
        rest.load_rows(first_half.begin_snapshot())
        outputs += steps(rest, second, NUM_STEPS // 2, NUM_STEPS)
        assert_same_bits(outcome(rest, outputs), uncached(case.optimizer))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_base_and_its_deltas_are_the_whole(optimizer: str, tmp_path: Path) -> None:
    case = Case(optimizer=optimizer, tiers="file", depth=2)
    expiry = ExpiryOptions(every=3, max_age=4)
    with build(case, tmp_path, expiry=expiry) as table:
        kept: dict[int, Tensor] = {}
        since = None
        sizes = []
        for first in range(0, NUM_STEPS, 6):
            steps(table, case, first, first + 6)
            # What is read for a look changes no row that a delta would have to tell of.
            with torch.no_grad():
                table(batches()[first])
            source = table.begin_snapshot(since)
            assert source.since == since
            since = source.version
            for gone in source.removed():
                for key in gone.tolist():
                    kept.pop(key, None)
            ids, rows = rows_of(source)
            sizes.append(len(ids))
            kept |= dict(zip(ids.tolist(), rows, strict=True))
        ids, rows = rows_of(table.begin_snapshot())
        assert sorted(kept) == ids.tolist()
        assert torch.equal(bits(torch.stack([kept[key] for key in sorted(kept)])), bits(rows))
        assert table.stats().expired > 0


def test_a_delta_holds_only_what_changed(tmp_path: Path) -> None:
    with build(Case(tiers="host"), tmp_path) as table:
        train(table, Case())
        version = table.begin_snapshot().version
        assert len(rows_of(table.begin_snapshot(version))[0]) == 0
        table(torch.tensor([[5, 5, 9, 5]])).sum().backward()
        table.step(0.1)
        assert rows_of(table.begin_snapshot(version))[0].tolist() == [5, 9]


def test_what_changed_is_remembered_only_for_a_snapshot_that_builds_on_another(tmp_path: Path) -> None:
    with build(Case(tiers="whole"), tmp_path, expiry=ExpiryOptions(every=1, max_age=1)) as table:
        train(table, Case())
        assert all(len(keys) == 0 for keys in (table.rows.changes._changed._parts, table.rows.changes._removed._parts))
        version = table.begin_snapshot().version
        with pytest.raises(CheckpointError, match=r"since version 3 of a table are not known[\s\S]*all rows first"):
            table.begin_snapshot(3)
        train(table, Case())
        source = table.begin_snapshot(version, is_base=False)
        [removed] = source.removed()
        assert len(removed) == len(torch.unique(removed)) > 0
        train(table, Case())
        assert table.rows.changes.since is None
        with pytest.raises(CheckpointError, match="no snapshot to build on"):
            table.begin_snapshot(source.version)


def test_changed_keys_are_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitforge.embedding_cache.changes.FIRST_KEYS", 8)
    deltas = ChangeTracker()
    deltas.restart(4)
    for number in range(100):
        deltas.before_change(torch.tensor([number % 5, -number % 5 - 7]).unique(), torch.zeros_like)
        deltas.mark_removed(torch.tensor([3]))
        assert deltas._changed._num <= 22
    changed, removed = deltas.changes(4)
    assert changed.tolist() == [-7, -6, -5, -4, -3, 0, 1, 2, 3, 4]
    assert removed.tolist() == [3]


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_delta_reads_no_row_that_did_not_change(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(optimizer=optimizer, tiers="file", depth=0)
    with build(case, tmp_path) as table:
        train(table, case)
        version = table.begin_snapshot().version
        steps(table, case, 0, 2)
        asked, read = [], FileStore.read

        def counting(store: FileStore, keys: Tensor, out: Tensor) -> Tensor:
            asked.append(keys)
            return read(store, keys, out)

        monkeypatch.setattr(FileStore, "read", counting)
        monkeypatch.setattr(FileStore, "keys", None)
        source = table.begin_snapshot(version)
        changed = torch.unique(torch.cat(batches()[:2])).tolist()
        asked.clear()
        ids, _ = rows_of(source)
        assert ids.tolist() == changed
        # Rows that have not left the upper tiers yet are read from no file.
        assert {key for keys in asked for key in keys.tolist()} <= set(changed)


def test_rows_that_never_moved_are_in_no_snapshot(tmp_path: Path) -> None:
    with build(Case(tiers="host"), tmp_path) as table:
        with torch.no_grad():
            table(batches()[0])
        assert len(rows_of(table.begin_snapshot())[0]) == 0


def test_counts_of_admission_are_those_of_the_boundary_not_of_what_was_planned_ahead(tmp_path: Path) -> None:
    admission = AdmissionOptions(name="count", count=3)
    plain = build(Case(tiers="whole", depth=0), tmp_path, admission=admission)
    ahead = build(Case(tiers="host"), tmp_path, admission=admission)
    given = batches()
    for step, ids in enumerate(ahead.prefetch(given, 4)):
        for table in (plain, ahead):
            loss_of(table(ids), step).backward()
            table.step(rate(step))
        if step == 9:
            time.sleep(0.05)
            one, other = (rows_of(table.begin_snapshot(), "admission") for table in (plain, ahead))
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1], other[1])
            break
    for table in (plain, ahead):
        again = build(Case(tiers="file", depth=0), tmp_path / str(id(table)), admission=admission)
        again.load_rows(table.begin_snapshot())
        outputs = [again(ids).detach() for ids in given[10:]]
        assert all(
            torch.equal(bits(got), bits(plain(ids).detach())) for got, ids in zip(outputs, given[10:], strict=True)
        )
        again.close()


def test_rows_are_not_replaced_under_lookups_that_need_them(tmp_path: Path) -> None:
    with build(Case(tiers="host"), tmp_path) as table:
        answer = table(batches()[0])
        with pytest.raises(ConfigError, match="lookups are open"):
            table.load_rows(table.begin_snapshot())
        del answer


def test_a_closed_snapshot_costs_nothing_more(tmp_path: Path) -> None:
    with build(Case(tiers="host"), tmp_path) as table:
        steps(table, Case(), 0, 5)
        source: TableSnapshot = table.begin_snapshot()
        assert table.rows.changes.observers
        source.close()
        source.close()
        assert not table.rows.changes.observers
