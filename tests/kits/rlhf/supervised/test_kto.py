"""A policy learns from single answers, beside the policy that it began as."""

from typing import Any, cast

import pytest
import torch

from kitforge.foundation.types import Cursor
from kitforge.kits.rlhf.supervised.kto import KTOTask
from tests.kits.rlhf import runs


def first_step(size: int | None = None, moved: float = 0.05) -> tuple[KTOTask, Any, list[dict[str, Any]]]:
    """The first step of a policy that is some way from its reference, in float64."""
    choices = {"trainer.micro_batch_size": size, "data.shuffle": False, "data.eval_fraction": 0.0}
    assembly = runs.begin("kto", None, choices, model=runs.network(torch.float64))
    task, model = cast(KTOTask, assembly.loop.task), assembly.loop.model
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1 + moved)
    return task, model, next(iter(task.steps(model, Cursor())))


def test_the_baseline_is_of_answers_to_other_prompts_of_the_whole_step() -> None:
    # huggingface/trl 1.12, trainer/kto_trainer.py: each micro-batch has a baseline of its own.
    whole, parts = first_step(None)[2], first_step(1)[2]
    assert len(parts) == 4
    assert all(torch.allclose(part["kl_baseline"], whole[0]["kl_baseline"], atol=1e-12, rtol=0) for part in parts)
    rows = [row["tokens"][0][row["tokens"][0] != 257].tolist() for row in parts]
    task, model, _ = first_step()
    crossed = [rows[i][:4] + rows[i - 1][4:] for i in range(4)]
    with torch.no_grad():
        ratios = [answer(model, row) - answer(cast(Any, task)._reference_model.model, row) for row in crossed]
    assert float(whole[0]["kl_baseline"]) == pytest.approx(max(sum(ratios) / 4, 0.0), abs=1e-10)
    assert abs(sum(ratios)) > 1e-3


def answer(model: Any, tokens: list[int]) -> float:
    log_probs = model(torch.tensor([tokens]))[0].log_softmax(-1)
    return sum(float(log_probs[i, tokens[i + 1]]) for i in range(3, len(tokens) - 1))


def test_good_answers_become_likelier_and_bad_ones_less() -> None:
    metrics = runs.finish(runs.begin("kto", None, {"trainer.max_steps": 25}))
    assert metrics["eval/rewards/accuracy"] == 1.0
    assert metrics["eval/rewards/desirable"] > 0 > metrics["eval/rewards/undesirable"]


def evaluated(rows: list[dict[str, Any]], **choices: Any) -> dict[str, float]:
    """The evaluation of a policy that is some way from its reference."""
    given = {f"data.{name}": value for name, value in choices.items()}
    assembly = runs.begin("kto", None, given, model=runs.network(torch.float64), eval_dataset=rows)
    with torch.no_grad():
        next(iter(assembly.loop.model.parameters())).mul_(0.8)
    return assembly.loop.evaluate()


ROWS = [{"prompt": f"Q{n}: ", "completion": "yes no maybe"[n : 2 * n + 2], "label": n % 2 == 0} for n in range(9)]


@pytest.mark.parametrize("kept", [ROWS, [*ROWS[:5], ROWS[0], {**ROWS[1], "label": True}]], ids=["rows", "repeated"])
def test_an_evaluation_depends_neither_on_its_batches_nor_on_the_order_of_rows(kept: list[dict[str, Any]]) -> None:
    whole = evaluated(kept, batch_size=len(kept))
    assert whole["eval/kl_baseline"] > 1e-3
    for size in (2, 3, 4):
        assert evaluated(kept, batch_size=size) == pytest.approx(whole, abs=1e-6)
    for order in (kept[::-1], kept[3:] + kept[:3], kept[1::2] + kept[::2]):
        assert evaluated(order, batch_size=4) == pytest.approx(whole, abs=1e-6)


def test_an_evaluation_of_one_row_has_no_baseline() -> None:
    assert evaluated(ROWS[:1])["eval/kl_baseline"] == 0.0
