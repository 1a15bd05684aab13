"""How fast a stage learns: gently where there are weights already, as its presets say where there are none."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from kitforge.api import Trainer
from kitforge.cli.main import run
from kitforge.composition import compose_config
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.registry import RLHF_TASKS
from tests.differential.drawn import WHOLE
from tests.kits.rlhf import runs
from tests.trainer import tiny

SHORT: dict[str, Any] = {"trainer.max_steps": 1, "trainer.progress": False, "data.sequence_length": 40, "device": "cpu"}
# From weights; everything but `sft` and `reward` is a policy that has been taught already.
RATES = {"sft": 2e-5, "reward": 1e-5}
CRITIC = {"ppo": 1e-5}


def rates(task: str, **choices: Any) -> tuple[float, float, float | None]:
    """Learning rate, decay and the critic's rate."""
    values = compose_config(task, choices).values
    optimizer = values["optimizer"]
    return optimizer["learning_rate"], optimizer["weight_decay"], values.get("critic", {}).get("learning_rate")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("task", RLHF_TASKS)
def test_a_run_from_weights_learns_gently(task: str, tmp_path: Path) -> None:
    rate, critic = RATES.get(task, 1e-6), CRITIC.get(task)
    folder = str(tmp_path)
    assert rates(task, checkpoint=folder) == (rate, 0.0, critic)
    if WHOLE or task in RATES:
        assert rates(task, model=folder) == (rate, 0.0, critic)
        # From nothing all is as it was.
        assert rates(task) == rates(task, model="llama_tiny") == rates(task, lora={"rank": 8})
    # Adapters learn ten times as fast.
    lora = rates(task, checkpoint=folder, lora={"rank": 8})
    assert lora == (pytest.approx(10 * rate), 0.0, None if critic is None else pytest.approx(10 * critic))
    assert rates(task)[0] == (6e-4 if task in RATES else 5e-5)


@pytest.mark.slow
def test_what_was_asked_for_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tmp_path)
    assert rates("sft", checkpoint=folder, optimizer="muon")[0] == 3e-3
    assert rates("sft", checkpoint=folder, **{"optimizer.learning_rate": 0.5}) == (0.5, 0.0, None)
    assert rates("ppo", checkpoint=folder, **{"critic.learning_rate": 0.5}) == (1e-6, 0.0, 0.5)
    # A rate that was asked for is the critic's too, unless that was given one.
    assert rates("ppo", checkpoint=folder, **{"optimizer.learning_rate": 0.25}) == (0.25, 0.0, None)
    both = {"optimizer.learning_rate": 0.25, "critic.learning_rate": 0.5}
    assert rates("ppo", checkpoint=folder, **both) == (0.25, 0.0, 0.5)
    assert rates("grpo", checkpoint=folder, recipe="rlhf_tiny") == (3e-3, 0.0, None)
    monkeypatch.chdir(tmp_path)
    Path("configs/recipe").mkdir(parents=True)
    recipe = Path("configs/recipe/own.yaml")
    recipe.write_text("# @package _global_\ndefaults:\n  - override /optimizer: sgd\n")
    assert rates("sft", checkpoint=folder, recipe="own")[0] == 1e-2
    recipe.write_text("# @package _global_\nlora:\n  rank: 2\n")
    assert rates("sft", checkpoint=folder, recipe="own")[0] == 2e-4


@pytest.mark.slow
def test_a_network_in_memory_is_weights_too(tmp_path: Path) -> None:
    given = {"processor": ByteTokenizer(), "options": SHORT, "output_dir": tmp_path / "run"}
    trainer = Trainer("dpo", runs.network(), runs.PAIRS, **given)
    assert trainer.options.optimizer.learning_rate == 1e-6 and trainer.options.starts_from_weights
    made = trainer.train()
    (told,) = tiny.events(tmp_path / "run", "run")
    assert "\nlearning    starts from weights: learning rate 1e-06, weight decay 0\n" in told
    assert Trainer("sft", made, options=SHORT).options.optimizer.learning_rate == 2e-5
    fresh = Trainer("sft", "llama_tiny", runs.DEMONSTRATIONS, options=SHORT, output_dir=tmp_path / "tuned")
    assert fresh.options.optimizer.learning_rate == 6e-4 and not fresh.options.starts_from_weights
    fresh.finetune(made)
    assert fresh.options.optimizer.learning_rate == 2e-5
    typed = Trainer("sft", "llama_tiny", runs.DEMONSTRATIONS, options=SHORT | {"optimizer.learning_rate": 0.5})
    typed.options = dataclasses.replace(typed.options, output_dir=str(tmp_path / "typed"))
    typed.finetune(made)
    assert typed.options.optimizer.learning_rate == 0.5


@pytest.mark.slow
def test_it_is_said_before_anything_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["task=sft", f"checkpoint={tmp_path}"], "# starts from weights: learning rate 2e-05, weight decay 0"),
        (["task=reward"], "# starts from nothing: learning rate 0.0006, weight decay 0.1"),
        (["task=ppo", f"checkpoint={tmp_path}"], "learning rate 1e-06, weight decay 0, critic learning rate 1e-05"),
    ):
        assert run(["config", *arguments]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1].endswith(words)
        assert float(yaml.safe_load(out)["optimizer"]["learning_rate"]) == pytest.approx(
            float(words.split("rate ")[1].split(",")[0])
        )


def test_policy_and_critic_each_have_a_rate_a_clip_and_a_norm(tmp_path: Path) -> None:
    choices = {
        "trainer.max_steps": 2,
        "critic.learning_rate": 3e-2,
        "critic.max_grad_norm": 1e-9,
        "optimizer.name": "sgd",
        "optimizer.weight_decay": 0.0,
    }
    begun = runs.begin("ppo", tmp_path, choices)
    before = {name: each.detach().clone() for name, each in begun.loop.model.named_parameters()}
    runs.finish(begun)
    for line in tiny.records(tmp_path, "train"):
        assert line["grad_norm"] == pytest.approx(math.hypot(line["grad_norm/policy"], line["grad_norm/critic"]))
        assert line["learning_rate/critic"] == pytest.approx(3 * line["learning_rate"])
        assert line["grad_norm/critic"] > 1e-6
    # A clip of next to nothing holds the critic where it is, and the policy goes on.
    moved = {part: 0.0 for part in ("policy", "critic")}
    for name, each in begun.loop.model.named_parameters():
        part = name.partition(".")[0]
        moved[part] = max(moved[part], float((each.detach() - before[name]).abs().max()))
    assert moved["critic"] < 1e-9 and moved["policy"] > 1e-5


def test_a_run_without_a_critic_has_no_parts(tmp_path: Path) -> None:
    runs.finish(runs.begin("grpo", tmp_path, {"trainer.max_steps": 1}))
    (line,) = tiny.records(tmp_path, "train")
    assert "grad_norm" in line and not [name for name in line if name.startswith(("grad_norm/", "learning_rate/"))]
