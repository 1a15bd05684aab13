"""Tasks over rows learn from weighted sources: in the order of the mixture, resumed, inspected, refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.cli import main as cli
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.rlhf.supervised.example_task import ExampleTask
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.kits.rlhf import runs
from tests.trainer import tiny

ANSWERS = {"a": 12, "b": 5, "c": 9}
EVERY_STEP = {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 100, "trainer.log_every": 2}


def demonstrations(letter: str, size: int) -> list[dict[str, str]]:
    return [{"question": f"Q{n}: ", "completion": letter * (n % 4 + 1)} for n in range(size)]


def mixed(folder: Path, weights: tuple[float, ...] = (2, 1, 1)) -> list[dict[str, Any]]:
    """Sources whose completions are of one letter each; the first two as files, the last in memory."""
    spec: list[dict[str, Any]] = []
    for (letter, size), weight in zip(ANSWERS.items(), weights, strict=True):
        rows: Any = demonstrations(letter, size)
        if letter != "c":
            (folder / f"{letter}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            rows = str(folder / f"{letter}.jsonl")
        spec.append({"source": rows, "weight": weight, "columns": {"prompt": "question"}})
    return spec


def letters_of(task: ExampleTask[Any, Any], step: list[Any]) -> dict[str, int]:
    text = ByteTokenizer().decode([token for each in step for token in each["tokens"].flatten().tolist()])
    completions = [part.split(": ")[1].rstrip("\x00")[:1] for part in text.split("Q")[1:]]
    return {letter: completions.count(letter) for letter in ANSWERS}


def test_batches_hold_samples_by_weight(tmp_path: Path) -> None:
    assembly = runs.begin("sft", train_dataset=mixed(tmp_path))
    task, state = assembly.loop.task, assembly.loop.state
    assert isinstance(task, ExampleTask)
    steps = [step for _, step in zip(range(12), task.steps(assembly.loop.model, state.cursor), strict=False)]
    assert [letters_of(task, step) for step in steps] == [{"a": 2, "b": 1, "c": 1}] * 12


def test_resuming_changes_nothing_and_counts_are_reported(tmp_path: Path) -> None:
    inputs = {"train_dataset": mixed(tmp_path)}
    runs.finish(runs.begin("sft", tmp_path / "whole", EVERY_STEP, **inputs))
    cut = tiny.copy_up_to(tmp_path / "whole", tmp_path / "again", 1)
    runs.finish(runs.begin("sft", cut, EVERY_STEP | {"resume": "auto"}, **inputs))
    tiny.assert_same(cut, tmp_path / "whole")
    assert tiny.records(cut, "train")[-1]["mixture/a.jsonl"] == 8
    with pytest.raises(ConfigError, match="weights"):
        runs.begin("sft", cut, EVERY_STEP | {"resume": "auto"}, train_dataset=mixed(tmp_path, (1, 1, 1))).train()


@pytest.mark.parametrize("stage", ["kto", "dpo", "reward"])
def test_pairs_and_verdicts_can_be_mixed(stage: str, tmp_path: Path) -> None:
    rows = runs.ROWS[stage]
    spec = [{"source": rows[:10], "weight": 1}, {"source": rows[10:], "weight": 3}]
    runs.finish(runs.begin(stage, tmp_path / "run", train_dataset=spec))
    line = tiny.records(tmp_path / "run", "train")[-1]
    assert sorted(value for name, value in line.items() if name.startswith("mixture/")) == [4, 12]


def test_evaluation_rows_are_held_out_of_every_source(tmp_path: Path) -> None:
    seen = Rows()
    runs.finish(runs.begin("sft", tmp_path / "run", train_dataset=mixed(tmp_path), callbacks=[seen]))
    splits = seen.task._rows
    assert splits.mixture is not None
    assert len(splits.train) + len(splits.eval) == sum(ANSWERS.values())
    assert {bytes(row.tokens[-2:-1].tolist()).decode() for row in splits.eval} == set(ANSWERS)
    assert [splits.train[number].tokens.tolist() for number in (-1, len(splits.train) - 1)] == [
        splits.train[len(splits.train) - 1].tokens.tolist()
    ] * 2
    with pytest.raises(IndexError):
        splits.train[len(splits.train)]


def test_stop_ends_the_run(tmp_path: Path) -> None:
    choices = {"data.on_source_end": "stop", "trainer.max_steps": 1000}
    assembly = runs.begin("sft", tmp_path / "run", choices, train_dataset=mixed(tmp_path))
    task = assembly.loop.task
    assert isinstance(task, ExampleTask)
    runs.finish(assembly)
    mixture = task._rows.mixture
    assert mixture is not None
    used = list(zip(mixture.counts(assembly.loop.state.cursor.samples), mixture.num_rows, strict=True))
    assert any(count == size for count, size in used)
    assert all(count <= size for count, size in used)


def test_tasks_that_cannot_mix_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixture of sources cannot be read here"):
        runs.begin("grpo", train_dataset=[{"source": runs.PROMPTS, "weight": 1}])
    with pytest.raises(ConfigError, match="ptx.data"):
        pretraining = [{"source": runs.DEMONSTRATIONS, "weight": 1}]
        runs.begin("ppo", None, {"ptx.coef": 0.1}, roles={"reward": runs.letters, "ptx": pretraining})


def test_errors_name_the_source(tmp_path: Path) -> None:
    spec = mixed(tmp_path)
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(DataError, match=r"source .*b\.jsonl of the mixture"):
        runs.begin("sft", train_dataset=spec)
    with pytest.raises(ConfigError, match="columns of [^!]*a mapping"):
        runs.begin("sft", train_dataset=[spec[0] | {"columns": "prompt"}])


def test_inspect_shows_every_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixed(tmp_path)
    entries = ",".join(
        f"{{source:{tmp_path}/{letter}.jsonl,weight:{weight},columns:{{prompt:question}}}}"
        for letter, weight in (("a", 3), ("b", 1))
    )
    assert cli.run(["inspect", "task=sft", f"data.train=[{entries}]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("source")] == [
        f"source {tmp_path}/a.jsonl, 75.0% of the samples",
        f"source {tmp_path}/b.jsonl, 25.0% of the samples",
    ]
    assert lines[1:4] == ["row 1: 6 tokens, 2 trained", "  context 'Q0: '", "  trained 'a<eos>'"]


class Rows(Callback):
    """Keeps the task of the run."""

    task: Any

    def on_event(self, event: Event, run: RunContext) -> None:
        self.task = run.task  # type: ignore[attr-defined]
