"""The body of /v1/responses as pydantic models: a conversation of items, which becomes that of a chat.

Imports pydantic, so only `app.create_app` imports it.
"""

from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.server.errors import named_as, refused
from kitforge.inference.server.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, TEXT_OR_PARTS, RequestBody
from kitforge.inference.server.requests import ChatRequest, NewTokens, SamplingFields, check_consistency, read

# Fields of a chat, and what they are called here.
ITEM_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "prompt": "input"}
ITEM_NAMES |= dict.fromkeys(("response_format", "response_format.json_schema", "structured_outputs"), "text.format")
_ECHOED = {
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "user",
}
_ECHOED |= {"safety_identifier", "service_tier", "temperature", "text", "tool_choice", "tools", "top_p"}
# What an item of each type has, and a thought may have.
_FIELDS = {"message": ("role", "content"), "function_call": ("call_id", "name", "arguments")}
_FIELDS |= {"function_call_output": ("call_id", "output"), "reasoning": ("content", "summary")}


class ItemText(RequestBody):
    """A part of the text of an item."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None  # of responses that clients send back; ignored, as are the next two
    logprobs: list[Any] | None = None
    parsed: Any = None


Parts = Annotated[list[ItemText], Field(max_length=MAX_PARTS, fail_fast=True)]
Texts = Annotated[Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")], TEXT_OR_PARTS]


class Item(RequestBody):
    """What somebody says, an assistant's thought or call of a tool, or what a call gave."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] = "assistant"
    content: Texts | None = None
    summary: Parts | None = None  # of a thought without content
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Texts | None = None

    # Fields of responses that clients send back; ignored.
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: Literal[""] | None = None
    parsed_arguments: Any = None


Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ItemTool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def nested(self) -> dict[str, Any]:
        """The same as chats write it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


ItemTools = Annotated[list[ItemTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class ItemToolChoice(RequestBody):
    """The choice of one function by its name, or of some tools."""

    type: Literal["function", "allowed_tools"]
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: ItemTools = []


class TextFormat(RequestBody):
    """The field text.format."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class TextSettings(RequestBody):
    """The field text."""

    format: TextFormat = TextFormat(type="text")
    verbosity: Literal["medium"] | None = None


class ReasoningSettings(RequestBody):
    """The field reasoning."""

    effort: Literal["none", "medium"] | None = None
    summary: Literal["auto"] | None = None  # a thought comes as it is


class ItemsRequest(SamplingFields):
    """The body of /v1/responses. None means the server's default."""

    input: Annotated[Annotated[str, Tag("text")] | Annotated[Items, Tag("parts")], TEXT_OR_PARTS]
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    tools: ItemTools = []
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag("text")] | Annotated[ItemToolChoice, Tag("parts")],
        TEXT_OR_PARTS,
    ] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None  # further template variables

    # Accepted with values that change nothing.
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    stream_options: dict[Literal["include_obfuscation"], bool] | None = None
    top_logprobs: Literal[0] | None = None
    truncation: Literal["disabled"] | None = None

    def echo(self, defaults: SamplingOptions) -> dict[str, Any]:
        """What the response repeats; of the sampling what holds."""
        said = self.model_dump(include=_ECHOED, by_alias=True)
        said |= {"background": False, "store": False, "top_logprobs": 0, "truncation": "disabled"}
        if isinstance(self.tool_choice, ItemToolChoice):
            said["tool_choice"] = self.tool_choice.model_dump(exclude_unset=True)
        holds = {"temperature": defaults.temperature, "top_p": defaults.top_p or 1.0, "metadata": dict[str, Any]()}
        return said | {name: value for name, value in holds.items() if said[name] is None}

    def chat(self) -> ChatRequest:
        """The same as a request for a chat."""
        choice: Any = self.tool_choice
        if not isinstance(choice, str):
            chosen = {"mode": choice.mode, "tools": [each.nested() for each in choice.tools]}
            named = {"type": choice.type, "function": {"name": choice.name}}
            choice = named if choice.type == "function" else {"type": choice.type, "allowed_tools": chosen}
        form, schema = self.text.format, self.text.format.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
        fields = {name: getattr(self, name) for name in (*SamplingFields.model_fields, "chat_template_kwargs")} | {
            "messages": self._messages(),
            "tools": [each.nested() for each in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": {"type": form.type} | ({"json_schema": schema} if "schema" in schema else {}),
            "max_completion_tokens": self.max_output_tokens,
        }
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})

    def _messages(self) -> list[dict[str, Any]]:
        said: list[dict[str, Any]] = []
        if self.instructions is not None:
            said.append({"role": "system", "content": self.instructions})
        for item in [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input:
            if item.type == "function_call_output":
                said.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
            elif item.type == "message" and item.role != "assistant":
                said.append({"role": item.role, "content": _joined(item.content)})
            else:
                _add_reply(said, item)
        return said


def read_items(body: bytes) -> tuple[ItemsRequest, ChatRequest]:
    """Parse a body of /v1/responses, also as that of a chat. Raises ApiError."""
    request = read(ItemsRequest, body)
    for index, item in enumerate(() if isinstance(request.input, str) else request.input):
        for name in sorted(set(chain(*_FIELDS.values()))):
            is_given, is_known = name in item.model_fields_set, name in _FIELDS[item.type]
            field = f"input[{index}].{name}"
            if is_given and not is_known:
                raise refused(field, f"{field!r} is none of the fields of a {item.type}", "unknown_parameter")
            if is_known and not is_given and item.type != "reasoning":
                raise refused(field, f"{field!r} is missing", "missing_parameter")
    choice = request.tool_choice
    if not isinstance(choice, str) and not (choice.name if choice.type == "function" else choice.tools):
        name = "tool_choice." + ("name" if choice.type == "function" else "tools")
        raise refused(name, f"{name!r} is missing", "missing_parameter")
    with named_as(ITEM_NAMES):
        chat = request.chat()
        check_consistency(chat)
    return request, chat


def _add_reply(said: list[dict[str, Any]], item: Item) -> None:
    """Add what an assistant thought, said or called to its last message, or to a new one. A message has one thought, a
    text behind it, and calls; what is said behind a call is of the same text."""
    last = said[-1] if said and said[-1]["role"] == "assistant" else None
    is_second = item.type == "message" and last is not None and last["content"] and "tool_calls" not in last
    if last is None or is_second or item.type == "reasoning":
        said.append(last := {"role": "assistant", "content": ""})
    if item.type == "reasoning":
        last["reasoning"] = _joined(item.content or item.summary)
    elif item.type == "function_call":
        call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
        last.setdefault("tool_calls", []).append(call)
    else:
        last["content"] += _joined(item.content)


def _joined(texts: str | list[ItemText] | None) -> str:
    return texts if isinstance(texts, str) else "".join(each.text for each in texts or ())
