"""Runs over a mixture of sources: resumed, on several ranks, ended by a source, and what they report."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.kit import RunAssembly
from kitforge.kits.transformers.build import Inputs
from tests.distributed.ranks import run_ranks
from tests.distributed.training import run_training
from tests.trainer import tiny

EVERY_STEP = {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 100, "trainer.log_every": 2}


def sources(corpus: Path, first: float = 0.7, second: float = 0.3) -> list[dict[str, Any]]:
    return [
        {"source": str(corpus / "corpus.txt"), "weight": first},
        {"source": str(corpus / "documents.jsonl"), "weight": second},
    ]


def begin(folder: Path, corpus: Path, choices: dict[str, Any] | None = None, **inputs: Any) -> RunAssembly[Any, Any]:
    values = tiny.OPTIONS | {"data.train": sources(corpus), "data.cache": str(corpus / "cache")} | (choices or {})
    options = tiny.KIT.read_options(tiny.nested(values | {"output_dir": str(folder)}))
    return tiny.KIT.assemble(options, Inputs(**inputs), Rendezvous.open(options.parallel, options.device))


def finish(folder: Path, corpus: Path, choices: dict[str, Any] | None = None, **inputs: Any) -> Path:
    tiny.finish(begin(folder, corpus, choices, **inputs))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 4])
def test_resuming_from_any_step_changes_nothing(tmp_path: Path, corpus: Path, step: int) -> None:
    whole = finish(tmp_path / "whole", corpus, EVERY_STEP)
    cut = tiny.copy_up_to(whole, tmp_path / "again", step)
    tiny.assert_same(finish(cut, corpus, EVERY_STEP | {"resume": "auto"}), whole)


def test_the_samples_of_each_source_are_reported(tmp_path: Path, corpus: Path) -> None:
    folder = finish(tmp_path / "run", corpus)
    line = tiny.records(folder, "train")[-1]
    # 6 steps of 4 rows: 16.8 and 7.2 exactly.
    assert (line["mixture/corpus.txt"], line["mixture/documents.jsonl"]) == (17, 7)
    assert "mixture/documents.jsonl" in (folder / "report.html").read_text()


def test_the_batches_hold_rows_of_their_sources_only(tmp_path: Path) -> None:
    """Each source is written in a letter of its own, so every row tells where it is from."""
    spec = []
    for letter, weight in (("a", 2), ("b", 1), ("c", 1)):
        (tmp_path / f"{letter}.txt").write_text(letter * 400)
        spec.append({"source": str(tmp_path / f"{letter}.txt"), "weight": weight})
    assembly = begin(tmp_path / "run", tmp_path, {"data.train": spec, "data.batch_size": 8})
    task = assembly.loop.task
    for _, step in zip(range(10), task.steps(assembly.loop.model, assembly.loop.state.cursor), strict=False):
        (micro_batch,) = step
        letters = [chr(token) for token in micro_batch["tokens"][:, 0].tolist()]
        assert {each: letters.count(each) for each in "abc"} == {"a": 4, "b": 2, "c": 2}


def test_objects_can_be_mixed(tmp_path: Path, corpus: Path) -> None:
    texts = [f"{word} " * 30 for word in tiny.WORDS]
    mixed = [{"source": texts, "weight": 1}, {"source": iter([{"body": "word " * 90}]), "weight": 3, "column": "body"}]
    folder = finish(tmp_path / "run", corpus, train_dataset=mixed)
    assert tiny.records(folder, "train")[-1]["mixture/data.train[1] (list_iterator)"] == 18


def test_stop_ends_the_run_and_its_schedule_with_the_first_source(tmp_path: Path, corpus: Path) -> None:
    choices = {"data.on_source_end": "stop", "trainer.max_steps": 10_000, "data.batch_size": 16}
    assembly = begin(tmp_path / "run", corpus, choices)
    mixture = assembly.loop.task._corpus.mixture  # type: ignore[attr-defined]
    wanted = -(-mixture.num_samples(1.0) // 16)
    assert assembly.loop.max_steps == wanted < 100
    tiny.finish(assembly)
    assert assembly.loop.state.cursor.samples == mixture.num_samples(1.0)


def test_other_weights_or_another_end_are_refused_on_resume(tmp_path: Path, corpus: Path) -> None:
    short = {"trainer.max_steps": 2, "trainer.checkpoint_every": 1, "resume": "auto"}
    folder = finish(tmp_path / "run", corpus, short)
    later = short | {"data.train": sources(corpus, 0.6, 0.4)}
    with pytest.raises(ConfigError, match="weights"):
        finish(folder, corpus, later)
    with pytest.raises(ConfigError, match="data.on_source_end"):
        finish(folder, corpus, short | {"data.on_source_end": "stop"})
    finish(folder, corpus, later | {"trainer.allow_data_changes": True})


def test_the_weights_of_a_mixture_are_relative(tmp_path: Path, corpus: Path) -> None:
    runs = [
        finish(tmp_path / str(first), corpus, {"data.train": sources(corpus, first, second)})
        for first, second in ((0.25, 0.75), (1, 3))
    ]
    assert tiny.records(runs[0]) == tiny.records(runs[1])


def test_a_mixture_for_evaluation_and_a_short_source_are_refused(tmp_path: Path, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval is a mixture"):
        begin(tmp_path / "run", corpus, {"data.eval": sources(corpus)})
    (tmp_path / "short.txt").write_text("too short")
    spec = [*sources(corpus), {"source": str(tmp_path / "short.txt"), "weight": 1}]
    with pytest.raises(DataError, match=r"source .*short\.txt of the mixture: the corpus is shorter than one row"):
        begin(tmp_path / "run", corpus, {"data.train": spec})
    nothing = [{"source": [], "weight": 1}, {"source": iter(()), "weight": 1}]
    with pytest.raises(DataError, match="of the mixture: there is no text"):
        begin(tmp_path / "run", corpus, train_dataset=nothing)


@pytest.mark.slow
def test_ranks_change_nothing_and_another_number_of_them_goes_on(tmp_path: Path, corpus: Path) -> None:
    check_ranks(tmp_path, corpus, {"data.train": sources(corpus)})


def check_ranks(tmp_path: Path, corpus: Path, choices: dict[str, Any]) -> None:
    """Two ranks do what one does, and one and three go on from the middle of it."""
    choices = {**choices, "trainer.checkpoint_every": 2, "data.batch_size": 5}
    one, _ = run_training(0, corpus, {**choices, "output_dir": str(tmp_path / "one")})
    two = {**choices, "parallel.data": 2, "output_dir": str(tmp_path / "two")}
    for lines, _ in run_ranks(2, run_training, corpus, two):
        assert losses(lines) == pytest.approx(losses(one), abs=2e-6)
        assert [line.get("mixture/corpus.txt") for line in lines] == [line.get("mixture/corpus.txt") for line in one]
    for name, ranks in (("back", 1), ("three", 3)):
        folder = tiny.copy_up_to(tmp_path / "two", tmp_path / name, 2)
        later = {**choices, "output_dir": str(folder), "resume": "auto", "parallel.data": ranks}
        runs = [run_training(0, corpus, later)] if ranks == 1 else run_ranks(ranks, run_training, corpus, later)
        for lines, _ in runs:
            assert losses(lines) != []
            assert losses(lines) == pytest.approx(losses(one)[-len(losses(lines)) :], abs=2e-6)
        shutil.rmtree(folder)


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines if "loss" in line]
