"""A reward model finds what people prefer, and what its scores mean travels with it."""

from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.kits.rlhf.learning import preferred
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ModelError
from kitforge.kits.rlhf.pipeline import RewardPipeline
from kitforge.kits.rlhf.roles.model_loading import load_policy, load_reward_model
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from tests.kits.rlhf import runs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ValueHeadModel]:
    folder = tmp_path_factory.mktemp("reward") / "run"
    assembly = runs.begin("reward", folder, {"trainer.max_steps": 30})
    runs.finish(assembly)
    return folder, cast(ValueHeadModel, assembly.loop.model)


def scores(model: ValueHeadModel) -> torch.Tensor:
    texts = [
        {"prompt": row["prompt"], "completion": row[kind]} for row in runs.PAIRS for kind in ("chosen", "rejected")
    ]
    return torch.tensor([answer[0]["score"] for answer in RewardPipeline(model, ByteTokenizer())(texts)])


def test_a_folder_gives_the_model_and_the_meaning_of_its_scores(trained: tuple[Path, ValueHeadModel]) -> None:
    folder, model = trained
    loaded = load_reward_model(folder, CPU)
    assert float(loaded.deviation) != 1.0
    assert torch.equal(scores(loaded), scores(model))


def test_preferred_answers_score_higher_each_source_for_itself(trained: tuple[Path, ValueHeadModel]) -> None:
    chosen, rejected = scores(trained[1]).view(-1, 2).unbind(1)
    assert bool((chosen > rejected).all())
    assembly = runs.begin("reward", None, model=trained[1])
    metrics = assembly.loop.evaluate()
    assert [metrics[f"eval/rewards/accuracy{source}"] for source in ("", "/a", "/b")] == [1.0] * 3


def test_scores_are_not_bounded() -> None:
    # mindspore-lab/mindrlhf ends its critic in a sigmoid, and cannot expect more than 1.
    model = ValueHeadModel(runs.network())
    model.reset_head(0)
    model.score.weight.data *= 1e4
    assert float(model(torch.arange(9).unsqueeze(0)).detach().abs().max()) > 10


def test_what_fills_a_row_is_not_scored() -> None:
    model = ValueHeadModel(runs.network(torch.float64))
    model.reset_head(0)
    short = torch.tensor([[5, 6, 7]])
    wide = torch.tensor([[5, 6, 7, 250, 251], [5, 6, 7, 256, 256]])
    alone = model.scores_at(short, torch.tensor([2])).detach()
    assert torch.allclose(model.scores_at(wide, torch.tensor([2, 2])).detach(), alone.expand(2), atol=1e-12, rtol=0)


@pytest.mark.slow
def test_planted_preferences_are_found_as_far_as_they_can_be(tmp_path: Path) -> None:
    truth, found = preferred(str(tmp_path), 0)
    assert found > truth - 0.01


def test_a_language_model_is_no_reward_model(trained: tuple[Path, ValueHeadModel], tmp_path: Path) -> None:
    runs.finish(runs.begin("sft", tmp_path / "sft", {"trainer.max_steps": 1}))
    with pytest.raises(ModelError, match="no reward model"):
        load_reward_model(tmp_path / "sft", CPU)
    assert load_policy(tmp_path / "sft", CPU) is not None
