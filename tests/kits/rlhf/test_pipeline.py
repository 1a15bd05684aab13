"""`kitforge predict`: a reward model scores rows of prompts and completions, a policy answers prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.api import pipeline
from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, DataError
from tests.kits.rlhf import runs

ROWS: list[dict[str, Any]] = [{"prompt": f"Q{n}: ", "completion": "yes" * (n % 3 + 1), "id": n} for n in range(20)]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "reward"
    runs.finish(runs.begin("reward", folder, {"trainer.max_steps": 1}))
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def predict(folder: Path, source: Path, target: Path, *more: str) -> list[dict[str, Any]]:
    given = [f"checkpoint={folder}", f"data.eval={source}", f"output={target}", "device=cpu", *more]
    assert cli.run(["predict", *given]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.slow
def test_rows_are_scored_as_by_the_pipeline(scorer: Path, tmp_path: Path) -> None:
    found = predict(scorer, write(tmp_path / "rows.jsonl", ROWS), tmp_path / "scores.jsonl")
    expected = [answer[0]["score"] for answer in pipeline("reward", model=scorer)(ROWS)]
    assert found == [{**row, "score": score} for row, score in zip(ROWS, expected, strict=True)]


@pytest.mark.slow
def test_a_bad_row_is_named_or_dropped(scorer: Path, tmp_path: Path) -> None:
    bad = [*ROWS[:2], {"prompt": "Q", "id": 99}, *ROWS[2:4]]
    source, target = write(tmp_path / "rows.jsonl", bad), tmp_path / "scores.jsonl"
    with pytest.raises(DataError, match=r"rows\.jsonl:3"):
        predict(scorer, source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    found = predict(scorer, source, target, "data.on_invalid=skip")
    assert [row["id"] for row in found] == [0, 1, 2, 3]
    expected = pipeline("reward", model=scorer)(ROWS[:4])
    assert [row["score"] for row in found] == [answer[0]["score"] for answer in expected]


@pytest.mark.slow
def test_what_cannot_be_written_is_refused(scorer: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [ROWS[0] | {"score": 1}])
    with pytest.raises(DataError, match="has a column `score` already"):
        predict(scorer, source, tmp_path / "scores.jsonl")
    with pytest.raises(ConfigError, match="'output'"):
        predict(scorer, source, tmp_path / "scores.csv")
    with pytest.raises(ConfigError, match="predictions need a run"):
        cli.run(["predict", f"checkpoint={scorer}"])


def test_a_policy_answers_prompts(tmp_path: Path) -> None:
    runs.finish(runs.begin("sft", tmp_path / "sft", {"trainer.max_steps": 1}))
    source = write(tmp_path / "prompts.jsonl", [{"prompt": "Q1: "}, {"prompt": "Q2: "}])
    found = predict(tmp_path / "sft", source, tmp_path / "answers.jsonl", "inference.max_new_tokens=2")
    assert [set(row) for row in found] == [{"prompt", "generated_text", "finish_reason"}] * 2
