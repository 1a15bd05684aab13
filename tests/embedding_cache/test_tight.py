"""The tightest caches, in which a fault shows that passes where there is room to spare: each has the bits of none."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.tiers.file import FileStore
from tests.embedding_cache import training
from tests.embedding_cache.training import Case, assert_same_bits, build, outcome, train, uncached

TIGHT = Case(optimizer="lazy_adam", depth=2, tiers="file", spare=0.0)
# Rows that are zero, rows that change places with those of a host tier, and lookups that are planned well ahead.
CASES = [TIGHT, replace(TIGHT, optimizer="ftrl"), replace(TIGHT, tiers="host"), replace(TIGHT, spare=2.0)]


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
        # Where there is no room, planning waits for the training in turn.
        latest = time.monotonic() + 0.05
        while num_planned < min(num_computed + 1, training.NUM_STEPS) and time.monotonic() < latest:
            time.sleep(0.001)
        return forward(*arguments)

    patch.setattr(CacheManager, "ensure_resident", counting)
    patch.setattr(training.CachedEmbedding, "forward", late)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_tightest_caches_have_the_bits_of_none(case: Case, tmp_path: Path) -> None:
    with build(case, tmp_path) as table:
        assert_same_bits(outcome(table, train(table, case)), uncached(case.optimizer))


def slow_file(patch: pytest.MonkeyPatch) -> None:
    """A row may be on its way there when it is wanted again."""
    write = FileStore.write

    def slow_write(store: FileStore, keys: Tensor, rows: Tensor) -> None:
        time.sleep(0.003)
        write(store, keys, rows)

    patch.setattr(FileStore, "write", slow_write)


@pytest.mark.parametrize("slowed", [slow_file, training_falls_behind])
def test_so_they_have_where_the_file_or_the_training_falls_behind(
    slowed: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch)
    with build(TIGHT, tmp_path) as table:
        assert_same_bits(outcome(table, train(table, TIGHT)), uncached(TIGHT.optimizer))


def test_rows_that_change_places_keep_their_marks(tmp_path: Path) -> None:
    """Rows that are looked at in between are on the device and unchanged, which rows of the training never are."""
    case, outputs = replace(TIGHT, tiers="host_file", depth=0), []
    with build(case, tmp_path) as table:
        for step, ids in enumerate(training.batches()):
            outputs.append(table(ids))
            training.loss_of(outputs[-1], step).backward()
            table.step(training.rate(step))
            with torch.no_grad():
                for other in training.batches()[5 * step % 7 :: 7]:
                    table(other)
        assert_same_bits(outcome(table, outputs), uncached(case.optimizer))


def test_an_exception_leaves_no_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = training.batches()
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

        with monkeypatch.context() as patch:
            patch.setattr(training.TwoLevelStore, "fetch", failing)
            with pytest.raises(OSError, match="the disk is gone"):
                table(torch.arange(8).view(2, 4))
        assert table.rows.pins.open_lookups() == []
