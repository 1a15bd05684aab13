"""Rows of an iterator: each is read, and trained on, exactly once, wherever a run was stopped."""

import json
from collections.abc import Iterator
from typing import Any, final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.cells import CellRules
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, ListColumn
from kitforge.data.tables.row_stream import RowStream
from kitforge.foundation.errors import DataError

LAYOUT = ColumnLayout(
    numbers=("price",), keys=(KeyColumn(name="id", kind="integer"),), lists=(ListColumn(name="seen", kind="integer"),)
)


def row(number: int) -> object:
    """Every seventh row is a bad one."""
    return (
        "no row"
        if number % 7 == 3
        else {"id": np.int64(number), "price": float("nan"), "seen": np.array([number]), "z": object()}
    )


@final
class Numbers:
    """Rows by their numbers, from any place."""

    def __init__(self, stop: int) -> None:
        self.next, self.stop = 0, stop

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.next == self.stop:
            raise StopIteration
        self.next += 1
        return row(self.next - 1)

    def position(self) -> dict[str, int]:
        return {"offset": self.next}

    def seek(self, position: dict[str, int]) -> None:
        self.next = position["offset"]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    is_seekable=st.booleans(),
    num_rows=st.integers(1, 60),
    num_fit=st.integers(1, 30),
    runs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 6), st.integers(0, 3)), min_size=1, max_size=4),
)
def test_rows_in_are_rows_out(is_seekable: bool, num_rows: int, num_fit: int, runs: list[tuple[int, int, int]]) -> None:
    plain = map(row, range(num_rows))
    trained: list[int] = []
    state: dict[str, Any] | None = None
    # The last run goes to the end.
    for size, num_steps, ahead in [*runs, (5, 100, 1)]:
        # A source that can seek is opened anew; another one goes on where it was left.
        stream = RowStream(Numbers(num_rows) if is_seekable else plain, LAYOUT, CellRules())
        if state is None:
            stream.read(num_fit, BadRows(policy="skip"))
            stream.rewind()
        else:
            stream.load_state(json.loads(json.dumps(state)))
        ready: list[Any] = []
        for _ in range(num_steps):
            while len(ready) <= ahead and (columns := stream.read(size, BadRows(policy="skip"))) is not None:
                ready.append(columns)
            if not ready:
                break
            stream.mark_trained()
            trained += ready.pop(0).keys[:, 0].tolist()
        state = stream.state()
    assert trained == [number for number in range(num_rows) if number % 7 != 3]


def test_a_source_is_read_no_further_than_it_is_asked() -> None:
    source = iter([row(number) for number in range(20)])
    columns = RowStream(source, LAYOUT, CellRules()).read(5, BadRows(policy="skip"))
    assert columns is not None
    # Of six rows the fourth is a bad one.
    assert (columns.keys[:, 0].tolist(), next(source)["id"]) == ([0, 1, 2, 4, 5], 6)  # type: ignore[index]


def test_a_column_that_the_rows_lack_is_named_with_the_nearest() -> None:
    rows = iter([{"id": 1, "prise": 2.0, "seen": []}])
    with pytest.raises(DataError, match=r"no column 'price'[^$]*prise"):
        RowStream(rows, LAYOUT, CellRules()).read(1, BadRows())
    with pytest.raises(DataError, match="these are no rows of a table"):
        RowStream(iter([7]), LAYOUT, CellRules()).read(1, BadRows())
