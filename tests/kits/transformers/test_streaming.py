"""Runs over a stream: resumed after a kill, on several ranks, and refused where a stream cannot do what is asked."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kitforge.foundation.errors import ConfigError
from tests.data.text.test_streaming import Plain, Stateful
from tests.kits.transformers.test_mixture import begin, check_ranks, finish
from tests.trainer import tiny

STREAM = {"data.streaming": True, "data.eval_fraction": 0.0, "data.shuffle_buffer": 12}
EVERY_STEP = STREAM | {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 100, "trainer.log_every": 2}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    generator, folder = random.Random(2), tmp_path_factory.mktemp("shards")
    for number in range(5):
        lines = (json.dumps({"text": tiny.sentence(generator, generator.randint(1, 9))}) for _ in range(12))
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return str(folder)


@pytest.mark.parametrize("kind", ["folder", "iterable", "stateful"])
def test_resuming_from_a_step_changes_nothing(tmp_path: Path, corpus: Path, shards: str, kind: str) -> None:
    def run(folder: Path, choices: dict[str, Any]) -> Path:
        datasets: dict[str, Any] = {"folder": None, "iterable": Plain(), "stateful": Stateful()}
        return finish(folder, corpus, choices | {"data.train": shards}, train_dataset=datasets[kind])

    whole = run(tmp_path / "whole", EVERY_STEP)
    for step in (1, 4):
        cut = tiny.copy_up_to(whole, tmp_path / str(step), step)
        tiny.assert_same(run(cut, EVERY_STEP | {"resume": "auto"}), whole)


@pytest.mark.slow
def test_ranks_change_nothing_and_another_number_of_them_goes_on(tmp_path: Path, corpus: Path, shards: str) -> None:
    check_ranks(tmp_path, corpus, STREAM | {"data.train": shards})


def test_evaluation_text_is_read_as_always(tmp_path: Path, corpus: Path, shards: str) -> None:
    choices = STREAM | {"data.train": shards, "data.eval": str(corpus / "corpus.txt"), "data.eval_fraction": 0.05}
    folder = finish(tmp_path / "run", corpus, choices)
    assert tiny.records(folder, "eval")[-1]["eval/loss"] > 0


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "held out": ({"data.eval_fraction": 0.1}, r"held out[^!]*data\.eval_fraction=0\.1[^!]*data\.eval=FILE"),
    "no length": ({"trainer.max_steps": None}, r"data\.streaming[^!]*trainer\.max_steps=None[^!]*no length"),
    "epochs": ({"trainer.epochs": 1.0}, r"trainer\.epochs=1\.0[^!]*without trainer\.epochs"),
    "buffer": ({"data.shuffle_buffer": 0}, r"data\.shuffle_buffer"),
    "mixture": ({"data.train": [{"source": "python_stdlib", "weight": 1}]}, "a mixture cannot be streamed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_stream_cannot_do_is_refused(name: str, tmp_path: Path, corpus: Path, shards: str) -> None:
    choices, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        begin(tmp_path / "run", corpus, STREAM | {"data.train": shards} | choices)


def test_another_batch_size_is_refused_on_resume(tmp_path: Path, corpus: Path, shards: str) -> None:
    choices = EVERY_STEP | {"data.train": shards, "trainer.max_steps": 2, "resume": "auto"}
    folder = finish(tmp_path / "run", corpus, choices)
    later = {"data.batch_size": 3, "trainer.allow_config_changes": True, "trainer.max_steps": 4}
    with pytest.raises(ConfigError, match="another batch size"):
        finish(folder, corpus, choices | later)
