"""The options of a run reach pipeline, HTTP, predict and evaluate alike, and a given option wins, default or not."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitforge import pipeline
from kitforge.cli import main as cli
from kitforge.composition import nested, parse
from kitforge.foundation.config import from_dict, option_help, option_names
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender import build
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.config import NegativeOptions, RecommendationDataOptions, RecommendationOptions
from kitforge.kits.recommender.factory import merge_options, open_run_checkpoint, with_run_options
from tests.kits.recommender.runs import run

KIT = TASKS["recommendation"]
SCHEMA = {
    "categorical": {name: {"kind": "integer", "encoding": "vocabulary"} for name in ("user", "item")},
    "sequences": {"history": {"kind": "integer", "encoding": "vocabulary", "table": "item"}},
}
# Another value than the default for every option of a run that is read again, and the default as it is typed.
Changes = dict[str, tuple[Any, str]]
RETRIEVAL: Changes = {
    "seed": (7, "0"),
    "data.format": ("csv", "auto"),
    "data.columns": (["user", "item", "history"], "null"),
    "data.delimiter": ("|", "null"),
    "data.missing_values": (["?"], "[]"),
    "data.decimal": (",", "auto"),
    "data.batch_size": (50, "null"),
    "data.eval_fraction": (0.25, "0.05"),
    "data.split": ("last", "random"),
    "data.on_invalid": ("skip", "refuse"),
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
SAMPLED: Changes = {
    "data.split": ("time", "random"),
    "data.time_column": ("time", "null"),
    "data.cache": ("columns", "null"),
    "data.negatives.num_negatives": (2, "0"),
    "data.negatives.negative_sampling": ("popularity", "uniform"),
    "data.negatives.item": ("item", "null"),
    "data.negatives.item_features": (["kind"], "[]"),
    "data.negatives.exclude_seen": (False, "true"),
    "retrieval.index": ("HNSW8", "Flat"),
    "retrieval.ef_search": (32, "null"),
}
LABELLED: Changes = {"data.label": ("bought", "null"), "data.positive": ("b", "null")}
RUNS: dict[str, tuple[str, Changes, dict[str, Any]]] = {
    "retrieval": (
        "two_tower",
        RETRIEVAL,
        {"model.user": ["user", "history"], "model.item": ["item"], "data.schema": SCHEMA},
    ),
    "sampled": (
        "deepfm",
        SAMPLED,
        {"data.schema": {"categorical": {name: {"encoding": "vocabulary"} for name in ("user", "item", "kind")}}},
    ),
    "labelled": ("deepfm", LABELLED, {}),
}


def rows(num_rows: int = 240) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    return [
        {
            "user": int(draw.integers(0, 20)),
            "item": n % 40,
            "history": [int(each) for each in draw.integers(0, 40, 3)],
            "kind": f"k{n % 40 % 3}",
            "time": n,
            "bought": "ab"[n % 2],
        }
        for n in range(num_rows)
    ]


@pytest.fixture(scope="module", params=RUNS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Changes]:
    """A run whose options all differ from their defaults, and these options."""
    return _trained(tmp_path_factory.mktemp("run"), request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _trained(tmp_path_factory.mktemp("run"), "retrieval")[0]


def _trained(folder: Path, name: str) -> tuple[Path, Changes]:
    family, changed, further = RUNS[name]
    if "data.cache" in changed:
        changed = {**changed, "data.cache": (str(folder / "columns"), "null")}
    values = {name: value for name, (value, _) in changed.items()}
    run(folder, family, {**further, **values, "trainer.max_steps": 2}, rows=rows())
    return folder, changed


def _delimiter(folder: Path) -> str:
    return "|" if 'delimiter: "|"' in (folder / "config.yaml").read_text() else ","


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
    (files / "a.csv").write_text("user|item|history|kind|time|bought\n1|2|3|k0|4|a\n".replace("|", _delimiter(folder)))
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


def by_hand(folder: Path, given: Mapping[str, str], *_: Any) -> RecommendationOptions:
    """Of options that were not composed those that differ from their defaults are given."""
    values = nested({name: parse(f"{name}={value}")[1][0] for name, value in given.items()})
    return with_run_options(from_dict(RecommendationOptions, values), open_run_checkpoint(folder))


def value_of(options: RecommendationOptions, name: str) -> Any:
    value: Any = options
    for key in name.split("."):
        value = getattr(value, key)
    return list(value) if isinstance(value, tuple) else value


DOORS: tuple[Door, ...] = (by_pipeline, by_predict, by_evaluate, by_http)


@pytest.mark.parametrize("door", [*DOORS, by_hand], ids=lambda each: each.__name__)
def test_every_option_of_a_run_reaches_every_door(
    door: Door, trained: tuple[Path, Changes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, changed = trained
    options = door(folder, {}, tmp_path, monkeypatch)
    assert {name: value_of(options, name) for name in changed} == {name: value for name, (value, _) in changed.items()}


@pytest.mark.parametrize("door", DOORS, ids=lambda each: each.__name__)
def test_a_given_option_wins_also_where_it_is_the_default(
    door: Door, trained: tuple[Path, Changes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, changed = trained
    plain = RecommendationOptions()
    options = door(folder, {name: typed for name, (_, typed) in changed.items()}, tmp_path, monkeypatch)
    assert {name: value_of(options, name) for name in changed} == {name: value_of(plain, name) for name in changed}


def test_the_matrix_has_every_option_that_is_read_again() -> None:
    others = {"data.train", "data.eval", "data.schema"}
    known = {
        name for name in option_names(RecommendationOptions) if name.startswith(("data.", "retrieval.", "predict."))
    }
    assert {"seed", *known} - others == {*RETRIEVAL, *SAMPLED, *LABELLED}


@pytest.mark.parametrize("verb", ["train", "predict", "evaluate", "serve"])
def test_whether_options_are_those_of_a_run_is_no_option(verb: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option 'inherits_run'"):
        cli.run([verb, f"checkpoint={folder}", "inherits_run=true", "port=-1"])


def test_whether_options_are_those_of_a_run_is_neither_shown_nor_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.run(["train", "task=recommendation", "--help"])
    assert "inherits" not in capsys.readouterr().out
    assert "inherits" not in (folder / "config.yaml").read_text()
    assert "inherits_run" not in option_help(RecommendationOptions)


def test_of_options_built_by_hand_each_that_differs_from_its_default_is_given(folder: Path) -> None:
    recorded = NegativeOptions(num_negatives=4, item="item", exclude_seen=False)
    given = RecommendationDataOptions(negatives=NegativeOptions(num_negatives=2))
    merged = merge_options(given, RecommendationDataOptions(negatives=recorded, split="last"))
    assert merged.negatives == NegativeOptions(num_negatives=2, item="item", exclude_seen=False)
    assert merged.split == "last"
    assert by_hand(folder, {"seed": "3", "retrieval.top_k": "5"}).seed == 3


def test_a_pipeline_takes_no_word_on_whether_options_are_those_of_a_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option 'inherits_run'"):
        pipeline("recommendation", model=folder, options={"inherits_run": True})


def test_seen_items_and_missing_values_are_those_of_the_run_at_every_door(folder: Path) -> None:
    user = {"user": 3, "history": [1, 2, 3]}
    seen = {found["item"] for found in pipeline("recommendation", model=folder).retrieve(user, k=40)}  # type: ignore[attr-defined]
    assert not seen & {1, 2, 3}
    wide = {"retrieval.exclude_seen": False, "retrieval.index": "Flat", "retrieval.nprobe": None}
    opened = pipeline("recommendation", model=folder, options=wide)
    assert {found["item"] for found in opened.retrieve(user, k=40)} == set(range(40))  # type: ignore[attr-defined]
