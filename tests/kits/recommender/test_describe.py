"""What `inspect` finds in a table, the schema it proposes, and what it shows."""

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import LabelColumn
from kitforge.data.tables.source import TableSourceConfig, open_table
from kitforge.data.tables.split import RowRange
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.describe import TableDescription, describe_table, render_description
from kitforge.kits.recommender.feature_fitting import fit_features
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.schema import read_schema, with_rare_values
from tests.kits.recommender.runs import ready

DATA = Path(__file__).parents[4] / "shared/data"


def shown(description: TableDescription) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render_description(description))
    return console.export_text()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> TableDescription:
    lines = ["row_id,click,age,income,site_id,color,constant,empty"]
    for number in range(100):
        price = "" if number % 10 == 0 else str(number**4)
        lines.append(f"r{number},{int(number % 4 == 0)},{20.5 + number % 30},{price},{number % 40},c{number % 3},k,")
    lines.append("r100,1")
    path = tmp_path_factory.mktemp("table") / "clicks.csv"
    path.write_text("\n".join(lines))
    return describe_table(path)


def test_types_are_told_from_values(found: TableDescription) -> None:
    types = {view.name: view.type for view in found.columns}
    assert types == {
        "row_id": "text", "click": "integer", "age": "number", "income": "integer",
        "site_id": "integer", "color": "text", "constant": "text", "empty": "nothing",
    }  # fmt: skip


def test_values_are_counted(found: TableDescription) -> None:
    views = {view.name: view for view in found.columns}
    assert (views["income"].num_values, views["income"].num_missing) == (90, 10)
    assert (views["age"].smallest, views["age"].largest) == (20.5, 49.5)
    assert views["color"].common == (("c0", 34), ("c1", 33), ("c2", 33))
    assert found.label_rate == 0.25
    assert found.bad_rows == {"has the wrong number of cells": 1}
    assert found.head[1] == ("r1", "0", "21.5", "1", "1", "c1", "k", "")


def test_the_schema_uses_what_may_say_something(found: TableDescription) -> None:
    assert found.schema.label == LabelColumn(name="click")
    assert {name: feature.log for name, feature in found.schema.numeric.items()} == {"age": False, "income": False}
    assert {name: feature.column for name, feature in found.schema.bucketed.items()} == {
        "age_range": "age",
        "income_range": "income",
    }
    # Rare colours may count as one; sites are things, and whoever looks for one must find it.
    assert {name: feature.min_count for name, feature in found.schema.categorical.items()} == {"site_id": 1, "color": 2}
    assert all(feature.min_count == 1 for feature in with_rare_values(found.schema).categorical.values())
    assert set(found.left_out) == {"row_id", "constant", "empty"}


def test_the_page_shows_all_of_it(found: TableDescription) -> None:
    text = shown(found)
    for part in ("100 rows, 8 columns", "25.00% positive", "bad rows: 1", "row_id, a different value in every row",
                 "c0 (34)", "10.0%", "schema:", "  categorical:"):  # fmt: skip
        assert part in text, part
    assert "As events, a sequence of items a user" in shown(dataclasses.replace(found, sequences=found.schema))


def test_cells_are_no_markup(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,[red]x\n1,[/bold]\n0,[b]\n")
    text = shown(describe_table(tmp_path / "a.csv"))
    assert "[/bold]" in text and "[red]x" in text


def test_an_iterator_is_left_alone() -> None:
    rows = iter([{"click": 1, "x": 1}] * 3)
    with pytest.raises(DataError, match=r"(?s)read only once.*data\.schema"):
        describe_table(rows)


def test_odd_names_of_columns_survive_yaml() -> None:
    rows = [{"on": number % 7, "a: b": number / 3, "[x]": number % 5, "5": number % 3} for number in range(30)]
    found = describe_table(rows)
    assert set(found.schema.numeric) | set(found.schema.categorical) == {"on", "a: b", "[x]", "5"}
    assert read_schema(yaml.safe_load(found.yaml)) == found.schema


def test_only_the_first_rows_are_looked_at() -> None:
    rows = [{"click": number % 2, "x": number / 3} for number in range(10_000)]
    found = describe_table(rows, num_rows=50)
    assert (found.num_rows, found.is_complete) == (50, False)
    assert describe_table(rows[:50], num_rows=50).is_complete


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
    assert describe_table(rows).schema.label == label


def test_numbers_of_things_are_no_quantities_and_lists_are_bags_or_sequences() -> None:
    rows = [
        {"user_id": number % 30, "C14": number % 25, "count": number % 50, "tags": [1, 2], "history": [number % 7]}
        for number in range(60)
    ]
    schema = describe_table(rows).schema
    assert {name: feature.kind for name, feature in schema.categorical.items()} == {
        "user_id": "integer",
        "C14": "integer",
    }
    assert (list(schema.numeric), list(schema.bags), list(schema.sequences)) == (["count"], ["tags"], ["history"])


def test_a_table_without_features_says_what_there_is() -> None:
    with pytest.raises(DataError, match=r"(?s)no column of the table can be a feature.*got: +same"):
        describe_table([{"click": number % 2, "same": 1} for number in range(30)])


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
    found = describe_table(DATA / name)
    schema = found.schema
    assert schema.label is not None and schema.label.name == label
    assert (len(schema.numeric), len(schema.categorical)) == (num_numeric, num_categorical)
    assert sorted(found.left_out) == left_out
    (tmp_path / "schema.yaml").write_text(found.yaml)
    assert read_schema(tmp_path / "schema.yaml") == schema
    table = load_table(open_table(DATA / name, TableSourceConfig()), schema.layout(), tmp_path, BadRows())
    encoder = FeatureEncoder(schema, fit_features(schema, table, RowRange(0, table.num_rows)))
    batch = ClickDataset(table, RowRange(0, table.num_rows), encoder).batch(np.arange(1000))
    assert batch.dense.isfinite().all()
    assert batch.dense.shape == (1000, num_numeric)
    assert batch.labels is not None and batch.labels.unique().tolist() == [0, 1]
    for spec in encoder.tables():
        assert spec.num_ids is not None and 0 <= batch.ids[spec.features[0]].min() < spec.num_ids


def clicks_with(odd: str) -> str:
    rows = [f"{number % 2},{odd if number % 50 == 7 else number / 3},c{number % 3}" for number in range(200)]
    return "click,price,color\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize("odd", ["NA", "NaN", "NULL", "inf", "-", "\\N"])
def test_a_cell_that_is_no_number_does_not_make_a_number_a_text(tmp_path: Path, odd: str) -> None:
    (tmp_path / "a.csv").write_text(clicks_with(odd))
    found = describe_table(tmp_path / "a.csv")
    assert list(found.schema.numeric) == ["price"] and list(found.schema.categorical) == ["color"]
    assert found.missing_values == (odd,)
    text = shown(found)
    assert f"price is a number but for {odd} (4)" in text and f"data.missing_values='[\"{odd}\"]'" in text
    told = describe_table(tmp_path / "a.csv", TableSourceConfig(missing_values=(odd,)))
    assert told.missing_values == () and {view.name: view.num_missing for view in told.columns}["price"] == 4


def test_of_equally_frequent_values_those_that_come_first_are_shown() -> None:
    codes = [f"c{number}" for number in (*range(500), *range(1, 500, 3))]
    (_, code) = describe_table({"click": [each % 2 for each in range(len(codes))], "code": codes}).columns
    assert code.common == (("c1", 2), ("c4", 2), ("c7", 2))


def test_a_column_with_more_texts_than_that_is_one_of_texts() -> None:
    rows = [{"click": n % 2, "code": "x" if n % 15 == 0 else str(n)} for n in range(300)]
    assert list(describe_table(rows).schema.categorical) == ["code"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"click": [0, 1, None]}, "'click' has no value in 1 of 3 rows"),
        ({"click": [0, 0, 0]}, "'click' is 0 in every row"),
        ({"click": [0, 1, 2]}, "'click' holds 3 different values"),
        ({"bought": [0, 1, 1], "last": [7, 8, 9]}, "of those with two values (bought) none is first or last"),
        ({"last": [7, 8, 9]}, "none has two values"),
    ],
)
def test_why_there_is_no_label_is_said(tmp_path: Path, columns: dict[str, list[Any]], reason: str) -> None:
    table = {"x": [0.5, 1.5, 2.5], **columns}
    found = describe_table(table)
    assert found.schema.label is None and reason in str(found.no_label)
    with pytest.raises(DataError, match=r"these rows have no label") as error:
        ready(tmp_path, "wide_deep", {"data.eval_fraction": 0.0}, table)
    assert reason in str(error.value)


def test_minus_one_and_one_are_a_label() -> None:
    found = describe_table({"x": [0.5, 1.5, 2.5], "click": [-1, 1, -1]})
    assert found.schema.label == LabelColumn(name="click", positive="1", negative="-1")
    assert found.label_rate == 1 / 3


def test_texts_of_several_whole_numbers_are_lists(tmp_path: Path) -> None:
    lines = [f"{n % 2},{n % 5} {n % 7 + 10} {n % 3},{n % 9} {n % 4},{n} 000,{n / 3}" for n in range(1, 60)]
    (tmp_path / "a.csv").write_text("click,history,tags,price,x\n" + "\n".join(lines) + "\n")
    found = describe_table(tmp_path / "a.csv")
    assert (list(found.schema.sequences), list(found.schema.bags)) == (["history"], ["tags"])
    assert found.schema.sequences["history"].kind == "integer"
    assert {view.name: view.type for view in found.columns}["price"] == "text"
    assembly, _ = ready(tmp_path / "run", "wide_deep", {"data.schema": None}, str(tmp_path / "a.csv"))
    assert [spec.num_ids for spec in assembly.processor.tables() if spec.name == "history"] == [5 + 7 + 2]
