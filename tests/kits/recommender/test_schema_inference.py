"""Guesses of label, ids, categories and quantities by names and values; what is decided is said."""

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from kitforge.cli.inspect import inspect
from kitforge.data.tables.columns import LabelColumn
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.recommender.column_names import id_kind_of, name_words, positive_of
from kitforge.kits.recommender.describe import describe_table
from kitforge.kits.recommender.schema import schema_summary
from tests.kits.recommender.runs import ready, run
from tests.kits.recommender.test_describe import shown

DRAW = np.random.default_rng(3)
NUM_ROWS = 600


def clicks(**columns: Any) -> dict[str, Any]:
    return {**columns, "click": DRAW.integers(0, 2, NUM_ROWS)}


def ids(num_values: int = 60) -> Any:
    return DRAW.integers(1, num_values + 1, NUM_ROWS)


IDS = """userId movieId userid movieid UserID ItemID user_id:token item_id:token uid sku visitor product ad campaign
customer brand hour zipCode cate_id adgroup_id DeviceIP:token msno ISBN article_id creativeId nickId publisherId"""
QUANTITIES = """ price age
 hours_per_week capitalGain num_items click_count bid paid user_age productPrice year rating:float
education-num duration_ms userAge:float"""


def test_names_of_users_and_things_are_ids_or_categories_and_those_of_quantities_numbers() -> None:
    found = describe_table(clicks(**{name: ids() for name in (IDS + QUANTITIES).split()})).schema
    assert (list(found.categorical), list(found.numeric)) == (IDS.split(), QUANTITIES.split())


def test_a_type_in_the_name_is_obeyed_whatever_the_values() -> None:
    few = DRAW.integers(0, 5, NUM_ROWS)
    schema = describe_table(clicks(**{"f1:token": ids(), "f2:float": few, "f3:token": few})).schema
    assert (list(schema.numeric), list(schema.categorical)) == (["f2:float"], ["f1:token", "f3:token"])


def test_words_of_names_are_found_in_camel_case_and_between_separators() -> None:
    assert name_words("userID") == ["user", "id"] == name_words("user_id:token") == name_words("User-Id")
    assert name_words("HTTPServerName") == ["http", "server", "name"]
    edges = {"price_category": "category", "age_group": "category", "time_zone_code": "category", "category_count":
             "quantity", "group_size": "quantity", "score_user": "id", "code": "category"}  # fmt: skip
    assert {name: id_kind_of(name) for name in edges} == edges
    assert [id_kind_of(name) for name in ("grid", "paid", "x", "valid", "I1")] == [None, "quantity", None, None, None]


@pytest.mark.parametrize(
    ("values", "is_id"),
    [
        (DRAW.integers(0, 100, 5000), True),
        (DRAW.permutation(100)[np.minimum(DRAW.zipf(1.3, 5000) - 1, 99)], True),
        (DRAW.choice(DRAW.integers(10**6, 10**7, 200), 5000), True),
        (np.rint(DRAW.normal(40, 10, 5000)), False),
        (DRAW.poisson(30, 5000), False),
        (np.rint(DRAW.exponential(50, 5000)), False),
        (np.rint(DRAW.lognormal(4, 1, 5000)), False),
        (DRAW.integers(0, 10**6, 5000), False),
    ],
    ids=["uniform", "zipf", "sparse", "normal", "poisson", "exponential", "lognormal", "unrepeated"],
)
def test_whole_numbers_that_behave_as_ids_are_ids(values: Any, is_id: bool) -> None:
    schema = describe_table({"f": values.astype(np.int64), "click": DRAW.integers(0, 2, len(values))}).schema
    assert ("f" in schema.categorical) == is_id and ("f" in schema.numeric) != is_id


POSITIVE = [("yes", "no"), ("Y", "N"), ("true", "false"), (True, False), ("TRUE", "FALSE"), ("clicked", "not clicked"),
            ("1", "0"), (1.0, 0.0), ("positive", "negative"), ("click", "no_click"), ("buy", "skip"), (1, -1),
            (">50K", "<=50K"), ("T", "F"), (" 1", " 0"), ("liked", "unliked"), ("t", "f"), ("Yes.", "No."),
            ("+1", "-1"), ("ja", "nein"), ("Oui", "Non"), ("sí", "no"), ("是", "否"), ("да", "нет"),
            ("sim", "não")]  # fmt: skip


@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_the_positive_label_is_told_by_its_word_whatever_its_share(rate: float) -> None:
    for pair in POSITIVE:
        labels = [pair[0] if number < rate * 100 else pair[1] for number in range(100)]
        found = describe_table([{"x": n / 3, "label": label} for n, label in enumerate(labels)])
        assert found.label_rate == pytest.approx(rate), pair


@pytest.mark.parametrize("pair", [("phone", "tablet"), ("1", "2"), (3, 4), ("yes", "sure")], ids=str)
def test_a_label_whose_values_do_not_say_what_is_positive_is_refused_with_the_option(pair: Any, tmp_path: Path) -> None:
    rows = [{"x": n / 3, "label": pair[n % 3 == 0]} for n in range(60)]
    if pair == ("yes", "sure"):
        assert describe_table(rows).schema.label == LabelColumn(name="label", positive="yes", negative="sure")
        return
    with pytest.raises(DataError, match=r"(?s)no label.*do not say what is positive.*data\.positive"):
        ready(tmp_path, "wide_deep", {"data.schema": None}, rows)
    chosen = {"data.label": "label", "data.positive": str(pair[1])}
    assembly, _ = ready(tmp_path, "wide_deep", {"data.schema": None, **chosen}, rows)
    assert assembly.processor.schema.label == LabelColumn(name="label", positive=str(pair[1]), negative=str(pair[0]))


def test_the_label_is_chosen_by_an_option(tmp_path: Path) -> None:
    rows = [{"rating": n % 5, "x": n / 3, "device": ["phone", "tablet"][n % 2]} for n in range(60)]
    assembly, _ = ready(tmp_path, "wide_deep", {"data.label": "rating", "data.positive": "4"}, rows)
    assert assembly.processor.schema.label == LabelColumn(name="rating", positive="4")
    with pytest.raises(DataError, match=r"(?s)no such label.*ratings.*rating"):
        ready(tmp_path, "wide_deep", {"data.label": "ratings", "data.positive": "4"}, rows)
    with pytest.raises(ConfigError, match=r"data\.label"):
        ready(tmp_path, "wide_deep", {"data.label": "x", "data.schema": {"numeric": {"x": {}}}}, rows)


def test_a_column_of_two_texts_at_the_end_is_no_label_unless_its_words_say_so() -> None:
    rows = [{"user_id": n % 30, "x": n / 3, "device": ["phone", "tablet"][n % 10 == 0]} for n in range(60)]
    found = describe_table(rows)
    assert found.schema.label is None and "device" in found.schema.categorical
    assert "'device' has two values that do not say what is positive" in str(found.no_label)


def test_a_retrieval_family_guesses_no_label(tmp_path: Path) -> None:
    rows = [{"user_id": n % 30, "item_id": n % 7, "bought": int(n % 10 == 0)} for n in range(120)]
    towers = {"data.schema": None, "model.user": ["user_id"], "model.item": ["item_id"], "data.eval_fraction": 0.0}
    assembly, _ = ready(tmp_path, "two_tower", towers, rows)
    assert assembly.processor.schema.label is None and assembly.processor.schema.left_out == {}
    named = [{**row, "click": row["bought"]} for row in rows]
    assembly, _ = ready(tmp_path, "two_tower", towers, named)
    assert assembly.processor.schema.label == LabelColumn(name="click")


def test_features_named_for_the_towers_are_ids(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = {
        "who": draw.integers(0, 90, 120),
        "what": np.sort(draw.poisson(40, 120)),
        "price": draw.integers(0, 90, 120),
    }
    towers = {"data.schema": None, "model.user": ["who", "price"], "model.item": ["what"]}
    assembly, _ = ready(tmp_path, "two_tower", towers, rows)
    assert list(assembly.processor.schema.categorical) == ["who", "what"]
    assert list(assembly.processor.schema.numeric) == ["price"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("timestamp", 1_700_000_000 + 977 * np.arange(60)),
        ("review_time", 1_700_000_000_000.0 + 977 * np.arange(60)),
        ("createdAt", [None, *(1_700_000_000 + 977 * np.arange(59)).tolist()]),
        ("seen", [f"2026-01-{1 + n % 9:02}" for n in range(60)]),
        ("seen", [f"2026-01-01 10:{n:02}:00.5+02:00" for n in range(60)]),
        ("when", [datetime(2026, 1, 1 + n % 9) for n in range(60)]),
    ],
)
def test_times_are_left_out_unless_a_schema_names_them(name: str, values: Any) -> None:
    rows = [{name: value, "x": n / 3, "click": n % 2} for n, value in enumerate(values)]
    schema = describe_table(rows).schema
    assert f"data.split=time data.time_column={name} evaluates on the newest rows" in schema.left_out[name]
    assert (list(schema.numeric), list(schema.categorical)) == (["x"], [])


@pytest.mark.parametrize("name", ["time", "hours", "date_count"])
def test_other_numbers_of_such_names_stay_features(name: str) -> None:
    assert list(describe_table(clicks(**{name: ids()})).schema.numeric) == [name]


def test_first_rows_that_are_sorted_decide_neither_label_nor_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"campaign": "a" if n < 40 else "b", "x": n / 3, "click": int(n >= 40)} for n in range(60)]
    part = describe_table(rows[:40] * 30, num_rows=40)
    assert part.schema.label == LabelColumn(name="click") and "campaign" in part.schema.categorical
    assert describe_table(rows[:40]).schema.label is None and "campaign" in describe_table(rows[:40]).left_out


def test_whole_numbers_beyond_int64_are_texts() -> None:
    large = pandas.DataFrame(clicks(user_id=ids().astype(np.uint64) + np.uint64(2**63)))
    assert describe_table(large).schema.categorical["user_id"].kind == "text"


@pytest.mark.parametrize(
    "write", [str, json.dumps, lambda items: str(np.array(items)), lambda items: str(list(map(str, items)))]
)
def test_lists_that_went_through_csv_are_lists(write: Callable[[Any], str], tmp_path: Path) -> None:
    tags = [write([n % 5, n % 3]) for n in range(NUM_ROWS)]
    frame = pandas.DataFrame(clicks(tags=tags, x=DRAW.normal(size=NUM_ROWS)))
    frame["vector"] = [str([n / 3, 0.5]) for n in range(NUM_ROWS)]
    frame.to_csv(tmp_path / "a.csv", index=False)
    found = describe_table(tmp_path / "a.csv")
    assert list(found.schema.bags) == ["tags"] and "lists" not in found.schema.categorical
    assert "vector" in found.left_out
    assert next(view.num_values for view in found.columns if view.name == "tags") == 5


UNUSABLE: dict[str, Any] = {
    "timestamp": [datetime(2026, 1, 1 + n % 9, n % 24) for n in range(60)],
    "date": [date(2026, 1, 1 + n % 9) for n in range(60)],
    "time": [time(n % 24) for n in range(60)],
    "timedelta": [timedelta(seconds=n) for n in range(60)],
    "struct": [{"a": n} for n in range(60)],
    "lists of lists": [[[n]] for n in range(60)],
    "vector": [[n / 3, 0.5] for n in range(60)],
}


@pytest.mark.parametrize("values", UNUSABLE.values(), ids=UNUSABLE)
def test_a_column_that_no_feature_is_read_from_is_left_out_with_the_reason(values: Any, tmp_path: Path) -> None:
    rows = [{"x": n / 3, "when": value, "click": n % 2} for n, value in enumerate(values)]
    assert "neither a number, a text nor a list" in describe_table(rows).left_out["when"]
    ready(tmp_path, "wide_deep", {}, rows)


def frames() -> dict[str, Callable[[], Any]]:
    base = pandas.DataFrame({"x": np.arange(60) / 3, "click": np.arange(60) % 2})
    return {
        "period": lambda: base.assign(p=pandas.period_range("2026-01", periods=60, freq="M")),
        "interval": lambda: base.assign(p=pandas.interval_range(0, 60)),
        "uint64": lambda: base.assign(p=np.arange(60, dtype=np.uint64) % 30 + 2**63),
        "decimal": lambda: base.assign(p=[Decimal(n) / 4 for n in range(60)]),
        "bytes": lambda: base.assign(p=[b"ab", b"c"] * 30),
        "zoned": lambda: base.assign(p=pandas.date_range("2026-01-01", periods=60, tz="Europe/Berlin")),
        "float16": lambda: base.assign(p=(np.arange(60) / 7).astype(np.float16)),
        "nullable": lambda: base.assign(p=pandas.array([1, None] * 30, dtype="Int64")),
    }


@pytest.mark.parametrize("make", frames().values(), ids=frames())
def test_frames_with_a_column_of_any_type_are_trained_on(make: Callable[[], Any], tmp_path: Path) -> None:
    frame = make()
    ready(tmp_path / "run", "wide_deep", {}, frame)
    if frame["p"].dtype.name != "float16":
        frame.to_parquet(tmp_path / "a.parquet")
        ready(tmp_path / "parquet", "wide_deep", {}, str(tmp_path / "a.parquet"))


def test_numbers_with_blanks_or_decimal_commas_are_numbers(tmp_path: Path) -> None:
    lines = [f"{n / 7:.3f}, {n * n}, {int(n % 3 > 0)}" for n in range(60)]
    (tmp_path / "a.csv").write_text("x, z, click\n" + "\n".join(lines) + "\n")
    found = describe_table(tmp_path / "a.csv").schema
    assert found.label is not None and (found.label.name.strip(), found.label.positive) == ("click", None)
    assert [name.strip() for name in found.numeric] == ["x", "z"]
    lines = [f"{n / 7:.3f}".replace(".", ",") + f";{n % 2}" for n in range(60)]
    (tmp_path / "b.csv").write_text("x;click\n" + "\n".join(lines) + "\n")
    assert list(describe_table(tmp_path / "b.csv").schema.numeric) == ["x"]


def test_what_was_decided_is_said() -> None:
    rows = [{"userId": n % 30, "price": n / 3, "same": 1, "bought": ["no", "yes"][n % 3 > 0]} for n in range(60)]
    found = describe_table(rows)
    lines = schema_summary(found.schema)
    assert lines == [
        "label: bought (positive: 'yes', negative: 'no')",
        "categories: userId",
        "numbers: price",
        "left out: same (always the same)",
    ]
    text = shown(found)
    assert all(line in text for line in lines[:3]) and "left out of the schema: same, always the same" in text


def test_a_run_says_what_it_takes_columns_for(tmp_path: Path) -> None:
    rows = [{"userId": n % 30, "price": n / 3, "same": 1, "click": n % 2} for n in range(200)]
    told, _ = run(tmp_path, "wide_deep", {"trainer.max_steps": 1}, rows=rows)
    (event,) = [line for line in told.lines if line.get("event") == "schema"]
    assert "label: click" in event["message"] and "left out: same (always the same)" in event["message"]
    assert "label: click" in (tmp_path / "metrics.jsonl").read_text()


def test_positive_of_leaves_open_what_words_do_not_say() -> None:
    assert positive_of("phone", "tablet") is None and positive_of("yes", "true") is None
    assert positive_of("no", "maybe") == ("maybe", "no")
    assert positive_of("not_clicked", "clicked") == ("clicked", "not_clicked")


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.csv", "a.inter"])
def test_inspect_takes_a_file_whose_columns_are_no_chat_for_a_table(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pandas.DataFrame({"userId": np.arange(60) % 7, "price": np.arange(60) / 7, "click": np.arange(60) % 2})
    path = tmp_path / name
    if name == "a.parquet":
        frame.to_parquet(path)
    elif name == "a.jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_csv(path, index=False, sep="\t" if name == "a.inter" else ",")
    assert inspect([f"data.train={path}"]) == 0
    assert "label: click" in capsys.readouterr().out
