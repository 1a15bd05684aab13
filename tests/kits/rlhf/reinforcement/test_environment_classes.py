"""Environment classes as TRL takes them: their tools, what they are told, their rewards, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import HuggingFaceTokenizer
from kitforge.foundation.errors import ConfigError, DataError, TrainingError
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.environment_classes import (
    ClassEnvironment,
    environment_runner_of,
    is_own_protocol,
)
from kitforge.kits.rlhf.reinforcement.experience import environment_metrics
from kitforge.kits.rlhf.reinforcement.online_dpo import OnlineDPOTask
from kitforge.kits.rlhf.reinforcement.tool_environment import FunctionTools, ToolCall, function_schema
from kitforge.kits.rlhf.tasks import Inputs, task_inputs_of
from kitforge.trainer.loop import Loop
from tests.data.chat.cases import CHATML, THINKING, save_tokenizer
from tests.differential.drawn import drawn
from tests.distributed.ranks import run_ranks
from tests.kits.rlhf import runs
from tests.kits.rlhf.reinforcement.test_environment import Calculator
from tests.kits.rlhf.reinforcement.test_tool_environment import CHOICES, PARSER, add, assembled, begin
from tests.trainer import tiny

HINTS = [
    int,
    float,
    str,
    bool,
    list[int],
    dict[str, float],
    Literal["left", "right"],
    int | None,
    list[str] | None,
    Any,
]
WORDS = st.text("abcdefg", min_size=1, max_size=6)
NAMES = st.text("abcdefg_", min_size=1, max_size=6).filter(lambda name: name not in ("as", "def"))


@st.composite
def tools(draw: st.DrawFn) -> Callable[..., Any]:
    """A function of a class with drawn arguments, documented as Google does."""
    arguments = draw(st.dictionaries(NAMES, st.sampled_from(HINTS), max_size=4))
    is_optional = [draw(st.booleans()) for _ in arguments]
    told = {name: draw(st.lists(WORDS, min_size=1, max_size=3)) for name in arguments}
    entries = "".join(
        f"\n    {name}: {chr(10).join(words).replace(chr(10), chr(10) + '        ')}" for name, words in told.items()
    )
    returns = draw(st.sampled_from(["", "\n\nReturns:\n    What is found."]))
    signature = ", ".join(
        ["self", *(f"{name}=None" if late else name for late, name in sorted(zip(is_optional, arguments, strict=True)))]
    )
    space: dict[str, Any] = {}
    exec(f"{draw(st.sampled_from(['', 'async ']))}def tool({signature}): return None", space)
    found: Callable[..., Any] = space["tool"]
    found.__annotations__ = arguments | ({"return": draw(st.sampled_from(HINTS))} if returns else {})
    found.__doc__ = f"{draw(WORDS)}.\n\nArgs:{entries}{returns}" if arguments else f"{draw(WORDS)}.{returns}"
    return found


@pytest.mark.slow
@drawn(60)
@given(st.dictionaries(NAMES, tools(), min_size=1, max_size=3))
def test_the_tools_of_a_class_are_those_that_transformers_describes(methods: dict[str, Any]) -> None:
    for name, each in methods.items():
        each.__name__ = name
    kind = type("Drawn", (), {"reset": lambda self, **row: None, "get_reward": lambda self: 0.0, **methods})
    # TRL takes the functions of the class that do not begin with an underscore, by name.
    shown = sorted(name for name in methods if not name.startswith("_"))
    if not shown:
        with pytest.raises(ConfigError, match="Drawn is not an environment"):
            ClassEnvironment(kind)
        return
    episode = ClassEnvironment(kind)
    assert episode.schemas == [transformers.utils.get_json_schema(getattr(kind(), name)) for name in shown]


class Cellar:
    """Its bottles are taken from the row's own list, which other completions read too."""

    played: list[Cellar] = []

    def __init__(self) -> None:
        self.told: list[str] = []
        Cellar.played.append(self)

    def reset(self, bottles: list[int], **row: Any) -> str | None:
        self.bottles, self.columns = bottles, row
        return f" There are {len(bottles)}." if len(bottles) % 2 else None

    def take(self, count: int) -> str:
        """Take bottles.

        Args:
            count: How many.
        """
        if count > len(self.bottles):
            self.told.append(json.dumps({"error": "ValueError: too few"}))
            raise ValueError("too few")
        del self.bottles[:count]
        self.told.append(f"{len(self.bottles)} left")
        return self.told[-1]

    @property
    def taken(self) -> int:
        raise AssertionError("a property is no tool")


ROWS = [{"prompt": [{"role": "user", "content": f"Take {n}"}], "bottles": [0] * n} for n in range(8)]
SCHEMAS = [function_schema(Cellar().take)]


def parse(text: str, *_: Any) -> list[ToolCall]:
    """An untrained policy says anything, of which most is taken for a call."""
    return [ToolCall(name="take", arguments={"count": len(text) % 7})] if len(text) % 4 else []


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PARSER, parse)
    Cellar.played = []


def left(*, environments: list[Cellar], messages: list[Any]) -> list[float]:
    """What is left, told by instances that are those of the completions."""
    for game, talk in zip(environments, messages, strict=True):
        heard = [each["content"] for each in talk if each["role"] == "tool"]
        # The last answer is not told where the episode ends with it.
        assert heard == game.told[: len(heard)] and len(game.told) - len(heard) <= 1
        assert talk[0]["content"] == game.columns["prompt"][0]["content"] + opening(game.columns["prompt"])
    return [len(game.bottles) + 0.1 * len(game.told) for game in environments]


def opening(prompt: list[dict[str, Any]]) -> str:
    count = int(prompt[0]["content"].removeprefix("Take "))
    return f" There are {count}." if count % 2 else ""


@pytest.mark.slow
def test_each_completion_plays_with_an_instance_that_its_reward_reads(tmp_path: Path) -> None:
    found = begin(tmp_path, THINKING, {"environment": Cellar, "reward": left}, ROWS, **{"rl.num_generations": 6})
    # The first instance is asked for its tools.
    games = Cellar.played[1:]
    assert len({id(each) for each in games}) == len(found) == 12
    assert [each.reward for each in found] == [len(game.bottles) + 0.1 * len(game.told) for game in games]
    assert [each["bottles"] for each in ROWS] == [[0] * n for n in range(8)]
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    tokenizer.eos_ids = (tokenizer.special_tokens["<|im_end|>"],)
    for each, game in zip(found, games, strict=True):
        (said,) = game.columns["prompt"]
        asked = {**said, "content": said["content"] + opening([said])}
        assert list(each.completion.prompt) == template_of(tokenizer).tokens([asked], opens_reply=True, tools=SCHEMAS)
        text = tokenizer.decode(each.completion.tokens)
        assert all(told in text for told in game.told[: len(each.turn_rewards) - 1])
    told = list(itertools.chain(*(each.told for each in games)))
    assert any("too few" in each for each in told) and any("left" in each for each in told)
    figures = environment_metrics(found)
    assert figures["environment/errors"] == 0 < figures["tools/error_frequency"] < 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3])
def test_micro_batches_of_episodes_give_one_gradient(tmp_path: Path, size: int) -> None:
    roles = {"environment": Cellar, "reward": left}
    found = [
        runs.gradient(assembled(tmp_path / f"{each}", THINKING, roles, ROWS, **{"trainer.micro_batch_size": each}))
        for each in (None, size)
    ]
    assert float(found[0].abs().max()) > 0
    assert torch.allclose(found[0], found[1], atol=1e-6)


def trained(_rank: int, num_ranks: int, folder: Path) -> tuple[torch.Tensor, dict[str, float]]:
    """Weights and metrics of two steps with a class on some ranks."""
    torch.set_num_threads(1)
    mesh = Mesh(ParallelConfig(data=num_ranks), "cpu") if num_ranks > 1 else None
    tokenizer = HuggingFaceTokenizer(folder)
    tokenizer.eos_ids = (tokenizer.special_tokens["<|im_end|>"],)
    model = runs.network(torch.float64, {**tiny.LLAMA, "max_length": 1024}, padding=600)
    cast(Any, model).output.data[tokenizer.eos_ids[0]] += 2 * cast(Any, model).norm.weight.data
    chosen = (
        runs.OPTIONS
        | runs.ROUNDS
        | runs.SHAPED["grpo"]
        | CHOICES
        | {"task": "grpo", "trainer.max_steps": 2, "optimizer.learning_rate": 1e-4}
    )
    options = TASKS["grpo"].read_options(tiny.nested(chosen))
    roles = {"environment": Scored, "reward": left}
    inputs = Inputs(processor=tokenizer, model=model, train_dataset=ROWS, roles=roles)
    with mock.patch(PARSER, parse):
        parts = task_inputs_of(options, inputs, torch.device("cpu"))
        task, _ = TASKS["grpo"].build_task(parts).task(World(device=torch.device("cpu"), mesh=mesh))
        loop = Loop(task, options, World(device=torch.device("cpu"), mesh=mesh))
        metrics = loop.train()
    parallel = loop.state.parallel
    return torch.cat([parallel.full_tensor(name).flatten() for name in parallel.parameters()]), metrics


@pytest.mark.slow
def test_two_ranks_play_the_episodes_of_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "bytes", THINKING)
    weights, metrics = trained(0, 1, tmp_path)
    assert metrics["tools/error_frequency"] > 0
    for found, told in run_ranks(2, trained, 2, tmp_path):
        assert float((found - weights).abs().max()) < 1e-9
        names = [name for name in metrics if name.startswith(("tools", "environment", "reward"))]
        assert {name: told[name] for name in names} == pytest.approx({name: metrics[name] for name in names})


def test_episodes_in_waves_are_those_that_run_at_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def reward(*, environments: list[Cellar], completions: list[str]) -> list[float]:
        asked.append(len(environments))
        # Those of an earlier wave are over, and those of a later one are not made yet.
        assert Cellar.played[1:][sum(asked[:-1]) :] == environments
        return [float(len(text)) for text in completions]

    choices = {"rl.prompts_per_rollout": 3, "rl.num_generations": 2}
    found = []
    for most in (None, 5, 2):
        Cellar.played, asked[:] = [], []
        roles = {"environment": Cellar, "reward": reward}
        drawn = begin(tmp_path / f"{most}", THINKING, roles, ROWS, **choices, **{"environment.max_episodes": most})
        found.append((list(asked), drawn))
    assert [calls for calls, _ in found] == [[6], [4, 2], [2, 2, 2]]
    for _, each in found:
        assert [one.completion for one in each] == [one.completion for one in found[0][1]]
    with pytest.raises(ConfigError, match=r"environment\.max_episodes.*\n.*1\n.*at least the 2 completions"):
        assembled(tmp_path, THINKING, roles, ROWS, **choices, **{"environment.max_episodes": 1})


class Scored(Cellar):
    def get_reward(self) -> float:
        return float(len(self.told))


class ScoredLater(Cellar):
    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(len(self.told))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Scored, ScoredLater])
@pytest.mark.parametrize("reward", [None, left, {"left": (0.5, left)}, [left, lambda *, prompts: [1.0] * len(prompts)]])
def test_a_class_may_give_a_reward_beside_others(tmp_path: Path, kind: Any, reward: Any) -> None:
    roles = {"environment": kind} if reward is None else {"environment": kind, "reward": reward}
    found = begin(tmp_path, THINKING, roles, ROWS)
    weight = 0.5 if isinstance(reward, dict) else 1.0
    for each, game in zip(found, Cellar.played[1:], strict=True):
        named = {kind.__name__: float(len(game.told))}
        if reward is not None:
            named |= {"left": len(game.bottles) + 0.1 * len(game.told)}
        assert named.items() <= dict(each.rewards).items()
        more = isinstance(reward, list)
        assert each.reward == pytest.approx(named[kind.__name__] + weight * named.get("left", 0.0) + more)


@pytest.mark.slow
def test_a_run_with_a_class_is_logged_evaluated_and_goes_on(tmp_path: Path) -> None:
    choices = {"trainer.max_steps": 2, "trainer.eval_first": True, "data.eval_fraction": 0.25, "rl.num_minibatches": 2}
    metrics = runs.finish(assembled(tmp_path, THINKING, {"environment": Scored}, ROWS, **choices))
    assert {"rewards/Scored/mean", "tools/error_frequency", "eval/reward"} <= metrics.keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines if each["kind"] == "train"] == [1, 2]


def of_all(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(each.told)) for each in columns["environments"]]


def test_a_reward_with_keywords_gets_the_instances_and_one_without_a_class_is_told(tmp_path: Path) -> None:
    found = begin(tmp_path, THINKING, {"environment": Cellar, "reward": of_all}, ROWS)
    assert [each.reward for each in found] == [len(each.told) for each in Cellar.played[1:]]
    with pytest.raises(DataError, match=r"(?s)'left' needs a column.*environments"):
        begin(tmp_path, THINKING, {"tools": [add], "reward": left}, ROWS)


@pytest.mark.slow
@pytest.mark.parametrize("num_generations", [4, 5])
def test_online_pairs_are_completions_of_one_prompt(tmp_path: Path, num_generations: int) -> None:
    # Every second completion is asked at another door; the lengths of completions tell them apart.
    doors = itertools.count()

    class Doors(Cellar):
        def reset(self, **row: Any) -> str | None:
            super().reset(**row)
            return f" Door {Cellar.played.index(self) % 2}."

    def reward(*, environments: list[Any]) -> list[float]:
        return [float(next(doors) * 7 % 11) for _ in environments]

    choices = {"rl.num_generations": num_generations, "environment.max_workers": 1}
    roles = {"environment": Doors, "reward": reward}
    assembly = assembled(tmp_path, THINKING, roles, ROWS, stage="online_dpo", **choices)
    task = cast(OnlineDPOTask, assembly.loop.task)
    step = runs.first_step(task, assembly.loop.model)
    found = runs.collected(task)
    wanted = set()
    for start in range(0, len(found), num_generations):
        group = found[start : start + num_generations]
        assert len({each.completion.prompt for each in group}) == 2
        pairs = itertools.product(group, group)
        best, worst = max(
            ((one, other) for one, other in pairs if one.completion.prompt == other.completion.prompt),
            key=lambda pair: pair[0].reward - pair[1].reward,
        )
        wanted.add((best.completion.prompt + best.completion.tokens, worst.completion.prompt + worst.completion.tokens))
    drawn_pairs = set()
    for batch in step:
        half = len(batch["tokens"]) // 2
        rows = [tuple(row.tolist()) for row in batch["tokens"]]
        drawn_pairs |= set(zip(rows[:half], rows[half:], strict=True))
    assert len(drawn_pairs) == len(wanted) == 2
    for one, other in drawn_pairs:
        assert any(one[: len(best)] == best and other[: len(worst)] == worst for best, worst in wanted)


def pouring(signature: str, told: str = "Pour.\n\nArgs:\n    count: How much.\n") -> Any:
    """A cellar with one more tool."""
    space: dict[str, Any] = {}
    exec(f"def pour(self, {signature}): return ''", space)
    space["pour"].__doc__ = told or None
    return type("Pouring", (Cellar,), {"pour": space["pour"]})


class Needy(Cellar):
    def __init__(self, url: str) -> None:
        super().__init__()


class Mute:
    def reset(self, **row: Any) -> None:
        return None


class Unstarted:
    take = Cellar.take


class Odd(Cellar):
    def reset(self, **row: Any) -> Any:
        return 3


class Picky(Cellar):
    def reset(self, wine: str, **row: Any) -> str | None:
        return None


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (pouring("count: int", ""), "the tool 'pour' has no docstring"),
        (pouring("count"), r"argument 'count' of the tool 'pour' is not documented\n.*no type hint"),
        (pouring("count: int", "Pour."), r"argument 'count' of the tool 'pour' is not documented\n.*no description"),
        (pouring("*count: int"), "cannot be passed by name"),
        (Needy, r"Needy cannot be made\n.*missing 1 required positional argument: 'url'"),
        (Mute, "Mute is not an environment"),
        (Unstarted, "Unstarted is not an environment"),
        (object, "object is not an environment"),
        (Odd, r"Odd.reset returned a value that is not text\n.*3"),
        (Picky, r"Picky.reset failed\n.*missing 1 required positional argument: 'wine'"),
    ],
)
def test_a_class_that_no_episode_can_be_played_with_is_told(tmp_path: Path, kind: Any, problem: str) -> None:
    is_late = kind in (Odd, Picky)
    started = begin if is_late else assembled
    with pytest.raises(TrainingError if is_late else ConfigError, match=problem):
        started(tmp_path, THINKING, {"environment": kind, "reward": left}, ROWS)


@pytest.mark.parametrize(
    ("roles", "template", "rows", "problem"),
    [
        ({"tools": [add], "reward": left}, THINKING, ROWS, "roles tools and environment are both given"),
        ({}, THINKING, ROWS, "grpo has no reward"),
        ({"reward": left}, CHATML, ROWS, "chat template does not render tools"),
        ({"reward": left}, THINKING, [{"prompt": "Take 1", "bottles": [1]}] * 4, "tools need prompts of messages"),
        ({"reward": {"Scored": left}, "environment": Scored}, THINKING, ROWS, "the role reward"),
    ],
)
def test_roles_that_a_class_cannot_have_are_refused(
    tmp_path: Path, roles: dict[str, Any], template: str, rows: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        assembled(tmp_path, template, {"environment": Cellar} | roles, rows)
    assert not any(hasattr(each, "bottles") for each in Cellar.played)


def test_rewards_are_where_their_environments_are(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", THINKING))
    for ranks, is_sound in (
        ({"rollout": [1]}, False),
        ({"reward": [1]}, False),
        ({"rollout": [1], "reward": [1]}, True),
    ):
        options = cast(RLOptions, TASKS["grpo"].read_options({"role_ranks": ranks}))
        with nullcontext() if is_sound else pytest.raises(ConfigError, match=r"role_ranks\.reward"):
            environment_runner_of({"environment": Cellar}, options, tokenizer, EventLoop())


class Walk:
    """A class of TRL whose tool is called as a method of ours."""

    def reset(self, **row: Any) -> None:
        return None

    def step(self, way: str) -> str:
        """Walk.

        Args:
            way: Where to.
        """
        return way


def test_classes_are_told_from_environments_of_the_other_protocol() -> None:
    assert is_own_protocol(Calculator) and is_own_protocol(FunctionTools)
    assert not any(map(is_own_protocol, (Cellar, Walk, Mute, object)))
    episode = ClassEnvironment(Walk)
    assert [each["function"]["name"] for each in episode.schemas] == ["step"]
    assert ClassEnvironment(partial(Needy, url="here")).name == "Needy"


def test_a_first_observation_ends_the_last_message_whatever_it_is(tmp_path: Path) -> None:
    begun = [{**row, "prompt": [*row["prompt"], {"role": "assistant", "content": "I"}]} for row in ROWS]
    found = begin(tmp_path, THINKING, {"environment": Scored}, begun)
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer")
    texts = [tokenizer.decode(each.completion.prompt) for each in found]
    odd = [len(game.columns["prompt"]) == 2 and opening(game.columns["prompt"]) for game in Cellar.played[1:]]
    assert any(odd) and all(text.endswith(f"I{said}") for text, said in zip(texts, odd, strict=True))
