"""Rows of dialogue data sets under one set of names: columns, speakers, messages, and dialogues spelt as text."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeGuard

import numpy as np

from kitforge.data.chat.template import BegunMessage, Message
from kitforge.data.document_shard import RecordShard
from kitforge.data.features import Features, without_fills
from kitforge.foundation.errors import DataError, nearest

# Text, messages or tokens.
Said = str | Sequence[Message] | Sequence[int]

LEAVE_OUT = "leave such rows out, with data.on_invalid=skip"
# Columns in which something is said.
SAID = ("text", "messages", "prompt", "completion", "chosen", "rejected")
# Columns in whose values Arrow fills in nulls.
_CHATS = (*SAID, "conversations", "tools", "chat_template_kwargs")
FLAGS = ("weight", "train", "loss")  # of a message: whether it is trained on
_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_TOOL_WORDS = ("observation", "tool", "function", "function_response", "tool_response")
_ASSISTANT_WORDS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model", "bot", "ai", "claude", "chatbot", "output")
# The names that data sets give to speakers, in small letters, and their roles.
_ROLES = {
    **dict.fromkeys(("human", "user", "prompter", "input"), "user"),
    **dict.fromkeys(_ASSISTANT_WORDS, "assistant"),
    **dict.fromkeys(_TOOL_WORDS, "tool"),
    "system": "system",
    "developer": "developer",
}
# Roles that chat templates know by these names.
_STANDARD_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_CALL = "function_call"  # as ShareGPT has it, with JSON of name and arguments as its value
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
# How Python spells a list of messages.
_PYTHON_LIST = re.compile(r"\[\s*\{\s*'(role|content|from|value)'\s*:")
# Columns that chat templates read besides messages: their type, and its name in errors.
_INPUTS: tuple[tuple[str, type, str], ...] = (
    ("tools", list, "a list of JSON schemas of functions"),
    ("chat_template_kwargs", dict, "a mapping, such as {'enable_thinking': false}"),
)
# Columns that change the meaning of others: named once where they are not read.
CONTEXT = ("system", "history")
MEANT = (*CONTEXT, "tools", "chat_template_kwargs", "weight", "train")
# Scripts without spaces, of which a character counts as a word.
_UNSPACED = (
    r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_LETTER = rf"(?:(?![{_UNSPACED}])[\w\u0300-\u036f\u0591-\u05c7\u0610-\u065f\u0900-\u0dff])"
_WORD = re.compile(rf"{_LETTER}+(?:[.,'’-]{_LETTER}+)*")


class ChatRow:
    """A row under our names; `location` names it in errors. `columns` maps our names to those that the row had."""

    def __init__(
        self, row: Mapping[str, Any], location: object, columns: Mapping[str, str], features: Features = None
    ) -> None:
        self.location = location
        self.notes: dict[str, str] = {}  # what is to be said once, by its kind
        if features is not None:
            chats = [columns.get(name, name) for name in _CHATS if columns.get(name, name) in row]
            row = {**row, **{name: without_fills(row[name], features.get(name)) for name in chats}}
        renamed = {name: row[own] for name, own in columns.items() if own in row}
        # A column under another name has its own no longer; rewards alone know both.
        self._renamed = {own: row[own] for own in columns.values() if own in row}
        others = {name: value for name, value in row.items() if name not in self._renamed}
        self.values = to_standard_columns({**others, **renamed})
        # Columns that hold messages and nothing else.
        self._chats = {"messages"} | ({"prompt"} if "conversations" in row and "chosen" in row else set())
        self._columns = columns
        self._read: set[str] = set()

    def refusal(self, what: str, *, got: object = None, expected: str, fix: str = LEAVE_OUT) -> DataError:
        """The error about a row that cannot be used."""
        return DataError(f"{self.location} {what}", got=got, expected=expected, fix=fix)

    @property
    def all_values(self) -> dict[str, Any]:
        """The values by our names, and those of renamed columns by their own too."""
        return {**self._renamed, **self.values}

    def has(self, name: str) -> bool:
        """Whether the column has a value."""
        return self.values.get(name) is not None

    def required(self, name: str) -> Any:
        """The value of a column. Raises DataError for null, and for no such column."""
        self._read.add(name)
        if name in self.values and self.values[name] is None:
            expected = "text, messages or tokens" if name in SAID else "a value"
            raise self.refusal(f"has null in column {name!r}", expected=expected)
        if name not in self.values:
            own, got = self._columns.get(name, name), f"columns {', '.join(map(str, self.values))}"
            expected = f"{own}, as data.columns.{name} says" if own != name else name
            if own == "completion" and "prompt" not in self.values:
                expected = "messages, text, or prompt and completion"
            raise self.refusal(f"has no column {own!r}", got=got, expected=expected, fix=self._advice(name, own))
        return self.values[name]

    def _advice(self, name: str, own: str) -> str:
        """How to name the column that is missing: by what the others hold, then by how they are called."""
        is_alone = own == "completion" and "prompt" not in self.values
        chats = [str(each) for each, value in self.values.items() if name in SAID and _holds_chat(value)]
        if chats:
            return " or ".join(f"data.columns.{'messages' if is_alone else name}={each}" for each in chats)
        texts = [str(each) for each, value in self.values.items() if isinstance(value, str)]
        if is_alone and texts:
            return f"data.columns.text=NAME for text without a prompt; columns of text: {', '.join(texts)}"
        known = texts if name in SAID and texts else map(str, self.values)
        return f"data.columns.{name}=NAME; {nearest(own, known)}"

    def said(self, name: str, knows_role: Callable[[str], bool]) -> Said:
        """The text, messages or tokens of a column; messages may be spelt as JSON or as a dialogue. `knows_role` tells
        whether the chat template names a role. Raises DataError for anything else."""
        value = self.required(name)
        if isinstance(value, str):
            parsed = self._parsed(name, value)
            if parsed is None:
                self._check_encodable(name, value)
                return messages_of(value) if is_dialogue(value) else value
            self.values[name] = value = parsed
        if hasattr(value, "tolist"):
            value = value.tolist()  # an array of numpy, or a tensor
        items: list[Any] | None = list(value) if isinstance(value, (list, tuple)) else None
        items = [value] if isinstance(value, Mapping) else items
        if items is not None and all(isinstance(item, Mapping) for item in items):
            self._check_encodable(name, items)
            return [_message(item, self.location, knows_role) for item in items]
        is_number = (isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in items or ())
        if items is not None and all(is_number):
            return [int(item) for item in items]
        expected = "text, a list of messages with role and content, or a list of tokens"
        raise self._unreadable(name, f"{type(value).__name__} {str(value)[:60]!r}", expected)

    def inputs(self) -> dict[str, Any]:
        """What the chat template is given beside the messages: the columns tools and chat_template_kwargs, each of
        which may be spelt as JSON."""
        self._read |= {name for name, _, _ in _INPUTS}
        found = template_inputs(self.values, self.location)
        self._check_encodable("tools", found)
        return found

    def with_context(self, said: Said) -> Said:
        """The messages behind those of the columns `system` and `history`; a text is what the user says then. A system
        message among the messages counts more than the column."""
        context = [*self._system(), *self._history()]
        if not context:
            return said
        if said and not isinstance(said, str) and not is_chat(said):
            raise self.refusal("has tokens beside a system or a history", expected="text or messages")
        messages: list[Any] = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
        if messages and messages[0]["role"] == "system":
            self._read.discard("system")
            context = [*messages[:1], *(each for each in context if each["role"] != "system")]
            messages = messages[1:]
        return [*context, *messages]

    def number(self, name: str) -> float:
        """A finite number, which tables spell as text; 0 where the column has none."""
        value = self.values.get(name)
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            value = float(value)
        try:
            number = float(0 if value is None else value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        # Trained in single precision.
        if isinstance(value, (bool, str, bytes)) or not abs(number) <= float(np.finfo(np.float32).max):
            raise self.refusal(f"has a {name} that is not a number", got=str(value)[:60], expected="a finite number")
        return number

    def note_unread(self, names: Sequence[str]) -> None:
        """Note those of the columns that have a value and were not read."""
        said = {each: self.values.get(each) for each in names if each not in self._read}
        unread = [
            each
            for each, value in said.items()
            if value is not None and (value or not isinstance(value, (str, list, tuple, dict)))
        ]
        if unread:
            read = " and ".join(each for each in SAID if each in self._read)
            self.notes["columns"] = (
                f"{self.location} has {' and '.join(unread)} beside {read}: only the latter are trained on, and the "
                "other columns are ignored"
            )

    def note_keys(self, names: Sequence[str]) -> None:
        """Note keys of messages that nobody reads."""
        for name in names:
            what = f"{self.location} has a message with {name!r}, which the chat template does not read: it is ignored"
            self.notes[f"key {name}"] = f"{what} (whether a reply is trained on is said by {', '.join(FLAGS)})"

    def _parsed(self, name: str, text: str) -> list[Any] | None:
        """The messages that a text spells as JSON. Raises DataError where a column of messages holds other text, and
        for a list as Python writes it."""
        found = _messages_in_json(text)
        is_chat_column = name in self._chats
        if found is not None and (found or is_chat_column):
            return found
        if _PYTHON_LIST.match(text.lstrip()):
            expected, fix = "JSON, with double quotes, or a list", "write the column with json.dumps(messages)"
            what = f"has a Python list in column {name!r}, spelt as text"
            raise self.refusal(what, got=f"{text[:60]!r}", expected=expected, fix=fix)
        if is_chat_column and not is_dialogue(text):
            expected = "a list of messages with role and content, also as JSON"
            fix = "call a column of plain text `text`: data.columns.text=NAME"
            raise self.refusal(f"has a text in column {name!r}", got=f"{text[:60]!r}", expected=expected, fix=fix)
        return None

    def _system(self) -> list[Message]:
        self._read.add("system")
        text = self.values.get("system")
        if text is None or text == "":
            return []
        if not isinstance(text, str):
            raise self._unreadable("system", text, "text")
        self._check_encodable("system", text)
        return [{"role": "system", "content": text}]

    def _history(self) -> list[Message]:
        self._read.add("history")
        turns = self.values.get("history")
        if isinstance(turns, str):
            with suppress(ValueError):
                turns = json.loads(turns or "[]")
        turns = turns.tolist() if isinstance(turns, np.ndarray) else turns or []
        is_read = isinstance(turns, (list, tuple)) and all(
            isinstance(turn, (list, tuple, np.ndarray))
            and len(turn) == 2
            and all(isinstance(each, str) for each in turn)
            for turn in turns
        )
        if not is_read:
            raise self._unreadable("history", turns, "a list of pairs: what was asked and what was answered")
        self._check_encodable("history", turns)
        roles = ("user", "assistant")
        return [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]

    def _check_encodable(self, name: str, value: Any) -> None:
        if (broken := _lone_surrogate(value)) is not None:
            what = f"half of a surrogate pair in column {name!r}, which no encoding can write"
            got, fix = f"U+{ord(broken):04X}", f"repair the row, or {LEAVE_OUT}"
            raise self.refusal(f"holds {what}", got=got, expected="text that UTF-8 can hold", fix=fix)

    def _unreadable(self, name: str, value: object, expected: str) -> DataError:
        return self.refusal(f"cannot be read in column {name!r}", got=str(value)[:90], expected=expected)


def chat_rows(shard: RecordShard, columns: Mapping[str, str]) -> Iterator[tuple[Mapping[str, Any], ChatRow]]:
    """Every row as it is and under our names."""
    features = shard.features
    for location, row in shard.rows():
        if not isinstance(row, Mapping):
            raise DataError(f"{location} is not a row", got=type(row).__name__, expected="a mapping of columns")
        yield row, ChatRow(row, location, columns, features)


def iter_said(row: ChatRow) -> Iterator[str]:
    """Everything that is said in a row of any kind, messages one by one, but for what has no encoding."""
    for value in (row.values.get(name) for name in SAID):
        said = (_messages_in_json(value) or value) if isinstance(value, str) else value
        parts: Any = said if isinstance(said, (list, tuple, np.ndarray)) else [said]
        texts = (part.get("content", part.get("value")) if isinstance(part, Mapping) else said for part in parts)
        yield from (text for text in texts if isinstance(text, str) and _lone_surrogate(text) is None)


def to_standard_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the columns of Alpaca (instruction, input, output) or ShareGPT (conversations) under our names. An
    instruction with its input is what the user says."""
    columns = dict(row)
    if "instruction" in columns and "prompt" not in columns:
        columns["prompt"] = columns["instruction"]
        if isinstance(columns["prompt"], str):
            asked = "\n".join(str(each) for each in (columns["prompt"], columns.get("input")) if each)
            columns["prompt"] = [{"role": "user", "content": asked}]
        if "output" in columns:
            columns.setdefault("completion", columns["output"])
    if "conversations" in columns:
        # Next to a chosen and a rejected reply, the conversation is their prompt.
        columns.setdefault("prompt" if "chosen" in columns else "messages", columns.pop("conversations"))
    return columns


def template_inputs(row: Mapping[str, Any], location: object) -> dict[str, Any]:
    """The columns tools and chat_template_kwargs, either of which may be spelt as JSON, as the chat template reads
    them. Raises DataError for other values."""
    inputs: dict[str, Any] = {}
    for name, kind, expected in _INPUTS:
        value: Any = row.get(name)
        if isinstance(value, str):
            try:
                value = json.loads(value or "null")
            except ValueError:
                value = row[name]
        value = value.tolist() if isinstance(value, np.ndarray) else value
        members: Any = value if kind is list and isinstance(value, list) else []
        if not isinstance(value, kind | None) or not all(isinstance(each, dict) for each in members):
            raise DataError(f"{location} cannot be read in column {name!r}", got=str(value)[:60], expected=expected)
        # Tables fill in what other rows have.
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if each is not None}
        inputs[name] = value or None
    return inputs


def is_dialogue(text: str) -> bool:
    """Whether a text is spelt "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    return _TURN.match(text) is not None


def messages_of(text: str) -> list[Message]:
    """The messages of a dialogue that is spelt "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    _, *parts = _TURN.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker.lower()], "content": content.strip()} for speaker, content in pairs]


def with_open_end(prompt: Said) -> Said:
    """The prompt, of which a last message of the assistant is begun and not ended; an empty one is only announced."""
    if not is_chat(prompt) or prompt[-1].get("role") != "assistant" or prompt[-1].get("tool_calls"):
        return prompt
    last = prompt[-1]
    if not last.get("content") and not any(last.get(name) for name in _THOUGHTS):
        return list(prompt[:-1])
    return [*prompt[:-1], BegunMessage(last)]


def is_chat(said: Said) -> TypeGuard[Sequence[Message]]:
    """Whether it is messages."""
    return not isinstance(said, str) and bool(said) and isinstance(said[0], Mapping)


def common_prompt(chosen: Said, rejected: Said, refusal: Callable[..., DataError]) -> tuple[Said, Said, Said]:
    """The common prompt of two completions and the rest of each, split at whole messages, words or tokens. Raises
    a refusal where nothing is left of one, and where they are of different kinds."""
    if isinstance(chosen, str) != isinstance(rejected, str) or is_chat(chosen) != is_chat(rejected):
        expected = "two texts, two lists of messages or two lists of tokens; or a column 'prompt'"
        got, what = f"{_kind(chosen)} and {_kind(rejected)}", "has two kinds of completions and so no common prompt"
        raise refusal(what, got=got, expected=expected)
    if chosen == rejected:
        raise refusal("prefers a completion to itself", expected="two completions")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    length = next((at for at, (left, right) in pairs if left != right), min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        # A common beginning of the first word belongs to the completions, not to the prompt.
        length = min(_word_start(text, length) for text in (chosen, str(rejected)))
    if length == min(len(chosen), len(rejected)):
        got = "one completion is how the other begins" if length else "no token"
        raise refusal("has an empty completion", got=got, expected="at least one token in each behind the prompt")
    if is_chat(chosen) and not length:
        got, expected = f"{str(chosen[0])[:60]} and {str(rejected[0])[:60]}", "a prompt that both begin with"
        raise refusal("has conversations that share no message", got=got, expected=f"{expected}, or a column 'prompt'")
    return chosen[:length], chosen[length:], rejected[length:]


def _kind(said: Said) -> str:
    return "a text" if isinstance(said, str) else "messages" if is_chat(said) else "tokens"


def _word_start(text: str, at: int) -> int:
    """Where the word begins that lies across this position; the position itself where none does."""
    begin = at
    while begin > 0 and not text[begin - 1].isspace():
        begin -= 1
    for word in _WORD.finditer(text, begin):
        if word.end() > at:
            return min(word.start(), at)
    return at


def _messages_in_json(text: str) -> list[Any] | None:
    """The messages of a text that is JSON of them."""
    if (text.lstrip()[:1], text.rstrip()[-1:]) not in (("[", "]"), ("{", "}")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    items = value if isinstance(value, list) else [value]
    return items if all(isinstance(each, dict) and ("role" in each or "from" in each) for each in items) else None


def _holds_chat(value: object) -> bool:
    items: Any = _messages_in_json(value) if isinstance(value, str) else value
    if not isinstance(items, (list, tuple, np.ndarray)) or len(items) == 0:
        return False
    return all(isinstance(each, Mapping) and ("role" in each or "from" in each) for each in items)


def _message(item: Mapping[str, Any], location: object, knows_role: Callable[[str], bool]) -> Message:
    """A message with the keys that templates read, and `train` if it is not to be trained on."""
    flags = {name: item[name] for name in FLAGS if item.get(name) is not None}
    if any(flag not in (0, 1) for flag in flags.values()):
        raise DataError(
            f"{location} has a message that is partly trained on",
            got=", ".join(f"{name}={flag!r}" for name, flag in flags.items()),
            expected="weight 0 or 1, train or loss false or true",
        )
    message = _speech({name: value for name, value in item.items() if name not in FLAGS}, location, knows_role)
    return {**message, "train": False} if not all(flags.values()) else message


def _speech(item: Mapping[str, Any], location: object, knows_role: Callable[[str], bool]) -> Message:
    if _CALL in (item.get("from"), item.get("role")):
        return _tool_call({}, item.get("value", item.get("content")), location)
    role, content = _role(item, location, knows_role), item.get("content", item.get("value"))
    if item.get(_CALL) and not item.get("tool_calls"):
        rest = {name: value for name, value in item.items() if name != _CALL}
        return _tool_call({**rest, "role": role, "content": content}, item[_CALL], location)
    # A reply may be calls or thoughts alone, and a content a list of parts.
    has_more = any(item.get(name) for name in ("tool_calls", *_THOUGHTS))
    content = content.tolist() if isinstance(content, np.ndarray) else content
    if not (isinstance(content, (str, list, tuple)) or (content is None and has_more)):
        raise DataError(f"{location} holds a message without role or content", got=str(dict(item))[:80])
    if isinstance(content, (list, tuple)) and all(isinstance(part, Mapping) for part in content):
        # Templates for text alone leave parts out, or write them as a list.
        is_text = all(part.get("type", "text") == "text" and isinstance(part.get("text"), str) for part in content)
        content = "".join(part["text"] for part in content) if is_text else content
    return {**item, "role": role, "content": content}


def _role(item: Mapping[str, Any], location: object, knows_role: Callable[[str], bool]) -> str:
    """The role of a speaker; a name that is neither usual nor one of the template's is refused."""
    role, speaker = item.get("role"), item.get("from")
    name = speaker if role is None else role
    if not isinstance(name, str):
        raise DataError(f"{location} holds a message without role or content", got=str(dict(item))[:80])
    if role is not None and (name in _STANDARD_ROLES or knows_role(name)):
        return name
    found = _ROLES.get(name.lower(), name if knows_role(name) else None)
    if found is None:
        raise DataError(
            f"{location} has an unknown speaker",
            got=f"{name!r}",
            expected=f"a role that the chat template names, or one of {', '.join(_ROLES)}, {_CALL}",
            fix=f"{nearest(name, _ROLES)}",
        )
    return found


def _tool_call(message: Mapping[str, Any], value: Any, location: object) -> Message:
    """A call of a function, which is the assistant's."""
    try:
        call = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        call = None
    calls = call if isinstance(call, list) else [call]
    if not calls or not all(isinstance(each, Mapping) and "name" in each for each in calls):
        expected = "JSON with name and arguments, or a list of these"
        raise DataError(f"{location} has a {_CALL} that cannot be read", got=str(value)[:60], expected=expected)
    return {
        "role": "assistant",
        "content": None,
        **message,
        "tool_calls": [{"type": "function", "function": dict(each)} for each in calls],
    }


def _lone_surrogate(value: Any) -> str | None:
    """The first half of a surrogate pair in a text, or in those of a value."""
    if isinstance(value, str):
        if value.isascii():
            return None
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
        return None
    parts: Any = ()
    if isinstance(value, Mapping):
        parts = (*value, *value.values())
    elif isinstance(value, (list, tuple)):
        parts = value
    return next((found for found in map(_lone_surrogate, parts) if found is not None), None)
