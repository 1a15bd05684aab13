"""What a chat template leaves out of a conversation: contents, calls, thoughts, tools, and whole replies."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kitforge.data.chat.render import REASONING, with_mark
from kitforge.foundation.errors import DataError

Message = Mapping[str, Any]
# The text of messages with other inputs. Raises DataError where the template refuses them.
Write = Callable[[Sequence[Message], Mapping[str, Any]], str]


def check_written(
    write: Write, messages: Sequence[Message], trained: Mapping[int, str], inputs: Mapping[str, Any]
) -> None:
    """Raise DataError for tools, contents, calls and thoughts that have no part in what `write` makes of the messages,
    and for a reply of `trained` that is written as one with that content, usually none.

    Whether a part is written is told by a mark in it, or by the text without it. Thoughts that a template takes out of
    earlier turns are no loss if it writes them in the last."""
    whole = write(messages, inputs)
    if inputs.get("tools") and _attempt(write, messages, {**inputs, "tools": None}) == whole:
        raise _left_out("tools", "the column 'tools'")
    nonce = secrets.token_hex(8)
    marked = _attempt(write, [_marked(each, f"{nonce}x{number}") for number, each in enumerate(messages)], inputs) or ""
    for number, message in enumerate(messages):
        for name in _parts(message):
            letter = {"content": "c", "tool_calls": "k"}.get(name, "r")
            is_marked = f"{nonce}x{number}{letter}" in marked
            if not is_marked and not is_written(write, messages, number, name, inputs):
                raise _left_out(name, f"{name} of message {number}, which is the {message['role']}'s")
    for number, content in trained.items():
        is_marked = not content and "content" in _parts(messages[number]) and f"{nonce}x{number}c" in marked
        bare = [*messages[:number], {"role": "assistant", "content": content}, *messages[number + 1 :]]
        if not is_marked and _attempt(write, bare, inputs) == whole:
            raise _empty(number)


def check_plain(messages: Sequence[Message], trained: Mapping[int, str], inputs: Mapping[str, Any]) -> None:
    """The same for the plain text of a conversation, which holds its contents alone."""
    if inputs.get("tools"):
        raise _left_out("tools", "the column 'tools'")
    for number, message in enumerate(messages):
        for name in _parts(message):
            if name != "content":
                raise _left_out(name, f"{name} of message {number}, which is the {message['role']}'s")
        if number in trained and (message.get("content") or "") == trained[number]:
            raise _empty(number)


def _parts(message: Message) -> list[str]:
    """The keys of a message under which something is said."""
    content = message.get("content")
    has_content = bool(content.strip()) if isinstance(content, str) else bool(content)
    thoughts = [name for name in REASONING if message.get(name)][:1]
    return ["content"] * has_content + ["tool_calls"] * bool(message.get("tool_calls")) + thoughts


def _marked(message: Message, mark: str) -> Message:
    """The message with the mark and the letter of its key behind every part."""
    marked: dict[str, Any] = with_mark(message, f"{mark}c") if "content" in _parts(message) else dict(message)
    for name in REASONING:
        if isinstance(message.get(name), str) and message[name]:
            marked[name] = f"{message[name]}{mark}r"
    if message.get("tool_calls"):
        marked["tool_calls"] = [_marked_call(each, f"{mark}k") for each in message["tool_calls"]]
    return marked


def _marked_call(call: Any, mark: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return call
    return {**call, "function": {**function, "name": function["name"] + mark}}


def is_written(write: Write, messages: Sequence[Message], number: int, name: str, inputs: Mapping[str, Any]) -> bool:
    """Whether the conversation up to a message, or all of it, is another without a part of that message."""
    names = REASONING if name in REASONING else (name,)
    kept = {key: value for key, value in messages[number].items() if key not in names}
    less = {**kept, "content": ""} if name == "content" else kept
    for end in (number + 1, len(messages)):
        with_part = _attempt(write, messages[:end], inputs)
        without = _attempt(write, [*messages[:number], less, *messages[number + 1 : end]], inputs)
        if with_part != without or with_part is None:
            return True
    return False


def _attempt(write: Write, messages: Sequence[Message], inputs: Mapping[str, Any]) -> str | None:
    """The text, or None where the template refuses the messages."""
    try:
        return write(messages, inputs)
    except DataError:
        return None


def _left_out(name: str, what: str) -> DataError:
    fixes = {
        "tools": "leave the column out, or use a tokenizer whose template renders `tools`",
        "content": "leave the text out of the row, or use a template that writes it",
    }
    return DataError(
        f"the chat template does not write {name}, which would be lost",
        got=what,
        expected="a chat template that writes all that the row says",
        fix=fixes.get(name, f"leave {name} out of the row, or use a tokenizer whose template writes it"),
    )


def _empty(number: int) -> DataError:
    return DataError(
        "the row has an empty response",
        got=f"message {number}, of which no token of its own is written",
        expected="at least one token",
        fix="leave such rows out, with data.on_invalid=drop",
    )
