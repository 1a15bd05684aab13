"""Reading in order by many workers, streams that go on, and the cache: always the rows of one plain pass."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data import file_bytes
from kitforge.data.tables import column_cache, reader
from kitforge.data.tables.bad_rows import ArrowChunk, BadRow, BadRows
from kitforge.data.tables.column_cache import ColumnCache, load_table
from kitforge.data.tables.columns import (
    ColumnLayout,
    Columns,
    ColumnTable,
    KeyColumn,
    LabelColumn,
    ListColumn,
    concatenate,
)
from kitforge.data.tables.reader import blocks, read_columns
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import DataError
from tests.core.checkpoint.killed import die_at_every_operation
from tests.data.tables.reading_rows import columns_of, equal
from tests.patience import PATIENCE

LAYOUT = ColumnLayout(
    numbers=("price", "age"),
    keys=tuple(KeyColumn(name=f"k{place}") for place in range(9)),
    lists=(ListColumn(name="tags"),),
    label=LabelColumn(name="click"),
)
NUM_ROWS = 500


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_bytes, "_BLOCK_BYTES", 2000)
    random = np.random.default_rng(0)
    lines = ["click,price,age," + ",".join(column.name for column in LAYOUT.keys) + ",tags"]
    for number in range(NUM_ROWS):
        keys = [str(key) if key else "" for key in random.integers(0, 4, 9)]
        tags = " ".join(map(str, random.integers(0, 9, number % 5)))
        lines.append(f"{number % 2},{number},{random.normal():.3f},{','.join(keys)},{tags}")
    (tmp_path / "a.csv").write_text("\n".join(lines))
    return tmp_path / "a.csv"


def cached(path: Path, bad: BadRows | None = None) -> ColumnTable:
    return load_table(open_table(path), LAYOUT, path.parent / "cache", bad or BadRows(), num_workers=2)


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_the_number_of_workers_changes_nothing(path: Path, num_workers: int) -> None:
    parts = list(read_columns(open_table(path), LAYOUT, BadRows(), num_workers=num_workers))
    assert len(parts) > 5
    assert equal(concatenate(parts), columns_of(path, LAYOUT))


def test_any_rows_of_the_cache_are_those_of_the_file(path: Path) -> None:
    whole, table = columns_of(path, LAYOUT), cached(path)
    assert table.num_rows == NUM_ROWS
    rows = np.random.default_rng(1).integers(0, NUM_ROWS, 700)
    assert equal(table.rows(rows), whole.take(rows))
    assert equal(table.rows(rows[:0]), whole.take(rows[:0]))


def test_a_cache_is_built_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached(path)
    monkeypatch.setattr("kitforge.data.tables.column_cache.read_columns", lambda *_: pytest.fail("read again"))
    again = cached(path)
    assert again.fingerprint == first.fingerprint
    assert equal(again.rows(np.arange(5)), first.rows(np.arange(5)))


def test_another_file_or_another_layout_is_another_cache(path: Path) -> None:
    first = cached(path)
    other = ColumnLayout(numbers=("price",))
    assert load_table(open_table(path), other, path.parent / "cache", BadRows()).fingerprint != first.fingerprint
    path.write_text(path.read_text() + "\n1,1,1,,,,,,,,,,")
    assert cached(path).num_rows == NUM_ROWS + 1


def test_a_file_that_changes_while_it_is_read_is_refused(path: Path) -> None:
    source = open_table(path)
    parts = read_columns(source, LAYOUT, BadRows(), num_workers=1)
    next(parts)
    path.touch()
    with pytest.raises(DataError, match=r"a\.csv has changed since"):
        list(parts)
    with pytest.raises(DataError, match=r"a\.csv has changed since"):
        load_table(source, LAYOUT, path.parent / "cache", BadRows())
    assert not list((path.parent / "cache").rglob("*.bin"))


def test_a_build_that_fails_leaves_nothing_behind(path: Path) -> None:
    path.write_text(path.read_text() + "\n7,1,1,,,,,,,,,,")
    with pytest.raises(DataError, match=r"a\.csv:502 holds no label"):
        cached(path)
    assert not list((path.parent / "cache").rglob("*.bin"))
    bad = BadRows(policy="skip")
    assert cached(path, bad).num_rows == NUM_ROWS
    assert bad.total == 1


def test_a_cache_remembers_how_many_rows_were_left_out(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text(path.read_text() + "\n7,1,1,,,,,,,,,,\n1")
    first, second = BadRows(policy="skip"), BadRows(policy="skip")
    cached(path, first)
    caplog.clear()
    cached(path, second)
    assert first.counts == second.counts
    (told,) = (record.getMessage() for record in caplog.records)
    assert f"a.csv: 2 of {NUM_ROWS + 2} rows are left out" in told
    assert "holds no label in column 'click' (1)" in told and "has the wrong number of cells (1)" in told
    assert second.total == 2


def contents(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.fixture
def wanted(path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What a build that nobody stops leaves; those that follow take notes after every second chunk or so."""
    path.write_text(path.read_text().replace("\n1,", "\n7,", 20))
    cached(path, BadRows(policy="skip"))
    found = contents(path.parent / "cache")
    size = sum(len(content) for content in found.values())
    monkeypatch.setattr(column_cache, "_STRIDE", size // 10)
    return found


def test_a_build_that_is_stopped_goes_on_from_there(
    path: Path, wanted: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: list[int] = []
    parse = reader.to_columns

    def count(chunk: ArrowChunk, layout: ColumnLayout) -> tuple[Columns, list[BadRow]]:
        chunks.append(len(chunks))
        return parse(chunk, layout)

    def stop(num_rows: int) -> None:
        if num_rows > NUM_ROWS // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(reader, "to_columns", count)
    root, bad = path.parent / "stopped", BadRows(policy="skip")
    load_table(open_table(path), LAYOUT, path.parent / "whole", BadRows(policy="skip"), num_workers=1)
    num_chunks = len(chunks)
    chunks.clear()
    with pytest.raises(KeyboardInterrupt):
        load_table(open_table(path), LAYOUT, root, BadRows(policy="skip"), num_workers=1, progress=stop)
    num_parsed = len(chunks)
    chunks.clear()
    load_table(open_table(path), LAYOUT, root, bad, num_workers=1)
    assert num_chunks - num_parsed <= len(chunks) <= num_chunks - num_parsed + 3 < num_chunks
    assert contents(root) == wanted
    assert bad.total == 20


def stopped(path: Path) -> Path:
    """The folder of a build that was stopped halfway, behind its last notes."""

    def stop(num_rows: int) -> None:
        if num_rows > NUM_ROWS // 2:
            raise KeyboardInterrupt

    root = path.parent / "stopped"
    with pytest.raises(KeyboardInterrupt):
        load_table(open_table(path), LAYOUT, root, BadRows(policy="skip"), num_workers=1, progress=stop)
    with open(next(root.rglob("keys.bin")), "ab") as file:
        file.write(b"the beginning of a chunk")
    return root


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:8])])
def test_notes_about_files_that_are_gone_or_shorter_are_not_believed(
    spoil: Callable[[Path], object], path: Path, wanted: dict[str, bytes]
) -> None:
    root = stopped(path)
    spoil(next(root.rglob("values_0.bin")))
    load_table(open_table(path), LAYOUT, root, BadRows(policy="skip"))
    assert contents(root) == wanted


@pytest.mark.slow
def test_a_build_that_is_killed_at_any_file_operation_ends_with_the_same_bytes(
    path: Path, tmp_path: Path, wanted: dict[str, bytes]
) -> None:
    def build(root: Path) -> list[int]:
        told: list[int] = []
        load_table(open_table(path), LAYOUT, root, BadRows(policy="skip"), num_workers=1, progress=told.append)
        return told

    whole = build(tmp_path / "whole")
    die_at_every_operation(build, tmp_path / "killed", stride=2)
    roots = list((tmp_path / "killed").iterdir())
    assert len(roots) > 20
    assert sum(any(root.rglob("progress.json")) for root in roots) > 10
    for root in roots:
        went_on = any(root.rglob("progress.json"))
        told = build(root)
        assert told == whole[len(whole) - len(told) :]
        assert (len(told) < len(whole)) == went_on or not told
        assert contents(root) == wanted


@pytest.mark.parametrize("name", ["keys.bin", "numbers.bin", "values_0.bin", "table.json"])
def test_a_damaged_cache_says_what_to_delete(path: Path, name: str) -> None:
    cached(path)
    (found,) = (path.parent / "cache").rglob(name)
    found.write_bytes(found.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"(?s)is damaged.*delete the folder"):
        cached(path)


def test_a_cache_of_another_version_is_refused(path: Path) -> None:
    cached(path)
    (found,) = (path.parent / "cache").rglob("table.json")
    found.write_text(json.dumps({"format": 0}))
    with pytest.raises(DataError, match=r"(?s)is damaged.*format 4"):
        ColumnCache(found.parent, LAYOUT)


def test_rows_in_python_become_a_table_in_memory(tmp_path: Path) -> None:
    rows = [{"x": number, "click": number % 2} for number in range(10)]
    layout = ColumnLayout(numbers=("x",), label=LabelColumn(name="click"))
    tables = [load_table(open_table(rows), layout, tmp_path, BadRows()) for _ in range(2)]
    assert tables[0].fingerprint == tables[1].fingerprint
    assert tables[0].rows(np.array([7, 2])).numbers[:, 0].tolist() == [7, 2]
    assert not list(tmp_path.iterdir())
    other = load_table(open_table(rows[:9]), layout, tmp_path, BadRows())
    assert other.fingerprint != tables[0].fingerprint


def some_rows(count: int, sizes: list[int]) -> Iterator[Columns]:
    numbers = np.arange(count, dtype=np.float64)[:, None]
    start = 0
    for size in [*sizes, count]:
        part = numbers[start : start + size]
        start += size
        if len(part):
            empty = np.zeros((len(part), 0))
            yield Columns(numbers=part, keys=empty.astype(np.int64), absent=empty.astype(bool), lists={})


def numbers_of(parts: Iterator[Columns]) -> list[list[float]]:
    return [part.numbers[:, 0].tolist() for part in parts]


@given(st.integers(0, 60), st.lists(st.integers(0, 30), max_size=5), st.integers(1, 25))
def test_blocks_are_of_one_size_whatever_the_chunks_are(count: int, sizes: list[int], size: int) -> None:
    wanted = [float(number) for number in range(count)]
    assert numbers_of(blocks(some_rows(count, sizes), size)) == [
        wanted[begin : begin + size] for begin in range(0, len(wanted), size)
    ]


@pytest.mark.slow
def test_the_builder_waits_its_turn(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import fcntl
    import threading

    table = cached(path)
    (found,) = (path.parent / "cache").glob("*")
    (found / "table.json").rename(found / "hidden")
    with caplog.at_level(logging.INFO), open(found / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        again: list[ColumnTable] = []
        waiting = threading.Thread(target=lambda: again.append(cached(path)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        (found / "hidden").rename(found / "table.json")
        fcntl.flock(lock, fcntl.LOCK_UN)
        waiting.join(PATIENCE)
    assert again[0].fingerprint == table.fingerprint
    assert any("waiting for it" in record.getMessage() for record in caplog.records)
