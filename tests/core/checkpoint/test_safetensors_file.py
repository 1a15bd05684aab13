"""Files that ranks write side by side: a quick checksum that notices damage, and the step that they are of."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.safetensors_file import Crc32, TensorFile, crc32, step_of, write, write_shard
from kitforge.foundation.errors import CheckpointError

TENSORS = [("large", torch.arange(400_000.0)), ("odd", torch.arange(7, dtype=torch.uint8)), ("none", torch.ones(0))]


def test_the_checksum_of_a_file_is_that_of_what_was_written(tmp_path: Path) -> None:
    entry = write_shard(tmp_path / "share", TENSORS, 3)
    assert entry.crc32 == crc32(tmp_path / "share")
    assert (entry.sha256, entry.bytes) == ("", (tmp_path / "share").stat().st_size)


def test_tensors_of_a_share_come_back(tmp_path: Path) -> None:
    write_shard(tmp_path / "share", TENSORS, 3)
    file = TensorFile(tmp_path / "share", CheckpointError)
    assert all(file.tensor(name).equal(tensor) for name, tensor in TENSORS)


def test_a_share_says_of_which_step_it_is_and_other_files_do_not(tmp_path: Path) -> None:
    write_shard(tmp_path / "share", TENSORS, 3)
    write(tmp_path / "alone", TENSORS)
    (tmp_path / "broken").write_bytes(b"no")
    assert [step_of(tmp_path / name) for name in ("share", "alone", "broken")] == [3, None, None]


def test_a_large_share_is_sent_to_the_disk_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(safetensors_file, "WRITE_BYTES", 2**19)
    monkeypatch.setattr(safetensors_file, "_send", lambda file, start: sent.append(file.tell() - start))
    entry = write_shard(tmp_path / "share", TENSORS, 3)
    assert sum(sent) == entry.bytes
    assert len(sent) > 1


@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=5), block=st.integers(1, 20))
def test_the_checksum_does_not_depend_on_how_bytes_come(data: bytes, cuts: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_file, "READ_BYTES", block)
        whole, divided = Crc32(), Crc32()
        whole.update(data)
        places = [0, *sorted(cuts), len(data)]
        for start, end in zip(places, places[1:], strict=False):
            divided.update(data[start : max(start, end)])
        assert divided.hexdigest() == whole.hexdigest()


@pytest.mark.parametrize("place", [0, 5, 2**20 - 1, 2**20, 2**20 + 17])
def test_one_flipped_bit_is_noticed(place: int) -> None:
    data = bytearray(2**20 + 18)
    checksums = []
    for flip in (0, 1):
        data[place] ^= flip
        digest = Crc32()
        digest.update(bytes(data))
        checksums.append(digest.hexdigest())
    assert checksums[0] != checksums[1]


def test_zeros_at_the_end_are_noticed() -> None:
    checksums = set()
    for length in (0, 1, 100, 2**20, 2**20 + 1):
        digest = Crc32()
        digest.update(bytes(length))
        checksums.add(digest.hexdigest())
    assert len(checksums) == 5
