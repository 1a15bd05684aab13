"""A recommender over HTTP: answers of the pipeline, in batches, errors for people, and newer checkpoints meanwhile."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kitforge.api import load_model, load_processor, pipeline
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.server.service import RecommenderService, Refresher
from tests.inference.server.conftest import metric
from tests.inference.server.conftest import serving as serving_app
from tests.kits.recommender.test_pipeline import rows as rows_of_log
from tests.patience import PATIENCE

KIT = TASKS["recommendation"]


def rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows as JSON has them: null where there is no number."""
    found = rows_of_log(num_rows)
    return [{name: None if str(value) == "nan" else value for name, value in row.items()} for row in found]


def opened(folder: Path, **serve: Any) -> RecommenderService:
    options = KIT.read_options({"task": "recommendation", "checkpoint": str(folder), "serve": serve})
    return KIT.open_service(load_model(folder, "cpu"), load_processor(folder), "clicks", options)


@contextlib.contextmanager
def serving(service: RecommenderService) -> Iterator[str]:
    with serving_app(service, KIT.new_app(service)) as found:
        yield found.url


@pytest.fixture(scope="module")
def url(runs: dict[str, Path]) -> Iterator[str]:
    with serving(opened(runs["wide_deep"], max_rows=50, max_wait_ms=20)) as found:
        yield found


@pytest.fixture(scope="module")
def towers(runs: dict[str, Path]) -> Iterator[str]:
    with serving(opened(runs["two_tower"])) as found:
        yield found


def ask(url: str, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{url}/{path}", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(url: str, path: str, body: Any) -> tuple[int, str]:
    answer = httpx.post(f"{url}/{path}", json=body, timeout=PATIENCE)
    return answer.status_code, answer.json()["error"]["message"]


def expected(folder: Path, num_rows: int) -> list[float]:
    return [each["score"] for each in pipeline("recommendation", model=folder)(rows(num_rows))]


@pytest.mark.slow
def test_scores_are_those_of_the_pipeline_by_rows_and_by_columns(runs: dict[str, Path], url: str) -> None:
    given = rows(7)
    found = ask(url, "score", rows=given)
    assert found["scores"] == pytest.approx(expected(runs["wide_deep"], 7), rel=1e-6)
    assert (found["model"], found["step"]) == ("clicks", 8)
    columns = {name: [row[name] for row in given] for name in given[0]}
    assert ask(url, "score", columns=columns)["scores"] == found["scores"]
    health = httpx.get(f"{url}/health", timeout=PATIENCE).json()
    assert health == {"status": "ok", "model": "clicks", "step": 8}


@pytest.mark.slow
def test_concurrent_requests_are_answered_in_batches_and_a_wrong_one_alone_is_refused(
    runs: dict[str, Path], url: str
) -> None:
    given = rows(24)
    given[5] = {**given[5], "c1": "x"}
    before = metric(url, "kitforge_batch_rows_count")
    with ThreadPoolExecutor(24) as threads:
        score = partial(httpx.post, f"{url}/score", timeout=PATIENCE)
        answers = list(threads.map(lambda row: score(json={"rows": [row]}), given))
    scores = expected(runs["wide_deep"], 24)
    assert [answer.status_code for answer in answers] == [400 if number == 5 else 200 for number in range(24)]
    for number, answer in enumerate(answers):
        if number != 5:
            assert answer.json()["scores"] == pytest.approx([scores[number]], rel=1e-5)
    assert metric(url, "kitforge_batch_rows_count") - before < 23


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"c1": "x"}, ("rows[1] holds no 64-bit id in column 'c1'", "got:      'x'", "expected:", "do:")),
        ({"c9": 1}, ("rows[1] has an unknown column", "'c9'", "did you mean 'c")),
        ({"d1": "much"}, ("rows[1] holds no number in column 'd1'", "got:      'much'", "a number")),
        ({"c1": [1]}, ("rows[1].c1", "one value")),
        ({"history": [1, "2"]}, ("rows[1].history", "a list of whole numbers or a list of texts")),
        ({"history": 7}, ("rows[1].history",)),
    ],
)
def test_a_wrong_cell_is_named(url: str, change: dict[str, Any], words: tuple[str, ...]) -> None:
    given = rows(2)
    given[1] = {**given[1], **change}
    status, message = refused(url, "score", {"rows": given})
    assert status == 400
    assert all(word in message for word in words), message


@pytest.mark.slow
def test_a_wrong_body_is_refused_with_what_to_do(url: str) -> None:
    row = rows(1)[0]
    missing = {name: value for name, value in row.items() if name != "c2"}
    cases: list[tuple[Any, str]] = [
        ({"rows": [missing]}, "rows[0] has no column 'c2'"),
        ({"rows": []}, "no rows"),
        ({"rows": [row] * 51}, "1 to 50 rows (serve.max_rows)"),
        ({}, "either 'rows' or 'columns'"),
        ({"rows": [row], "columns": {}}, "either 'rows' or 'columns'"),
        ({"rows": [3]}, "rows[0]"),
        ({"rows": row}, "a list of objects"),
        ({"columns": {"c1": [1, 2], "c2": [1]}}, "different lengths"),
        ({"row": [row]}, "did you mean 'rows'"),
        ([row], "a JSON object"),
    ]
    for body, words in cases:
        status, message = refused(url, "score", body)
        assert status == 400
        assert words in message
    assert refused(url, "retrieve", {"rows": [row]}) == (
        404,
        "this run scores rows and finds no items; send them to POST /score",
    )
    assert httpx.get(f"{url}/score", timeout=PATIENCE).status_code == 405


def test_an_empty_cell_is_null(runs: dict[str, Path], url: str) -> None:
    given = [{**rows(1)[0], "c1": None, "d1": None, "history": None}]
    score = pipeline("recommendation", model=runs["wide_deep"])(given)[0]["score"]
    assert ask(url, "score", rows=given)["scores"] == pytest.approx([score], rel=1e-6)


@pytest.mark.slow
def test_items_are_found_for_users_without_those_excluded(runs: dict[str, Path], towers: str) -> None:
    users = [{name: row[name] for name in ("c1", "history", "d1")} for row in rows(3)]
    best = pipeline("recommendation", model=runs["two_tower"]).retrieve(users, k=6)
    found = ask(towers, "retrieve", rows=users, k=6)["items"]
    assert [[each["item"] for each in row] for row in found] == [[each["item"] for each in row] for row in best]
    assert found[0][0]["score"] == pytest.approx(best[0][0]["score"], rel=1e-5)
    first = [row[0]["item"] for row in best]
    alone = ask(towers, "retrieve", rows=users, k=5, exclude=[[item] for item in first])["items"]
    assert [[each["item"] for each in row] for row in alone] == [[each["item"] for each in row[1:]] for row in best]
    none = ask(towers, "retrieve", rows=users, k=5, exclude=[*first, 10**12])["items"]
    assert not {each["item"] for row in none for each in row} & set(first)
    for wrong in (3, [1.5], [[1], [2]], ["x"], [2**70]):
        assert refused(towers, "retrieve", {"rows": users, "exclude": wrong})[0] == 400
    assert "from 1 to 1000" in refused(towers, "retrieve", {"rows": users, "k": 0})[1]


@pytest.mark.slow
def test_a_history_is_continued(runs: dict[str, Path]) -> None:
    with serving(opened(runs["sasrec"])) as url:
        best = pipeline("recommendation", model=runs["sasrec"]).retrieve({"items": [3, 4, 5]}, k=4)
        (found,) = ask(url, "retrieve", rows=[{"items": [3, 4, 5]}], k=4)["items"]
        assert [each["item"] for each in found] == [each["item"] for each in best]
        assert refused(url, "score", {}) == (404, "a sasrec scores no rows; ask for items: POST /retrieve")


def test_the_description_holds_the_columns_of_the_run(url: str, towers: str) -> None:
    paths = httpx.get(f"{url}/openapi.json", timeout=PATIENCE).json()["paths"]
    assert set(paths) == {"/health", "/metrics", "/score", "/version"}
    body = paths["/score"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    row = body["properties"]["rows"]["items"]
    assert row["required"] == ["d1", "d2", "c1", "c2", "c3", "c4", "history"]
    assert row["properties"]["d1"] == {"type": ["number", "null"]}
    assert row["properties"]["history"]["items"] == {"type": "integer"}
    assert "/retrieve" in httpx.get(f"{towers}/openapi.json", timeout=PATIENCE).json()["paths"]


def test_a_token_is_asked_for_and_a_full_server_says_so(runs: dict[str, Path]) -> None:
    service = opened(runs["wide_deep"], token="secret", max_requests=1)
    with serving(service) as url:
        assert httpx.post(f"{url}/score", json={}, timeout=PATIENCE).status_code == 401
        service.num_active = 1
        headers = {"Authorization": "Bearer secret"}
        answer = httpx.post(f"{url}/score", json={"rows": rows(1)}, headers=headers, timeout=PATIENCE)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")


def growing(whole: Path, folder: Path) -> Path:
    """A copy of a run as it was after its first checkpoint."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("step_[468]", "serving"))
    return folder


def publish(whole: Path, folder: Path, step: int) -> None:
    shutil.copytree(whole / "checkpoints" / f"step_{step}", folder / "checkpoints" / f"step_{step}")


@pytest.mark.parametrize("family", ["wide_deep", "two_tower"])
def test_newer_deltas_are_taken_over_and_only_they_are_read(
    runs: dict[str, Path], tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = growing(runs[family], tmp_path / "run")
    service = opened(folder, refresh_seconds=3600)
    refresher = Refresher(service, folder / "checkpoints", 3600)
    first = service.version
    assert first.step == 2
    # The rows of the step that is served are not there to be read any more.
    for file in (folder / "checkpoints" / "step_2").glob("table-*rows*"):
        size = file.stat().st_size
        file.unlink()
        file.write_bytes(bytes(size))
    for step in (4, 8):
        if step == 8:
            publish(runs[family], folder, 6)
        publish(runs[family], folder, step)
        refresher.look()
        assert service.version.step == step
        fresh = load_model(runs[family] / "checkpoints" / f"step_{step}", "cpu").tables.tables
        served = service.version.pipeline.model.tables.tables
        assert {len(table.ids()) for table in served.values()} != {0}
        for name, table in served.items():
            assert table.ids().equal(fresh[name].ids())
            assert table.vectors(table.ids()).equal(fresh[name].vectors(fresh[name].ids()))
    if family == "wide_deep":
        batch = service.row_reader.read({"rows": rows(5)})  # type: ignore[union-attr]
        found = service.version.pipeline.scores(batch).tolist()
        assert found == pytest.approx(expected(runs[family], 5), rel=1e-6)


def test_a_broken_checkpoint_is_logged_once_and_the_old_one_answers_until_it_is_whole(
    runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = runs["wide_deep"]
    folder = growing(whole, tmp_path / "run")
    service = opened(folder, refresh_seconds=3600)
    refresher = Refresher(service, folder / "checkpoints", 3600)
    publish(whole, folder, 4)
    place = folder / "checkpoints" / "step_4"
    file = next(path for path in place.iterdir() if path.name.startswith("model"))
    content = file.read_bytes()
    for spoilt in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(spoilt)
        caplog.clear()
        refresher.look()
        refresher.look()
        assert service.version.step == 2
        assert len([line for line in caplog.messages if "step 4 is not taken over, step 2 goes on" in line]) == 1
    file.write_bytes(content)
    refresher.look()
    assert service.version.step == 4
    refresher.look()
    assert service.metrics.refreshes._value.get() == 1


@pytest.mark.slow
def test_a_server_refreshes_itself_and_every_answer_is_of_one_step(runs: dict[str, Path], tmp_path: Path) -> None:
    whole = runs["wide_deep"]
    folder = growing(whole, tmp_path / "run")
    with serving(opened(folder, refresh_seconds=0.05, max_wait_ms=0)) as url:
        answers = [ask(url, "score", rows=rows(20))]
        publish(whole, folder, 4)
        while answers[-1]["step"] == 2:
            answers.append(ask(url, "score", rows=rows(20)))
        assert httpx.get(f"{url}/health", timeout=PATIENCE).json()["step"] == 4
    scores = {
        step: pipeline("recommendation", model=whole / "checkpoints" / f"step_{step}")(rows(20)) for step in (2, 4)
    }
    for answer in answers:
        assert answer["scores"] == pytest.approx([each["score"] for each in scores[answer["step"]]], rel=1e-5)
    assert not np.allclose(answers[0]["scores"], answers[-1]["scores"], rtol=1e-5)


def test_what_cannot_be_refreshed_is_refused(runs: dict[str, Path]) -> None:
    folder = runs["wide_deep"]
    with pytest.raises(ConfigError, match="from a run folder"):
        opened(folder / "checkpoints" / "step_8", refresh_seconds=1.0)
    with pytest.raises(ConfigError, match=r"serve\.refresh_seconds"):
        opened(folder, refresh_seconds=0.0)
    options = dataclasses.replace(KIT.read_options({"checkpoint": str(folder)}), checkpoint=None)
    assert KIT.open_service(load_model(folder, "cpu"), load_processor(folder), "clicks", options).version.step == 8
