"""What a check comes to: held within its bound, broken beyond it, by an error, by death and by silence."""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.verify.contract import Contract, Measured, NotOfferedError, Verdict, furthest
from kitforge.verify.kernel_cases import run_kernel
from kitforge.verify.processes import Process, run_ranks
from kitforge.verify.run_equality import distance
from kitforge.verify.runner import chosen, run_contracts, summary
from tests.patience import PATIENCE


def fails(_: str) -> Measured:
    raise ValueError("no way")


def absent(_: str) -> Measured:
    raise NotOfferedError("there is none")


def dies(_: str) -> Measured:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def leaves(_: str) -> Measured:
    sys.exit(3)


def hangs(_: str) -> Measured:
    time.sleep(1000)
    raise AssertionError


def gives(figure: float) -> Callable[[str], Measured]:
    return lambda _: Measured(figure=figure, bound=0.5, unit="things")


def verdict(check: Callable[[str], Measured], folder: Path, timeout: float = 60.0) -> Verdict:
    contract = Contract(name="one", promise="one = one", check=check)
    (found,) = run_contracts([contract], "subject", "name", folder / "log", timeout=timeout)
    return found


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (gives(0.5), "held", "things"),
        (gives(0.6), "broken", "things"),
        (gives(math.nan), "broken", "things"),
        (fails, "broken", "ValueError: no way"),
        (dies, "broken", "exit code -9"),
        (leaves, "broken", "SystemExit: 3"),
        (absent, "not offered", "there is none"),
    ],
)
def test_a_check_comes_to_one_of_three(
    check: Callable[[str], Measured], status: str, words: str, tmp_path: Path
) -> None:
    found = verdict(check, tmp_path)
    assert (found.status, found.contract, found.subject) == (status, "one", "name")
    assert words in found.words


@pytest.mark.parametrize("figures", [[math.nan, 1.0], [0.0, math.nan], [2.0, math.nan, 3.0]])
def test_the_furthest_figure_is_nan_wherever_it_stands(figures: list[float]) -> None:
    assert math.isnan(furthest(figures))


def test_the_furthest_figure_of_none_is_infinite() -> None:
    assert furthest([]) == math.inf and furthest([], default=0.0) == 0.0 and furthest([1.0, 3.0, 2.0]) == 3.0


LINES: list[dict[str, Any]] = [
    {"kind": "train", "step": 1, "loss": 1.0, "grad_norm": 2.0},
    {"kind": "train", "step": 2, "loss": 1.0, "grad_norm": 2.0},
    {"kind": "eval", "step": 2, "eval/loss": 3.0},
]
APART: dict[str, tuple[list[dict[str, Any]], float]] = {
    "nothing": (LINES, 0.0),
    "time alone": ([LINES[0] | {"time/seconds": 9.0}, *LINES[1:]], 0.0),
    "a value": ([*LINES[:2], LINES[2] | {"eval/loss": 3.03}], 0.01),
    "a step that did not come": ([LINES[0], LINES[2]], math.inf),
    "an evaluation that did not come": (LINES[:2], math.inf),
    "a value that is absent": ([{"kind": "train", "step": 1, "loss": 1.0}, *LINES[1:]], math.inf),
    "a value that is not finite": ([LINES[0] | {"grad_norm": None}, *LINES[1:]], math.inf),
}


@pytest.mark.parametrize("words", APART)
def test_two_runs_are_apart_by_their_values_and_by_what_one_of_them_lacks(words: str, tmp_path: Path) -> None:
    other, far = APART[words]
    folders = []
    for name, lines in (("got", other), ("wanted", LINES)):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        (folders[-1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert distance(*folders) == pytest.approx(far, rel=0.02)
    assert distance(*reversed(folders)) == pytest.approx(far, rel=0.02)


def test_a_check_that_hangs_is_broken_and_killed_with_its_children(tmp_path: Path) -> None:
    def starts_another(_: str) -> Measured:
        child = Process(time.sleep, 1000)
        (tmp_path / "child").write_text(str(child._process.pid))
        return hangs("")

    found = verdict(starts_another, tmp_path, timeout=2.0)
    assert found.status == "broken"
    assert "nothing within 2 seconds" in found.words
    child = int((tmp_path / "child").read_text())
    state = Path(f"/proc/{child}/stat")

    def lives() -> bool:
        # It is a zombie until whoever adopted it looks.
        return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    # A signal reaches a process at its next turn on a core.
    deadline = time.monotonic() + PATIENCE
    while lives() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not lives()


def test_the_others_go_on_after_an_error(tmp_path: Path) -> None:
    contracts = [Contract(name=check.__name__, promise="", check=check) for check in (fails, absent)]
    found = summary(list(run_contracts(contracts, "", "name", tmp_path / "log")))
    assert (found["held"], found["broken"], found["not offered"]) == (0, 1, 1)
    assert "Traceback" in (tmp_path / "log").read_text()


def test_what_is_no_number_is_null_in_json(tmp_path: Path) -> None:
    assert summary([verdict(gives(math.inf), tmp_path)])["contracts"][0]["figure"] is None


def test_unknown_contracts_are_refused_with_the_nearest_name() -> None:
    contracts = [Contract(name="packing", promise="", check=fails)]
    with pytest.raises(ConfigError, match="packing"):
        chosen(contracts, ["pcking"])


def on_rank(rank: int, failing: int) -> int:
    if rank == failing:
        raise ConfigError("a bad rank", got=rank)
    return rank * 10


def test_ranks_return_in_order_and_raise_what_one_of_them_raised() -> None:
    assert run_ranks(3, on_rank, -1, timeout=PATIENCE) == [0, 10, 20]
    with pytest.raises(ConfigError, match="a bad rank"):
        run_ranks(3, on_rank, 1, timeout=PATIENCE)


def test_an_error_that_cannot_be_sent_keeps_its_words() -> None:
    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    def raises() -> None:
        raise OddError(1, 2)

    with pytest.raises(RuntimeError, match="OddError: 1 and 2"):
        Process(raises).result(60.0)


def test_a_process_that_dies_is_reported_with_its_exit_code() -> None:
    with pytest.raises(TrainingError, match="exit code 3"):
        Process(os._exit, 3).result(60.0)


def test_a_process_without_an_answer_is_killed() -> None:
    process = Process(time.sleep, 1000)
    try:
        with pytest.raises(TrainingError, match="nothing within 0 seconds"):
            process.result(0.0)
        assert not process.is_alive
    finally:
        process.kill()


class _Constant(torch.autograd.Function):
    """A square whose gradient is a constant to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (x,) = ctx.saved_tensors
            return torch.mul(2 * x, grad)


def test_a_second_gradient_that_is_missing_is_zero_and_not_left_out() -> None:
    square, constant = (run_kernel(each, [torch.tensor([3.0])]) for each in (torch.square, _Constant.apply))
    assert [float(each) for each in square] == [9, 6, 2]
    assert [float(each) for each in constant] == [9, 6, 0]
