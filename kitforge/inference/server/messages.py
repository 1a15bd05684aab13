"""The messages and tools of chats as pydantic models.

Imports pydantic, so only `requests` imports it.
"""

import json
from abc import ABC
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOLS = 128

EmptyList = Annotated[list[Any], Field(max_length=0)]


class RequestBody(BaseModel, ABC):
    """A JSON object, validated strictly."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class TextPart(RequestBody):
    """A content part of a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None  # ignored: prompts are cached by their tokens


class FunctionCall(RequestBody):
    """The function of a tool call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    parsed_arguments: dict[str, Any] | None = None  # of OpenAI's client, which sends its message back with it; ignored


class MessageToolCall(RequestBody):
    """A tool call in an assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: FunctionCall


_UNREAD: Any = {"index": True, "function": {"parsed_arguments"}}  # by templates
TEXT_OR_PARTS = Discriminator(
    lambda value: "text" if isinstance(value, str) else "parts" if isinstance(value, (dict, list, BaseModel)) else None,
    custom_error_type="content",
    custom_error_message='text, or a list of objects with a type, as {"type": "text", "text": ...}',
)
Parts = Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], TEXT_OR_PARTS]


class ChatMessage(RequestBody):
    """One chat message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None  # optional for an assistant message with tool calls
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=128, fail_fast=True)] | None = None

    # Fields of responses that clients send back; ignored.
    provider_specific_fields: dict[str, Any] | None = None
    parsed: dict[str, Any] | None = None
    refusal: Literal[""] | None = None
    annotations: EmptyList | None = None
    images: EmptyList | None = None
    thinking_blocks: EmptyList | None = None

    def to_template_message(self) -> dict[str, Any]:
        """The message for a chat template, in which the arguments of a tool call are an object."""
        parts = "" if self.content is None else self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        for name in ("name", "reasoning", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            calls = [call.model_dump(exclude_none=True, exclude=_UNREAD) for call in self.tool_calls]
            for call in calls:
                call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
            message["tool_calls"] = calls
        return message


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class FunctionDefinition(RequestBody):
    """A function that the model may call. Whatever else it says is for the chat template."""

    model_config = RequestBody.model_config | ConfigDict(extra="allow")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # the JSON schema of the arguments
    strict: bool | None = None  # the arguments must match it


class Tool(RequestBody):
    """A tool that the model may call."""

    type: Literal["function"] = "function"
    function: FunctionDefinition


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ToolSubset(RequestBody):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[Tools, Field(min_length=1)]


class AllowedTools(RequestBody):
    """The choice of some tools, beside which the others stay in the prompt."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


def _choice_kind(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "text" if isinstance(value, str) else None
    return "allowed" if value.get("type") == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("text")]
    | Annotated[Tool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(
        _choice_kind,
        custom_error_type="tool_choice",
        custom_error_message='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
    ),
]


def _arguments(given: str | dict[str, Any] | None) -> Any:
    if not isinstance(given, str):
        return given or {}
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        return given
