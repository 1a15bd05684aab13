"""What `inspect` finds in a table, the schema it proposes, and what it shows."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from kitforge.data.tables.chunk import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import LabelColumn
from kitforge.data.tables.source import TableConfig, open_table
from kitforge.data.tables.split import RowRange
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.features import Encoder
from kitforge.kits.recommender.fitting import fit
from kitforge.kits.recommender.guess import with_rare_values
from kitforge.kits.recommender.inspection import Inspection, inspect
from kitforge.kits.recommender.inspection_view import rendered
from kitforge.kits.recommender.samples import Samples
from kitforge.kits.recommender.schema import read_schema

DATA = Path(__file__).parents[4] / "shared/data"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    lines = ["row_id,click,age,income,site_id,color,constant,empty"]
    for number in range(100):
        price = "" if number % 10 == 0 else str(number**4)
        lines.append(f"r{number},{int(number % 4 == 0)},{20.5 + number % 30},{price},{number % 40},c{number % 3},k,")
    lines.append("r100,1")
    path = tmp_path_factory.mktemp("table") / "clicks.csv"
    path.write_text("\n".join(lines))
    return inspect(path)


def test_types_are_told_from_values(found: Inspection) -> None:
    types = {view.name: view.type for view in found.columns}
    assert types == {
        "row_id": "text", "click": "integer", "age": "number", "income": "integer",
        "site_id": "integer", "color": "text", "constant": "text", "empty": "nothing",
    }  # fmt: skip


def test_values_are_counted(found: Inspection) -> None:
    views = {view.name: view for view in found.columns}
    assert (views["income"].num_values, views["income"].num_missing) == (90, 10)
    assert (views["age"].smallest, views["age"].largest) == (20.5, 49.5)
    assert views["color"].common == (("c0", 34), ("c1", 33), ("c2", 33))
    assert found.label_rate == 0.25
    assert found.bad_rows == {"has the wrong number of cells": 1}
    assert found.head[1] == ("r1", "0", "21.5", "1", "1", "c1", "k", "")


def test_the_schema_uses_what_may_say_something(found: Inspection) -> None:
    assert found.schema.label == LabelColumn(name="click")
    assert {name: feature.log for name, feature in found.schema.numeric.items()} == {"age": False, "income": False}
    assert {name: feature.column for name, feature in found.schema.bucketed.items()} == {
        "age_range": "age",
        "income_range": "income",
    }
    # Rare colours may count as one; sites are things, and whoever looks for one must find it.
    assert {name: feature.min_count for name, feature in found.schema.categorical.items()} == {"site_id": 1, "color": 3}
    assert all(feature.min_count == 1 for feature in with_rare_values(found.schema).categorical.values())
    assert set(found.left_out) == {"row_id", "constant", "empty"}


def test_the_page_shows_all_of_it(found: Inspection) -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(rendered(found))
    text = console.export_text()
    for part in ("100 rows, 8 columns", "25.00% positive", "bad rows: 1", "row_id, a different value in every row",
                 "c0 (34)", "10.0%", "schema:", "  categorical:"):  # fmt: skip
        assert part in text, part


def test_cells_are_no_markup(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,[red]x\n1,[/bold]\n0,[b]\n")
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(rendered(inspect(tmp_path / "a.csv")))
    text = console.export_text()
    assert "[/bold]" in text and "[red]x" in text


def test_an_iterator_is_left_alone() -> None:
    rows = iter([{"click": 1, "x": 1}] * 3)
    with pytest.raises(DataError, match=r"(?s)read only once.*data\.schema"):
        inspect(rows)


def test_odd_names_of_columns_survive_yaml() -> None:
    rows = [{"on": number % 7, "a: b": number / 3, "[x]": number % 5, "5": number % 3} for number in range(30)]
    found = inspect(rows)
    assert set(found.schema.numeric) | set(found.schema.categorical) == {"on", "a: b", "[x]", "5"}
    assert read_schema(yaml.safe_load(found.yaml)) == found.schema


def test_only_the_first_rows_are_looked_at() -> None:
    rows = [{"click": number % 2, "x": number / 3} for number in range(10_000)]
    found = inspect(rows, num_rows=50)
    assert (found.num_rows, found.is_whole) == (50, False)
    assert inspect(rows[:50], num_rows=50).is_whole


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({"click": [0, 1, 0]}, LabelColumn(name="click")),
        ({"clicked": [True, False, False]}, LabelColumn(name="clicked")),
        ({"income": [">50K", "<=50K", "<=50K"]}, LabelColumn(name="income", positive=">50K", negative="<=50K")),
        ({"other": ["b", "b", "b"]}, None),
    ],
)
def test_the_label_is_found_by_its_name_or_place(values: dict[str, list[Any]], label: LabelColumn | None) -> None:
    (name, column), = values.items()  # fmt: skip
    rows = [{"x": place / 3, "z": place, name: value} for place, value in enumerate(column)]
    assert inspect(rows).schema.label == label


def test_numbers_of_things_are_no_quantities_and_lists_are_bags_or_sequences() -> None:
    rows = [
        {"user_id": number % 30, "C14": number % 25, "count": number % 50, "tags": [1, 2], "history": [number % 7]}
        for number in range(60)
    ]
    schema = inspect(rows).schema
    assert {name: feature.kind for name, feature in schema.categorical.items()} == {
        "user_id": "integer",
        "C14": "integer",
    }
    assert (list(schema.numeric), list(schema.bags), list(schema.sequences)) == (["count"], ["tags"], ["history"])


def test_a_table_without_features_says_what_there_is() -> None:
    with pytest.raises(DataError, match=r"(?s)no column of the table can be a feature.*got: +same"):
        inspect([{"click": number % 2, "same": 1} for number in range(30)])


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("name", "label", "num_numeric", "num_categorical", "left_out"),
    [
        ("criteo_kaggle_10k/train.tsv.gz", "label", 12, 27, []),
        ("avazu_9k/train.csv.gz", "click", 0, 21, ["hour", "id"]),
        ("adult_income/train.csv.gz", "income", 5, 9, []),
    ],
)
def test_the_schema_of_a_real_log_encodes_it(
    name: str, label: str, num_numeric: int, num_categorical: int, left_out: list[str], tmp_path: Path
) -> None:
    found = inspect(DATA / name)
    schema = found.schema
    assert schema.label is not None and schema.label.name == label
    assert (len(schema.numeric), len(schema.categorical)) == (num_numeric, num_categorical)
    assert sorted(found.left_out) == left_out
    (tmp_path / "schema.yaml").write_text(found.yaml)
    assert read_schema(tmp_path / "schema.yaml") == schema
    table = load_table(open_table(DATA / name, TableConfig()), schema.layout(), tmp_path, BadRows())
    encoder = Encoder(schema, fit(schema, table, RowRange(0, table.num_rows)))
    batch = Samples(table, RowRange(0, table.num_rows), encoder).batch(np.arange(1000))
    assert batch.dense.isfinite().all()
    assert batch.dense.shape == (1000, num_numeric)
    assert batch.labels is not None and batch.labels.unique().tolist() == [0, 1]
    for spec in encoder.tables():
        assert spec.num_ids is not None and 0 <= batch.ids[spec.features[0]].min() < spec.num_ids
