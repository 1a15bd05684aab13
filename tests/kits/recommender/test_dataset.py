"""Rows that come once: trained on as they come, with snapshots of what changed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import pytest
import torch

from kitforge.composition import compose_config
from kitforge.core.checkpoint.manifest import read_manifest, steps
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.trainer.run_folder import train
from tests.distributed.training import Losses, TestRendezvous
from tests.kits.recommender.runs import OPTIONS, numbers, state_of

KIT = TASKS["recommendation"]

SCHEMA = {
    "label": {"name": "click"},
    "numeric": {"price": {}},
    "categorical": {"user": {"kind": "integer", "encoding": "exact"}, "item": {"kind": "integer", "num_buckets": 50}},
}


def endless(start: int = 0) -> Iterator[dict[str, Any]]:
    """Users come and go: new ids never end."""
    for number in itertools.count(start):
        item = number * 7 % 40
        yield {
            "number": number,
            "user": number // 20 - 2**40,
            "item": item,
            "price": float(number % 11),
            "click": int(item < 10),
        }


def online(
    folder: Path, rows: Iterator[dict[str, Any]], stop_at: int | None = None, **choices: Any
) -> tuple[Losses, Any]:
    """A run over rows that come once."""
    torch.set_num_threads(1)
    told = Losses()
    told.stop_at = stop_at
    given = {**OPTIONS, "model.hidden": [8], "data.schema": SCHEMA, "output_dir": str(folder), **choices}
    options = KIT.read_options(compose_config("recommendation", given).values)
    assembly = KIT.assemble(options, Inputs(train_dataset=rows, callbacks=[told]), TestRendezvous(options.parallel))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return told, assembly


def numbered(rows: Iterator[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every row is a user of its own, so that the table of users tells which rows were trained on."""
    return ({**row, "user": row["number"]} for row in rows)


def trained_rows(assembly: Any) -> list[int]:
    """The numbers of the rows that were trained on, in order."""
    state = state_of(assembly)
    return next(ids.tolist() for name, ids in state.items() if name.endswith("of_user ids"))


@final
class Shelf:
    """Rows that can be read again from any place."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Shelf:
        return self

    def __next__(self) -> dict[str, Any]:
        self.next += 1
        return next(numbered(endless(self.next - 1)))

    def position(self) -> int:
        return self.next

    def seek(self, position: int) -> None:
        self.next = position


@pytest.mark.slow
def test_an_endless_source_is_read_no_further_than_it_is_needed(tmp_path: Path) -> None:
    rows = endless()
    told, _ = online(tmp_path / "run", rows, **{"trainer.max_steps": 30, "tables.wide.learning_rate": 0.5})
    assert numbers(told, "samples")[-1] == 3000
    assert numbers(told, "loss")[-1] < 0.8 * numbers(told, "loss")[0]
    # Neither the rows that features are fitted on nor the batches that wait ready go beyond the last step.
    assert next(rows)["number"] == 3000


@pytest.mark.slow
def test_snapshots_hold_what_changed(tmp_path: Path) -> None:
    choices = {"trainer.max_steps": 8, "trainer.checkpoint_every": 2, "trainer.incremental_checkpoints": 3}
    online(tmp_path / "run", endless(), **choices, **{"trainer.save_total_limit": 10})
    root = tmp_path / "run" / "checkpoints"
    sizes = {}
    for step in steps(root):
        manifest = read_manifest(root / f"step_{step}")
        is_whole = manifest.parent is None
        sizes[step] = (is_whole, sum(rows.num_rows for table in manifest.tables for rows in table.rows))
    assert [whole for whole, _ in sizes.values()] == [True, False, False, False]
    assert sizes[4][1] <= sizes[2][1] + 40


@pytest.mark.slow
def test_a_stream_goes_on_with_what_comes_next(tmp_path: Path) -> None:
    choices = {"trainer.max_steps": 8, "resume": "auto"}
    online(tmp_path / "run", endless(), stop_at=4, **choices)
    features = (tmp_path / "run" / "features.json").read_bytes()
    dearer = ({**row, "price": 100 * row["price"]} for row in endless(4000))
    told, _ = online(tmp_path / "run", dearer, **choices)
    assert numbers(told, "samples") == [500, 600, 700, 800]
    # What a price means to the model is as it was, whatever the rows cost that come now.
    assert (tmp_path / "run" / "features.json").read_bytes() == features


def test_a_stream_without_a_schema_or_with_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be looked at beforehand"):
        online(tmp_path, endless(), **{"data.schema": None})
    words = {**SCHEMA, "categorical": {"item": {"kind": "integer", "encoding": "vocabulary"}}}
    with pytest.raises(ConfigError, match="a stream has no vocabulary"):
        online(tmp_path, endless(), **{"data.schema": words})


def test_a_stream_needs_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the length of the training is unknown"):
        online(tmp_path, endless(), **{"trainer.max_steps": None})


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_rows_that_were_read_ahead_are_trained_on_by_the_run_that_goes_on(tmp_path: Path, depth: int) -> None:
    rows, choices = numbered(endless()), {"trainer.max_steps": 20, "resume": "auto", "cache.prefetch_batches": depth}
    online(tmp_path / "run", rows, stop_at=4, **choices)
    _, assembly = online(tmp_path / "run", rows, **choices)
    assert trained_rows(assembly) == list(range(2000))
    assert next(rows)["number"] == 2000


@pytest.mark.slow
def test_rows_that_features_were_fitted_on_are_trained_on_once(tmp_path: Path) -> None:
    rows, choices = numbered(endless()), {"trainer.max_steps": 9, "data.num_fit_rows": 250}
    _, assembly = online(tmp_path / "run", rows, **choices)
    assert trained_rows(assembly) == list(range(900))


def test_a_source_that_falls_silent_behind_the_last_step_does_not_hold_up_a_run(tmp_path: Path) -> None:
    def live() -> Iterator[dict[str, Any]]:
        yield from itertools.islice(endless(), 800)
        raise AssertionError("the run has asked for a row that it does not train on")

    told, _ = online(tmp_path / "run", live())
    assert numbers(told, "samples")[-1] == 800


@pytest.mark.slow
def test_a_source_with_positions_is_sent_back_to_the_first_row_that_was_not_trained_on(tmp_path: Path) -> None:
    choices = {"trainer.max_steps": 20, "resume": "auto"}
    online(tmp_path / "run", Shelf(), stop_at=4, **choices)
    state = json.loads((tmp_path / "run" / "checkpoints" / "step_4" / "state.json").read_bytes())
    assert state["task"]["stream"] == {"rows": "[]", "position": 400}
    _, assembly = online(tmp_path / "run", Shelf(), **choices)
    assert trained_rows(assembly) == list(range(2000))
