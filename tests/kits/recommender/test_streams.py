"""Rows that come once: trained on as they come, with snapshots of what changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.api import composed
from kitforge.core.checkpoint.layout import read_manifest, steps
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import Inputs, assemble, read_options
from kitforge.trainer.run import train
from tests.distributed.training import Losses, TestLobby
from tests.kits.recommender.runs import OPTIONS, numbers

SCHEMA = {
    "label": {"name": "click"},
    "numeric": {"price": {}},
    "categorical": {"user": {"kind": "integer", "encoding": "exact"}, "item": {"kind": "integer", "num_buckets": 50}},
}


def endless(start: int = 0) -> Iterator[dict[str, Any]]:
    """Users come and go: new ids never end."""
    for number in itertools.count(start):
        item = number * 7 % 40
        yield {"user": number // 20 - 2**40, "item": item, "price": float(number % 11), "click": int(item < 10)}


def online(
    folder: Path, rows: Iterator[dict[str, Any]], stop_at: int | None = None, **choices: Any
) -> tuple[Losses, Any]:
    """A run over rows that come once."""
    torch.set_num_threads(1)
    told = Losses()
    told.stop_at = stop_at
    given = {**OPTIONS, "model.hidden": [8], "data.schema": SCHEMA, "output_dir": str(folder), **choices}
    options = read_options(composed("recommendation", given).values)
    assembly = assemble(options, Inputs(train_dataset=rows, callbacks=[told]), TestLobby(options.parallel))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return told, assembly


def test_an_endless_source_is_read_no_further_than_it_is_needed(tmp_path: Path) -> None:
    rows = endless()
    told, _ = online(tmp_path / "run", rows, **{"trainer.max_steps": 30, "tables.wide.learning_rate": 0.5})
    assert numbers(told, "samples")[-1] == 3000
    assert numbers(told, "loss")[-1] < 0.8 * numbers(told, "loss")[0]
    # Features are fitted on the first ten thousand rows, and a few batches wait ready.
    assert next(rows)["user"] < 16_000 // 20 - 2**40


def test_snapshots_hold_what_changed(tmp_path: Path) -> None:
    choices = {"trainer.max_steps": 8, "trainer.checkpoint_every": 2, "trainer.delta_checkpoints": 3}
    online(tmp_path / "run", endless(), **choices, **{"trainer.keep_checkpoints": 10})
    root = tmp_path / "run" / "checkpoints"
    sizes = {}
    for step in steps(root):
        manifest = read_manifest(root / f"step_{step}")
        is_whole = manifest.base is None
        sizes[step] = (is_whole, sum(rows.num_rows for table in manifest.tables for rows in table.rows))
    assert [whole for whole, _ in sizes.values()] == [True, False, False, False]
    assert sizes[4][1] <= sizes[2][1] + 40


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
    with pytest.raises(ConfigError, match="how long to train is not known"):
        online(tmp_path, endless(), **{"trainer.max_steps": None})
