"""Environment classes as TRL takes them (read in TRL 1.16): `reset(**row)`, and a tool in every other public method.

Their rewards come from reward functions, which may declare `environments`, and from a method `get_reward`. Here is
decided which kind of environment a run has.
"""

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from kitforge.data.chat.template import ChatTemplate, template_of
from kitforge.data.text.continuation import ReplyMarks
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.config import EnvironmentOptions, RLOptions
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.environment import EnvironmentRunner, PromptEnd
from kitforge.kits.rlhf.reinforcement.tool_environment import FunctionTools, ToolEnvironment

# Methods that are no tools.
_OWN = ("reset", "get_reward")
Rewards: TypeAlias = Callable[..., Any]


class ClassEnvironment(ToolEnvironment):
    """One episode with an instance of its own; its tools stand in the order of their names, as TRL's."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.name = getattr(make, "__name__", "the environment")
        try:
            self.instance = make()
        except Exception as error:
            raise ConfigError(
                f"{self.name} cannot be made", got=repr(error), expected="a class without arguments"
            ) from error
        self.name = type(self.instance).__name__
        # Of the class, as a property of the instance would be evaluated.
        methods = [name for name, _ in inspect.getmembers(type(self.instance), inspect.isfunction)]
        tools = [getattr(self.instance, name) for name in methods if name not in _OWN and not name.startswith("_")]
        expected = "a method reset(**row), and others with typed arguments and docstrings as tools"
        if "reset" not in methods or not tools:
            raise ConfigError(
                f"{self.name} is not an environment", got=", ".join(methods) or "no method", expected=expected
            )
        super().__init__(tools)
        self.reward_columns: Mapping[str, Any] = {}

    def reset(self, row: Mapping[str, Any]) -> Any:
        """Start an episode; the first observation ends the prompt. An instance may change the row that it gets."""
        self.reward_columns = {"environments": self.instance}
        said = self.instance.reset(**copy.deepcopy(dict(row)))
        return PromptEnd(said or "") if said is None or isinstance(said, str) else said

    def reward(self, completion: str) -> float:
        """0: the role `reward` and `get_reward` score the completion."""
        return 0.0


def is_own_protocol(kind: type) -> bool:
    """Whether a class is an `Environment`: it has step, and a reset of one positional argument without `**`."""
    try:
        reset = inspect.signature(kind.reset)  # type: ignore[attr-defined]
        reset.bind(None, {})
    except (AttributeError, TypeError):
        return False
    has_keywords = any(each.kind is each.VAR_KEYWORD for each in reset.parameters.values())
    return hasattr(kind, "step") and not has_keywords


def own_rewards(instance: object) -> dict[str, Rewards]:
    """The reward that a class gives itself, by its name; empty without a method get_reward."""

    def get_reward(*, environments: Sequence[Any]) -> Any:
        found = [each.get_reward() for each in environments]
        return _gathered(found) if any(map(inspect.isawaitable, found)) else found

    return {type(instance).__name__: get_reward} if hasattr(instance, "get_reward") else {}


async def _gathered(found: Sequence[Any]) -> list[Any]:
    return list(await asyncio.gather(*found))


def environment_runner_of(
    roles: Mapping[str, Any], options: RLOptions, tokenizer: Tokenizer, loop: EventLoop
) -> EnvironmentRunner | None:
    """The runner of multi-turn rollouts; None without the role `environment` or `tools`. Async steps run in `loop`.
    Raises ConfigError for what no episode could be played with."""
    given, functions = (roles.get(name) for name in ("environment", "tools"))
    if given is None and functions is None:
        coef = options.rl.echo_coef
        check(coef == 0, "rl.echo_coef", coef, "0 without tools or an environment, whose answers it trains on")
        return None
    if given is not None and functions is not None:
        raise ConfigError(
            "the roles tools and environment are both given",
            fix="give the environment the tools: as methods of its class, or derived from ToolEnvironment",
        )
    most, needed = options.environment.max_episodes, max(options.rl.num_generations, options.rl.eval.num_generations)
    expected = f"at least the {needed} completions of a prompt, which rewards compare"
    check(most is None or most >= needed, "environment.max_episodes", most, expected)
    make: Any = partial(FunctionTools, functions or ()) if given is None else given
    if given is not None:
        check(callable(given), "the role environment", given, "a class, or a function that returns an Environment")
    kind = make if isinstance(make, type) else type(make())
    is_class = not is_own_protocol(kind)
    if given is not None:
        _check_rewards(options, is_class=is_class)
    make = partial(ClassEnvironment, make) if is_class else make
    probe = make() if is_class or issubclass(kind, ToolEnvironment) else None
    return EnvironmentRunner(
        make=partial(_configured, make, options.environment, template_of(tokenizer)),
        tokenizer=tokenizer,
        max_turns=options.rollout.max_turns,
        max_tokens=options.data.sequence_length,
        options=options.environment,
        loop=loop,
        tools=None if probe is None else probe.schemas,
        marks=ReplyMarks(spelled={} if probe is None else template_of(tokenizer).spelled),
        has_rewards=functions is None and not is_class,
        own_rewards=own_rewards(probe.instance) if isinstance(probe, ClassEnvironment) else {},
    )


def _check_rewards(options: RLOptions, *, is_class: bool) -> None:
    """Raise ConfigError for rewards elsewhere than the environments, and for penalties on what steps return."""
    ranks, expected = options.role_ranks, "the environment computes the rewards"
    if is_class:
        placed = [ranks.ranks(name, options.parallel.world_size) for name in ("reward", "rollout")]
        needs = "the ranks of role_ranks.rollout, where the environments are"
        check(placed[0] == placed[1], "role_ranks.reward", ranks.reward, needs)
        return
    check(ranks.reward is None, "role_ranks.reward", ranks.reward, f"null: {expected}")
    for name in ("missing_eos_penalty", "overlong_buffer"):
        check(not getattr(options.rl, name), f"rl.{name}", getattr(options.rl, name), f"0: {expected}")


def _configured(make: Callable[[], Any], options: EnvironmentOptions, template: ChatTemplate) -> Any:
    """An environment, with what the run says of its tools."""
    made = make()
    if isinstance(made, ToolEnvironment):
        made.max_consecutive_errors = options.max_consecutive_errors
        made.calls, made.thought = template.calls, template.thought
    return made
