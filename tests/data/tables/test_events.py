"""Events become sequences: by user, in order of time, from any kind of table, and nothing is lost without a word."""

import csv
import json
import logging
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from kitforge.data.tables import events as module
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, Columns, KeyColumn, ListColumn, concatenate
from kitforge.data.tables.events import EventColumns, sequences_of
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import TableSourceConfig, open_table
from kitforge.foundation.errors import ConfigError, DataError

EVENTS = EventColumns(user="user", item="item", time="time")
USERS = ColumnLayout(keys=(KeyColumn(name="user", kind="integer"),), lists=(ListColumn(name="item", kind="integer"),))
HISTORIES = ColumnLayout(
    numbers=("time",),
    keys=tuple(KeyColumn(name=name, kind="integer") for name in ("user", "item")),
    lists=(ListColumn(name="before", kind="integer"),),
)


def made(count: int = 3000, seed: int = 0) -> list[dict[str, int]]:
    """Events in any order, many of one user at one time."""
    random = np.random.default_rng(seed)
    drawn = zip(
        random.integers(0, 40, count), random.integers(0, 99, count), random.integers(0, 30, count), strict=True
    )
    return [{"user": int(user), "item": int(item), "time": int(time)} for user, item, time in drawn]


def expected(rows: list[dict[str, int]]) -> dict[int, list[int]]:
    """By Python's own stable sort, users by their first rows."""
    found: dict[int, list[dict[str, int]]] = defaultdict(list)
    for row in rows:
        found[row["user"]].append(row)
    return {user: [row["item"] for row in sorted(own, key=lambda row: row["time"])] for user, own in found.items()}


def columns(
    spec: Any, layout: ColumnLayout = USERS, events: EventColumns = EVENTS, bad: BadRows | None = None
) -> Columns:
    source = sequences_of(open_table(spec, TableSourceConfig()), events, [column.name for column in layout.lists])
    return concatenate(list(read_columns(source, layout, bad or BadRows(), num_workers=1)))


def sequences(found: Columns) -> dict[int, list[int]]:
    lists = next(iter(found.lists.values()))
    parts = np.split(lists.values, lists.offsets[1:-1])
    return {int(user): part.tolist() for user, part in zip(found.keys[:, 0], parts, strict=True)}


def written(folder: Path, suffix: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"events{suffix}"
    if suffix == ".parquet":
        pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if suffix == ".csv" else "\t")
            writer.writerows([list(rows[0]), *(list(row.values()) for row in rows)])
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".inter", ".parquet", ".jsonl", "rows"])
def test_events_of_any_table_become_a_row_a_user_in_order_of_time(tmp_path: Path, suffix: str) -> None:
    rows = made()
    found = sequences(columns(rows if suffix == "rows" else written(tmp_path, suffix, rows)))
    assert found == expected(rows)
    assert list(found) == list(expected(rows))  # users come by their first rows


def test_chunks_hold_whole_users(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = made()
    monkeypatch.setattr(module, "_CHUNK_EVENTS", 100)
    assert sequences(columns(rows)) == expected(rows)
    source = sequences_of(open_table(rows, TableSourceConfig()), EVENTS, ["item"])
    sizes = [job().table.num_rows for job in source.jobs(["user", "item"])]
    assert len(sizes) > 10 and sum(sizes) == 40


def test_a_row_an_event_has_the_items_before_it() -> None:
    rows, events = made(500), EventColumns(user="user", item="item", time="time", history="before", history_length=5)
    found = columns(rows, HISTORIES, events)
    whole, seen = expected(rows), defaultdict(int)
    lists = found.lists["before"]
    assert len(found) == 500
    for row, (user, item) in enumerate(found.keys.tolist()):
        place = seen[user]
        before = lists.values[lists.offsets[row] : lists.offsets[row + 1]].tolist()
        assert (before, item) == (whole[user][max(place - 5, 0) : place], whole[user][place])
        seen[user] += 1


def test_only_the_newest_events_of_a_user_are_kept_and_the_rest_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = made(4000)
    monkeypatch.setattr(module, "_HELD_EVENTS", 50)  # so that they are let go while rows are read
    events = EventColumns(user="user", item="item", time="time", max_events=7)
    with caplog.at_level(logging.WARNING):
        found = sequences(columns(rows, events=events))
    assert found == {user: items[-7:] for user, items in expected(rows).items()}
    dropped = 4000 - sum(map(len, found.values()))
    assert f"{dropped:,} of 4,000 events are left out" in caplog.text


def test_other_columns_are_lists_or_the_newest_value() -> None:
    rows = [
        {"user": 1, "item": 5, "time": 2, "kind": 8, "city": 3},
        {"user": 1, "item": 6, "time": 1, "kind": 9, "city": 4},
    ]
    layout = ColumnLayout(
        keys=(KeyColumn(name="user", kind="integer"), KeyColumn(name="city", kind="integer")),
        lists=(ListColumn(name="item", kind="integer"), ListColumn(name="kind", kind="integer")),
    )
    found = columns(rows, layout)
    assert found.keys.tolist() == [[1, 3]]
    assert {name: lists.values.tolist() for name, lists in found.lists.items()} == {"item": [6, 5], "kind": [9, 8]}


@pytest.mark.parametrize("times", [
    ["2024-01-02", "2023-12-31T23:59:59", "2024-01-02 00:00:01"],
    ["1704153600", "-5", "1.7041536011e9"],
    ["3", "1", "20"],
    ["2024-01-02T00:00:00+00:00", "1.0", "2024-01-02 00:00:01Z"],
])  # fmt: skip
def test_times_are_numbers_or_dates(tmp_path: Path, times: list[str]) -> None:
    rows = [{"user": 1, "item": place, "time": time} for place, time in enumerate(times)]
    assert sequences(columns(written(tmp_path, ".csv", rows))) == {1: [1, 0, 2]}
    stamps = pa.table({"user": [1, 1], "item": [7, 8], "time": pa.array([5, 2], pa.timestamp("ns", "UTC"))})
    assert sequences(columns(stamps)) == {1: [8, 7]}


def test_an_event_without_user_item_or_time_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text("user,item,time\n1,4,9\n1,5,\n,6,1\n1,7,3\n")
    with pytest.raises(DataError, match=r"events\.csv:(3 has no time|4 has no value)"):
        columns(path)
    bad = BadRows(policy="skip")
    assert sequences(columns(path, bad=bad)) == {1: [7, 4]}
    assert bad.total == 2
    path.write_text("user,item,time\n1,4,20240102\n1,5,soon\n1,6,20240101\n")
    assert sequences(columns(path, bad=BadRows(policy="skip"))) == {1: [6, 4]}
    path.write_text("user,item,time\n1,3,20240102\n1,4,\n1,5,soon\n1,6,30\n")
    found = [job().table for job in replace(open_table(path, TableSourceConfig()), times=("time",)).jobs(["time"])]
    assert found[0].column("time").to_pylist() == ["20240102", None, "soon", "30"]  # a number is not a date
    path.write_text("user,item,time\n1,4,soon\n1,5,2\n")
    with pytest.raises(DataError, match=r"events\.csv:2 holds no number in column 'time'[^$]*soon"):
        columns(path)


def test_what_cannot_be_sorted_is_refused() -> None:
    with pytest.raises(DataError, match="events that come once cannot be sorted"):
        columns(iter(made(5)))
    with pytest.raises(DataError, match="no column 'time'"):
        columns([{"user": 1, "item": 2, "when": 3}])
    with pytest.raises(ConfigError, match="a different column for each"):
        EventColumns(user="user", item="item", time="item")
    with pytest.raises(ConfigError, match="max_events"):
        EventColumns(user="user", item="item", time="time", max_events=0)


@pytest.mark.parametrize("line", ["[1, 2]", "[" * 100_000])
def test_a_line_that_is_no_json_object_is_a_bad_row(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f'{{"user": 1, "item": 4, "time": 9}}\n\n{line}\n{{"user": 1, "item": 5, "time": 2}}\n')
    with pytest.raises(DataError, match=r"events\.jsonl:3 is not a JSON object"):
        columns(path)
    assert sequences(columns(path, bad=BadRows(policy="skip"))) == {1: [5, 4]}
    path.write_text("user,item\n1,2\n")
    with pytest.raises(DataError, match="first line of .* is not a JSON object"):
        columns(path)
