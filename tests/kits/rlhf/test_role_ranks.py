"""Fragments on ranks of their own: the run is that of one process, and each rank holds what it has a part in."""

import gc
import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kitforge.cli import main as cli
from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.kits.rlhf import tasks
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.config import ROLES
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_collector import RolloutCollector
from kitforge.kits.rlhf.roles import model_loading
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.models import loading as model_folder
from kitforge.trainer.run_folder import train
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.distributed.test_command import losses, start_command, wait_for
from tests.distributed.test_command import ranks_of as process_numbers
from tests.distributed.training import Losses, TestRendezvous
from tests.kits.rlhf import runs
from tests.patience import PATIENCE
from tests.trainer import tiny

Choices = dict[str, Any]
CHOICES: Choices = {
    "data.eval_fraction": 0.3,
    "trainer.max_steps": 4,
    "trainer.eval_every": 3,
    "rl.prompts_per_rollout": 5,
    "rl.epochs": 2,
    "parallel.timeout": 60,
}
AHEAD: Choices = {"rl.old_logprobs": "recompute", "importance_sampling.mode": "truncate", "rollout.max_staleness": 1}
ADAPTERS: Choices = {"lora.rank": 3}
TWO = {"parallel.data": 2}
CUT = {"parallel.shard": 2}
STAGES = {"parallel.pipeline": 2}


def at(*places: list[int] | None, **named: list[int]) -> Choices:
    """Of the fragments, in their order or by name."""
    chosen = dict(zip(ROLES, places, strict=False)) | named
    return {f"role_ranks.{name}": ranks for name, ranks in chosen.items()}


# Who is where, how the run is beside that, and whether its arithmetic is that of one process to the last bit: it is
# where one rank trains and each fragment is on one, so that every sum is over the same rows.
PLACED: list[tuple[Choices, Choices, bool]] = [
    (at(), {}, True),
    (at(rollout=[1]), {}, True),
    (at(reference=[1]), {}, True),
    (at(reward=[1]), {}, True),
    (at([1], [1], [1]), {}, True),
    (at([1], [2], [3]), {}, True),
    (at(rollout=[1], reward=[1]), AHEAD, True),
    (at([1], [2], [0]), AHEAD, True),
    (at([1], [2], [1]), ADAPTERS, True),
    (at(rollout=[2, 1]), {}, False),
    (at([0, 1], [1, 2], [2]), {}, False),
    (at(reference=[1]) | TWO, {}, False),
    (at([2, 3], [3], [2]) | TWO, {}, False),
    (at([2, 3], [3], [2]) | CUT, {}, False),
    (at([1, 2], [0], [2]) | CUT, AHEAD, False),
    (at(rollout=[2]) | STAGES, {}, False),
    (at() | STAGES, {}, False),
]
PRODUCT = list(itertools.product(("ppo", "grpo"), range(len(PLACED))))
# Otherwise those that others are within, beside one of the two; the eighth is killed and goes on below.
SAMPLE = [(("ppo", "grpo")[place % 2], place) for place in (5, 6, 8, 10, 12, 13, 16)]
CASES = PRODUCT if WHOLE else SAMPLE
Case = tuple[str, Choices]


def options_of(stage: str, folder: Path, choices: Mapping[str, Any]) -> Any:
    values = runs.OPTIONS | runs.SHAPED[stage] | runs.ROUNDS | CHOICES | {"output_dir": str(folder)} | choices
    return TASKS[stage].read_options(tiny.nested(values | {"task": stage}))


def judge() -> ValueHeadModel:
    model = ValueHeadModel(runs.network(torch.float64, tiny.LLAMA | {"num_layers": 3}))
    model.reset_head(5)
    return model


def run(stage: str, folder: Path, choices: Choices, **given: Any) -> dict[str, Any]:
    """Metrics, whole weights and answers of a short run in float64; a rank that trains nothing gives its metrics."""
    torch.set_num_threads(1)
    options = options_of(stage, folder, choices)
    given.setdefault("model", None if "checkpoint" in choices else runs.network(torch.float64))
    given.setdefault("roles", {"reward": judge() if stage == "ppo" else runs.letters})
    inputs = Inputs(processor=ByteTokenizer(), train_dataset=runs.PROMPTS, **given)
    lobby: Any = TestRendezvous(options.parallel)
    made: Any = TASKS[stage].assemble(options, inputs, lobby)
    metrics = train(made.loop, made.options, made.folder, made.config_text)
    parallel = made.loop.state.parallel
    weights = {name: parallel.full_tensor(name).clone() for name in parallel.union(parallel.parameters())}
    return {"metrics": metrics, "weights": weights}


def ranks_of(case: Case) -> int:
    return int(options_of(case[0], Path("unused"), case[1]).num_ranks)


def played(_rank: int, folders: list[Path], cases: list[Case]) -> list[Any]:
    return [run(stage, folder, choices) for folder, (stage, choices) in zip(folders, cases, strict=True)]


def together(folders: list[Path], cases: list[Case], function: Any = played) -> list[list[Any]]:
    """What each rank gives, case by case; cases of as many ranks share their processes."""
    found: list[list[Any]] = [[] for _ in cases]
    for size in sorted({ranks_of(case) for case in cases}):
        places = [place for place, case in enumerate(cases) if ranks_of(case) == size]
        own, chosen = [folders[place] for place in places], [cases[place] for place in places]
        outcomes = run_ranks(size, function, own, chosen) if size > 1 else [function(0, own, chosen)]
        for nth, place in enumerate(places):
            found[place] = [rank[nth] for rank in outcomes]
    return found


def answers(folder: Path) -> list[list[dict[str, Any]]]:
    """Of each round."""
    files = sorted((folder / "rollouts").glob("round_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def assert_equal(folder: Path, ranks: list[Any], wanted: Path, one: dict[str, Any], is_exact: bool, what: str) -> None:
    if is_exact:
        assert answers(folder) == answers(wanted), what
    for round_, other in zip(answers(folder), answers(wanted), strict=True):
        for each, expected in zip(round_, other, strict=True):
            assert each.keys() == expected.keys()
            for name, value in expected.items():
                numbers = isinstance(value, (float, list)) and name != "loss_mask"
                assert each[name] == (pytest.approx(value, abs=1e-9) if numbers else value), f"{what}: {name}"
    for rank in ranks:
        assert rank["metrics"] == (one["metrics"] if is_exact else pytest.approx(one["metrics"], abs=1e-6)), what
        for name, weight in rank.get("weights", {}).items():
            if is_exact:
                assert torch.equal(weight, one["weights"][name]), f"{what}: {name}"
            assert torch.allclose(weight, one["weights"][name], rtol=0, atol=1e-9), f"{what}: {name}"


@pytest.mark.prove
@pytest.mark.slow
def test_a_run_is_the_same_wherever_its_fragments_are(tmp_path: Path) -> None:
    cases = [(stage, PLACED[place][0] | PLACED[place][1]) for stage, place in CASES]
    folders = [tmp_path / f"{stage}{place}" for stage, place in CASES]
    found, alone = together(folders, cases), {}
    for (stage, place), folder, ranks in zip(CASES, folders, found, strict=True):
        placement, beside, is_exact = PLACED[place]
        name = tmp_path / f"{stage} {' '.join(beside)}"
        if name not in alone:
            alone[name] = run(stage, name, beside)
        assert_equal(folder, ranks, name, alone[name], is_exact, f"{stage} {placement} {beside}")


@pytest.mark.prove
@pytest.mark.slow
def test_a_killed_run_goes_on_under_another_placement(tmp_path: Path) -> None:
    """Within a round, with answers drawn ahead, and with a reference that is known by its weights wherever it is."""
    choices = AHEAD | {"trainer.max_steps": 6, "trainer.checkpoint_every": 1, "trainer.save_total_limit": 9}
    ways = [at(), at([1], [1], [1]), at([1], [2], [0])]
    run("ppo", tmp_path / "whole", choices)
    begun = [tmp_path / "together", tmp_path / "apart"]
    together(begun, [("ppo", choices), ("ppo", choices | ways[2])])
    # In the gate each way goes on from another.
    moves = list(itertools.product(range(3), begun)) if WHOLE else [*zip((2, 1, 0), (*begun, begun[1]), strict=True)]
    copies = [tiny.copy_up_to(each, tmp_path / f"{each.name}{number}", 3) for number, each in moves]
    cases = [("ppo", choices | ways[number] | {"resume": "auto"}) for number, _ in moves]
    together(copies, cases)
    (wanted, _), logged = tiny.last_checkpoint(tmp_path / "whole"), tiny.records(tmp_path / "whole")
    for copy in copies:
        found, _ = tiny.last_checkpoint(copy)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items()), copy.name
        assert tiny.records(copy) == logged, copy.name
    with pytest.raises(ConfigError, match="the reference model changed"):
        together(copies[-1:], cases[-1:], beside_another)


def beside_another(_rank: int, folders: list[Path], cases: list[Case]) -> list[Any]:
    (stage, choices), other = cases[0], runs.network(torch.float64, tiny.GPT2)
    return [run(stage, folders[0], choices, roles={"reward": judge(), "reference": other})]


# Beside the training.


def drawing_beside(rank: int, folders: list[Path], cases: list[Case]) -> list[Any]:
    """The first update waits for the second round's answers to be begun, and those for the first update."""
    begun = [folders[0] / "draws", folders[0] / "trains"]

    def meet(own: Path, other: Path) -> None:
        own.touch()
        until = time.monotonic() + PATIENCE
        while not other.exists():
            assert time.monotonic() < until, f"{own.name} alone"
            time.sleep(0.01)

    def draw(self: RolloutCollector, policy: Any, number: int) -> Any:
        if number == 1:
            meet(*begun)
        return honest_draw(self, policy, number)

    def loss(self: PolicyGradientTask, model: Any, micro_batch: Any) -> Any:
        meet(*reversed(begun))
        return honest_loss(self, model, micro_batch)

    folders[0].mkdir(exist_ok=True)
    honest_draw, honest_loss = RolloutCollector._sample_batch, PolicyGradientTask.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RolloutCollector, "_sample_batch", draw)
        patch.setattr(PolicyGradientTask, "loss", loss)
        return played(rank, folders, cases)


@pytest.mark.slow
def test_a_rank_of_its_own_draws_while_others_train(tmp_path: Path) -> None:
    together([tmp_path / "run"], [("grpo", at(rollout=[1]) | AHEAD)], drawing_beside)


def stopping(_rank: int, folders: list[Path], cases: list[Case]) -> list[Any]:
    """A callback ends the run, which the ranks besides do not call."""
    watch = Losses()
    watch.stop_at = 2
    return [run(cases[0][0], folders[0], cases[0][1], callbacks=[watch])]


@pytest.mark.slow
def test_ranks_beside_end_with_those_that_train(tmp_path: Path) -> None:
    ((first, beside),) = together([tmp_path], [("grpo", at(rollout=[1]) | {"parallel.timeout": 20})], stopping)
    assert {each.name for each in (tmp_path / "checkpoints").glob("step_*")} == {"step_0", "step_2"}
    assert beside["metrics"] == first["metrics"] and "loss" in first["metrics"]


# Outside of a run.


def evaluated(_rank: int, folders: list[Path], cases: list[Case]) -> list[dict[str, float]]:
    torch.set_num_threads(1)
    stage, choices = cases[0]
    options = options_of(stage, folders[0], choices)
    roles = {"reward": judge(), "reference": runs.network(torch.float64, tiny.GPT2)}
    model, lobby = ActorCritic(runs.network(torch.float64), judge()), cast(Any, TestRendezvous(options.parallel))
    inputs = Inputs(processor=ByteTokenizer(), train_dataset=runs.PROMPTS, model=model, roles=roles)
    return [TASKS[stage].evaluate(options, inputs, lobby)]


@pytest.mark.slow
def test_an_evaluation_is_the_same_wherever_its_fragments_are(tmp_path: Path) -> None:
    (ranks,) = together([tmp_path], [("ppo", at([1], [2], [0]))], evaluated)
    (alone,) = evaluated(0, [tmp_path], [("ppo", {})])
    assert alone["eval/kl"] != 0
    assert ranks == [alone] * 3


# What a rank holds.


def holding(_rank: int, folders: list[Path], cases: list[Case]) -> list[Any]:
    """How many networks a rank has while the run goes on, and what it read from files to get there."""
    found: dict[str, Any] = {"read": set()}

    def counting(name: str, read: Any) -> Any:
        return lambda *given, **named: found["read"].add(name) or read(*given, **named)

    def watched(self: RolloutCollector, *given: Any) -> Any:
        gc.collect()
        found["networks"] = sum(isinstance(each, Decoder) for each in gc.get_objects())
        return honest(self, *given)

    honest = RolloutCollector.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "open_policy", counting("policy", model_loading.open_policy))
        patch.setattr(model_loading, "open_reward_model", counting("reward", model_loading.open_reward_model))
        patch.setattr(tasks, "open_reward_model", model_loading.open_reward_model)
        patch.setattr(RolloutCollector, "collect", watched)
        run(cases[0][0], folders[0], cases[0][1], roles={})
    return [found]


@pytest.mark.slow
def test_a_rank_holds_what_it_has_a_part_in(tmp_path: Path) -> None:
    model_folder.save(cast(Decoder, runs.network()), tmp_path / "policy")
    runs.finish(runs.begin("reward", tmp_path / "reward", {"trainer.max_steps": 1}))
    files = {"checkpoint": str(tmp_path / "policy"), "reward": str(tmp_path / "reward")}
    cases = [("ppo", files | at([1], [2], [3])), ("grpo", files | at(reward=[1]))]
    apart, judged = together([tmp_path / "ppo", tmp_path / "grpo"], cases, holding)
    # A policy and a critic, which begins as the reward model, to train and to draw with; the other two.
    assert apart == [
        {"read": {"reward", "policy"}, "networks": 2},
        {"read": {"reward", "policy"}, "networks": 2},
        {"read": {"policy"}, "networks": 1},
        {"read": {"reward"}, "networks": 1},
    ]
    assert judged == [{"read": {"policy"}, "networks": 2}, {"read": {"reward"}, "networks": 1}]


# What is refused.


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"role_ranks": {"rollout": []}}, r"role_ranks\.rollout.*\n.*got: +\[\]"),
        ({"role_ranks": {"reference": [-1]}}, r"role_ranks\.reference.*\n.*got: +\[-1\]"),
        ({"role_ranks": {"reward": [1, 1]}}, r"role_ranks\.reward.*\n.*got: +\[1, 1\]"),
        (
            {"role_ranks": {"rollout": [3]}, "parallel": {"data": 2}},
            r"rollout on rank 3\n.*a role for rank 2 too.*data=2",
        ),
        ({"role_ranks": {"rollout": [2, 4]}}, r"a role for ranks 1 3 too"),
        ({"role_ranks": {"critic": [1]}}, r"unknown option 'role_ranks\.critic'"),
    ],
)
def test_a_placement_that_cannot_be_is_refused_in_words(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TASKS["ppo"].read_options({"task": "ppo"} | choices)


def test_the_plan_of_a_run_says_who_is_where() -> None:
    options = options_of("ppo", Path("unused"), at([2, 3], [3], [2]) | TWO)
    assert options.num_ranks == 4
    assert options.summary.endswith(
        "; training on ranks 0 1, rollout on ranks 2 3, reference on rank 3, reward on rank 2"
    )
    assert "training on" not in options_of("ppo", Path("unused"), TWO).summary


def test_what_fails_on_a_rank_beside_is_told_there(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="broken.*failed"):
        together([tmp_path / "run"], [("grpo", at(reward=[1]) | {"parallel.timeout": 10})], breaking)


def breaking(_rank: int, folders: list[Path], cases: list[Case]) -> list[Any]:
    def broken(*, completions: list[str]) -> list[float]:
        raise ValueError("no scores today")

    return [run(cases[0][0], folders[0], cases[0][1], roles={"reward": broken})]


# The command line.

SMALL = ["recipe=rlhf_tiny", "model.dim=32", "model.num_layers=1", "model.mlp_dim=48", "rl.prompts_per_rollout=2"]
SHORT = ["trainer.max_steps=15", "trainer.checkpoint_every=1", "trainer.progress=false", "device=cpu"]


def is_running(number: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


@pytest.mark.slow
def test_a_killed_rank_beside_ends_the_run_which_another_placement_goes_on_with(tmp_path: Path, shims: Path) -> None:
    command = ["train", *SMALL, *SHORT, f"output_dir={tmp_path / 'run'}"]
    process = start_command(tmp_path, shims, *command, "role_ranks.rollout=[1]")
    wait_for(tmp_path / "run" / "checkpoints" / "step_2")
    started = process_numbers(process.pid, tmp_path / "run")
    os.kill(max(started), signal.SIGKILL)
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert complaint.count("error:") == 1 and "was killed by SIGKILL" in complaint
    assert len(started) == 2 and not any(map(is_running, started))
    assert cli.run([*command, "resume=auto"]) == 0
    assert cli.run([*command[:-1], f"output_dir={tmp_path / 'whole'}"]) == 0
    assert losses(tmp_path, "run") == losses(tmp_path, "whole")
