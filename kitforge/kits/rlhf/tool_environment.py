"""Python functions as tools: a policy calls them in its text, and is told what they return."""

from __future__ import annotations

import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast, final

from kitforge.data.chat_datasets import PromptExample
from kitforge.data.template import ChatTemplate, Message
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.environment import EnvironmentRunner
from kitforge.kits.rlhf.function_schema import function_schema, schema_mismatch

_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in a policy's text; with a `problem` it cannot be run."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    problem: str | None = None


def parse_tool_calls(text: str) -> list[ToolCall]:
    """The calls in a reply: JSON of name and arguments in <tool_call> and </tool_call> (Qwen, Hermes), or else a reply
    that is JSON of name and parameters (Llama 3.1). None in a reply that calls nothing."""
    bodies = _HERMES.findall(text)
    if bodies:
        return [_parse_call(body, "arguments") for body in bodies]
    body = text.strip().removeprefix(_PYTHON_TAG).strip()
    if body.startswith("{") and '"name"' in body:
        return [_parse_call(body, "parameters")]
    return []


class ToolEnvironment(ABC):
    """An environment of plain Python functions, sync or async, with type hints and docstrings. The policy is told what
    they return, as messages of the role tool, and why a call cannot be run. A reply without a call ends the episode, as
    does the last of `max_turns`. A tool that raises is a step that fails: see `environment.on_error`."""

    def __init__(self, tools: Sequence[Callable[..., Any]], max_turns: int | None = None) -> None:
        self.schemas = [function_schema(each) for each in tools]
        self.row: Mapping[str, Any] = {}
        self.num_tool_calls = self.num_tool_results = 0
        self._tools = {schema["function"]["name"]: tool for schema, tool in zip(self.schemas, tools, strict=True)}
        self._parameters = {each["function"]["name"]: each["function"]["parameters"] for each in self.schemas}
        if len(self._tools) < len(tools) or not tools:
            got = ", ".join(each["function"]["name"] for each in self.schemas)
            raise ConfigError(
                "tools need names of their own", got=got or "no tools", expected="at least one, each once"
            )
        self._turns_left = max_turns

    @abstractmethod
    def reward(self, response: str) -> float:
        """What the reply that ends the episode is worth; `self.row` has the prompt's columns."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin an episode."""
        self.row = row
        return ""

    async def _step(self, response: str, calls: Sequence[ToolCall], results: Sequence[Any]) -> Any:
        return self._tool_messages(
            response, calls, [await each if inspect.isawaitable(each) else each for each in results]
        )

    def step(self, response: str) -> Any:
        """Run the calls of a reply; an awaitable where a tool is async."""
        calls = [self._validated_call(each) for each in parse_tool_calls(response)]
        if not calls:
            return "", self.reward(response), True
        self.num_tool_calls += len(calls)
        results = [
            {"error": each.problem} if each.problem is not None else self._tools[each.name](**(each.arguments or {}))
            for each in calls
        ]
        if any(inspect.isawaitable(each) for each in results):
            return self._step(response, calls, results)
        return self._tool_messages(response, calls, results)

    def _tool_messages(self, response: str, calls: Sequence[ToolCall], results: Sequence[Any]) -> Any:
        self.num_tool_results += sum(each.problem is None for each in calls)
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": result if isinstance(result, str) else _to_json(result)}
            for call, result in zip(calls, results, strict=True)
        ]
        if self._turns_left is None:
            return messages, 0.0, False
        self._turns_left -= 1
        is_over = self._turns_left <= 0
        return messages, self.reward(response) if is_over else 0.0, is_over

    def _validated_call(self, call: ToolCall) -> ToolCall:
        """The call, with a problem if no tool takes it."""
        if call.problem is not None:
            return call
        if call.name not in self._tools:
            return replace(call, problem=f"there is no tool {call.name!r}; {nearest(call.name, self._tools)}")
        given, parameters = call.arguments or {}, self._parameters[call.name]
        known = parameters["properties"]
        problems = [f"unknown argument {each!r}" for each in given if each not in known]
        problems += [f"missing argument {each!r}" for each in parameters.get("required", ()) if each not in given]
        found = {each: schema_mismatch(value, known[each]) for each, value in given.items() if each in known}
        problems += [f"argument {each!r}: {problem}" for each, problem in found.items() if problem]
        return replace(call, problem="; ".join(problems)) if problems else call


@final
class FunctionTools(ToolEnvironment):
    """Tools whose use is scored by the role `reward`."""

    def reward(self, response: str) -> float:
        """Nothing: others say that."""
        return 0.0


def with_tools(prompt: PromptExample, template: ChatTemplate, schemas: Sequence[Mapping[str, Any]]) -> PromptExample:
    """The prompt in which the chat template names the tools. Raises ConfigError where it cannot."""
    expected = "a chat template that writes `tools`, as those of Qwen 2.5 and Llama 3.1"
    if prompt.messages is None:
        raise ConfigError("tools need prompts of messages", got="a prompt that is text", expected="role and content")
    if prompt.inputs.get("tools"):
        raise ConfigError("a prompt has tools of its own", expected="no column tools beside functions as tools")
    inputs = {**prompt.inputs, "tools": schemas}
    tokens = tuple(template.tokens(prompt.messages, opens_reply=True, **inputs))
    if tokens == prompt.tokens:
        raise ConfigError("the chat template leaves the tools out", expected=expected)
    return replace(prompt, tokens=tokens, inputs=inputs)


def environment_runner_of(
    roles: Mapping[str, Any], options: RLOptions, tokenizer: Tokenizer
) -> EnvironmentRunner | None:
    """Where answers of several turns are played; None without the role `environment` or `tools`."""
    make, functions = (roles.get(name) for name in ("environment", "tools"))
    schemas = None
    if functions is not None:
        if make is not None:
            raise ConfigError(
                "tools beside an environment", fix="let the environment be a ToolEnvironment of these tools"
            )
        make = partial(FunctionTools, functions)
        schemas = make().schemas
    elif make is None:
        return None
    else:
        check(callable(make), "the role environment", make, "a class, or a function that gives an Environment")
        placed, penalties = options.role_ranks.reward, ("missing_eos_penalty", "overlong_buffer")
        check(placed is None, "role_ranks.reward", placed, "none: it gives the rewards")
        for name in penalties:
            check(
                not getattr(options.rl, name), f"rl.{name}", getattr(options.rl, name), "0, as the environment judges"
            )
        if isinstance(make, type) and issubclass(make, ToolEnvironment):
            schemas = cast(Any, make)().schemas
    return EnvironmentRunner(
        make=make,
        tokenizer=tokenizer,
        max_turns=options.rollout.max_turns,
        max_tokens=options.data.sequence_length,
        options=options.environment,
        tools=schemas,
        has_rewards=functions is None,
    )


def _parse_call(body: str, arguments: str) -> ToolCall:
    try:
        found = json.loads(body)
    except ValueError as error:
        return ToolCall(problem=f"the call is not JSON: {error}")
    given = found.get(arguments, {}) if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not isinstance(given, dict):
        return ToolCall(problem=f'the call is not of the form {{"name": ..., "{arguments}": {{...}}}}')
    return ToolCall(name=found["name"], arguments=given)


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
