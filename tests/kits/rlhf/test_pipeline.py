"""`kitforge predict` and `serve`: a reward model scores prompts and completions, a policy answers prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from kitforge.api import pipeline
from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, DataError
from tests.kits.rlhf import runs
from tests.kits.served import served
from tests.kits.transformers.task_runs import write_rows

ROWS: list[dict[str, Any]] = [{"prompt": f"Q{n}: ", "completion": "yes" * (n % 3 + 1), "id": n} for n in range(20)]


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "reward"
    runs.finish(runs.begin("reward", folder, {"trainer.max_steps": 1}))
    return folder


def predict(folder: Path, source: Path, target: Path, *more: str) -> list[dict[str, Any]]:
    given = [f"checkpoint={folder}", f"data.eval={source}", f"output={target}", "device=cpu", *more]
    assert cli.run(["predict", *given]) == 0
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.slow
def test_rows_are_scored_as_by_the_pipeline(scorer: Path, tmp_path: Path) -> None:
    found = predict(scorer, write_rows(tmp_path / "rows.jsonl", ROWS), tmp_path / "scores.jsonl")
    expected = [answer[0]["score"] for answer in pipeline("reward", model=scorer)(ROWS)]
    assert found == [{**row, "score": score} for row, score in zip(ROWS, expected, strict=True)]


CHAT = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "yes"}]


@pytest.mark.slow
def test_a_server_gives_the_scores_of_the_pipeline_to_the_bit(scorer: Path) -> None:
    scored = pipeline("reward", model=scorer)
    prompts, completions = ([row[name] for row in ROWS] for name in ("prompt", "completion"))
    with served(scorer) as client:
        reply = client.post("/score", json={"text_1": prompts, "text_2": completions}).json()
        assert [each["score"] for each in reply["data"]] == [each[0]["score"] for each in scored(ROWS)]
        assert reply["usage"]["prompt_tokens"] == sum(len(row["prompt"] + row["completion"]) + 1 for row in ROWS)
        reply = client.post("/v1/score", json={"messages": CHAT, "model": "scorer"}).json()
        assert reply["data"][0]["score"] == scored({"messages": CHAT})[0]["score"]
        answers = ["no", "yes", "perhaps"]
        values = [each[0]["score"] for each in scored([{"prompt": "Q: ", "completion": each} for each in answers])]
        found = client.post("/rerank", json={"query": "Q: ", "documents": answers}).json()["results"]
        assert [(each["relevance_score"], each["document"]["text"]) for each in found] == sorted(
            zip(values, answers, strict=True), reverse=True
        )
        assert all(values[each["index"]] == each["relevance_score"] for each in found)


@pytest.mark.slow
def test_a_server_of_scores_has_their_routes_alone_and_refuses_what_has_no_score(scorer: Path) -> None:
    with served(scorer) as client:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["scorer"]
        assert client.get("/health").json() == {"status": "ok"} and "/rerank" in client.get("/docs").text
        for path in ("/v1/embeddings", "/v1/completions"):
            reply = client.post(path, json={})
            assert reply.status_code == 404 and "/score" in reply.json()["error"]["message"]
        assert client.get("/").status_code == 404
        for body, status, words in (
            ({"text_1": "x" * 500, "text_2": "y"}, 400, "longer than the model allows"),
            ({"text_1": "x", "text_2": "y", "model": "other"}, 404, "'scorer'"),
            ({"messages": [{"role": "user", "content": ""}]}, 400, "expected"),
        ):
            reply = client.post("/score", json=body)
            assert reply.status_code == status and words in reply.json()["error"]["message"]
        assert 'kitforge_requests_total{path="/score",status="400"} 2.0' in client.get("/metrics").text


@pytest.mark.slow
def test_a_bad_row_is_named_or_dropped(scorer: Path, tmp_path: Path) -> None:
    bad = [*ROWS[:2], {"prompt": "Q", "id": 99}, *ROWS[2:4]]
    source, target = write_rows(tmp_path / "rows.jsonl", bad), tmp_path / "scores.jsonl"
    with pytest.raises(DataError, match=r"rows\.jsonl:3"):
        predict(scorer, source, target)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    found = predict(scorer, source, target, "data.on_invalid=skip")
    assert [row["id"] for row in found] == [0, 1, 2, 3]
    expected = pipeline("reward", model=scorer)(ROWS[:4])
    assert [row["score"] for row in found] == [answer[0]["score"] for answer in expected]


@pytest.mark.slow
def test_what_cannot_be_written_is_refused(scorer: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows.jsonl", [ROWS[0] | {"score": 1}])
    with pytest.raises(DataError, match="has a column `score` already"):
        predict(scorer, source, tmp_path / "scores.jsonl")
    with pytest.raises(ConfigError, match="'output'"):
        predict(scorer, source, tmp_path / "scores.csv")
    with pytest.raises(ConfigError, match="predictions need a run"):
        cli.run(["predict", f"checkpoint={scorer}"])


def test_a_policy_answers_prompts(tmp_path: Path) -> None:
    runs.finish(runs.begin("sft", tmp_path / "sft", {"trainer.max_steps": 1}))
    source = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "Q1: "}, {"prompt": "Q2: "}])
    found = predict(tmp_path / "sft", source, tmp_path / "answers.jsonl", "inference.max_new_tokens=2")
    assert [set(row) for row in found] == [{"prompt", "generated_text", "finish_reason"}] * 2
