"""The whole of it on real text: a byte-level LLaMA of a million parameters learns Shakespeare."""

import os
from pathlib import Path
from typing import Any

import pytest

from kitforge.api import Trainer
from tests.trainer import tiny

TEXT = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare" / "input.txt"
# The mark of the whole recipe, and what a fortieth of it reaches on the first batches of the same text.
WHOLE: tuple[dict[str, Any], int, float] = ({}, 1_200_000, 1.65)
SHORT: tuple[dict[str, Any], int, float] = (
    {"trainer.max_steps": 24, "trainer.eval_every": 24, "trainer.eval_batches": 4},
    28_800,
    2.8,
)


@pytest.mark.slow
@pytest.mark.prove
def test_a_million_tokens_of_shakespeare_bring_the_loss_below_the_mark(tmp_path: Path) -> None:
    if not TEXT.exists():
        pytest.skip(f"{TEXT} is not here")
    length, most_tokens, nats_per_byte = WHOLE if os.environ.get("KITFORGE_PROVE") else SHORT
    options = {"recipe": "tinyshakespeare", "trainer.progress": False, "data.cache": str(tmp_path / "cache"), **length}
    run = Trainer("text_generation", train_dataset=str(TEXT), output_dir=tmp_path / "run", options=options).train()
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    assert 900_000 < parameters < 1_100_000
    assert tiny.records(run.folder, "train")[-1]["tokens"] <= most_tokens
    assert run.metrics["eval/loss"] <= nats_per_byte
