"""Runs of every family keep what a run promises: splits, resumes and caches change nothing."""

import itertools
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitforge.api import evaluate, pipeline
from kitforge.composition import compose_eval_config
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.kits.recommender.config import with_size_defaults
from kitforge.kits.recommender.features import FeatureEncoder, FeatureStatistics
from kitforge.kits.recommender.model import Recommender, build_request_plan
from kitforge.kits.recommender.schema import read_schema
from kitforge.models.catalog import recommender_of
from tests.differential.drawn import WHOLE
from tests.kits.recommender.runs import FAMILIES, by_default, numbers, ready, rows_of, run, same

KIT = TASKS["recommendation"]

CACHES: dict[str, dict[str, Any]] = {
    "smaller than a batch": {"cache.device_rows": 16},
    "fetched ahead": {"cache.device_rows": 120, "cache.prefetch_batches": 2},
    "lfu, far ahead": {"cache.device_rows": 60, "cache.prefetch_batches": 4, "cache.policy.name": "lfu"},
    "looks ahead": {"cache.device_rows": 60, "cache.prefetch_batches": 1, "cache.policy.name": "lookahead"},
    "files": {"cache.device_rows": 30, "cache.host_rows": 10, "cache.prefetch_batches": 2, "cache.path": "rows"},
}
PRODUCT = list(itertools.product(FAMILIES, CACHES))
CASES = PRODUCT if WHOLE else random.Random(3).sample(PRODUCT, 6)
# Those of wide_deep and two_tower are rows of tests/verify/test_contracts.py.
SAMPLED = sorted(FAMILIES) if WHOLE else ["din", "sasrec"]
# Every family, and both roles of a column by turns.
NAMINGS = [
    pair for place, pair in enumerate(itertools.product(FAMILIES, (False, True))) if WHOLE or place % 4 in (0, 3)
]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("family", SAMPLED)
def test_micro_batches_are_one_batch(tmp_path: Path, family: str) -> None:
    whole, _ = run(tmp_path / "whole", family)
    split, _ = run(tmp_path / "split", family, {"trainer.micro_batch_size": 30})
    for name in ("loss", "eval/loss", "grad_norm"):
        assert numbers(split, name) == pytest.approx(numbers(whole, name), abs=2e-6, rel=1e-5)
    assert numbers(whole, "loss")[-1] < numbers(whole, "loss")[0]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("family", SAMPLED)
def test_a_resumed_run_is_one_that_never_stopped(tmp_path: Path, family: str) -> None:
    choices = {"cache.device_rows": 40, "cache.prefetch_batches": 2}
    whole, state = run(tmp_path / "whole", family, choices)
    first, _ = run(tmp_path / "parts", family, choices, stop_at=3)
    second, resumed = run(tmp_path / "parts", family, {**choices, "resume": "auto"})
    assert same(resumed, state)
    assert numbers(first, "loss") + numbers(second, "loss") == numbers(whole, "loss")
    assert numbers(second, "eval/loss")[-1:] == numbers(whole, "eval/loss")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("family", "cache"), CASES)
def test_a_cache_is_invisible(tmp_path: Path, family: str, cache: str) -> None:
    plain, state = run(tmp_path / "plain", family)
    choices = dict(CACHES[cache])
    if "cache.path" in choices:
        choices["cache.path"] = str(tmp_path / "rows")
    cached, found = run(tmp_path / "cached", family, choices)
    assert same(found, state)
    for name in ("loss", "eval/loss", "grad_norm"):
        assert numbers(cached, name) == numbers(plain, name)


@pytest.mark.slow
def test_evaluation_does_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    for family in ("dcn_v2", "sasrec"):
        told = {
            size: run(
                tmp_path / f"{family}{size}",
                family,
                {"trainer.max_steps": 2, "data.batch_size": 100, "trainer.micro_batch_size": size},
            )[0]
            for size in (7, 100)
        }
        names = {name for line in told[7].lines for name in line if name.startswith("eval/")}
        for name in names:
            assert numbers(told[7], name) == pytest.approx(numbers(told[100], name), abs=1e-5)


def test_grouped_auc_comes_with_a_group_key(tmp_path: Path) -> None:
    schema = {
        "label": {"name": "click"},
        "categorical": {"c1": {"kind": "integer"}, "c2": {"kind": "integer"}},
        "group": "c4",
        "group_kind": "integer",
    }
    told, _ = run(tmp_path / "run", "dcn_v2", {"data.schema": schema, "trainer.max_steps": 3})
    assert 0 < numbers(told, "eval/grouped_auc")[-1] < 1


@pytest.mark.slow
def test_the_metric_that_says_what_is_best_is_the_family_s_own(tmp_path: Path) -> None:
    monitors = {family: ready(tmp_path / family, family, {})[0].loop.options for family in ("dlrm", "sasrec")}
    assert [(each.metric_for_best, each.metric_for_best_mode) for each in monitors.values()] == [
        ("eval/auc", "max"),
        ("eval/hr@10", "max"),
    ]


@pytest.mark.slow
def test_another_number_of_items_or_another_metric_may_say_what_is_best(tmp_path: Path) -> None:
    told, _ = run(tmp_path / "run", "sasrec", {"retrieval.top_k": 7, "trainer.max_steps": 2})
    assert set(told.lines[-1]) >= {f"eval/{name}@{top}" for name in ("hr", "ndcg") for top in (1, 5, 7, 10, 20)}
    assert ready(tmp_path / "top", "sasrec", {"retrieval.top_k": 7})[0].loop.options.metric_for_best == "eval/hr@7"
    said = ready(tmp_path / "said", "sasrec", {"trainer.metric_for_best": "eval/loss"})[0].loop.options
    assert (said.metric_for_best, said.metric_for_best_mode) == ("eval/loss", "min")
    asked = {"checkpoint": str(tmp_path / "run"), "device": "cpu"}
    for top, choices in ((7, {}), (3, {"retrieval": {"top_k": 3}})):
        found = evaluate(KIT.read_options(asked | choices), Inputs(train_dataset=rows_of("sasrec")))
        ranks = {f"eval/{name}@{k}" for name in ("hr", "ndcg") for k in (1, 5, 10, 20, top)}
        assert {*found} - ranks == {
            *("eval/loss", "eval/mrr", "eval/cold_share", "eval/unknown_share/items"),
            f"eval/popularity_hr@{top}",
        }
        assert ranks <= {*found}


@pytest.mark.parametrize("axis", ["tensor", "context", "expert"])
def test_an_axis_that_cuts_the_network_is_refused_before_any_rank_is_started(tmp_path: Path, axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.{axis}[\s\S]*a recommender"):
        ready(tmp_path, "wide_deep", {"parallel.data": 2, f"parallel.{axis}": 2})


@pytest.mark.slow
def test_bf16_is_near_fp32(tmp_path: Path) -> None:
    exact, _ = run(tmp_path / "fp32", "wide_deep")
    rounded, _ = run(tmp_path / "bf16", "wide_deep", {"precision": "bf16"})
    assert numbers(rounded, "loss") == pytest.approx(numbers(exact, "loss"), rel=0.01)
    assert numbers(rounded, "loss") != numbers(exact, "loss")


@pytest.mark.parametrize(
    ("rows", "size", "epochs", "rate"),
    [
        (100, 64, 4.0, 0.0035),
        (40_000, 128, 4.0, 0.07),
        (200_000, 512, 4.0, 0.1565),
        (200_001, 512, 2.0, 0.1565),
        (10**6, 2048, 2.0, 0.3),
        (10**7, 4096, 1.0, 0.3),
        (None, 4096, None, 0.1),
    ],
)
def test_what_is_not_said_is_left_to_the_number_of_rows(
    rows: int | None, size: int, epochs: float | None, rate: float
) -> None:
    found = with_size_defaults(KIT.read_options({}), rows, "wide_deep")
    assert (found.data.batch_size, found.trainer.epochs) == (size, epochs)
    assert found.tables.wide.learning_rate == pytest.approx(rate, rel=1e-3)
    assert found.tables.wide.initial_sum == pytest.approx((4 * rate / size) ** 2, rel=1e-2)
    wide = f"wide weights {found.tables.wide.learning_rate:.3g}"
    assert found.summary == f"learning rates: 0.001, vectors 0.001, {wide}"


def test_sequences_are_passed_over_more_often() -> None:
    assert with_size_defaults(KIT.read_options({}), 10**7, "sasrec").trainer.epochs == 10
    few = with_size_defaults(KIT.read_options({}), 943, "sasrec")
    assert (few.trainer.epochs, few.data.batch_size) == (50, 16)


def test_what_is_said_stays() -> None:
    wide = {"learning_rate": 0.5, "initial_sum": 0.25}
    options = KIT.read_options({"data": {"batch_size": 7}, "trainer": {"max_steps": 3}, "tables": {"wide": wide}})
    assert with_size_defaults(options, 50, "sasrec") == options


@pytest.mark.parametrize("family", ["wide_deep", "deepfm", "dcn_v2", "dlrm", "din"])
def test_the_first_logits_are_the_log_odds_of_a_click(tmp_path: Path, family: str) -> None:
    assembly, _ = ready(tmp_path, family, {})
    model = assembly.loop.model
    assert isinstance(model, Recommender)
    rate = model.encoder.statistics.positive_rate
    assert rate is not None and not 0.45 < rate < 0.55
    rows = assembly.loop.task.steps(model, assembly.loop.state.cursor)
    with torch.no_grad():
        clicks = model.eval().logits(next(iter(rows))[0]).sigmoid().mean().item()
    assert clicks == pytest.approx(rate, abs=0.05)
    if family in ("wide_deep", "deepfm"):
        assert not model.network.get_parameter("linear.weight").any()


@pytest.mark.slow
def test_a_small_table_is_learned_without_a_word_about_how(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).normal(size=(4000, 2))
    clicks = np.random.default_rng(1).random(4000) < np.where(np.abs(numbers[:, 0]) > 1, 0.8, 0.1)
    rows = [{"a": a, "b": b, "click": int(click)} for (a, b), click in zip(numbers, clicks, strict=True)]
    # A line through the numbers has 0.5, the truth about 0.84.
    assert by_default(tmp_path, "wide_deep", rows, 3000)["eval/auc"] > 0.8


def day(number: int, num_rows: int = 900) -> list[dict[str, Any]]:
    """Rows whose labels depend on the user alone. Every day other users are the frequent ones, some are new, and
    prices are others."""
    generator = np.random.default_rng(number)
    users = (generator.integers(0, 10 + 10 * number, num_rows) ** 2 // (10 + 10 * number) + 7 * number) % 40
    prices = generator.normal(10 + 30 * number, 1 + number, num_rows).round(2)
    return [
        {"user": f"u{user}", "price": float(price), "click": int(user % 3 == 0)}
        for user, price in zip(users, prices, strict=True)
    ]


# No batch size and no rates: the number of rows decides them.
GROWING: dict[str, Any] = {
    "data.schema": {
        "label": {"name": "click"},
        "numeric": {"price": {}},
        "bucketed": {"price_range": {"column": "price", "num_buckets": 4}},
        "categorical": {"user": {"encoding": "vocabulary"}},
    },
    "data.batch_size": None,
    "trainer.max_steps": None,
    "trainer.epochs": 12,
}


def auc_of(checkpoint: Path) -> float:
    choices = {"checkpoint": str(checkpoint), "device": "cpu", "data.train": None}
    options = KIT.read_options(compose_eval_config("recommendation", choices).values)
    return evaluate(options, Inputs(eval_dataset=day(1, 400)))["eval/auc"]


@pytest.mark.slow
@pytest.mark.parametrize("added", [day(1, 945)[900:], day(2, 1500)], ids=["a twentieth", "other users"])
def test_a_run_over_rows_that_have_grown_keeps_what_its_rows_stand_for(tmp_path: Path, added: Any) -> None:
    _, state = run(tmp_path, "wide_deep", GROWING, stop_at=100, rows=day(1))
    before = auc_of(tmp_path / "checkpoints" / "step_100")
    assert before > 0.95
    went_on = {**GROWING, "resume": "auto", "trainer.allow_data_changes": True}
    told, later = run(tmp_path, "wide_deep", went_on, stop_at=102, rows=day(1) + added)
    assert auc_of(tmp_path / "checkpoints" / "step_100") == before
    assert auc_of(tmp_path / "checkpoints" / "step_102") == pytest.approx(before, abs=0.02)
    is_new = {row["user"] for row in added} - {row["user"] for row in day(1)}
    words = [event["message"] for event in told.lines if event.get("event") == "unlearned"]
    assert bool(words) == bool(is_new)
    assert all(f"{len(is_new)} values of 'user'" in each for each in words)


def test_a_run_from_another_names_the_columns_that_its_network_does_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # Of the first day, a column that tells nothing is left out on purpose.
    rows = [{**row, "same": 1} for row in day(1, 200)]
    run(tmp_path / "a", "wide_deep", {"trainer.max_steps": 1}, rows=rows)
    tuned = {"checkpoint": str(tmp_path / "a"), "trainer.max_steps": 1}
    run(tmp_path / "b", "wide_deep", tuned, rows=rows)
    assert "has no feature" not in caplog.text
    run(tmp_path / "c", "wide_deep", tuned, rows=[{**row, "channel": "tv", "age": 3} for row in rows])
    assert "the network has no feature for 'age', 'channel'; a new run would" in caplog.text


@pytest.mark.slow
def test_a_run_that_goes_on_refuses_another_schema_and_one_that_begins_from_it_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    schema = {"label": {"name": "click"}, "categorical": {"user": {"encoding": "vocabulary"}}, "numeric": {"price": {}}}
    (tmp_path / "a.yaml").write_text(json.dumps(schema))
    choices = {"data.schema": str(tmp_path / "a.yaml"), "trainer.max_steps": 3}
    run(tmp_path / "run", "wide_deep", choices, stop_at=1, rows=day(1, 200))
    run(tmp_path / "run", "wide_deep", {**choices, "resume": "auto"}, stop_at=2, rows=day(1, 200))
    (tmp_path / "a.yaml").write_text(json.dumps({**schema, "numeric": {"price": {"log": True}}}))
    with pytest.raises(ConfigError, match=r"(?s)data\.schema is not the one.*other numeric"):
        run(tmp_path / "run", "wide_deep", {**choices, "resume": "auto"}, rows=day(1, 200))
    assert "other numeric" not in caplog.text
    run(tmp_path / "b", "wide_deep", {**choices, "checkpoint": str(tmp_path / "run")}, stop_at=1, rows=day(1, 200))
    assert "other numeric" in caplog.text
    # A file that is gone says nothing.
    (tmp_path / "a.yaml").unlink()
    run(tmp_path / "run", "wide_deep", {**choices, "resume": "auto"}, rows=day(1, 200))


def test_each_call_of_a_table_has_a_key_of_its_own() -> None:
    exact = {"kind": "integer", "encoding": "exact"}
    values = {"item": exact, "item_last": exact}
    schema = read_schema({"categorical": values, "sequences": {"last": {**exact, "table": "item", "max_length": 2}}})
    plan = build_request_plan(
        recommender_of({"family": "wide_deep"}), FeatureEncoder(schema, FeatureStatistics(num_rows=1))
    )
    deep = sorted(name for name in plan.features.values() if name.startswith("deep"))
    assert deep == ["deep_16_of_item", "deep_16_of_item", "deep_16_of_item_last"]


# Names that Python's modules own, that networks give to their own parts, and that have a dot.
OWNED = ["items", "keys", "type", "deep", "item", "user", "user.id", "wide", "values", "a/b", "items.lengths"]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("family", "as_history"), NAMINGS)
def test_columns_have_any_name(tmp_path: Path, family: str, as_history: bool) -> None:
    rows = [
        {"click": n % 2, "n": n}
        | {f"last {name}": n % 7 for name in OWNED}
        | {f"all {name}": [n % 5, n % 7] for name in OWNED}
        for n in range(60)
    ]
    values, histories = {}, {}
    for name, encoding in zip(OWNED, itertools.cycle(["vocabulary", "exact"]), strict=False):
        word = {"kind": "integer", "encoding": encoding, "table": name}
        own, other = (f"its {name}", name) if as_history else (name, f"its {name}")
        values[own] = {**word, "column": f"last {name}"}
        histories[other] = {**word, "column": f"all {name}", "max_length": 3}
    schema = {"label": {"name": "click"}, "numeric": {"n": {}}, "categorical": values, "sequences": histories}
    towers = {"model.user": [*histories, *list(values)[1:]], "model.item": [*values][:1]}
    if family == "sasrec":
        schema = {"sequences": {"keys": histories[[*histories][0]]}}
    # In a file, as a name with a dot is several options on a command line.
    (tmp_path / "schema.yaml").write_text(json.dumps(schema))
    choices = {"data.schema": str(tmp_path / "schema.yaml"), "data.eval_fraction": 0.0, "trainer.max_steps": 2}
    run(tmp_path / "run", family, {**choices, **(towers if family == "two_tower" else {})}, rows=rows)
    found = pipeline("recommendation", str(tmp_path / "run"), options={"device": "cpu"})
    assert found.retrieve(rows[:1], k=1) if family in ("two_tower", "sasrec") else found(rows[:1])
