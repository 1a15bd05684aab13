"""The reward `math`: what math-verify finds equal, and what becomes of comparisons that take too long."""

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kitforge.foundation.errors import DataError, DependencyError, TrainingError
from kitforge.kits.rlhf.roles import math_reward
from kitforge.kits.rlhf.roles.math_reward import MathWorker, math_match
from kitforge.kits.rlhf.roles.math_worker import answers
from tests.kits.rlhf import runs

# Right answers, completions and whether they are right: pairs of the library's documentation and of its users' threads.
EQUAL = [
    (["18"], "so 9 + 9 = 18", True),
    (["#### 1,000"], "#### 1000", True),
    (["\\frac{1}{2}"], "half, which is $\\boxed{0.5}$", True),
    (["$\\sqrt{8}$"], "$2\\sqrt{2}$", True),
    (["3"], "x = 3", True),
    (["7", "8"], "it is 8", True),
    (["7", "8"], "it is 9", False),
    (["1/3"], "0.333", False),
    (["2"], "first $\\boxed{1}$. Then I see it is $\\boxed{2}$.", True),
    (["2"], "", False),
]


@pytest.fixture(scope="module")
def worker() -> Iterator[MathWorker]:
    found = MathWorker()
    yield found
    found.close()


def test_answers_are_compared_as_mathematics(worker: MathWorker) -> None:
    golds, texts, wanted = zip(*EQUAL, strict=True)
    found = math_match(completions=texts, answers=golds, worker=worker)
    assert [each["score"] == 1 for each in found] == list(wanted)
    assert {each["timeouts"] for each in found} == {0.0}


@pytest.mark.parametrize("gold", ["A", "", "no number"])
def test_a_right_answer_that_is_not_mathematics_is_refused_by_name(gold: str, worker: MathWorker) -> None:
    # An empty one verifies nothing, so that every score is 0 in silence (open-r1 #420).
    with pytest.raises(DataError, match="'answer' is not mathematics"):
        math_match(completions=["1"], answers=[[gold]], worker=worker)


def test_the_worker_in_this_process_answers_line_by_line() -> None:
    lines, replies = (
        io.StringIO("".join(json.dumps(each) + "\n" for each in ([["2"], "2"], [["A"], "2"]))),
        io.StringIO(),
    )
    answers(lines, replies)
    assert replies.getvalue() == "true\ntrue\nnull\n"


# Says that it is ready, answers the first question, and hangs at a text that says so.
HANGS = """
import json, sys, time
print("true", flush=True)
for line in sys.stdin:
    if "hang" in json.loads(line)[1]:
        time.sleep(600)
    print("true", flush=True)
"""


def test_a_comparison_that_takes_too_long_is_ended_and_counted_and_the_next_one_is_not() -> None:
    # verl #5635 gave 0 for every completion in silence, #5839 hung the run, verifiers #831 counted its own delays.
    worker = MathWorker(1.0, [sys.executable, "-c", HANGS])
    found = math_match(completions=["1", "hang", "2"], answers=[["1"]] * 3, worker=worker)
    worker.close()
    assert found == [{"score": 1, "timeouts": 0}, {"score": 0, "timeouts": 1}, {"score": 1, "timeouts": 0}]


def test_a_worker_that_was_ended_between_two_questions_starts_again() -> None:
    worker = MathWorker(60.0, [sys.executable, "-c", HANGS])
    for _ in range(2):
        assert worker.ask(["1"], "1") is True
        assert worker._process is not None
        worker._process.kill()
        worker._process.wait()
    worker.close()


def test_a_worker_that_does_not_start_is_an_error() -> None:
    worker = MathWorker(1.0, [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(TrainingError, match="does not start"):
        worker.ask(["1"], "1")


def test_without_the_package_the_reward_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(DependencyError, match=r"kitforge\[math\]"):
        runs.begin("grpo", roles={}, choices={"reward": "math"})


def test_a_run_logs_how_many_comparisons_took_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = MathWorker(1.0, [sys.executable, "-c", HANGS.replace('"hang"', '"\\\\x00"').replace("600", "0")])
    monkeypatch.setattr(math_reward, "_worker", lambda: slow)
    assembly: Any = runs.begin("grpo", roles={}, choices={"reward": "math", "data.eval_fraction": 0.0})
    (batch, *_) = runs.first_step(assembly.loop.task, assembly.loop.model)
    slow.close()
    assert batch["metrics"]["reward"] == 1
    assert batch["metrics"]["rewards/timeouts/mean"] == 0
