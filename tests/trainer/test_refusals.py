"""What a resume says, uses and refuses: damaged checkpoints, changed options, changed text, another run's folder."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kitforge.core.checkpoint.manifest import steps
from kitforge.foundation.errors import CheckpointError, ConfigError
from kitforge.trainer.options import RunOptions
from kitforge.trainer.resume import check_changes, find_resume_checkpoint
from kitforge.trainer.run_folder import train as train_run
from tests.trainer import tiny
from tests.trainer.regression import train

SAVED = {"trainer.max_steps": 3, "trainer.checkpoint_every": 1}


def test_no_file_is_touched_before_all_ranks_have_agreed(tmp_path: Path) -> None:
    class Refusing:
        """Another rank has found something to refuse."""

        rank = 0
        is_training = True

        def broadcast_object(self, value: Any) -> Any:
            return value

        def all_gather_object(self, value: Any) -> list[Any]:
            raise ConfigError("another rank refuses the run")

    loop = SimpleNamespace(world=Refusing(), train=lambda: {})
    with pytest.raises(ConfigError, match="another rank"):
        train_run(cast(Any, loop), RunOptions(), tmp_path / "run", "seed: 1")
    assert not (tmp_path / "run").exists()


@pytest.fixture
def folder(tmp_path: Path, corpus: Path) -> Path:
    """A finished run whose last checkpoint is missing, so that it can go on."""
    tiny.run(tmp_path / "whole", corpus, SAVED)
    return tiny.copy_up_to(tmp_path / "whole", tmp_path / "run", 2)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["model-00001-of-00001.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    train(tmp_path, max_steps=3)
    damage(tmp_path / "checkpoints" / "step_3" / name)
    said: list[tuple[str, str]] = []
    found = find_resume_checkpoint("auto", tmp_path, lambda event, message: said.append((event, message)))
    assert found is not None
    assert found.step == 2
    assert [event for event, _ in said] == ["damaged"]
    assert str(tmp_path / "checkpoints" / "step_3") in said[0][1]


def test_a_run_whose_newest_checkpoint_is_damaged_ends_as_if_it_were_not(
    tmp_path: Path, corpus: Path, folder: Path
) -> None:
    flip(folder / "checkpoints" / "step_2" / "optimizer-00001-of-00001.safetensors")
    tiny.run(folder, corpus, SAVED | {"resume": "auto"})
    tiny.assert_same(folder, tmp_path / "whole")


def test_harmless_changes_are_said(corpus: Path, folder: Path) -> None:
    changes = {"trainer.log_every": 2, "trainer.save_total_limit": 9, "prompt": "the "}
    tiny.run(folder, corpus, SAVED | changes | {"resume": "auto"})
    told = tiny.events(folder, "changed")
    for line in ("trainer.log_every: 1 -> 2", "trainer.save_total_limit: 3 -> 9", "prompt: None -> 'the '"):
        assert line in told
    # That the run goes on is an event of its own.
    assert not any(line.startswith("resume") for line in told)


BREAKING: dict[str, tuple[Any, str]] = {
    "optimizer.learning_rate": (0.5, "optimizer.learning_rate: 0.01 -> 0.5"),
    "seed": (1, "seed: 0 -> 1"),
    "data.batch_size": (2, "data.batch_size: 4 -> 2"),
    "trainer.max_steps": (9, "trainer.max_steps: 3 -> 9"),
    "precision": ("bf16", "precision: 'fp32' -> 'bf16'"),
    "schedule.name": ("linear", "schedule.name: 'cosine' -> 'linear'"),
}


@pytest.mark.parametrize("name", BREAKING)
def test_breaking_changes_are_refused_before_a_file_is_touched(corpus: Path, folder: Path, name: str) -> None:
    value, line = BREAKING[name]
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as caught:
        tiny.run(folder, corpus, SAVED | {"resume": "auto", name: value})
    assert line in str(caught.value)
    assert "trainer.allow_config_changes=true" in str(caught.value)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", BREAKING)
def test_breaking_changes_are_made_when_they_are_allowed(corpus: Path, folder: Path, name: str) -> None:
    value, line = BREAKING[name]
    tiny.run(folder, corpus, SAVED | {"resume": "auto", name: value, "trainer.allow_config_changes": True})
    assert line in tiny.events(folder, "changed")


def test_a_changed_shape_is_refused_even_when_changes_are_allowed(corpus: Path, folder: Path) -> None:
    changes = {"model": tiny.LLAMA | {"mlp_dim": 64}, "trainer.allow_config_changes": True, "resume": "auto"}
    with pytest.raises(Exception, match="of another shape") as caught:
        tiny.run(folder, corpus, SAVED | changes)
    assert "mlp" in str(caught.value)


def test_another_text_is_refused_unless_changes_are_allowed(tmp_path: Path, folder: Path) -> None:
    other = tiny.write_corpus(tmp_path / "other")
    text = (other / "corpus.txt").read_text(encoding="utf-8")
    (other / "corpus.txt").write_text(text + "one line more\n", encoding="utf-8")
    elsewhere = {"data.train": str(other / "corpus.txt"), "resume": "auto"}
    for changes in (elsewhere, elsewhere | {"trainer.allow_config_changes": True}):
        with pytest.raises(ConfigError, match="training text is not the one(.|\n)*allow_data_changes"):
            tiny.run(folder, other, SAVED | changes)
    tiny.run(folder, other, SAVED | elsewhere | {"trainer.allow_data_changes": True})


def test_the_same_text_elsewhere_is_the_same_text(tmp_path: Path, folder: Path) -> None:
    """Copied, fetched again, at another time."""
    other = tiny.write_corpus(tmp_path / "other")
    os.utime(other / "corpus.txt", (1, 1))
    moved = {"data.train": str(other / "corpus.txt"), "data.cache": str(tmp_path / "cache"), "resume": "auto"}
    tiny.run(folder, other, SAVED | moved)
    assert any(line.startswith("data.train: ") for line in tiny.events(folder, "changed"))


def test_another_evaluation_text_is_refused(tmp_path: Path, corpus: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("a text of its own, long enough for a row or two of the few tokens that a row has here. " * 9)
    run = tmp_path / "run"
    tiny.run(run, corpus, SAVED | {"data.eval": str(other)})
    other.write_text(other.read_text() + "and more")
    with pytest.raises(ConfigError, match="evaluation text is not the one"):
        tiny.run(run, corpus, SAVED | {"data.eval": str(other), "resume": "auto"})


def test_a_text_that_changed_under_its_name_is_refused(tmp_path: Path) -> None:
    corpus = tiny.write_corpus(tmp_path / "corpus")
    tiny.run(tmp_path / "run", corpus, SAVED)
    text = (corpus / "corpus.txt").read_text(encoding="utf-8")
    (corpus / "corpus.txt").write_text(text.replace("moon", "noon"), encoding="utf-8")
    with pytest.raises(ConfigError, match="not the one that the run began with"):
        tiny.run(tmp_path / "run", corpus, SAVED | {"resume": "auto"})
    with pytest.raises(ConfigError, match="not the one that the run began with"):
        tiny.run(tmp_path / "run", corpus, SAVED | {"resume": "auto", "trainer.allow_config_changes": True})
    tiny.run(tmp_path / "run", corpus, SAVED | {"resume": "auto", "trainer.allow_data_changes": True})


HARMLESS: dict[str, tuple[Any, Any]] = {
    "output": (None, "answers.jsonl"),
    "output_dir": ("runs/a", "runs/b"),
    "tasks": ((), ("piqa",)),
    "port": (8000, 8001),
    "serve": ({"max_waiting": 1}, {"max_waiting": 2}),
    "dtype": (None, "bfloat16"),
    "device": ("cuda:0", "cuda:1"),
    "compile_level": ("O1", "O2"),
    "deterministic": (False, True),
    "data": ({"cache": None, "tasks": None}, {"cache": "here", "tasks": "there"}),
    "trainer": (
        {"micro_batch_size": 4, "activation_checkpointing": "none"},
        {"micro_batch_size": 1, "activation_checkpointing": "selective"},
    ),
    "parallel": ({"data": 4}, {"data": 1, "tensor": 2}),
    "cache": ({"policy": {"name": "lru"}}, {"policy": {"name": "lfu"}}),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_computed_may_change(name: str) -> None:
    before, now = HARMLESS[name]
    lines = check_changes({"task": "a", name: before}, {"task": "a", name: now}, allowed=False)
    assert lines
    assert all(line.startswith(name) for line in lines)


@pytest.mark.parametrize(
    ("name", "before", "now"),
    [
        ("device", "cpu", "cuda"),
        ("task", "a", "b"),
        ("tokenizer", {"name": "byte"}, {"name": "folder"}),
        ("data", {"eval_fraction": 0.05}, {"eval_fraction": 0.5}),
    ],
)
def test_what_changes_what_is_computed_may_not(name: str, before: Any, now: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*: "):
        check_changes({name: before}, {name: now}, allowed=False)


def test_the_folder_of_another_run_is_refused_before_a_file_is_touched(corpus: Path, folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="belongs to another run") as caught:
        tiny.run(folder, corpus, SAVED | {"tokenizer.name": "sentencepiece", "tokenizer.vocab_size": 300})
    assert "resume=auto" in str(caught.value)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_without_a_checkpoint_cannot_be_resumed_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint to resume from"):
        find_resume_checkpoint(tmp_path, None, lambda *_: None)


def test_a_step_can_be_resumed_by_name(tmp_path: Path, corpus: Path, folder: Path) -> None:
    assert steps(folder / "checkpoints") == [1, 2]
    tiny.run(tmp_path / "new", corpus, SAVED | {"resume": str(folder / "checkpoints" / "step_1")})
    tensors, _ = tiny.last_checkpoint(tmp_path / "new")
    wanted, _ = tiny.last_checkpoint(tmp_path / "whole")
    assert all(tensor.equal(wanted[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("target", ["run", "whole"])
def test_a_folder_with_other_later_checkpoints_is_refused(tmp_path: Path, folder: Path, target: str) -> None:
    """`run` holds a later step of its own, `whole` holds those of another run."""
    step = folder / "checkpoints" / "step_1"
    with pytest.raises(ConfigError, match=r"(?s)not from before this one.*choose another output_dir"):
        find_resume_checkpoint(step, tmp_path / target, lambda *_: None)


def test_an_automatic_resume_without_a_folder_is_refused(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="output_dir"):
        train(None, resume="auto")


def test_options_that_came_or_went_are_changes() -> None:
    with pytest.raises(ConfigError, match="data.new: None -> 1"):
        check_changes({"data": {}}, {"data": {"new": 1}}, allowed=False)
    assert check_changes({"data": {"old": 2}}, {"data": {}}, allowed=True) == ["data.old: 2 -> None"]


@pytest.mark.parametrize("prompt", ["", "x" * 100])
def test_a_prompt_that_no_sample_could_continue_is_refused_before_the_run(
    tmp_path: Path, corpus: Path, prompt: str
) -> None:
    with pytest.raises(ConfigError, match="option 'prompt'"):
        tiny.begin(tmp_path / "run", corpus, {"prompt": prompt, "inference.max_new_tokens": 64})
    assert not (tmp_path / "run").exists()
