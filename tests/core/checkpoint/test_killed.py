"""SIGKILL during a save, wherever it strikes, costs nothing that was published."""

import os
from pathlib import Path

import pytest

from kitforge.core.checkpoint.load import newest, open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.foundation.errors import CheckpointError
from tests.core.checkpoint import example, killed, rows


def refuse(damage: CheckpointError) -> None:
    raise damage


def roots(place: Path) -> list[Path]:
    """What processes left that died below `place`, in order."""
    return sorted(place.iterdir(), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def killed_at_every_operation(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("operations")
    killed.die_at_every_operation(killed.save_four, place)
    return roots(place)


@pytest.mark.slow
def test_the_newest_is_whole_after_a_kill_at_any_file_operation(killed_at_every_operation: list[Path]) -> None:
    # The last child ran to its end, so every operation was struck once.
    assert len(killed_at_every_operation) > 60
    reached = 0
    for root in killed_at_every_operation:
        checkpoint = newest(root, on_damaged=refuse)
        if checkpoint:
            example.assert_whole(checkpoint)
        # A process that lived longer never leaves an older newest step.
        assert (checkpoint.step if checkpoint else 0) >= reached
        reached = checkpoint.step if checkpoint else 0
    assert reached == 3


@pytest.mark.slow
def test_every_published_step_is_whole_after_a_kill_at_any_file_operation(
    killed_at_every_operation: list[Path],
) -> None:
    for root in killed_at_every_operation:
        for step in steps(root):
            example.assert_whole(open_checkpoint(step_folder(root, step)))


@pytest.mark.slow
def test_a_new_writer_sweeps_up_after_a_kill_at_any_file_operation(killed_at_every_operation: list[Path]) -> None:
    for root in killed_at_every_operation:
        CheckpointWriter(root).close()
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
        assert all(not list((root / f"step_{step}").glob(".*")) for step in steps(root))


@pytest.mark.slow
@pytest.mark.prove
def test_rows_of_tables_are_whole_after_a_kill_at_any_file_operation(tmp_path: Path) -> None:
    stride = 1 if "KITFORGE_PROVE" in os.environ else 4
    killed.die_at_every_operation(killed.save_tables, tmp_path, stride)
    places = roots(tmp_path)
    assert len(places) * stride > 100
    reached = 0
    for root in places:
        for step in steps(root):
            table = rows.DictTable()
            rows.loaded(root, step, table)
            assert table.rows == killed.table_of(step).rows
        found = newest(root, on_damaged=refuse)
        assert (found.step if found else 0) >= reached
        reached = found.step if found else 0
        CheckpointWriter(root).close()
        assert [path.name for path in root.iterdir() if path.name.startswith(".")] == []
    assert reached == 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_newest_is_whole_after_a_kill_at_a_random_instant(tmp_path: Path, seed: int) -> None:
    killed.die_at_random_instants(tmp_path, seed, count=5)
    for root in roots(tmp_path):
        checkpoint = newest(root, on_damaged=refuse)
        assert checkpoint is not None
        example.assert_whole(checkpoint, size=killed.LARGE)
