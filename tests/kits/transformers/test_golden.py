"""The whole of it on real text: a byte-level LLaMA of a million parameters learns Shakespeare."""

from pathlib import Path

import pytest

from kitforge.api import Trainer
from tests.trainer import tiny

TEXT = Path(__file__).parents[4] / "shared" / "data" / "tinyshakespeare" / "input.txt"
MOST_TOKENS = 1_200_000
NATS_PER_BYTE = 1.65


@pytest.mark.slow
def test_a_million_tokens_of_shakespeare_bring_the_loss_below_the_mark(tmp_path: Path) -> None:
    if not TEXT.exists():
        pytest.skip(f"{TEXT} is not here")
    options = {"recipe": "tinyshakespeare", "trainer.progress": False, "data.cache": str(tmp_path / "cache")}
    run = Trainer("text_generation", train_dataset=str(TEXT), output_dir=tmp_path / "run", options=options).train()
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    assert 900_000 < parameters < 1_100_000
    assert tiny.records(run.folder, "train")[-1]["tokens"] <= MOST_TOKENS
    assert run.metrics["eval/loss"] <= NATS_PER_BYTE
