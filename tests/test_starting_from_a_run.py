"""A Run stays what it was when a later one starts from it, whichever task trains it."""

import copy
import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kitforge.api import Trainer, pipeline
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.run_folder import Run
from tests.kits.recommender import runs as clicks
from tests.kits.rlhf import runs
from tests.kits.transformers import test_classification, test_image_classification, test_seq2seq
from tests.kits.transformers import test_token_classification as tagging

SHORT: dict[str, Any] = {"trainer.max_steps": 2, "trainer.progress": False, "device": "cpu", "data.batch_size": 4}
RATE = {"optimizer.learning_rate": 1e-2}
LLAMA: dict[str, Any] = {"model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.num_kv_heads": 1}
T5: dict[str, Any] = {"model.num_layers": 1, "model.dim": 16, "model.num_heads": 2, "model.head_dim": 8}
LENGTH = {"data.sequence_length": 48}
TEXTS = ["The moon rises.", "The sun sets.", "Rain falls on the hill."] * 8
# Task, preset, rows, options of the first run, and options of both.
CASES: dict[str, tuple[str, Any, dict[str, Any], dict[str, Any]]] = {
    "text_generation": ("llama_tiny", TEXTS, LLAMA, LENGTH),
    "sft": ("llama_tiny", runs.DEMONSTRATIONS, LLAMA, LENGTH),
    "text_classification": ("llama_tiny", test_classification.rows(), LLAMA, LENGTH),
    "token_classification": ("llama_tiny", tagging.rows(), LLAMA, LENGTH),
    "translation": ("t5_tiny", test_seq2seq.rows(), {}, LENGTH),
    "image_classification": ("vit_tiny", test_image_classification.rows(), {}, {}),
    "recommendation": ("deepfm", clicks.LOG, {"model.dim": 4, "model.hidden": [8]}, {}),
}


def trained(task: str, model: Any, folder: Path, own: dict[str, Any] | None = None) -> Run:
    preset, rows, first, both = CASES[task]
    chosen = SHORT | RATE | both | (first if model is None else {}) | (own or {})
    return Trainer(task, preset if model is None else model, rows, output_dir=folder, options=chosen).train()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(dict(model.named_parameters()))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


QUICK = ("text_generation", "sft")


@pytest.mark.parametrize(
    "task", [task if task in QUICK else pytest.param(task, marks=pytest.mark.slow) for task in CASES]
)
def test_a_later_run_leaves_its_start_as_it_was(task: str, tmp_path: Path) -> None:
    base = trained(task, None, tmp_path / "base")
    before = weights(base.model)
    second = trained(task, base, tmp_path / "second")
    assert same(weights(base.model), before)
    assert not same(weights(second.model), before)


@pytest.mark.slow
@pytest.mark.parametrize("task", CASES)
def test_a_run_and_its_folder_are_the_same_start(task: str, tmp_path: Path) -> None:
    base = trained(task, None, tmp_path / "base")
    found = [trained(task, start, tmp_path / type(start).__name__).model for start in (base, str(base.folder))]
    assert same(weights(found[0]), weights(found[1]))


def test_an_adapter_of_a_later_run_is_not_left_in_its_start(tmp_path: Path) -> None:
    base = trained("text_generation", None, tmp_path / "base")
    before = weights(base.model)
    second = trained("text_generation", base, tmp_path / "second", {"lora.rank": 2})
    assert same(weights(base.model), before) and base.model is not second.model
    merged = trained("text_generation", second, tmp_path / "third")
    assert any(".adapters." in name for name in weights(second.model))
    assert not any(".adapters." in name for name in weights(merged.model))


def test_a_run_without_its_folder_is_copied(tmp_path: Path) -> None:
    base = trained("sft", None, tmp_path / "base")
    from_folder = trained("sft", str(base.folder), tmp_path / "second")
    before = weights(base.model)
    shutil.rmtree(base.folder)
    assert same(weights(trained("sft", base, tmp_path / "third").model), weights(from_folder.model))
    assert same(weights(base.model), before)


def test_a_run_whose_weights_were_changed_in_memory_is_copied(tmp_path: Path) -> None:
    base, still = trained("sft", None, tmp_path / "base"), {"optimizer.learning_rate": 1e-30}
    with torch.no_grad():
        next(base.model.parameters()).mul_(0.5)
    before = weights(base.model)
    assert same(weights(trained("sft", base, tmp_path / "second", still).model), before)


def test_a_trainer_trains_twice_from_the_same_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = trained("sft", None, tmp_path / "base")
    trainer = Trainer("sft", base, runs.DEMONSTRATIONS, options=SHORT | RATE | LENGTH)
    assert same(*(weights(trainer.train().model) for _ in range(2)))


@pytest.mark.slow
def test_a_run_that_nobody_keeps_is_not_held_while_a_later_one_trains(tmp_path: Path) -> None:
    base = trained("sft", None, tmp_path / "base")
    network = weakref.ref(base.model)
    held: list[bool] = []

    class Watch(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            # Of many events, those between which the network would be built, loaded and trained.
            if event.kind in ("start", "step"):
                gc.collect()
                held.append(network() is not None)

    options = SHORT | LENGTH | {"output_dir": str(tmp_path / "second")}
    trainer = Trainer("sft", base, runs.DEMONSTRATIONS, options=options, callbacks=[Watch()])
    del base
    trainer.train()
    assert held and not any(held)


@pytest.mark.slow
def test_a_start_is_still_the_reference_the_pipeline_and_the_evaluated_model(tmp_path: Path) -> None:
    base = trained("sft", None, tmp_path / "base")
    answer = pipeline("sft", base)("Q1: ", max_new_tokens=4)
    second = trained("sft", base, tmp_path / "second", {"trainer.max_steps": 6})
    assert pipeline("sft", base)("Q1: ", max_new_tokens=4) == answer

    def preference_loss(reference: Any, name: str) -> dict[str, float]:
        options = SHORT | LENGTH | {"output_dir": str(tmp_path / name), "trainer.max_steps": 1}
        return Trainer("dpo", second, runs.PAIRS, roles={"reference": reference}, options=options).train().metrics

    assert preference_loss(base, "run")["loss"] == pytest.approx(preference_loss(str(base.folder), "folder")["loss"])
