"""What a chat template leaves out of a conversation: contents, calls, thoughts, tools, and whole replies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kitforge.data.chat.render import REASONING, ChatRender, origin_of
from kitforge.foundation.errors import DataError

Message = Mapping[str, Any]
# The text of messages with other inputs. Raises DataError where the template refuses them.
Write = Callable[[Sequence[Message], Mapping[str, Any]], str]


def check_written(
    write: Write, render: ChatRender, messages: Sequence[Message], trained: Mapping[int, str], inputs: Mapping[str, Any]
) -> None:
    """Raise DataError for tools, contents, calls and thoughts that have no part in what `write` makes of the messages,
    as `render` does, and for a reply of `trained` that is written as one with that content, usually none.

    Whether a part is written is told by its letters in the text, or by the text without it. Thoughts that a template
    takes out of earlier turns are no loss if it writes them in the last."""
    whole = render.text()
    if inputs.get("tools") and _attempt(write, messages, {**inputs, "tools": None}) == whole:
        raise _left_out("tools", "the column 'tools'")
    found = frozenset(render.origins(whole, render.text).tolist())
    dropped: set[str] = set()  # thoughts of earlier turns that are written in the last one
    for number, message in enumerate(messages):
        for name in _parts(message):
            is_found = origin_of(number, name) in found or (name == "content" and render.is_literal(number))
            if is_found or name in dropped:
                continue
            if not is_written(write, messages, number, name, inputs):
                raise _left_out(name, f"{name} of message {number}, which is the {message['role']}'s")
            dropped |= {name} & {*REASONING}
    for number, content in trained.items():
        is_marked = any(origin_of(number, each) in found for each in _parts(messages[number]))
        is_marked = not content and (is_marked or render.is_literal(number))
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
    thoughts = [name for name in REASONING if str(message.get(name) or "").strip()][:1]
    return ["content"] * has_content + ["tool_calls"] * bool(message.get("tool_calls")) + thoughts


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
        "the row has an empty completion",
        got=f"message {number}, of which no token of its own is written",
        expected="at least one token",
        fix="leave such rows out, with data.on_invalid=skip",
    )
