"""SIGKILL during a save, wherever it strikes, costs nothing that was published."""

import subprocess
import sys
from pathlib import Path

import pytest

from kitforge.core.checkpoint.layout import step_folder, steps
from kitforge.core.checkpoint.load import newest, open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.foundation.errors import CheckpointError
from tests.core.checkpoint import example, killed

CHECKOUT = Path(__file__).parents[3]


def refuse(damage: CheckpointError) -> None:
    raise damage


def roots(place: Path, *arguments: str) -> list[Path]:
    """Let processes die below `place`; returns their roots in order."""
    command = [sys.executable, "-m", "tests.core.checkpoint.killed", arguments[0], str(place), *arguments[1:]]
    subprocess.run(command, check=True, cwd=CHECKOUT, timeout=300)
    return sorted(place.iterdir(), key=lambda path: int(path.name))


@pytest.fixture(scope="module")
def killed_at_every_operation(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return roots(tmp_path_factory.mktemp("operations"), "operation")


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
@pytest.mark.parametrize("seed", range(2))
def test_the_newest_is_whole_after_a_kill_at_a_random_instant(tmp_path: Path, seed: int) -> None:
    for root in roots(tmp_path, "instant", str(seed), "5"):
        checkpoint = newest(root, on_damaged=refuse)
        assert checkpoint is not None
        example.assert_whole(checkpoint, size=killed.LARGE)
