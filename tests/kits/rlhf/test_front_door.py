"""The three stages as a person writes them, and what becomes of their folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kitforge.api import Trainer, load_model, pipeline
from kitforge.cli.main import run
from kitforge.composition import compose_config
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError
from kitforge.kits.registry import RLHF_TASKS
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from tests.kits.rlhf import runs
from tests.kits.transformers.task_runs import write_rows
from tests.trainer import tiny

NETWORK = {
    f"model.{name}": value
    for name, value in {"dim": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 48}.items()
}
SHORT: dict[str, Any] = {"trainer.max_steps": 2, "trainer.progress": False, "data.eval_fraction": 0.2, "device": "cpu"}
ROUNDS = SHORT | {"rl.prompts_per_rollout": 4, "rollout.max_new_tokens": 4}


@pytest.mark.slow
def test_three_stages_from_files_each_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    demos = write_rows(tmp_path / "demos.jsonl", runs.DEMONSTRATIONS)
    pairs = write_rows(tmp_path / "pairs.jsonl", runs.PAIRS)
    prompts = write_rows(tmp_path / "prompts.jsonl", runs.PROMPTS)
    policy = Trainer("sft", "llama_tiny", demos, options=NETWORK | SHORT).train()
    reward = Trainer("reward", policy, pairs, options=SHORT).train()
    trainer = Trainer("ppo", policy, prompts, roles={"reward": reward}, options=ROUNDS)
    before = trainer.evaluate()
    aligned = trainer.train()
    assert set(before) <= set(aligned.metrics)
    for step in (0, 2):
        samples = json.loads((aligned.folder / "samples" / f"step_{step}.json").read_text())["samples"]
        assert all(set(sample["figures"]) == {"reward", "kl"} for sample in samples)
    # Each folder gives its network back, and whoever comes later may start from folders alone.
    assert isinstance(load_model(reward.folder), ValueHeadModel)
    loaded = load_model(aligned.folder)
    assert isinstance(loaded, Decoder)
    tokens = torch.arange(5).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(loaded(tokens), aligned.model(tokens))
    assert len(pipeline("ppo", aligned.folder)("Q1: ", max_new_tokens=3)[0]["generated_text"]) > 4
    asked = [f"checkpoint={aligned.folder}", "data.eval=prompts.jsonl", "output=answers.jsonl"]
    assert run(["generate", *asked, "inference.max_new_tokens=3"]) == 0
    assert Path("answers.jsonl").read_text().count("generated_text") == len(runs.PROMPTS)
    assert pipeline("reward", reward.folder)("Q1: yes")[0]["score"] == pytest.approx(
        pipeline("reward", reward)("Q1: yes")[0]["score"]
    )
    again = Trainer("grpo", str(policy.folder), prompts, options=ROUNDS | {"reward": str(reward.folder)}).train()
    assert again.metrics["eval/completion/mean_length"] > 0


def test_a_vocabulary_is_trained_on_whatever_the_rows_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = {"tokenizer.name": "sentencepiece", "tokenizer.vocab_size": 275}
    run = Trainer("reward", "llama_tiny", runs.PAIRS, options=NETWORK | SHORT | tokenizer).train()
    assert run.processor.vocab_size == 275
    assert len(run.processor.encode("yes")) < len("yes")


@pytest.mark.parametrize("stage", RLHF_TASKS)
def test_the_shipped_yaml_makes_options(stage: str) -> None:
    options = TASKS[stage].read_options(compose_config(stage, {}).values)
    assert options.task == stage
    assert TASKS[stage].resolved(options)["model"]["family"] == "llama"


def test_a_role_that_a_stage_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no role 'judge'"):
        Trainer("ppo", "llama_tiny", runs.PROMPTS, roles={"judge": runs.letters}, options=NETWORK)


@pytest.mark.parametrize("stage", [stage for stage in TASKS if stage != "sft"])
def test_a_capacity_of_experts_is_refused_where_rows_are_padded(stage: str, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "top_k": 2, "capacity_factor": 1.5}
    network = runs.network(family={**tiny.LLAMA, "family": "mixtral", "experts": experts})
    with pytest.raises(
        ConfigError, match=r"capacity_factor=1.5\n.*expected: null in this task\n.*capacity_factor=null"
    ):
        runs.begin(stage, tmp_path / "run", model=network)
    assert not (tmp_path / "run").exists()
    runs.begin("sft", tmp_path / "run", model=network)
