"""A trained policy is evaluated as its run evaluated it: by the run's own options, beside the run's own reference."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from kitforge.api import Trainer
from kitforge.cli.main import run
from kitforge.composition import compose_config, compose_eval_config
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.kits.registry import RLHF_TASKS
from tests.differential.drawn import WHOLE
from tests.kits.rlhf import runs
from tests.kits.transformers.test_evaluate import NETWORK, Capture, evaluated, recorded

SHORT = ["trainer.max_steps=2", "trainer.progress=false", "device=cpu", "optimizer.learning_rate=0.01"]
SHORT += ["data.sequence_length=40", "data.batch_size=4"]
ROUNDS = ["rl.prompts_per_rollout=4", "rollout.max_new_tokens=5", "kl.coef=0.0", "kl.measure=true"]
# Of tasks over rollouts without a reference of the collector's.
COMPARED = {"distill": ROUNDS[:2], "online_dpo": [*ROUNDS[:2], "reward=own_rewards:size"]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, but for rows of every kind."""
    monkeypatch.chdir(tmp_path)
    for stage in RLHF_TASKS:
        rows = runs.ROWS.get(stage, runs.PROMPTS)
        # The policy itself, with a hint, is the teacher.
        rows = [{**row, "teacher_prompt": f"so {row['prompt']}"} for row in rows] if stage == "distill" else rows
        Path(f"{stage}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("own_rewards.py").write_text("def size(*, completions):\n    return list(map(len, completions))\n")
    return tmp_path


def train(stage: str, *further: str) -> int:
    rounds = [*ROUNDS, "reward=own_rewards:size"] if stage in runs.RL else COMPARED.get(stage, [])
    given = [f"data.train={stage}.jsonl", f"data.eval={stage}.jsonl", f"output_dir={stage}"]
    start = [] if any(each.startswith("checkpoint=") for each in further) else NETWORK
    return run(["train", f"task={stage}", *start, *SHORT, *rounds, *given, *further])


def close(values: Mapping[str, float]) -> Any:
    return pytest.approx(dict(values), rel=1e-4, abs=1e-5)


# Of tasks that share a class and its evaluation one; every task in `make prove`.
EVALUATED = RLHF_TASKS if WHOLE else ("sft", "reward", "dpo", "kto", "orpo", "ppo", "grpo", "distill", "online_dpo")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("stage", EVALUATED)
def test_the_command_to_try_next_gives_the_figures_of_the_run(stage: str, capsys: Capture) -> None:
    assert train(stage) == 0
    (shown,) = (line.split() for line in capsys.readouterr().out.splitlines() if "kitforge evaluate" in line)
    assert shown[shown.index("kitforge") :][:2] == ["kitforge", "evaluate"]
    arguments = [each.replace("FILE", f"{stage}.jsonl") for each in shown[shown.index("evaluate") + 1 :]]
    found, before = evaluated(capsys, *arguments), recorded(stage)
    assert found == close(before)
    if stage in runs.RL:
        assert found["kl"] > 1e-4


@pytest.mark.slow
def test_the_run_began_with_another_run(capsys: Capture) -> None:
    train("sft")
    train("grpo", "checkpoint=sft", "lora.rank=2")
    assert evaluated(capsys, "checkpoint=grpo", "reward=own_rewards:size") == close(recorded("grpo"))
    # Typed options come first, and those of the run stay.
    other = evaluated(capsys, "checkpoint=grpo", "reward=lowercase", "rollout.max_new_tokens=3")
    assert other["completion/mean_length"] <= 3 and other["reward"] <= 1 and other["kl"] > 1e-3
    # A step has the options of its run.
    step = evaluated(capsys, "checkpoint=grpo/checkpoints/step_2", "reward=own_rewards:size")
    assert step == close(recorded("grpo"))


@pytest.mark.slow
def test_a_reference_that_is_gone_leaves_the_figure_out_unless_it_is_named(
    capsys: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    train("sft")
    train("grpo", "checkpoint=sft")
    train("dpo", "checkpoint=sft")
    shutil.move("sft", "elsewhere")
    asked = ["checkpoint=grpo", "reward=own_rewards:size"]
    with caplog.at_level(logging.WARNING):
        found = evaluated(capsys, *asked)
    assert "kl" not in found and "no folder sft" in caplog.text and "reference=FOLDER" in caplog.text
    assert evaluated(capsys, *asked, "reference=elsewhere") == close(recorded("grpo"))
    with pytest.raises(ConfigError, match=r"(?s)evaluation of dpo needs its reference model.*reference=FOLDER"):
        run(["evaluate", "checkpoint=dpo"])
    assert evaluated(capsys, "checkpoint=dpo", "reference=elsewhere") == close(recorded("dpo"))
    # Other weights under the name of the first are not taken for them.
    shutil.copytree("grpo", "sft")
    caplog.clear()
    assert "kl" not in evaluated(capsys, *asked) and "other weights in sft" in caplog.text


@pytest.mark.slow
def test_a_reference_is_named_from_the_shell_and_written_down(capsys: Capture) -> None:
    train("sft")
    train("orpo")
    for stage in ("dpo", "kto", "ppo"):
        train(stage, "checkpoint=sft", "reference=orpo")
        assert yaml.safe_load(Path(stage, "config.yaml").read_text())["reference"] == "orpo"
        asked = ["reward=own_rewards:size"] if stage == "ppo" else []
        assert evaluated(capsys, f"checkpoint={stage}", *asked) == close(recorded(stage))
    with pytest.raises(ConfigError, match=r"(?s)invalid value for option 'reference'.*orpo has no reference model"):
        train("orpo", "reference=sft")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(
    ("start", "adapter"),
    [("preset", 0), ("network", 2), ("run", 0), ("preset", 2), ("network", 0), ("run", 2)][: None if WHOLE else 3],
)
def test_a_trainer_evaluates_what_it_has_trained(start: str, adapter: int) -> None:
    options = {each.split("=")[0]: yaml.safe_load(each.split("=")[1]) for each in (*SHORT, *ROUNDS)}
    options["lora.rank"] = adapter
    model: Any = runs.network()
    if start == "run":
        model = Trainer(
            "sft",
            model,
            runs.DEMONSTRATIONS,
            options={"trainer.max_steps": 1, "data.sequence_length": 40},
            processor=BYTE,
        ).train()
    given = {"preset": "llama_tiny", "network": model, "run": model}[start]
    options |= {f"model.{name}": 32 for name in ("dim", "mlp_dim")} if start == "preset" else {}
    tokenizer = BYTE if isinstance(given, nn.Module) else None
    for task, rows, roles in (("grpo", runs.PROMPTS, {"reward": runs.letters}), ("dpo", runs.PAIRS, None)):
        chosen = options if task == "grpo" else {name: each for name, each in options.items() if name[:2] not in TYPED}
        trainer = Trainer(task, given, rows, rows, roles=roles, options=chosen, processor=tokenizer, output_dir=task)
        done = trainer.train()
        found = trainer.evaluate()
        assert found == close({name: done.metrics[name] for name in found})
        assert ("eval/kl" in found) == (task == "grpo")
    config = yaml.safe_load(Path("grpo/config.yaml").read_text())
    assert config["reward"] == "tests.kits.rlhf.runs:letters"
    assert (config["checkpoint"] is not None) == (start == "run")


BYTE = runs.ByteTokenizer()
TYPED = ("rl", "ro", "kl")


def test_a_policy_that_is_not_trained_yet_has_no_distance_from_itself() -> None:
    options = {"rl.prompts_per_rollout": 4, "rollout.max_new_tokens": 4, "device": "cpu", "data.sequence_length": 40}
    trainer = Trainer(
        "ppo", runs.network(), runs.PROMPTS, processor=BYTE, options=options, roles={"reward": runs.letters}
    )
    assert set(trainer.evaluate()) == {
        "eval/reward",
        "eval/reward_std",
        "eval/completion/mean_length",
        "eval/completion/eos_rate",
    }


@pytest.mark.slow
def test_a_file_names_no_code() -> None:
    train("grpo")
    with pytest.raises(ConfigError, match=r"(?s)a file cannot name code.*config\.yaml.*add reward=own_rewards:size"):
        run(["evaluate", "checkpoint=grpo"])
    Path("configs/recipe").mkdir(parents=True)
    Path("configs/recipe/own.yaml").write_text("# @package _global_\ntask: grpo\nreward: own_rewards:size\n")
    with pytest.raises(ConfigError, match=r"(?s)configuration cannot name code.*reward: own_rewards:size"):
        run(["config", "recipe=own"])


@pytest.mark.slow
def test_an_environment_is_named_on_the_command_line() -> None:
    Path("own_games.py").write_text(
        "class Even:\n"
        "    def reset(self, row):\n        return ''\n"
        "    def step(self, response):\n        return ' on', float(len(response) % 2 == 0), False\n"
    )
    train("grpo", "reward=null", "environment=own_games.py:Even", "rollout.max_turns=2")
    rows = [json.loads(line) for line in Path("grpo/metrics.jsonl").read_text().splitlines()]
    assert all(row["environment/turns"] >= 1 for row in rows if row["kind"] == "train")
    with pytest.raises(ConfigError, match=r"(?s)a file cannot name code.*add environment=own_games\.py:Even"):
        run(["evaluate", "checkpoint=grpo"])
    assert run(["evaluate", "checkpoint=grpo", "environment=own_games:Even"]) == 0


@pytest.mark.slow
def test_what_says_where_a_run_ran_is_not_taken_over() -> None:
    train("ppo", "role_ranks.reward=null", "trainer.eval_batches=1")
    chosen = compose_eval_config("ppo", {"checkpoint": "ppo", "reward": "exact", "rl": {"epochs": 2}}).values
    assert chosen["rl"]["prompts_per_rollout"] == 4 and chosen["rl"]["epochs"] == 2
    assert chosen["trainer"]["eval_batches"] == 1 and chosen["reward"] == "exact"
    assert not {"parallel", "role_ranks", "output_dir", "device", "lora", "model"} & set(chosen)
    # Another task reads its own options, not those of the run.
    assert compose_eval_config("sft", {"checkpoint": "ppo"}) == compose_config("sft", {"checkpoint": "ppo"})
    for choices, words in (
        ({"model": "llama_tiny"}, "brings its own network"),
        ({"recipe": "rlhf_tiny"}, "evaluated by its own options"),
        ({"rl.epoch": 2}, "unknown option 'rl.epoch'"),
    ):
        with pytest.raises(KitforgeError, match=words):
            compose_eval_config("ppo", {"checkpoint": "ppo", "reward": "exact", **choices})
