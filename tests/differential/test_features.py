"""Drawn numbers as features: standardized as scikit-learn does, in one bucket whatever container they come in, and the
same after any growth of the rows."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from sklearn.preprocessing import StandardScaler

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.source import open_table
from kitforge.data.tables.split import RowRange
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import RecommendationDataOptions
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.feature_fitting import fit_features
from kitforge.kits.recommender.features import FeatureEncoder, load_features, save_features
from kitforge.kits.recommender.item_catalog import build_item_catalog, joined_catalog
from kitforge.kits.recommender.schema import BucketFeature, CategoricalFeature, FeatureSchema, NumericFeature
from tests.differential.drawn import drawn

# What scikit-learn takes and we refuse, and why.
REFUSED = {1e60: "float32 cannot hold it, and a network reads float32"}

DECIMALS = st.decimals(-1000, 1000, places=2, allow_nan=False).map(float)
NUMBERS = st.one_of(
    DECIMALS,
    st.integers(-(2**24), 2**24).map(float),
    st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
    st.floats(-1, 1).filter(lambda value: value == 0 or abs(value) > 1e-30),
)
WIDE = st.one_of(NUMBERS, st.floats(-1e37, 1e37), st.floats(-1e-307, 1e-307), st.just(math.nan))
SIZES, STEPS = st.integers(1, 3000), st.lists(st.integers(0, 9), min_size=1)
COLUMNS = st.one_of(
    st.lists(WIDE, min_size=1, max_size=30),
    # Constants, alone or beside what is missing.
    st.builds(lambda value, size, gaps: [value] * size + [math.nan] * gaps, WIDE, SIZES, st.integers(0, 2)),
    # A few close neighbors.
    st.builds(lambda value, steps: [value * (1 + step * 1e-9) for step in steps], NUMBERS, STEPS),
)


def batch(
    schema: FeatureSchema, rows: Any, encoder: FeatureEncoder | None = None, root: Path = Path("unused")
) -> tuple[FeatureBatch, FeatureEncoder]:
    table = load_table(open_table(rows), schema.layout(), root, BadRows())
    known = encoder or FeatureEncoder(schema, fit_features(schema, table, RowRange(0, table.num_rows)))
    return ClickDataset(table, RowRange(0, table.num_rows), known).batch(np.arange(table.num_rows)), known


@drawn(60)
@given(COLUMNS)
def test_a_column_is_standardized_as_by_scikit_learn(values: list[float]) -> None:
    column = np.array(values)
    there = column[~np.isnan(column)]
    size, spread = len(there), float(there.var()) if len(there) else 0.0
    bound = (size * abs(float(there.mean())) * 2.2e-16) ** 2 if size else 0.0
    # At its bound, whether a column is constant is a matter of rounding; and some variances cannot be held.
    assume(spread == 0 or spread > 1e-290 and not bound / 100 < spread < bound * 100)
    found, _ = batch(FeatureSchema(numeric={"x": NumericFeature()}), pd.DataFrame({"x": column}))
    wanted = np.zeros((len(column), 1))
    if len(set(there.tolist())) > 1:
        # Of a constant, scikit-learn's mean may be another number, and its result not 0.
        wanted = np.nan_to_num(StandardScaler().fit_transform(column[:, None]))
    np.testing.assert_allclose(found.dense.double().numpy(), wanted, rtol=2e-5, atol=2e-5)


def containers(values: list[float], folder: Path) -> dict[str, Any]:
    exact, single = np.array(values), np.array(values, np.float32)
    folder.mkdir(exist_ok=True)
    (folder / "x.csv").write_text("x,y\n" + "".join(f"{value!r},1\n" for value in values))
    found: dict[str, Any] = {"csv": str(folder / "x.csv")}
    for name, array in {"float64": exact, "float32": single}.items():
        found |= {
            f"frame of {name}": pd.DataFrame({"x": array}),
            f"Arrow of {name}": pa.table({"x": array}),
            f"rows of {name}": [{"x": value} for value in array],
        }
    return found | {"rows": [{"x": value} for value in values], "texts": [{"x": repr(value)} for value in values]}


@drawn(40, whole=1000)
@given(st.lists(NUMBERS, min_size=1, max_size=12), st.lists(NUMBERS, max_size=6), st.integers(2, 8), st.data())
def test_a_number_has_one_bucket_in_every_container(
    tmp_path: Path, values: list[float], others: list[float], num_buckets: int, data: st.DataObject
) -> None:
    edges = data.draw(st.none() | st.lists(NUMBERS, min_size=1, max_size=5, unique=True).map(sorted).map(tuple))
    schema = FeatureSchema(bucketed={"x": BucketFeature(num_buckets=num_buckets, edges=edges)})
    trained_on = data.draw(st.sampled_from(["csv", "float64", "float32"]))
    fitted = containers(values, tmp_path)[trained_on if trained_on == "csv" else f"frame of {trained_on}"]
    _, encoder = batch(schema, fitted, root=tmp_path)
    asked = values + others
    single = np.array(encoder.statistics.edges["x"]).astype(np.float32)
    wanted = np.searchsorted(single, np.array(asked, np.float32), side="right") + 1
    for name, rows in containers(asked, tmp_path).items():
        assert batch(schema, rows, encoder, tmp_path)[0].ids["x"].tolist() == wanted.tolist(), name


def test_a_number_that_float32_cannot_hold_is_refused() -> None:
    with pytest.raises(DataError, match="a number beyond float32[^$]*1e\\+60"):
        batch(FeatureSchema(numeric={"x": NumericFeature()}), [{"x": value} for value in REFUSED])


ROW = st.fixed_dictionaries(
    {"user": st.integers(0, 9).map(str), "item": st.integers(-3, 9), "x": NUMBERS, "y": st.sampled_from([0.1, 0.7, 5])}
)
ONE = {"user": "0", "item": 0, "x": 1e-20, "y": 0.1}
GROWING = FeatureSchema(
    numeric={"x": NumericFeature()},
    bucketed={"y": BucketFeature(num_buckets=4)},
    categorical={
        "user": CategoricalFeature(encoding="vocabulary"),
        "item": CategoricalFeature(kind="integer", encoding="exact"),
    },
)


@drawn(40)
@given(st.lists(ROW, min_size=1, max_size=20), st.lists(ROW, max_size=20))
def test_rows_keep_their_values_whatever_comes_after_them(
    tmp_path: Path, rows: list[dict[str, Any]], more: list[dict[str, Any]]
) -> None:
    before, encoder = batch(GROWING, rows)
    save_features(tmp_path / "features.json", encoder.schema, encoder.statistics)
    again = FeatureEncoder(*load_features(tmp_path / "features.json"))
    dataset = load_dataset(rows + more, None, RecommendationDataOptions(eval_fraction=0.0), 0, again)
    after = dataset.train_rows().batch(np.arange(len(rows)))
    assert all(after.ids[name].equal(before.ids[name]) for name in before.ids) and after.dense.equal(before.dense)


@drawn(40)
@given(st.lists(ROW, min_size=1, max_size=20), st.lists(ROW, min_size=1, max_size=20), st.booleans())
@example([ONE, ONE | {"x": float(np.float32(1e-20))}], [ONE | {"x": 5e10}], False)
def test_items_of_two_days_are_those_of_both(
    first: list[dict[str, Any]], second: list[dict[str, Any]], is_summed: bool
) -> None:
    _, encoder = batch(GROWING, first)
    days = []
    for rows in (first, second):
        table = load_table(open_table(rows), GROWING.layout(), Path("unused"), BadRows())
        try:
            days.append(build_item_catalog(ClickDataset(table, RowRange(0, len(rows)), encoder), "item"))
        except DataError as refused:
            # Beside numbers that are nearly one, another is beyond float32 once it is standardized.
            moments = encoder.statistics.moments["x"]
            assert "float32 cannot hold" in str(refused)
            assert (
                max(abs(row["x"] - moments.mean) for row in rows) > float(np.finfo(np.float32).max) * moments.deviation
            )
            return
    both = joined_catalog(*days, is_summed=is_summed)
    newest = {row["item"]: row for row in itertools.chain(first, second)}
    counted = [[row["item"] for row in day] for day in (first, second)]
    wanted = {
        item: counted[1].count(item) + counted[0].count(item) * (is_summed or item not in counted[1]) for item in newest
    }
    assert dict(zip(both.ids.tolist(), both.counts.tolist(), strict=True)) == wanted
    assert both.ids.tolist() == sorted(wanted)
    features, _ = batch(GROWING, [newest[item] for item in sorted(newest)], encoder)
    assert both.samples is not None and both.samples.dense.equal(features.dense)
    assert all(both.samples.ids[name].equal(features.ids[name]) for name in features.ids)
