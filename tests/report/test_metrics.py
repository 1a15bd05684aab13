"""Reading run folders, whole and damaged."""

import json
import math
from pathlib import Path

import pytest

from kitforge.foundation.errors import DataError
from kitforge.report.metrics import LoggedEvent, RunRecord, Sample, SampleSet, read_run


def read_lines(folder: Path, text: str | bytes) -> RunRecord:
    (folder / "config.yaml").write_text("seed: 1\n")
    (folder / "metrics.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_run(folder)


def test_a_whole_run_is_read_without_problems(write_run) -> None:
    run = read_run(write_run("bard", num_steps=60))
    assert run.name == "bard"
    assert run.problems == ()
    assert run.train["loss"].steps == tuple(range(1, 61))
    assert run.eval["eval/loss"].steps == tuple(range(5, 61, 5))
    assert run.config_text.startswith("task: text_generation")


def test_values_are_those_of_the_file(tmp_path) -> None:
    run = read_lines(tmp_path, '{"kind":"train","step":3,"loss":2.5,"good":true}\n{"kind":"train","step":4,"loss":2}\n')
    assert (run.train["loss"].steps, run.train["loss"].values) == ((3, 4), (2.5, 2.0))
    assert run.train["good"].values == (1.0,)


def test_events_keep_their_order_and_message(tmp_path) -> None:
    text = '{"kind":"event","step":5,"event":"skipped","message":"m"}\n{"kind":"event","step":4,"event":"rollback"}\n'
    expected = (LoggedEvent(step=5, name="skipped", message="m"), LoggedEvent(step=4, name="rollback", message=""))
    assert read_lines(tmp_path, text).events == expected


def test_samples_come_latest_first_by_number(tmp_path) -> None:
    (tmp_path / "samples").mkdir()
    for step in (5, 40, 300):
        body = {"step": step, "samples": [{"prompt": "a", "text": "b"}]}
        (tmp_path / "samples" / f"step_{step}.json").write_text(json.dumps(body))
    found = read_lines(tmp_path, "").samples
    assert [samples.step for samples in found] == [300, 40, 5]
    assert found[0] == SampleSet(step=300, samples=(Sample(prompt="a", text="b"),))


def test_a_torn_last_line_is_left_out_and_told(tmp_path) -> None:
    run = read_lines(tmp_path, '{"kind":"train","step":1,"loss":2}\n{"kind":"train","st')
    assert run.train["loss"].steps == (1,)
    assert run.problems == ("metrics.jsonl line 2 is torn: the run was stopped while writing it. It is left out.",)


def test_a_whole_last_line_without_its_line_break_counts(tmp_path) -> None:
    run = read_lines(tmp_path, '{"kind":"train","step":1,"loss":2}')
    assert run.train["loss"].values == (2.0,)
    assert not run.problems


@pytest.mark.parametrize("token", ["null", "NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_not_finite_become_gaps(tmp_path, token) -> None:
    run = read_lines(tmp_path, f'{{"kind":"train","step":1,"loss":{token}}}\n{{"kind":"train","step":2,"loss":1}}\n')
    assert not math.isfinite(run.train["loss"].values[0])
    assert run.train["loss"].finite() == [(2, 1.0)]
    assert not run.problems


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{not json}", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1, 2]", "is not an object"),
        (b'{"kind":"test","step":1}', "none of train, eval, event"),
        (b'{"step":1,"loss":2}', "has the kind None"),
        (b'{"kind":"train","loss":2}', "has no step that counts"),
        (b'{"kind":"train","step":-1}', "has no step that counts"),
        (b'{"kind":"train","step":true}', "has no step that counts"),
        (b'{"kind":"event","step":1}', "an event without a name"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_kept(tmp_path, line, words) -> None:
    run = read_lines(tmp_path, line + b'\n{"kind":"train","step":7,"loss":2}\n')
    assert run.train["loss"].steps == (7,)
    assert len(run.problems) == 1
    assert run.problems[0].startswith("metrics.jsonl line 1 ") and words in run.problems[0]


def test_metrics_that_are_no_numbers_are_told_once(tmp_path) -> None:
    run = read_lines(tmp_path, '{"kind":"train","step":1,"host":"a"}\n{"kind":"train","step":2,"host":"a"}\n')
    assert run.problems == ("The metric 'host' holds values that are no numbers. They are not drawn.",)


@pytest.mark.parametrize("body", ["", "{", "[]", '{"step": 1}', '{"step": 1, "samples": [{"prompt": "a"}]}'])
def test_a_broken_sample_file_is_told(tmp_path, body) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_1.json").write_text(body)
    run = read_lines(tmp_path, "")
    assert run.samples == ()
    assert run.problems == ("samples/step_1.json cannot be read. It is left out.",)


def test_a_configuration_that_is_not_utf8_is_shown_as_far_as_it_goes(tmp_path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"name: caf\xe9\n")
    run = read_run(tmp_path)
    assert run.config_text == "name: caf\N{REPLACEMENT CHARACTER}\n"
    assert "config.yaml is not UTF-8" in run.problems[1]


def test_a_run_that_has_logged_nothing_yet_is_a_run(tmp_path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert run.problems == ("metrics.jsonl is missing.",)


def test_a_link_is_called_by_the_folder_it_points_to(tmp_path, write_run) -> None:
    (tmp_path / "latest").symlink_to(write_run("bard", num_steps=12))
    assert read_run(tmp_path / "latest").name == "bard"


def test_an_absent_folder_is_an_error_that_says_what_to_do(tmp_path) -> None:
    with pytest.raises(DataError, match=r"no such run\n  got: .*nowhere\n  expected: a run folder\n  do: "):
        read_run(tmp_path / "nowhere")


def test_a_folder_that_is_no_run_is_an_error_that_lists_what_it_holds(tmp_path) -> None:
    for number in range(8):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(
        DataError, match=r"holds no run\n  got:      0.txt, .*, 5.txt\n  expected: config.yaml and metrics"
    ):
        read_run(tmp_path)
