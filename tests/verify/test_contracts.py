"""Every task keeps every contract of `kitforge verify`, by the code of the command: micro-batches, evaluation, packing,
kills, other layouts, damage, ranks, tiers and serving are compared with one undisturbed run a task."""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from kitforge.kits.registry import task_names
from kitforge.verify import case as cases
from kitforge.verify import distribution, resuming
from kitforge.verify.case import Case
from kitforge.verify.catalog import CONTRACTS
from kitforge.verify.contract import NotOfferedError
from kitforge.verify.runner import chosen
from tests.differential.drawn import WHOLE

SHAPE = {"model.dim": 32, "model.num_layers": 1, "model.num_heads": 2, "model.mlp_dim": 48}
LLAMA = SHAPE | {"model": "llama_tiny", "model.num_kv_heads": 2}
GPT2 = SHAPE | {"model": "gpt2_tiny", "model.embedding_dropout": 0.1, "model.attention_dropout": 0.1}
BERT = SHAPE | {"model": "bert_tiny", "model.embedding_dropout": 0.1, "model.attention_dropout": 0.1}
# Blocks for two stages, and for two on each of two ranks.
STAGES, IN_A_V = {"model.num_layers": 2}, {"model.num_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "recommendation": {"model.dim": 4, "model.hidden": [8]},
    "sft": GPT2,
    "text_classification": BERT,
    "token_classification": GPT2,
    "question_answering": BERT | STAGES,
    "masked_lm": BERT | IN_A_V,
    "translation": SHAPE | {"model.dropout": 0.1},
    "summarization": SHAPE,
    "image_classification": SHAPE | STAGES,
}
# Each task, and what changes the way of a gradient, an evaluation or a state.
ROWS: dict[str, dict[str, Any]] = {task: {"task": task} | MODELS.get(task, LLAMA) for task in task_names()} | {
    "sft of an adapter": {"task": "sft", "lora.rank": 2} | LLAMA | STAGES,
    "experts": {"task": "text_generation"} | LLAMA | {"model": "llama_moe_tiny"},
    "dropout": {"task": "text_generation"} | GPT2 | IN_A_V,
    "two tower": {"task": "recommendation", "model": "two_tower", "model.dim": 4, "model.hidden": [8]}
    | {"model.user": ["user"], "model.item": ["item", "category"]},
}
NAMES = [contract.name for contract in CONTRACTS if not contract.is_of_device]
# What a contract is not about.
TABLES = {row for row, choices in ROWS.items() if choices["task"] == "recommendation"}
LABELS = {
    "text_classification",
    "token_classification",
    "question_answering",
    "masked_lm",
    "embedding",
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


# Tasks that differ from another in their loss or their advantages alone, and have no state of their own.
LOSSES = {"dapo", "dr_grpo", "rloo", "reinforce_pp", "ipo", "simpo", "orpo"}
# Contracts of a network rather than of a task, which the tasks share.
SERVING = {"sampler", "batching", "scores"}
SERVED = {"text_generation", "grpo", "recommendation", "sft of an adapter", "experts", "dropout"}


def is_sampled(row: str, name: str) -> bool:
    """Whether the gate checks this pair, and not `make prove` alone: what is offered; of the two contracts of ranks one
    a row, by turns; of the serving ones those of a network each; kills of tasks with a state of their own."""
    if row in NOT_OFFERED.get(name, ()) or (name in ("resume", "damage") and row in LOSSES):
        return False
    if name in ("ranks", "layouts"):
        return (name == "ranks") == (list(ROWS).index(row) % 2 == 0)
    if name == "foreseen":
        # tests/trainer/test_step_trace.py has the tasks.
        return row in ("two tower", "experts")
    return name not in SERVING or row in SERVED


PAIRS = [(row, name) for row in ROWS for name in NAMES if WHOLE or is_sampled(row, name)]


@pytest.fixture(scope="module", autouse=not WHOLE)
def short() -> Iterator[None]:
    """In the gate runs of half the steps with as many checkpoints, of which each kind of kill ends one."""
    fixed = cases.FIXED | {"trainer.max_steps": 4, "trainer.checkpoint_every": 1}
    with (
        mock.patch.multiple(cases, FIXED=fixed, CHECKPOINT_EVERY=1),
        mock.patch.multiple(resuming, CHECKPOINT_EVERY=1, INSTANTS=1, SAVES=1),
    ):
        yield


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of a row, whose undisturbed run has ended."""
    # As the command does: forks of a process with threads sum otherwise, or wait for them for ever.
    torch.set_num_threads(1)
    distribution.import_sharding()

    @functools.cache
    def case(row: str) -> Case:
        made = Case.of({"device": "cpu", **ROWS[row]}, tmp_path_factory.mktemp(row))
        made.train_base()
        return made

    return case


@pytest.mark.prove
@pytest.mark.parametrize(("row", "name"), PAIRS)
def test_a_task_keeps_its_contract(
    row: str, name: str, case_of: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(row)
    if not WHOLE and name in ("ranks", "layouts"):
        # One layout a row, by turns; stages where there are blocks for them.
        found, turn = distribution.layouts(case), list(ROWS).index(row) // 2
        staged = [degrees for degrees in found if "parallel.pipeline" in degrees]
        monkeypatch.setattr(distribution, "layouts", lambda _case: staged or [found[turn % len(found)]])
    (contract,) = chosen(CONTRACTS, [name])
    if row in NOT_OFFERED.get(name, ()):
        with pytest.raises(NotOfferedError):
            contract.check(case)
    else:
        measured = contract.check(case)
        assert measured.is_held, measured
