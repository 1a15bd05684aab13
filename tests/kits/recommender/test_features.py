"""Features: what each transform gives, statistics of the training rows alone, and one way for training and serving."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import ColumnTable, LabelColumn, NamedColumns
from kitforge.data.tables.source import open_table
from kitforge.data.tables.split import RowList, RowRange, split_rows
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.recommender import feature_fitting
from kitforge.kits.recommender.artifacts import FEATURES, SaveFeatures
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.feature_fitting import fit_features
from kitforge.kits.recommender.features import FeatureEncoder, FeatureStatistics, load_features, save_features
from kitforge.kits.recommender.schema import (
    BagFeature,
    BucketFeature,
    CategoricalFeature,
    CrossFeature,
    FeatureSchema,
    NumericFeature,
    SequenceFeature,
    read_schema,
    schema_yaml,
    with_own_items,
)
from kitforge.trainer.callbacks.callback import Event
from tests.text_keys import hash_text

VALUES = [0.0, 1.0, None, 3.0, 100.0, -7.0]
ROWS: list[dict[str, Any]] = [
    {"x": value, "site": site, "user": user, "tags": tags, "click": place % 2}
    for place, (value, site, user, tags) in enumerate(
        zip(VALUES, ["a", "b", None, "a", "c", "a"], [5, 6, 5, -9, 7, 5], [[1], [], [2, 1], [3], [], [1]], strict=True)
    )
]
LABEL = LabelColumn(name="click")


def table_of(schema: FeatureSchema, rows: list[dict[str, Any]] = ROWS) -> ColumnTable:
    return load_table(open_table(rows), schema.layout(), Path("unused"), BadRows())


def encoded(
    schema: FeatureSchema, rows: list[dict[str, Any]] = ROWS, training: list[int] | None = None
) -> FeatureBatch:
    table = table_of(schema, rows)
    chosen = RowRange(0, len(rows)) if training is None else RowList(np.array(training))
    encoder = FeatureEncoder(schema, fit_features(schema, table, chosen))
    return ClickDataset(table, RowRange(0, len(rows)), encoder).batch(np.arange(len(rows)))


def dense(feature: NumericFeature) -> list[list[float]]:
    return encoded(FeatureSchema(numeric={"x": feature})).dense.double().tolist()


def test_a_missing_number_may_be_zero_and_marked() -> None:
    found = dense(NumericFeature(standardize=False, missing="zero", indicator=True))
    assert found == [[0, 0], [1, 0], [0, 1], [3, 0], [100, 0], [-7, 0]]


def test_a_logarithm_keeps_the_sign() -> None:
    found = dense(NumericFeature(log=True, standardize=False, missing="zero"))
    assert found[4][0] == pytest.approx(math.log(101), rel=1e-6)
    assert found[5][0] == pytest.approx(-math.log(8), rel=1e-6)


def test_moments_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    log = SyntheticClicks(SyntheticClicksConfig(num_rows=3000))
    schema = FeatureSchema(numeric={"d1": NumericFeature(log=True)}, bucketed={"b": BucketFeature(column="d2")})
    whole = fit_features(schema, log, RowRange(0, 3000))
    monkeypatch.setattr(feature_fitting, "_CHUNK_ROWS", 37)
    parts = fit_features(schema, log, RowRange(0, 3000))
    assert parts.edges == whole.edges
    assert parts.moments["d1"].mean == pytest.approx(whole.moments["d1"].mean, rel=1e-12)
    assert parts.moments["d1"].deviation == pytest.approx(whole.moments["d1"].deviation, rel=1e-12)
    values = log.rows(np.arange(3000)).numbers[:, 0]
    values = np.log1p(values[~np.isnan(values)])
    assert parts.moments["d1"].deviation == pytest.approx(values.std(), rel=1e-12)


def test_ranges_hold_equally_many_rows() -> None:
    log = SyntheticClicks(SyntheticClicksConfig(num_rows=5000, missing=0.1))
    schema = FeatureSchema(bucketed={"d1": BucketFeature(num_buckets=8)})
    ids = ClickDataset(
        log, RowRange(0, 5000), FeatureEncoder(schema, fit_features(schema, log, RowRange(0, 5000)))
    ).batch(np.arange(5000))
    counts = np.bincount(ids.ids["d1"])
    assert len(counts) == 9
    assert counts[0] == np.isnan(log.rows(np.arange(5000)).numbers[:, 0]).sum()
    assert counts[1:].max() - counts[1:].min() <= 1


@pytest.mark.parametrize(
    ("values", "ranges"),
    [
        ([0.0] * 90 + list(range(1, 11)), 6),  # what is mostly zero
        ([5.0] * 90 + list(range(-5, 5)), 6),
        ([0.0] * 45 + [9.0] * 45 + list(range(1, 9)) + [10.0, 11.0], 6),
        ([3.0] * 7, 6),
        ([1.0, 2.0, 2.0, 3.0], 6),
    ],
)
def test_a_value_that_fills_a_range_has_it_to_itself_and_the_rest_share_the_others(
    values: list[float], ranges: int
) -> None:
    edges = feature_fitting._edges_of(np.array(values), ranges)
    place = np.searchsorted(edges, values, side="right")
    counts = np.bincount(place, minlength=len(edges) + 1)
    assert counts.min() > 0
    for value in set(values):
        if values.count(value) * ranges > len(values):
            assert set(np.array(values)[place == np.searchsorted(edges, value, side="right")]) == {value}
    # The others are told apart as finely as their places allow.
    assert len(counts) >= min(ranges, len(set(values)))


def test_no_values_have_no_edges() -> None:
    assert len(feature_fitting._edges_of(np.zeros(0), 8)) == 0


def test_quantiles_of_many_rows_come_from_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    log = SyntheticClicks(SyntheticClicksConfig(num_rows=20_000, missing=0))
    schema = FeatureSchema(bucketed={"d1": BucketFeature(num_buckets=4)})
    exact = fit_features(schema, log, RowRange(0, 20_000)).edges["d1"]
    monkeypatch.setattr(feature_fitting, "_QUANTILE_VALUES", 4000)
    assert fit_features(schema, log, RowRange(0, 20_000)).edges["d1"] == pytest.approx(exact, rel=0.1)


def test_a_vocabulary_is_by_frequency_in_training_and_knows_what_it_does_not() -> None:
    found = encoded(
        FeatureSchema(categorical={"site": CategoricalFeature(encoding="vocabulary")}), training=[0, 1, 2, 3]
    )
    assert found.ids["site"].tolist() == [2, 3, 0, 2, 1, 2]


def test_a_rare_value_is_unknown_and_counted() -> None:
    schema = FeatureSchema(categorical={"site": CategoricalFeature(encoding="vocabulary", min_count=2)})
    statistics = fit_features(schema, table_of(schema), RowRange(0, 6))
    assert statistics.vocabularies["site"] == (hash_text("a"),)
    assert statistics.num_rare == {"site": 2}
    limited = FeatureSchema(categorical={"site": CategoricalFeature(encoding="vocabulary", max_size=1)})
    assert encoded(limited).ids["site"].tolist() == [2, 1, 0, 2, 1, 2]


def test_an_exact_id_is_the_key_itself() -> None:
    schema = FeatureSchema(categorical={"user": CategoricalFeature(kind="integer", encoding="exact")})
    assert encoded(schema).ids["user"].tolist() == [row["user"] for row in ROWS]
    assert FeatureEncoder(schema, fit_features(schema, table_of(schema), RowRange(0, 6))).tables()[0].num_ids is None


def test_hashed_ids_fill_their_buckets_evenly_and_bucket_0_is_for_what_is_missing() -> None:
    rows = [{"id": number} for number in range(20_000)] + [{"id": None}]
    schema = FeatureSchema(categorical={"id": CategoricalFeature(kind="integer", num_buckets=101)})
    ids = encoded(schema, rows).ids["id"]
    counts = np.bincount(ids)
    assert (ids[-1], counts[0], len(counts)) == (0, 1, 101)
    # Chi-squared with 99 degrees of freedom is below 150 in 999 of 1000 fair draws.
    assert ((counts[1:] - 200) ** 2 / 200).sum() < 150


def test_collisions_are_counted() -> None:
    rows = [{"id": number // 2} for number in range(2000)]
    schema = FeatureSchema(categorical={"id": CategoricalFeature(kind="integer", num_buckets=1001)})
    occupancy = fit_features(schema, table_of(schema, rows), RowRange(0, 2000)).collision_stats["id"]
    ids = encoded(schema, rows).ids["id"][::2]
    _, sizes = np.unique(ids, return_counts=True)
    assert (occupancy.num_values, occupancy.num_colliding) == (1000, sizes[sizes > 1].sum())
    assert not occupancy.is_estimated
    words = fit_features(schema, table_of(schema, rows), RowRange(0, 2000)).collisions()
    assert words == f"id {occupancy.num_colliding} of 1,000 values in 1,001 buckets"
    assert FeatureStatistics(num_rows=2000).collisions() is None


def test_collisions_among_too_many_values_are_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": number} for number in range(20_000)]
    schema = FeatureSchema(categorical={"id": CategoricalFeature(kind="integer", num_buckets=30_000)})
    exact = fit_features(schema, table_of(schema, rows), RowRange(0, 20_000)).collision_stats["id"]
    monkeypatch.setattr(feature_fitting, "_COUNTED_VALUES", 2000)
    found = fit_features(schema, table_of(schema, rows), RowRange(0, 20_000)).collision_stats["id"]
    assert found.is_estimated and not exact.is_estimated
    assert found.num_values == pytest.approx(20_000, rel=0.1)
    assert found.num_colliding == pytest.approx(exact.num_colliding, rel=0.2)


def test_features_of_one_table_share_its_ids() -> None:
    rows = [{"item": item, "history": [1, 2, 3]} for item in (1, 2, 3, 4)]
    for encoding in ("hash", "vocabulary", "exact"):
        table: dict[str, Any] = {"kind": "integer", "encoding": encoding, "table": "items"}
        schema = FeatureSchema(
            categorical={"item": CategoricalFeature(**table)}, sequences={"history": SequenceFeature(**table)}
        )
        found = encoded(schema, rows)
        assert found.sequences["history"].ids[0, :3].tolist() == found.ids["item"][:3].tolist()
        (spec,) = FeatureEncoder(schema, fit_features(schema, table_of(schema, rows), RowRange(0, 4))).tables()
        assert (spec.name, spec.features) == ("items", ("item", "history"))


def test_features_of_one_table_must_agree() -> None:
    with pytest.raises(ConfigError, match="the features of table 't' disagree"):
        encoded(
            FeatureSchema(
                categorical={
                    "site": CategoricalFeature(table="t"),
                    "user": CategoricalFeature(table="t", kind="integer"),
                }
            )
        )


def test_bags_and_sequences_hold_all_ids_in_order() -> None:
    schema = FeatureSchema(
        bags={"tags": BagFeature(kind="integer", encoding="exact")},
        sequences={"last": SequenceFeature(column="tags", kind="integer", encoding="exact", max_length=1)},
    )
    found = encoded(schema)
    assert found.bags["tags"].ids.tolist() == [1, 2, 1, 3, 1]
    assert found.bags["tags"].offsets.tolist() == [0, 1, 1, 3, 4, 4, 5]
    assert found.sequences["last"].ids.tolist() == [[1], [0], [1], [3], [0], [1]]
    assert found.sequences["last"].lengths.tolist() == [1, 0, 1, 1, 0, 1]


CROSSES = FeatureSchema(
    bucketed={"x": BucketFeature(edges=(0.5,))},
    categorical={"site": CategoricalFeature(), "user": CategoricalFeature(kind="integer")},
    crosses={
        "site_x": CrossFeature(of=("site", "x"), num_buckets=2**40),
        "user_site": CrossFeature(of=("user", "site"), num_buckets=2**40),
        "site_user": CrossFeature(of=("site", "user"), num_buckets=2**40),
    },
)


def test_a_cross_tells_every_combination_apart() -> None:
    found = encoded(CROSSES).ids
    pairs = [(row["site"], found["x"][place].item()) for place, row in enumerate(ROWS)]
    assert len(set(found["site_x"].tolist())) == len(set(pairs))
    # Rows 0 and 5 have the same user and site, the others have not.
    assert found["user_site"][0] == found["user_site"][5]
    assert len(set(found["user_site"].tolist())) == 5
    assert not set(found["user_site"].tolist()) & set(found["site_user"].tolist())


def test_values_that_trade_places_are_another_combination() -> None:
    schema = FeatureSchema(
        categorical={"a": CategoricalFeature(), "b": CategoricalFeature()},
        crosses={"both": CrossFeature(of=("a", "b"), num_buckets=2**40)},
    )
    assert len(set(encoded(schema, [{"a": "1", "b": "2"}, {"a": "2", "b": "1"}]).ids["both"].tolist())) == 2


def test_collisions_of_crosses_are_counted_too() -> None:
    schema = dataclasses.replace(CROSSES, crosses={"c": CrossFeature(of=("user", "site"), num_buckets=3)})
    occupancy = fit_features(schema, table_of(schema), RowRange(0, 6)).collision_stats["c"]
    assert (occupancy.num_values, occupancy.num_buckets) == (5, 3)
    assert occupancy.num_colliding >= 4


def test_groups_and_labels_come_along() -> None:
    found = encoded(FeatureSchema(label=LABEL, numeric={"x": NumericFeature()}, group="user", group_kind="integer"))
    assert found.groups is not None and found.groups.tolist() == [row["user"] for row in ROWS]
    assert found.labels is not None and found.labels.tolist() == [0, 1, 0, 1, 0, 1]


def everything() -> FeatureSchema:
    return FeatureSchema(
        label=LABEL,
        numeric={"d1": NumericFeature(log=True, indicator=True), "d2": NumericFeature(missing="zero")},
        bucketed={"b3": BucketFeature(column="d3")},
        categorical={
            "c1": CategoricalFeature(kind="integer", num_buckets=500),
            "c2": CategoricalFeature(kind="integer", encoding="vocabulary", min_count=3),
            "c3": CategoricalFeature(kind="integer", encoding="exact"),
        },
        sequences={"history": SequenceFeature(kind="integer", encoding="vocabulary", max_length=3)},
        crosses={"c4": CrossFeature(of=("c3", "b3"))},
        group="c1",
        group_kind="integer",
    )


@pytest.fixture(scope="module")
def fitted() -> tuple[SyntheticClicks, FeatureEncoder]:
    log, schema = SyntheticClicks(SyntheticClicksConfig(num_rows=3000, history=5)), everything()
    training, _ = split_rows(log, "random", 0.1, seed=0)
    return log, FeatureEncoder(schema, fit_features(schema, log, training))


def same(one: FeatureBatch, other: FeatureBatch) -> bool:
    assert one.labels is not None and other.labels is not None
    assert one.groups is not None and other.groups is not None
    return (
        torch.equal(one.dense, other.dense)
        and all(torch.equal(one.ids[name], other.ids[name]) for name in one.ids)
        and all(torch.equal(one.sequences[name].ids, other.sequences[name].ids) for name in one.sequences)
        and all(torch.equal(one.sequences[name].lengths, other.sequences[name].lengths) for name in one.sequences)
        and torch.equal(one.labels, other.labels)
        and torch.equal(one.groups, other.groups)
    )


def test_what_is_saved_with_a_run_encodes_the_same(
    fitted: tuple[SyntheticClicks, FeatureEncoder], tmp_path: Path
) -> None:
    log, encoder = fitted
    save_features(tmp_path / "features.json", encoder.schema, encoder.statistics)
    again = FeatureEncoder(*load_features(tmp_path / "features.json"))
    assert again.fingerprint == encoder.fingerprint
    rows = NamedColumns(log.rows(np.arange(500)), log.layout)
    assert same(encoder.encode(rows), again.encode(rows))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 9}', '{"format": 1, "schema": {"numbr": {}}}'])
def test_a_file_that_holds_no_features_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "features.json").write_text(text)
    with pytest.raises((DataError, ConfigError), match="features|numbr"):
        load_features(tmp_path / "features.json")


def test_a_part_of_a_batch_is_the_batch_of_its_rows(fitted: tuple[SyntheticClicks, FeatureEncoder]) -> None:
    log, encoder = fitted
    samples = ClickDataset(log, RowRange(100, 200), encoder)
    whole = samples.batch(np.arange(100))
    assert same(whole.narrow(20, 55), samples.batch(np.arange(20, 55)))
    assert len(whole.narrow(5, 5)) == 0


def test_a_part_of_bags_is_the_bags_of_its_rows() -> None:
    found = encoded(FeatureSchema(bags={"tags": BagFeature(kind="integer", encoding="exact")}))
    part = found.narrow(2, 4).bags["tags"]
    assert (part.ids.tolist(), part.offsets.tolist()) == ([2, 1, 3], [0, 2, 3])
    some = found.take(torch.tensor([3, 1, 2])).bags["tags"]
    assert (some.ids.tolist(), some.offsets.tolist()) == ([3, 2, 1], [0, 1, 1, 3])


def test_only_training_rows_are_looked_at(fitted: tuple[SyntheticClicks, FeatureEncoder]) -> None:
    """Validation rows may hold anything without changing the statistics."""
    log, encoder = fitted
    training, validation = split_rows(log, "random", 0.1, seed=0)
    held_out = set(validation.rows(np.arange(validation.num_rows)).tolist())

    class Poisoned:
        layout, num_rows, fingerprint = log.layout, log.num_rows, "poisoned"

        def rows(self, indices: NDArray[np.int64]) -> Any:
            assert not held_out & set(indices.tolist())
            return log.rows(indices)

    assert fit_features(everything(), Poisoned(), training) == encoder.statistics


def test_no_training_rows_are_refused() -> None:
    schema = FeatureSchema(numeric={"x": NumericFeature()})
    with pytest.raises(DataError, match="nothing to train on"):
        fit_features(schema, table_of(schema), RowRange(0, 0))


BROKEN: list[tuple[Callable[[], object], str]] = [
    (lambda: FeatureSchema(), r"data\.schema.*"),
    (
        lambda: FeatureSchema(numeric={"x": NumericFeature()}, categorical={"x": CategoricalFeature()}),
        "one feature only",
    ),
    (
        lambda: FeatureSchema(
            categorical={"a": CategoricalFeature(), "b": CategoricalFeature(column="a", kind="integer")}
        ),
        "a",
    ),
    (lambda: dataclasses.replace(CROSSES, crosses={"c": CrossFeature(of=("site", "usr"))}), "did you mean 'user'"),
    (lambda: CrossFeature(of=("a",)), "two or more"),
    (lambda: BucketFeature(edges=(2.0, 1.0)), "rising"),
    (lambda: read_schema({"numeric": {"x": {"lg": True}}}), r"(?s)data\.schema\.numeric\.x\.lg.*did you mean 'log'"),
    (lambda: read_schema(3), r"data\.schema"),
    (lambda: read_schema("/nowhere.yaml"), r"(?s)cannot read the schema.*kitforge inspect"),
]


def test_items_have_a_vocabulary_and_other_features_stay_as_they_were() -> None:
    categories = {name: CategoricalFeature() for name in "ab"}
    sequences = {name: SequenceFeature() for name in "cd"}
    own = with_own_items(FeatureSchema(categorical=categories, sequences=sequences), ("a", "d"))
    encodings = [each.encoding for each in (*own.categorical.values(), *own.sequences.values())]
    assert encodings == ["vocabulary", "hash", "hash", "vocabulary"]


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_a_schema_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_schema_is_the_same_after_yaml(tmp_path: Path) -> None:
    (tmp_path / "schema.yaml").write_text(schema_yaml(everything()))
    assert read_schema(tmp_path / "schema.yaml") == everything()
    assert "num_buckets: 100000" not in schema_yaml(everything())


def test_a_run_has_its_features_before_its_first_step_and_writes_them_once(tmp_path: Path) -> None:
    schema = FeatureSchema(label=LABEL, categorical={"site": CategoricalFeature()})
    table = table_of(schema)
    encoder = FeatureEncoder(schema, fit_features(schema, table, RowRange(0, len(ROWS))))
    run: Any = SimpleNamespace(
        folder=tmp_path, world=SimpleNamespace(rank=0), state=SimpleNamespace(cursor=SimpleNamespace(step=7))
    )
    keep = SaveFeatures(encoder, None, "site is used")
    keep.on_event(Event(kind="start"), run)
    assert load_features(tmp_path / FEATURES)[0] == schema
    (tmp_path / FEATURES).unlink()
    for kind in ("step", "log", "end"):
        keep.on_event(Event(kind=kind), run)
    assert not (tmp_path / FEATURES).exists()
