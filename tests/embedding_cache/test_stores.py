"""Every tier keeps the contract of `RowStore`, with a dict as its oracle; and what is special about each."""

import os
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.file import MIN_GROWTH_BYTES, FileStore
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.embedding_cache.tiers.two_level import TwoLevelStore
from kitforge.embedding_cache.tiers.write_behind import WriteBehindStore
from kitforge.foundation.errors import ConfigError, TrainingError
from tests.patience import PATIENCE

WIDTH = 3
KEYS = (-(2**63), 2**63 - 1, 0, -1, 1, 2**32)


def file_store(folder: Path, name: str = "rows", capacity: int | None = None) -> FileStore:
    return FileStore(folder, name, WIDTH, TABLE_REFERENCE, capacity)


def host_store() -> HostStore:
    return HostStore(WIDTH, TABLE_REFERENCE)


STORES: dict[str, Callable[[Path], RowStore]] = {
    "host": lambda _: host_store(),
    "file": file_store,
    "write_behind": lambda _: WriteBehindStore(host_store()),
    "bounded": lambda folder: TwoLevelStore(file_store(folder, capacity=2), host_store()),
    "all": lambda folder: WriteBehindStore(TwoLevelStore(file_store(folder, capacity=3), host_store())),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RowStore]:
    with STORES[request.param](tmp_path) as store:
        yield store


def rows_for(keys: Tensor, value: float) -> Tensor:
    return torch.full((len(keys), WIDTH), value) + torch.arange(len(keys)).unsqueeze(1)


def contents(store: RowStore) -> dict[int, list[float]]:
    return {key: row for keys, rows in store.scan(2) for key, row in zip(keys.tolist(), rows.tolist(), strict=True)}


def read(store: RowStore, keys: Tensor) -> dict[int, list[float]]:
    """What a call gives; a row that is not found must be left as it was."""
    out = torch.full((len(keys), WIDTH), torch.nan)
    found = store.read(keys, out)
    assert bool(out[~found].isnan().all())
    return {int(key): row.tolist() for key, row, here in zip(keys, out, found, strict=True) if here}


keys_of = st.lists(st.sampled_from(KEYS), unique=True, max_size=len(KEYS))
calls = st.lists(st.tuples(st.sampled_from(["write", "read", "delete"]), keys_of), max_size=14)


@pytest.mark.parametrize("name", STORES)
@settings(max_examples=25)
@given(calls=calls)
def test_a_store_is_a_dict(
    name: str, calls: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    oracle: dict[int, list[float]] = {}
    with STORES[name](tmp_path_factory.mktemp("store")) as store:
        for number, (call, given_keys) in enumerate(calls):
            keys = torch.tensor(given_keys, dtype=torch.int64)
            here = {key: oracle[key] for key in given_keys if key in oracle}
            if call == "write":
                # Zeros are rows like any others.
                rows = rows_for(keys, float(number)) * (number % 3)
                store.write(keys, rows)
                oracle |= dict(zip(given_keys, rows.tolist(), strict=True))
                rows.fill_(torch.nan)
            elif call == "delete":
                store.delete(keys)
                for key in here:
                    del oracle[key]
            else:
                assert read(store, keys) == here
        assert contents(store) == oracle
        assert len(store) == len(oracle)
        assert {key for keys in store.keys(2) for key in keys.tolist()} == set(oracle)


@pytest.mark.slow
def test_a_store_grows(store: RowStore) -> None:
    keys = torch.arange(5000) * 7 - 100
    for part in torch.split(keys, 900):
        store.write(part, torch.stack([part.float()] * WIDTH, 1))
    out = torch.empty(len(keys), WIDTH)
    assert bool(store.read(keys.flip(0), out).all())
    assert torch.equal(out[:, 0], keys.flip(0).float())


def test_cold_rows_come_back_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with file_store(tmp_path) as store:
        keys = torch.arange(4000)
        store.write(keys, torch.randn(4000, WIDTH, generator=torch.Generator().manual_seed(0)))
        warm, cold = torch.empty(4000, WIDTH), torch.full((4000, WIDTH), torch.nan)
        store.read(keys, warm)
        monkeypatch.setattr(FileStore, "_is_cached", lambda *_: False)
        order = torch.randperm(4000, generator=torch.Generator().manual_seed(1))
        assert bool(store.read(order, cold).all())
        assert torch.equal(cold, warm[order])


@pytest.mark.parametrize(("error", "is_cached"), [(None, True), (BlockingIOError, False), (OSError, True)])
def test_rows_in_the_page_cache_are_told_from_cold_ones(
    error: type[OSError] | None, is_cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_store(tmp_path) as store:
        store.write(torch.arange(4000), torch.zeros(4000, WIDTH))
        preadv = os.preadv

        def reading(file: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
            if flags and error is not None:
                raise error
            return preadv(file, buffers, offset)

        monkeypatch.setattr(os, "preadv", reading)
        assert store._is_cached(torch.arange(100)) == is_cached


def test_rows_are_counted_by_tier_and_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WriteBehindStore(TwoLevelStore(file_store(tmp_path, capacity=3), host_store()))
    keys = torch.arange(8)
    store.write(keys, torch.ones(8, store.width))
    # A row that comes back to the file leaves its old copy below.
    store.write(keys[:1], torch.zeros(1, store.width))
    store.drain()
    for each in (FileStore, HostStore):
        for name in ("scan", "read", "keys"):
            monkeypatch.setattr(each, name, None)
    assert store.num_rows("file") == {"file": 3, "remote": 6}
    monkeypatch.undo()
    assert len(store) == 8
    store.close()


def test_a_full_disk_is_said_and_loses_nothing(tmp_path: Path) -> None:
    with file_store(tmp_path) as store:
        store.write(torch.arange(10), torch.ones(10, WIDTH))
        many = torch.arange(100, 100 + MIN_GROWTH_BYTES // 4)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * MIN_GROWTH_BYTES, limits[1]))
        try:
            with pytest.raises(TrainingError, match=r"(?s)no room.*cache.path"):
                store.write(many, torch.zeros(len(many), WIDTH))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(store) == 10
        store.write(many, torch.zeros(len(many), WIDTH))
        assert len(store) == 10 + len(many)


def test_tables_of_one_name_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    key = torch.tensor([7])
    with file_store(tmp_path) as one, file_store(tmp_path) as other:
        for store, value in ((one, 1.0), (other, 2.0)):
            store.write(key, torch.full((1, WIDTH), value))
        out = torch.empty(1, WIDTH)
        assert one.read(key, out).all() and (out == 1.0).all()
        assert other.read(key, out).all() and (out == 2.0).all()


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with pytest.raises(ConfigError, match=r"(?s)no folder.*taken.*cache\.path"):
            file_store(folder)


def test_rows_that_the_disk_does_not_give_back_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileStore, "_is_cached", lambda *_: False)
    keys = torch.arange(4000)
    with file_store(tmp_path) as store:
        store.write(keys, torch.ones(4000, WIDTH))
        os.ftruncate(store._file, 4 * WIDTH * 2000)
        with pytest.raises(TrainingError, match="2000 of 4000 rows"):
            store.read(keys, torch.empty(4000, WIDTH))


class Broken(RowStore):
    """A store below that fails until it is mended."""

    def __init__(self) -> None:
        self.width, self.is_broken, self.may_write = WIDTH, True, threading.Event()
        self.inner = host_store()

    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        return self.inner.read(keys, out)

    def write(self, keys: Tensor, rows: Tensor) -> None:
        self.may_write.wait(PATIENCE)
        if self.is_broken:
            raise OSError("gone")
        self.inner.write(keys, rows)

    def delete(self, keys: Tensor) -> None:
        self.inner.delete(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        return self.inner.scan(chunk)

    def __len__(self) -> int:
        return len(self.inner)


def test_what_is_on_its_way_is_read_before_what_was_there() -> None:
    below = Broken()
    below.is_broken = False
    keys = torch.arange(3)
    below.inner.write(keys, torch.zeros(3, WIDTH))
    with WriteBehindStore(below) as store:
        store.write(keys[:2], torch.ones(2, WIDTH))
        store.write(keys[1:2], torch.full((1, WIDTH), 2.0))
        assert [row[0] for row in read(store, keys).values()] == [1.0, 2.0, 0.0]
        below.may_write.set()
        store.drain()
        assert {key: row[0] for key, row in contents(below).items()} == {0: 1.0, 1: 2.0, 2: 0.0}


def test_a_writer_waits_when_too_much_is_on_its_way() -> None:
    below = Broken()
    below.is_broken = False
    with WriteBehindStore(below) as store:

        def write_many() -> None:
            for number in range(12):
                store.write(torch.tensor([number]), torch.ones(1, WIDTH))

        writer = threading.Thread(target=write_many)
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        below.may_write.set()
        writer.join(PATIENCE)
        assert len(store) == 12


def test_a_failure_below_reaches_every_later_call_and_keeps_what_waits() -> None:
    below = Broken()
    below.may_write.set()
    with WriteBehindStore(below) as store:
        store.write(torch.tensor([1]), torch.ones(1, WIDTH))
        with pytest.raises(OSError, match="gone"):
            store.drain()
        for call in (lambda: store.write(torch.tensor([2]), torch.ones(1, WIDTH)), lambda: len(store)):
            with pytest.raises(OSError, match="gone"):
                call()
        assert [batch.keys.tolist() for batch in store._pending] == [[1]]
