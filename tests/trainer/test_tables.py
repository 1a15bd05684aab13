"""Runs with tables of rows: resumed as if they had never stopped, whatever the checkpoint they go on from."""

import os
from pathlib import Path
from typing import Any

import pytest

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.table_reader import StoredTable
from kitforge.core.optim.table_protocols import RowSource
from kitforge.foundation.errors import CheckpointError, ConfigError, ModelError
from kitforge.verify.run_equality import tables_in
from tests.sharded_table import ShardedTable
from tests.trainer import clicks, tiny

WHOLE = "KITFORGE_PROVE" in os.environ


@pytest.mark.slow
@pytest.mark.parametrize("incremental_checkpoints", [0, 3])
@pytest.mark.parametrize("kind", clicks.KINDS)
def test_a_resumed_run_equals_one_that_never_stopped(tmp_path: Path, kind: str, incremental_checkpoints: int) -> None:
    table = clicks.KINDS[kind]
    clicks.run(tmp_path / "whole", table, incremental_checkpoints=incremental_checkpoints)
    for step in (2, 6):
        folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / f"from_{step}", step)
        clicks.run(folder, table, incremental_checkpoints=incremental_checkpoints, resume="auto")
        clicks.assert_same(folder, tmp_path / "whole")


def forget_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the embedding comes back, as where a table is saved as weights."""
    chunks = StoredTable.chunks

    def bare(self: StoredTable, part: str = "rows") -> Any:
        for ids, rows in chunks(self, part):
            rows = rows.clone()
            rows[:, clicks.DIM :] = 0
            yield ids, rows

    monkeypatch.setattr(StoredTable, "chunks", bare)


def forget_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense Adam moves rows that rest by the rates of all steps."""
    load = ShardedTable.load_rows

    def without(self: ShardedTable, source: RowSource) -> None:
        load(self, source)
        self._rates = [0.05 for _ in self._rates]

    monkeypatch.setattr(ShardedTable, "load_rows", without)


def forget_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ShardedTable.load_rows

    def without(self: ShardedTable, source: RowSource) -> None:
        load(self, source)
        self._rates = []

    monkeypatch.setattr(ShardedTable, "load_rows", without)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (forget_the_state, "adagrad"),
        (forget_the_state, "ftrl"),
        (forget_the_rates, "dense adam by catch-up"),
        (forget_the_steps, "dense adam by catch-up"),
    ],
)
def test_what_a_resume_forgets_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any, kind: str
) -> None:
    clicks.run(tmp_path / "whole", clicks.KINDS[kind])
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "from_2", 2)
    fault(monkeypatch)
    # Either the run itself refuses, or what it leaves is not the same.
    with pytest.raises((AssertionError, ModelError)):
        clicks.run(folder, clicks.KINDS[kind], resume="auto")
        monkeypatch.undo()
        clicks.assert_same(folder, tmp_path / "whole")


@pytest.mark.slow
def test_deltas_leave_what_whole_checkpoints_leave(tmp_path: Path) -> None:
    for name, number in (("whole", 0), ("deltas", 3)):
        clicks.run(tmp_path / name, clicks.KINDS["adagrad"], incremental_checkpoints=number, checkpoint_every=1)
    bases = [
        open_checkpoint(tmp_path / "deltas" / "checkpoints" / f"step_{step}").manifest.parent for step in range(1, 9)
    ]
    assert [base and base.step for base in bases] == [None, 1, 2, 3, None, 5, 6, 7]
    for step in range(1, 9):
        first, second = (
            tables_in(open_checkpoint(tmp_path / name / "checkpoints" / f"step_{step}")) for name in ("whole", "deltas")
        )
        assert first == second


def test_a_damaged_base_sends_the_run_back_to_what_does_not_need_it(tmp_path: Path) -> None:
    clicks.run(tmp_path / "whole", clicks.KINDS["adagrad"], incremental_checkpoints=1, checkpoint_every=2)
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "from", 8)
    # Steps 2 and 6 are whole; 4 builds on 2, and 8 on 6.
    path = next((folder / "checkpoints" / "step_6").glob("table-clicks-rows-*"))
    path.write_bytes(path.read_bytes()[:-1])
    clicks.run(folder, clicks.KINDS["adagrad"], incremental_checkpoints=1, checkpoint_every=2, resume="auto")
    assert "goes on after step 4" in tiny.events(folder, "resume")[0]
    clicks.assert_same(folder, tmp_path / "whole")


def test_a_table_of_another_kind_is_refused_with_words(tmp_path: Path) -> None:
    clicks.run(tmp_path / "run", clicks.KINDS["adagrad"], max_steps=2)
    with pytest.raises(CheckpointError, match=r"table 'clicks'[\s\S]*another table[\s\S]*adagrad[\s\S]*ftrl"):
        clicks.run(tmp_path / "run", clicks.KINDS["ftrl"], max_steps=4, resume="auto")


def test_a_number_of_deltas_below_zero_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="incremental_checkpoints"):
        clicks.begin(tmp_path, clicks.KINDS["adagrad"], incremental_checkpoints=-1)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("seed", range(10 if WHOLE else 1))
@pytest.mark.parametrize("kind", clicks.KINDS if WHOLE else ["dense adam by catch-up"])
def test_a_run_that_was_killed_again_and_again_equals_one_that_was_not(tmp_path: Path, kind: str, seed: int) -> None:
    folder = tmp_path / "killed"
    assert clicks.kill_again_and_again(folder, kind, seed) >= 1
    clicks.assert_same(folder, tmp_path / "whole")
