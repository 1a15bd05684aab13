"""The options of a run reach pipeline, HTTP, predict and evaluate alike, and a given option wins, default or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitforge import pipeline
from kitforge.cli import main as cli
from kitforge.composition import parse
from kitforge.kits.recommender import build
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.config import RecommendationOptions
from tests.kits.recommender.runs import run

KIT = TASKS["recommendation"]
SCHEMA = {
    "categorical": {name: {"kind": "integer", "encoding": "vocabulary"} for name in ("user", "item")},
    "sequences": {"history": {"kind": "integer", "encoding": "vocabulary", "table": "item"}},
}
# Another value than the default for every option of a run that is read again, and the default as it is typed.
CHANGED: dict[str, tuple[Any, str]] = {
    "data.format": ("csv", "auto"),
    "data.columns": (["user", "item", "history"], "null"),
    "data.delimiter": ("|", "null"),
    "data.missing_values": (["?"], "[]"),
    "data.decimal": (",", "auto"),
    "data.batch_size": (50, "null"),
    "data.eval_fraction": (0.25, "0.05"),
    "data.split": ("last", "random"),
    "data.on_bad_row": ("skip", "error"),
    "data.shuffle": (False, "true"),
    "data.prefetch": (3, "2"),
    "data.num_fit_rows": (77, "10000"),
    "data.num_workers": (1, "null"),
    "retrieval.num_negatives": (9, "512"),
    "retrieval.top_k": (3, "10"),
    "retrieval.exclude_seen": (True, "false"),
    "retrieval.index": ("IVF4,Flat", "Flat"),
    "retrieval.nprobe": (2, "null"),
    "predict.top_k": (4, "10"),
    "predict.columns": (["user"], "null"),
}


def rows(num_rows: int = 240) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {"user": int(draw.integers(0, 20)), "item": n % 40, "history": [int(each) for each in draw.integers(0, 40, 3)]}
        for n in range(num_rows)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    towers = {"model.user": ["user", "history"], "model.item": ["item"], "data.schema": SCHEMA}
    changes = {name: value for name, (value, _) in CHANGED.items()}
    run(folder, "two_tower", {**towers, **changes, "trainer.max_steps": 2}, rows=rows())
    return folder


Door = Callable[[Path, Mapping[str, str], Path, pytest.MonkeyPatch], RecommendationOptions]


class _SeenError(Exception):
    """Ends a command when its options are known."""


def _caught(patch: pytest.MonkeyPatch, owner: Any, name: str, place: int, go: Callable[[], Any]) -> Any:
    seen = []

    def stop(*arguments: Any, **_: Any) -> None:
        seen.append(arguments[place])
        raise _SeenError

    with patch.context() as inner:
        inner.setattr(owner, name, stop)
        with pytest.raises(_SeenError):
            go()
    return seen[0]


def by_pipeline(folder: Path, given: Mapping[str, str], _: Path, patch: pytest.MonkeyPatch) -> RecommendationOptions:

    options = {name: parse(f"{name}={value}")[1][0] for name, value in given.items()}
    return pipeline("recommendation", model=folder, options=options).options  # type: ignore[attr-defined, no-any-return]


def by_predict(folder: Path, given: Mapping[str, str], files: Path, patch: pytest.MonkeyPatch) -> RecommendationOptions:
    typed = [f"{name}={value}" for name, value in given.items()]
    arguments = ["predict", f"checkpoint={folder}", f"data.eval={files / 'a.csv'}", f"output={files / 'b.csv'}", *typed]
    (files / "a.csv").write_text("user|item|history\n1|2|3\n")
    opened = _caught(patch, build, "write_predictions", 0, lambda: cli.run(arguments))
    return opened.options  # type: ignore[no-any-return]


def by_evaluate(folder: Path, given: Mapping[str, str], _: Path, patch: pytest.MonkeyPatch) -> RecommendationOptions:
    typed = [f"{name}={value}" for name, value in given.items()]
    found: RecommendationOptions = _caught(
        patch, build, "_dataset", 0, lambda: cli.run(["evaluate", f"checkpoint={folder}", *typed])
    )
    return found


def by_http(folder: Path, given: Mapping[str, str], _: Path, patch: pytest.MonkeyPatch) -> RecommendationOptions:
    typed = [f"{name}={value}" for name, value in given.items()]
    opened = _caught(patch, build, "RecommenderService", 0, lambda: cli.run(["serve", f"checkpoint={folder}", *typed]))
    return opened.options  # type: ignore[no-any-return]


def value_of(options: RecommendationOptions, name: str) -> Any:
    section, _, key = name.partition(".")
    value = getattr(getattr(options, section), key)
    return list(value) if isinstance(value, tuple) else value


DOORS: tuple[Door, ...] = (by_pipeline, by_predict, by_evaluate, by_http)


@pytest.mark.parametrize("door", DOORS, ids=lambda each: each.__name__)
def test_every_option_of_a_run_reaches_every_door(
    door: Door, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = door(folder, {}, tmp_path, monkeypatch)
    assert {name: value_of(options, name) for name in CHANGED} == {name: value for name, (value, _) in CHANGED.items()}


@pytest.mark.parametrize("door", DOORS, ids=lambda each: each.__name__)
def test_a_given_option_wins_also_where_it_is_the_default(
    door: Door, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = RecommendationOptions()
    given = {name: typed for name, (_, typed) in CHANGED.items() if name != "retrieval.nprobe"}
    options = door(folder, {**given, "retrieval.nprobe": "null"}, tmp_path, monkeypatch)
    assert {name: value_of(options, name) for name in CHANGED} == {name: value_of(plain, name) for name in CHANGED}


def test_the_matrix_has_every_option_that_is_read_again() -> None:
    others = {"train", "eval", "schema", "label", "positive", "negatives", "time_column", "cache", "ef_search"}
    plain = RecommendationOptions()
    for section in ("data", "retrieval", "predict"):
        names = {field.name for field in dataclasses.fields(getattr(plain, section))} - others
        assert names == {name.partition(".")[2] for name in CHANGED if name.startswith(f"{section}.")}


def test_seen_items_and_missing_values_are_those_of_the_run_at_every_door(folder: Path) -> None:
    user = {"user": 3, "history": [1, 2, 3]}
    seen = {found["item"] for found in pipeline("recommendation", model=folder).retrieve(user, k=40)}  # type: ignore[attr-defined]
    assert not seen & {1, 2, 3}
    wide = {"retrieval.exclude_seen": False, "retrieval.index": "Flat", "retrieval.nprobe": None}
    opened = pipeline("recommendation", model=folder, options=wide)
    assert {found["item"] for found in opened.retrieve(user, k=40)} == set(range(40))  # type: ignore[attr-defined]
