"""Tool calling in rollouts: Python functions as tools, their JSON schemas, and parsing of the policy's calls."""

import inspect
import json
import re
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

from kitforge.data.chat.datasets import PromptExample
from kitforge.data.chat.template import ChatTemplate, Message
from kitforge.data.chat.tool_calls import HERMES, LLAMA, CallFormat, ReplyReader
from kitforge.data.text.continuation import ReplyMarks
from kitforge.foundation.errors import ConfigError, nearest

_PLAIN = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Return|Raises|Examples?|Yields|Notes?):[ \t]*$", re.MULTILINE
)
# An argument of a Google-style docstring: `name: text` or `name (type): text`, with its continuation lines.
_ARGUMENT = re.compile(r"^(\w+)(?: ?\([^)]*\))?:\s*(.*?)(?=^\w+(?: ?\([^)]*\))?:|\Z)", re.MULTILINE | re.DOTALL)


def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a function with type hints and a Google-style docstring, equal to that of
    `transformers.utils.get_json_schema`. Raises ConfigError for a missing docstring, argument or type hint."""
    name = getattr(function, "__name__", type(function).__name__)
    text, arguments, returns = _parse_docstring(inspect.getdoc(function) or "")
    if not text:
        raise ConfigError(
            f"the tool {name!r} has no docstring", expected="a description, and an entry below Args: per argument"
        )
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"the tool {name!r} has an argument that cannot be passed by name",
                got=str(parameter),
                expected="named arguments, without *args, **kwargs and positional-only ones",
            )
        if parameter.name not in hints or parameter.name not in arguments:
            raise ConfigError(
                f"the argument {parameter.name!r} of the tool {name!r} is not documented",
                got="no type hint" if parameter.name not in hints else "no description in the docstring",
                expected=f'a type hint, and "{parameter.name}: DESCRIPTION" below Args:',
            )
        properties[parameter.name] = _schema(hints[parameter.name], name) | {"description": arguments[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        found["required"] = required
    function_part = {"name": name, "description": text, "parameters": found}
    if "return" in hints:
        function_part["return"] = _schema(hints["return"], name) | ({"description": returns} if returns else {})
    return {"type": "function", "function": function_part}


def schema_mismatch(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Why a JSON value does not match a schema; None if it does."""
    if "enum" in schema and value not in schema["enum"]:
        return f"expected one of {schema['enum']}"
    if "anyOf" in schema:
        return (
            None if any(schema_mismatch(value, each) is None for each in schema["anyOf"]) else "expected another type"
        )
    kinds = schema.get("type")
    if kinds is None or (value is None and schema.get("nullable")):
        return None
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_of(value, kind) for kind in kinds):
        return f"expected {' or '.join(kinds)}"
    if isinstance(value, list) and "items" in schema:
        return next((each for each in (schema_mismatch(item, schema["items"]) for item in value) if each), None)
    return None


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == {True: "boolean", False: "boolean", None: "null"}[value]
    kinds: dict[str, Any] = {"integer": int, "number": (int, float), "string": str, "array": list, "object": dict}
    return isinstance(value, kinds.get(kind, ()))


def _parse_docstring(doc: str) -> tuple[str, dict[str, str], str]:
    """The description of the function, of each argument, and of the return value."""
    text, *sections = _SECTION.split(doc)
    found = dict(zip(sections[::2], (inspect.cleandoc(each) for each in sections[1::2]), strict=True))
    entries = next((found[each] for each in ("Args", "Arguments", "Parameters") if each in found), "")
    arguments = {each[1]: " ".join(each[2].split()) for each in _ARGUMENT.finditer(entries)}
    returns = found.get("Returns", found.get("Return", ""))
    return text.strip(), arguments, " ".join(returns.split())


def _schema(hint: Any, name: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    if origin is Literal:
        kinds = list(dict.fromkeys(_PLAIN[type(each)] for each in args))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(args)}
    if origin in (Union, types.UnionType):
        members = [_schema(each, name) for each in args if each is not type(None)]
        if len(members) == 1:
            found = members[0]
        elif all(list(each) == ["type"] for each in members):
            found = {"type": sorted(each["type"] for each in members)}
        else:
            found = {"anyOf": members}
        return found | ({"nullable": True} if type(None) in args else {})
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": _schema(args[0], name)} if args else {})
    if hint is dict or origin is dict:
        return {"type": "object"} | ({"additionalProperties": _schema(args[1], name)} if args else {})
    raise ConfigError(
        f"the tool {name!r} has a type hint without a JSON type",
        got=str(hint),
        expected="int, float, str, bool, list, dict, Literal, Any, or a union of these",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call parsed from a completion; `problem` says why it cannot run."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    problem: str | None = None


def parse_tool_calls(
    text: str,
    calls: CallFormat | None = None,
    thought: tuple[str, str] | None = None,
    schemas: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[ToolCall]:
    """The tool calls in a completion, in the format of its chat template, behind its thought. Where no format is known,
    those between <tool_call> and </tool_call>, or the completion is one in JSON. Empty without calls."""
    if calls is None or calls.is_bare:
        calls = HERMES if HERMES.marks[0] in text else LLAMA
    is_thinking = thought is not None and thought[1] in text and thought[0] not in text
    found: list[ToolCall] = []
    spelled: dict[int, str] = {}
    for part in ReplyReader(ReplyMarks(thought=thought, is_thinking=is_thinking), calls, schemas).push(
        text, is_last=True
    ):
        if part.problem is not None:
            found.append(ToolCall(problem=part.problem))
        elif part.kind == "call":
            spelled[len(found)] = ""
            found.append(ToolCall(name=part.text))
        elif part.kind == "arguments":
            spelled[len(found) - 1] += part.text
    for number, arguments in spelled.items():
        try:
            found[number] = replace(found[number], arguments=json.loads(arguments))
        except (ValueError, RecursionError) as error:
            found[number] = ToolCall(problem=f"the call is not JSON: {error}")
    return found


@dataclass(frozen=True, slots=True)
class _Raised:
    """The error of a tool."""

    error: Exception


async def _awaited(result: Any) -> Any:
    try:
        return await result if inspect.isawaitable(result) else result
    except Exception as error:  # noqa: BLE001 (a tool is foreign code)
        return _Raised(error)


class ToolEnvironment(ABC):
    """An environment that runs Python functions, sync or async, with type hints and docstrings.

    The policy receives their results, and the errors of invalid calls and of tools that raise, as messages of the role
    tool. After `max_consecutive_errors` calls in a row whose tool raised, the next one fails the step, see
    `environment.on_error`. A completion without a call ends the episode, as does turn `max_turns`.
    """

    max_consecutive_errors = 3  # a run sets the option of that name
    # How the model calls tools, and what begins and ends its thoughts; a run asks its chat template.
    calls: CallFormat | None = None
    thought: tuple[str, str] | None = None

    def __init__(self, tools: Sequence[Callable[..., Any]], max_turns: int | None = None) -> None:
        self.schemas = [function_schema(each) for each in tools]
        self.row: Mapping[str, Any] = {}
        self.num_tool_calls = self.num_tool_results = self.num_tool_errors = 0
        self._num_consecutive_errors = 0
        self._tools = {schema["function"]["name"]: tool for schema, tool in zip(self.schemas, tools, strict=True)}
        self._parameters = {each["function"]["name"]: each["function"]["parameters"] for each in self.schemas}
        if len(self._tools) < len(tools) or not tools:
            got = ", ".join(each["function"]["name"] for each in self.schemas)
            raise ConfigError(
                "tools must have unique names", got=got or "no tools", expected="at least one tool, no name twice"
            )
        self._turns_left = max_turns

    @abstractmethod
    def reward(self, completion: str) -> float:
        """The reward of the completion that ends the episode; `self.row` holds the prompt's columns."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Start an episode."""
        self.row = row
        return ""

    def step(self, completion: str) -> Any:
        """Run the tool calls of a completion; an awaitable if a tool is async."""
        parsed = parse_tool_calls(completion, self.calls, self.thought, self._parameters)
        calls = [self._validated_call(each) for each in parsed]
        if not calls:
            return "", self.reward(completion), True
        self.num_tool_calls += len(calls)
        results = [self._result(each) for each in calls]
        if any(inspect.isawaitable(each) for each in results):
            return self._step(completion, calls, results)
        return self._tool_messages(completion, calls, results)

    def _result(self, call: ToolCall) -> Any:
        """The result of a call, or an awaitable of it; a `_Raised` for the error of its tool."""
        if call.problem is not None:
            return {"error": call.problem}
        try:
            return self._tools[call.name](**(call.arguments or {}))
        except Exception as error:  # noqa: BLE001 (a tool is foreign code)
            return _Raised(error)

    async def _step(self, completion: str, calls: Sequence[ToolCall], results: Sequence[Any]) -> Any:
        return self._tool_messages(completion, calls, [await _awaited(each) for each in results])

    def _tool_messages(self, completion: str, calls: Sequence[ToolCall], results: Sequence[Any]) -> Any:
        contents = [
            self._content(result, is_run=call.problem is None) for call, result in zip(calls, results, strict=True)
        ]
        messages: list[Message] = [
            {"role": "tool", "name": call.name, "content": content}
            for call, content in zip(calls, contents, strict=True)
        ]
        if self._turns_left is None:
            return messages, 0.0, False
        self._turns_left -= 1
        is_over = self._turns_left <= 0
        return messages, self.reward(completion) if is_over else 0.0, is_over

    def _content(self, result: Any, *, is_run: bool) -> str:
        """What the policy is told of a call. Raises the error of the tool if there were too many in a row."""
        raised = result.error if isinstance(result, _Raised) else None
        text = ""
        if raised is None:
            try:
                text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            except Exception as error:  # noqa: BLE001 (such as an endless result)
                raised = error
        if raised is None:
            if is_run:
                self.num_tool_results += 1
                self._num_consecutive_errors = 0
            return text
        self.num_tool_errors += 1
        self._num_consecutive_errors += 1
        if self._num_consecutive_errors > self.max_consecutive_errors:
            raise raised
        return json.dumps({"error": f"{type(raised).__name__}: {raised}"}, ensure_ascii=False)

    def _validated_call(self, call: ToolCall) -> ToolCall:
        """The call, with a problem if its tool or arguments are invalid."""
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


class FunctionTools(ToolEnvironment):
    """Tools of a run whose rewards come from the role `reward`."""

    def reward(self, completion: str) -> float:
        """0: the role `reward` scores the completion."""
        return 0.0


def with_tools(prompt: PromptExample, template: ChatTemplate, schemas: Sequence[Mapping[str, Any]]) -> PromptExample:
    """The prompt with the tools' schemas, rendered by the chat template. Raises ConfigError if it ignores them."""
    expected = "a chat template that renders `tools`, as those of Qwen 2.5 and Llama 3.1"
    if prompt.messages is None:
        got, fix = "a prompt of plain text", 'write each prompt as [{"role": "user", "content": ...}]'
        raise ConfigError("tools need prompts of messages", got=got, expected="a role and content each", fix=fix)
    if prompt.inputs.get("tools"):
        raise ConfigError(
            "a row has a column `tools`, and the role tools is given too",
            expected="one of them",
            fix="drop the column, or leave the role out",
        )
    inputs = {**prompt.inputs, "tools": schemas}
    tokens = tuple(template.prompt(prompt.messages, **inputs))
    if tokens == prompt.tokens:
        fix = "train a model whose tokenizer has one, or put it into chat_template.jinja of tokenizer=FOLDER"
        raise ConfigError("the chat template does not render tools", expected=expected, fix=fix)
    return replace(prompt, tokens=tokens, inputs=inputs)
