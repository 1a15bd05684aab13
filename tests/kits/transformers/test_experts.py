"""Mixtures of experts through the kit: what is refused before a rank starts, and what a task says of its balance."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.api import Trainer, pipeline, save_model
from kitforge.composition import compose_config
from kitforge.foundation.errors import ConfigError
from kitforge.kits.transformers.build import TASKS
from tests.small_run import OPTIONS, TEXT

MIXTURE = {"model.mlp_dim": 16, "model.experts.num_experts": 4}


def check(**choices: Any) -> None:
    kit = TASKS["text_generation"]
    values = {"model": "llama_moe_tiny", "data.train": "corpus.txt", **choices}
    kit.check_parallel(kit.read_options(compose_config("text_generation", values).values))


def test_a_balance_over_batches_is_refused_before_a_rank_starts() -> None:
    batch = {"model.experts.balance": "batch", "data.batch_size": 8}
    check(**batch)
    check(**batch, **{"trainer.micro_batch_size": 8})
    with pytest.raises(ConfigError, match="got: +2 micro-batches"):
        check(**batch, **{"trainer.micro_batch_size": 4})
    with pytest.raises(ConfigError, match="of 2 replicas"):
        check(**batch, **{"parallel.data": 2})


@pytest.mark.slow
def test_texts_of_a_trained_mixture_are_those_generated_alone(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    options = {**OPTIONS, **MIXTURE, "data.cache": str(tmp_path / "cache"), "output_dir": str(tmp_path / "run")}
    run = Trainer("text_generation", "llama_moe_tiny", tmp_path / "corpus.txt", options=options).train()
    assert "experts/fullest" in run.metrics
    generate = pipeline("text_generation", model=run.folder)
    prompts = ["ROMEO: line", "of a play", "little of it is said"]
    together = generate(prompts, max_new_tokens=6)
    assert together == [generate([prompt], max_new_tokens=6)[0] for prompt in prompts]
    assert all(torch.isfinite(each).all() for each in run.model.parameters())


@pytest.mark.slow
def test_a_capacity_is_for_packed_rows(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(TEXT)
    options = {**OPTIONS, **MIXTURE, "model.experts.capacity_factor": 0.5, "trainer.max_steps": 1}
    options["data.cache"] = str(tmp_path / "cache")
    trainer = Trainer("text_generation", "llama_moe_tiny", tmp_path / "corpus.txt", options=options)
    run = trainer.train()
    assert run.metrics["experts/dropped"] > 0
    rows = [{"text": "one two", "label": "a"}, {"text": "three", "label": "b"}] * 8
    folder = tmp_path / "labels"
    with pytest.raises(ConfigError, match=r"padding would(.|\n)*0\.5(.|\n)*start from its export"):
        Trainer("text_classification", run, rows, output_dir=folder).train()
    assert not folder.exists()
    # What the message says to do.
    save_model(run, tmp_path / "export")
    options = {"trainer.max_steps": 1, "output_dir": str(folder)}
    assert Trainer("text_classification", tmp_path / "export", rows, options=options).train().metrics
