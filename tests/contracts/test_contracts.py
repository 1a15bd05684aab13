"""Every task keeps every contract of `kitforge verify`: (task x contract), by the code of the command.

One undisturbed run a task is trained once and compared with by micro-batches, evaluation, kills, ranks and the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kitforge.kits.registry import task_names
from kitforge.verify import distribution
from kitforge.verify.case import Case
from kitforge.verify.catalog import CONTRACTS
from kitforge.verify.runner import chosen, run_contracts
from tests.differential.drawn import WHOLE

SHAPE = {"model.dim": 32, "model.num_layers": 1, "model.num_heads": 2, "model.mlp_dim": 48}
LLAMA = SHAPE | {"model": "llama_tiny", "model.num_kv_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "recommendation": {"model.dim": 4, "model.hidden": [8]},
    "translation": SHAPE,
    "summarization": SHAPE,
    "image_classification": SHAPE,
}
# Each task, and what changes the way of a gradient, an evaluation or a state.
ROWS: dict[str, dict[str, Any]] = {task: {"task": task} | MODELS.get(task, LLAMA) for task in task_names()} | {
    "sft of an adapter": {"task": "sft", "lora.rank": 2} | LLAMA,
    "experts": {"task": "text_generation"} | LLAMA | {"model": "llama_moe_tiny"},
    "dropout": {"task": "text_generation"} | SHAPE | {"model": "gpt2_tiny", "model.embedding_dropout": 0.2},
    "two tower": {"task": "recommendation", "model": "two_tower", "model.dim": 4, "model.hidden": [8]}
    | {"model.user": ["user"], "model.item": ["item", "category"]},
}
NAMES = [contract.name for contract in CONTRACTS if not contract.is_of_device]
# What a contract is not about.
TABLES = {row for row, choices in ROWS.items() if choices["task"] == "recommendation"}
LABELS = {
    "text_classification",
    "token_classification",
    "image_classification",
    "translation",
    "summarization",
    "reward",
}
PACKED = {row for row, choices in ROWS.items() if choices["task"] in ("text_generation", "sft")}
NOT_OFFERED = {
    "evaluation": {"kto"},
    "packing": ROWS.keys() - PACKED,
    "cache": ROWS.keys() - TABLES,
    "sampler": TABLES | LABELS,
    "batching": TABLES | LABELS,
    "scores": LABELS | {"two tower"},
}


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of a row, whose undisturbed run has ended."""
    distribution.import_sharding()
    cases: dict[str, Case] = {}

    def case(row: str) -> Case:
        if row not in cases:
            made = Case.of({"device": "cpu", **ROWS[row]}, tmp_path_factory.mktemp(row))
            made.train_base()
            cases[row] = made
        return cases[row]

    return case


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("row", ROWS)
def test_a_task_keeps_its_contract(
    row: str, name: str, case_of: Callable[[str], Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(row)
    if not WHOLE:
        # Each row in one layout, and goes on in the next one.
        found, turn = distribution.layouts(case), list(ROWS).index(row) + (name == "layouts")
        monkeypatch.setattr(distribution, "layouts", lambda _case: [found[turn % len(found)]])
    (verdict,) = run_contracts(chosen(CONTRACTS, [name]), case, row, tmp_path / "log")
    assert verdict.status == ("not offered" if row in NOT_OFFERED.get(name, ()) else "held"), verdict
