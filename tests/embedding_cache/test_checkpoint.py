"""Cached tables in checkpoints: of one step over all tiers while training goes on, and read into any tiers."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.optim.table_protocols import RowSource
from kitforge.embedding_cache import snapshot
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.changes import ChangeTracker
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions
from kitforge.embedding_cache.snapshot import TableSnapshot
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.write_behind import WriteBehindStore
from tests.embedding_cache import training
from tests.embedding_cache.training import NUM_STEPS, Case, Outcome

WHOLE = "KITFORGE_PROVE" in os.environ
SAVED = (4, 9, 10, 17)
CASES = [
    Case(optimizer="adagrad", depth=2, tiers="host_file"),
    Case(optimizer="adam", depth=1, tiers="file", policy="lfu"),
    Case(optimizer="ftrl", depth=0, tiers="host"),
    Case(optimizer="lazy_adam", depth=4, tiers="host_file", policy="lookahead", spare=0.5),
]
PRODUCT = [
    Case(optimizer=optimizer, depth=depth, tiers=tiers, policy=policy)
    for optimizer in training.OPTIMIZERS
    for depth in training.DEPTHS
    for tiers in training.TIERS
    for policy in training.POLICIES
]


@pytest.fixture(autouse=True)
def slow_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot is read in little pieces, between which there is time for steps."""
    chunk = TableSnapshot._chunk

    def slowly(self: TableSnapshot, keys: Tensor) -> Any:
        time.sleep(0.002)
        return chunk(self, keys)

    monkeypatch.setattr(snapshot, "CHUNK_ROWS", 16)
    monkeypatch.setattr(TableSnapshot, "_chunk", slowly)


def train_from(
    table: CachedEmbedding, case: Case, start: int, after_step: Callable[[int], None] = lambda _: None
) -> list[Tensor]:
    """The outputs of the steps from `start` on."""
    outputs = []
    for step, ids in enumerate(table.prefetch(training.batches()[start:], case.depth), start=start):
        answer = table(ids)
        training.loss_of(answer, step).backward()
        table.step(training.rate(step))
        outputs.append(answer.detach().clone())
        after_step(step + 1)
    return outputs


def saved_run(root: Path, case: Case, num_deltas: int = 2) -> Outcome:
    """A training in which some steps are saved while it goes on."""
    with training.build(case, root / "tier") as table, closing(CheckpointWriter(root, keep_last=99)) as writer:
        writer.attach({"table": table}, num_deltas=num_deltas)

        def save(step: int) -> None:
            if step in SAVED:
                writer.save(step, model=[], optimizer=[], state={})

        return training.outcome(table, train_from(table, case, 0, save))


def assert_goes_on(root: Path, folder: Path, case: Case, step: int) -> None:
    """A table in other tiers that begins with the saved step ends as one that never stopped."""
    expected = training.uncached(case.optimizer)
    with training.build(case, folder) as table:
        open_checkpoint(root / f"step_{step}").load_tables({"table": table})
        outputs = train_from(table, case, step)
        got = training.outcome(table, outputs)
    training.assert_same_bits(got, replace(expected, outputs=expected.outputs[step:]))


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("case", PRODUCT if WHOLE else CASES, ids=str)
def test_any_tiers_go_on_from_any_step_that_was_saved_during_training(tmp_path: Path, case: Case) -> None:
    training.assert_same_bits(saved_run(tmp_path / "run", case), training.uncached(case.optimizer))
    others = ("whole", "file", "host", "host_file")
    for number, step in enumerate(SAVED):
        other = replace(case, tiers=others[number], depth=(case.depth + number) % 3)
        assert_goes_on(tmp_path / "run", tmp_path / f"tier_{step}", other, step)


def no_copy_before_a_change(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChangeTracker, "notify", lambda *_: None)


def only_what_is_above(patch: pytest.MonkeyPatch) -> None:
    """What lies in the file is left out."""
    patch.setattr(WriteBehindStore, "keys", lambda *_: iter(()))


def clean_rows_are_taken_for_unchanged(patch: pytest.MonkeyPatch) -> None:
    """A delta that forgets what left the device tier since."""
    wanted = TableSnapshot._is_wanted

    def fewer(self: TableSnapshot, rows: Tensor) -> Tensor:
        if self.since is None:
            return wanted(self, rows)
        return wanted(self, rows) & (torch.arange(len(rows)) % 7 > 0)

    patch.setattr(TableSnapshot, "_is_wanted", fewer)


def no_rates(patch: pytest.MonkeyPatch) -> None:
    load = RowCache.insert_rows

    def without(self: RowCache, *arguments: Any) -> None:
        self.rates.zero_()
        load(self, *arguments)

    patch.setattr(RowCache, "insert_rows", without)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (no_copy_before_a_change, CASES[0]),
        (only_what_is_above, CASES[1]),
        (clean_rows_are_taken_for_unchanged, CASES[0]),
        (no_rates, CASES[1]),
    ],
)
def test_a_planted_fault_changes_what_goes_on(
    tmp_path: Path, fault: Callable[[pytest.MonkeyPatch], None], case: Case
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        saved_run(tmp_path / "run", case)
        with pytest.raises(AssertionError):
            for step in SAVED:
                assert_goes_on(tmp_path / "run", tmp_path / f"tier_{step}", case, step)


def rows_by_id(source: RowSource, part: str = "rows") -> dict[int, list[int]]:
    ids, rows = training.rows_of(source, part)
    bits = rows.contiguous().view(torch.uint8).tolist() if len(ids) else []
    return dict(zip(ids.tolist(), bits, strict=True))


@pytest.mark.slow
def test_rows_that_are_forgotten_and_counts_of_admission_are_in_every_step(tmp_path: Path) -> None:
    case = Case(optimizer="adagrad", depth=2)
    options = {
        "admission": AdmissionOptions(name="count", count=2),
        "expiry": ExpiryOptions(every=3, max_age=4),
    }
    wanted = {}
    with (
        training.build(case, tmp_path / "tier", **options) as table,
        closing(CheckpointWriter(tmp_path / "run", keep_last=99)) as writer,
    ):
        writer.attach({"table": table}, num_deltas=5)

        def save(step: int) -> None:
            writer.save(step, model=[], optimizer=[], state={})
            # Read at once, and whole: what the files must amount to.
            snapshot = table.begin_snapshot()
            wanted[step] = {part: rows_by_id(snapshot, part) for part in snapshot.parts}

        train_from(table, case, 0, save)
    went_away = 0
    for step in range(1, NUM_STEPS + 1):
        checkpoint = open_checkpoint(tmp_path / "run" / f"step_{step}")
        stored = checkpoint.table("table")
        assert {part: rows_by_id(stored, part) for part in wanted[step]} == wanted[step]
        went_away += sum(len(ids) for ids in next(stored.layers())[1])
        if step % 5 == 0:
            with training.build(case, tmp_path / f"tier_{step}", **options) as other:
                checkpoint.load_tables({"table": other})
                again = other.begin_snapshot()
                assert {part: rows_by_id(again, part) for part in again.parts} == wanted[step]
    assert went_away


def test_saving_costs_no_copy_of_the_table(tmp_path: Path) -> None:
    """Nothing is copied but rows that change before they have been read."""
    case = Case(optimizer="adagrad", depth=0)
    with training.build(case, tmp_path / "tier") as table:
        train_from(table, case, 0)
        snapshot = table.begin_snapshot()
        assert len(snapshot._copies.positions) == 0
        # The last batch has no ids.
        train_from(table, case, NUM_STEPS - 2)
        assert 0 < len(snapshot._copies.positions) <= len(torch.unique(training.batches()[-2]))
        snapshot.close()
        assert len(snapshot._copies.positions) == 0
        assert not table.rows.changes.observers
