"""Samples of a report take room for their own texts, and are left out where they would gather too much."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.transformers import generation_samples
from kitforge.kits.transformers.generation_samples import GenerationSamples, engine_options
from kitforge.trainer.callbacks.callback import Event
from tests.tiny import built
from tests.trainer import tiny

PROMPTS = ["the sun", "a", "old cafe"]


def run_of(model: Any, folder: Path, degree: int = 1, zero: int = 3) -> tuple[Any, list[tuple[str, str]]]:
    notes: list[tuple[str, str]] = []
    mesh = SimpleNamespace(
        degree=lambda axis: degree if axis == "shard" else 1, degrees=SimpleNamespace(zero_stage=zero)
    )
    state = SimpleNamespace(parallel=SimpleNamespace(reshard=lambda: None), cursor=SimpleNamespace(step=1))
    world = SimpleNamespace(rank=0, mesh=None if degree == 1 else mesh)
    note = lambda event, message: notes.append((event, message))  # noqa: E731
    return SimpleNamespace(model=model, world=world, state=state, folder=folder, log_event=note), notes


@pytest.fixture(scope="module")
def model() -> Any:
    return built(tiny.LLAMA, ByteTokenizer.vocab_size, max_length=4096)


@pytest.mark.parametrize("size", [1, 4, 16])
def test_texts_have_room_together_and_no_more_than_they_need(model: Any, size: int) -> None:
    lengths = [7, 1, 8]
    options = InferenceOptions(max_new_tokens=20, engine=EngineOptions(block_size=size))
    engine = Engine(model, engine_options(model, options, lengths))
    completions = engine.generate([[1] * length for length in lengths], options)
    stats = engine.stats()
    # Every pass has all texts: one reads the prompts, and each gives a token of every text.
    assert [len(each.tokens) for (each,) in completions] == [20] * 3 and stats["steps"] == 20
    assert stats["preemptions"] == 0
    assert stats["blocks"] * size <= sum(length + 20 + 2 * size for length in lengths)
    assert Engine(model, options.engine).stats()["blocks"] * size >= 4096


def test_samples_are_those_of_an_engine_with_all_the_room(model: Any, tmp_path: Path) -> None:
    options = InferenceOptions(max_new_tokens=12)
    run, notes = run_of(model, tmp_path)
    GenerationSamples(PROMPTS, ByteTokenizer(), options).on_event(Event(kind="evaluate"), run)
    completions = Engine(model, stop_ids=ByteTokenizer().eos_ids).generate(
        [ByteTokenizer().encode(prompt) for prompt in PROMPTS], options
    )
    page = json.loads((tmp_path / "samples" / "step_1.json").read_text())
    texts = [ByteTokenizer().decode(sample.content) for (sample,) in completions]
    assert [(each["prompt"], each["text"]) for each in page["samples"]] == list(zip(PROMPTS, texts, strict=True))
    assert not notes


def test_samples_that_would_gather_too_much_are_left_out_and_that_is_said_once(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = sum(each.numel() * each.element_size() for each in model.parameters())
    monkeypatch.setattr(generation_samples, "GATHERED", 11 * weights)
    monkeypatch.setattr(Engine, "generate", lambda *_: pytest.fail("they were not left out"))
    callback = GenerationSamples(PROMPTS, ByteTokenizer(), InferenceOptions(max_new_tokens=12))
    run, notes = run_of(model, tmp_path, degree=2)
    for _ in range(2):
        callback.on_event(Event(kind="evaluate"), run)
    assert [event for event, _ in notes] == ["samples"]
    assert "max_new_tokens=11 would do" in notes[0][1]
    monkeypatch.undo()


@pytest.mark.parametrize(("degree", "zero"), [(1, 3), (2, 2)])
def test_weights_that_are_whole_on_every_rank_are_not_gathered(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, degree: int, zero: int
) -> None:
    monkeypatch.setattr(generation_samples, "GATHERED", 0)
    run, notes = run_of(model, tmp_path, degree, zero)
    GenerationSamples(PROMPTS, ByteTokenizer(), InferenceOptions(max_new_tokens=3)).on_event(
        Event(kind="evaluate"), run
    )
    assert (tmp_path / "samples" / "step_1.json").exists() and not notes
