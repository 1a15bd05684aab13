"""Rows of a file as plain Python values, for tests."""

from pathlib import Path

import numpy as np

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, Columns, concatenate
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import TableSourceConfig, open_table

DATA = Path(__file__).parents[4] / "shared/data"


def columns_of(spec: object, layout: ColumnLayout, bad: BadRows | None = None, **options: object) -> Columns:
    """All rows at once."""
    source = open_table(spec, TableSourceConfig(**options))  # type: ignore[arg-type]
    return concatenate(list(read_columns(source, layout, bad or BadRows(), num_workers=1)))


def equal(one: Columns, other: Columns) -> bool:
    """Whether two sets of rows are the same to the bit."""
    arrays = ("numbers", "keys", "absent", "labels")
    return (
        all(np.array_equal(getattr(one, name), getattr(other, name), equal_nan=name == "numbers") for name in arrays)
        and one.lists.keys() == other.lists.keys()
        and all(np.array_equal(one.lists[name].values, other.lists[name].values) for name in one.lists)
        and all(np.array_equal(one.lists[name].offsets, other.lists[name].offsets) for name in one.lists)
    )
