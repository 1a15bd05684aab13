"""Saving: the instant is frozen, steps come and go by rule, and failures leave the last good step."""

import resource
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint import safetensors_file, snapshot
from kitforge.core.checkpoint import save as save_module
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import KEEP, step_folder, steps
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.foundation.errors import CheckpointError, ConfigError
from tests.core.checkpoint import example
from tests.patience import PATIENCE


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing reaches the disk before the block ends."""
    gate = threading.Event()
    write = safetensors_file.write

    def wait_and_write(path: Path, tensors: list[tuple[str, Tensor]]) -> object:
        gate.wait(timeout=PATIENCE)
        return write(path, tensors)

    monkeypatch.setattr(safetensors_file, "write", wait_and_write)
    try:
        yield
    finally:
        gate.set()


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """The system refuses to let any file grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def save_then_train_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(1000)
    with closing(CheckpointWriter(root)) as writer, held_writes(monkeypatch):
        writer.save(1, model=[("weight", weight)], optimizer=[], state={})
        weight.add_(1)
    assert open_checkpoint(step_folder(root, 1)).tensor("weight").eq(1).all()


def test_training_goes_on_while_the_file_gets_the_old_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_then_train_on(tmp_path, monkeypatch)


def test_a_snapshot_that_does_not_copy_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_buffer", lambda _, source: source)
    with pytest.raises(AssertionError):
        save_then_train_on(tmp_path, monkeypatch)


def test_the_next_save_waits_until_the_buffers_are_written(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        for step in range(6):
            example.save(writer, step, size=20_000)
    for step in steps(tmp_path):
        example.assert_whole(open_checkpoint(step_folder(tmp_path, step)), size=20_000)


def test_state_is_frozen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"seen": [1]}
    with closing(CheckpointWriter(tmp_path)) as writer, held_writes(monkeypatch):
        writer.save(1, model=[("weight", torch.ones(1))], optimizer=[], state=state)
        state["seen"].append(2)
    assert open_checkpoint(step_folder(tmp_path, 1)).state == {"seen": [1]}


def test_the_last_steps_are_kept(tmp_path: Path) -> None:
    assert steps(example.saved(tmp_path, 1, 2, 10, 11, keep_last=2)) == [10, 11]


def test_protected_steps_stay_whoever_protects_them(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        example.save(writer, 1, keep=True)
        example.save(writer, 2)
        writer.pin(2)
        example.save(writer, 3)
        writer.wait()
        writer.pin(3)
        example.save(writer, 4)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_later_process_keeps_protected_steps(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        example.save(writer, 1, keep=True)
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        example.save(writer, 1)
        example.save(writer, 2)
    assert steps(tmp_path) == [1, 2]


def test_a_released_step_goes(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        for step in (1, 2):
            example.save(writer, step, keep=True)
            writer.unpin(step)
        example.save(writer, 3)
    assert steps(tmp_path) == [3]


def is_kept(root: Path, step: int) -> bool:
    return (step_folder(root, step) / KEEP).exists()


def test_a_released_step_is_protected_until_the_one_being_written_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        example.save(writer, 1, keep=True)
        writer.wait()
        with held_writes(monkeypatch):
            example.save(writer, 2, keep=True)
            writer.unpin(1)
            assert is_kept(tmp_path, 1)
        writer.wait()
        assert steps(tmp_path) == [2]
        # Released with nothing to wait for, a step has to go with the next one.
        writer.unpin(2)
        assert not is_kept(tmp_path, 2)


def test_a_released_step_stays_protected_when_the_one_being_written_fails(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        example.save(writer, 1, keep=True)
        writer.wait()
        with full_disk(100_000):
            example.save(writer, 2, size=100_000, keep=True)
            writer.unpin(1)
            with pytest.raises(CheckpointError, match="step_2 could not"):
                writer.wait()
        for step in (3, 4):
            example.save(writer, step)
    assert steps(tmp_path) == [1, 4]


def test_protecting_a_step_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer, pytest.raises(CheckpointError, match="no step 5"):
        writer.pin(5)


def test_no_step_is_deleted_before_the_new_one_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        example.save(writer, 1)
        writer.wait()
        with held_writes(monkeypatch):
            example.save(writer, 2)
            assert steps(tmp_path) == [1]
        writer.wait()
        assert steps(tmp_path) == [2]


def test_going_back_does_not_delete_what_was_just_saved(tmp_path: Path) -> None:
    example.saved(tmp_path, 1, 8, 9)
    example.saved(tmp_path, 2, 3, keep_last=1)
    assert steps(tmp_path) == [3, 8, 9]


def test_a_step_saved_again_is_replaced(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.save(1, model=[("weight", torch.zeros(3))], optimizer=[], state={})
        writer.save(1, model=[("weight", torch.ones(3))], optimizer=[], state={})
    assert open_checkpoint(step_folder(tmp_path, 1)).tensor("weight").eq(1).all()
    assert hidden(tmp_path) == []


def test_a_synchronous_save_is_published_when_it_returns(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path, asynchronous=False)) as writer:
        example.save(writer, 1)
        assert steps(tmp_path) == [1]


def test_a_full_disk_costs_only_the_new_step(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        example.save(writer, 1)
        writer.wait()
        with full_disk(100_000):
            example.save(writer, 2, size=100_000)
            with pytest.raises(CheckpointError) as caught:
                writer.wait()
        assert hidden(tmp_path) == []
        assert steps(tmp_path) == [1]
        example.assert_whole(open_checkpoint(step_folder(tmp_path, 1)))
        example.save(writer, 3)
    assert steps(tmp_path) == [3]
    message = str(caught.value)
    # Two float32 tensors of 100,000 x 4, five int64, one int64, and the state.
    assert "step_2 could not be written" in message
    assert "3,200,1" in message
    assert "bytes free" in message
    assert "last good checkpoint is" in message


def test_a_failure_in_the_background_is_told_at_the_next_save_once(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        with full_disk(1000):
            example.save(writer, 1, size=100_000)
            with pytest.raises(CheckpointError, match="step_1 could not"):
                example.save(writer, 2)
        example.save(writer, 2)
    assert steps(tmp_path) == [2]


def test_an_old_step_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(folder: Path) -> Path:
        raise PermissionError(13, "not yours", str(folder))

    monkeypatch.setattr(save_module, "set_aside", refuse)
    example.saved(tmp_path, 1, 2, keep_last=1)
    assert steps(tmp_path) == [1, 2]
    assert "not yours" in caplog.text


def test_a_root_that_cannot_be_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    writer = CheckpointWriter(tmp_path / "file" / "checkpoints", asynchronous=False)
    with closing(writer), pytest.raises(CheckpointError, match="could not be written"):
        example.save(writer, 1)


def test_keeping_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last"):
        CheckpointWriter(tmp_path, keep_last=0)
