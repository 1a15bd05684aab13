"""Datasets of conversations, preference pairs and prompts, in the column formats of common projects.

Read are TRL's types (language modelling, prompt-completion, preference with or without a prompt of its own, unpaired
preference, prompt-only), each as text, as chat messages or as tokens; Alpaca's and ShareGPT's columns; and dialogues
spelt "\\n\\nHuman: ... \\n\\nAssistant: ...", as in hh-rlhf. Other names are mapped by `columns`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.continuation import encode_completion
from kitforge.data.document_shard import RecordShard, fingerprint_of
from kitforge.data.source import open_rows
from kitforge.data.template import ChatTemplate, Message
from kitforge.data.tokenizer_protocol import Tokenizer, document_frame
from kitforge.foundation.errors import DataError, nearest
from kitforge.foundation.log import logger

# Text, messages or tokens.
Said = str | Sequence[Message] | Sequence[int]

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant", "human": "user", "gpt": "assistant", "observation": "tool"}
_CALL = "function_call"  # as ShareGPT has it, with JSON of name and arguments as its value
_LEAVE_OUT = "leave such rows out, with data.on_invalid=drop"
_FORMAT = 2  # changes with what a row becomes, so that no older cache is read
_log = logger(__name__)
Row = TypeVar("Row")
ExampleKind = Literal["demonstrations", "pairs", "unpaired"]
# Columns that chat templates read besides messages: their type, and its name in errors.
_INPUTS: tuple[tuple[str, type, str], ...] = (
    ("tools", list, "a list of JSON schemas of functions"),
    ("chat_template_kwargs", dict, "a mapping, such as {'enable_thinking': false}"),
)
# Columns in which something is said.
_SAID = ("text", "messages", "prompt", "completion", "chosen", "rejected")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedExample:
    """Tokens of a text; `loss_mask` is true for the tokens that the loss counts. From a cache both are arrays."""

    tokens: Sequence[int] | NDArray[np.integer[Any]]
    loss_mask: Sequence[bool] | NDArray[np.bool_]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two responses to one prompt, of which the first was preferred."""

    chosen: TokenizedExample
    rejected: TokenizedExample
    margin: float = 0.0
    source: str = ""  # which collection it is from, for separate figures


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedExample:
    """One response that was found good or bad."""

    response: TokenizedExample
    is_desirable: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExample:
    """A prompt for the policy; the rewards get all columns of its row."""

    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None  # of which the tokens are; None where it is no chat
    inputs: Mapping[str, Any] = field(default_factory=dict)  # the other variables of the chat template


@final
@dataclass(slots=True, kw_only=True)
class ReadReport:
    """What became of rows: how many there are, how many were left out and the first reason, and the first row of which
    a column was not read."""

    num_rows: int = 0
    num_refused: int = 0
    first_refused: str = ""
    unread: str = ""

    def __add__(self, other: ReadReport) -> ReadReport:
        return ReadReport(
            num_rows=self.num_rows + other.num_rows,
            num_refused=self.num_refused + other.num_refused,
            first_refused=self.first_refused or other.first_refused,
            unread=self.unread or other.unread,
        )

    def check(self, spec: object) -> None:
        """Warn of dropped rows. Raises DataError if no row is left."""
        if self.num_rows == 0:
            name = spec if isinstance(spec, (str, os.PathLike)) else "the data"
            raise DataError(f"there are no rows in {name}", expected="at least one")
        if self.num_refused == self.num_rows:
            raise DataError(self.first_refused)
        if self.num_refused:
            _log.warning(
                "%d of %d rows cannot be used and are left out; the first: %s",
                self.num_refused,
                self.num_rows,
                self.first_refused,
            )
        if self.unread:
            _log.warning(
                "%s beside prompt and completion: the completion is trained on, and the other columns are ignored",
                self.unread,
            )


@final
class ChatDatasetReader:
    """Reads rows into tokens. `columns` maps a name of ours to the one that the rows have."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        columns: Mapping[str, str] | None = None,
        on_invalid: Literal["refuse", "drop"] = "refuse",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.columns = dict(columns or {})
        self.on_invalid = on_invalid

    def with_columns(self, columns: Mapping[str, str]) -> ChatDatasetReader:
        """The same reader for rows with other names of columns."""
        return ChatDatasetReader(self._tokenizer, self._template, columns, self.on_invalid)

    def demonstrations(self, spec: object) -> Iterator[TokenizedExample]:
        """Texts, conversations, or completions of prompts."""
        return self._each(spec, self._demonstration)

    def pairs(self, spec: object) -> Iterator[PreferencePair]:
        """A preferred and a rejected response to each prompt."""
        return self._each(spec, self._pair)

    def unpaired(self, spec: object) -> Iterator[UnpairedExample]:
        """Responses with a verdict each."""
        return self._each(spec, self._unpaired)

    def prompts(self, spec: object) -> Iterator[PromptExample]:
        """The prompts; for pairs without a prompt column, the common beginning of both responses."""
        return self._each(spec, self._question)

    def shard(
        self, kind: ExampleKind, shard: RecordShard, report: ReadReport
    ) -> Iterator[TokenizedExample | PreferencePair | UnpairedExample]:
        """The rows of one shard; what becomes of them is counted in `report`."""
        reads: dict[
            ExampleKind, Callable[[dict[str, Any], object], TokenizedExample | PreferencePair | UnpairedExample]
        ] = {
            "demonstrations": self._demonstration,
            "pairs": self._pair,
            "unpaired": self._unpaired,
        }
        return self._read(shard, reads[kind], report)

    def fingerprint(self, kind: ExampleKind) -> str:
        """Equal for readers that make the same of the same rows."""
        tokens = (self._tokenizer.fingerprint, self._template.fingerprint)
        return fingerprint_of("dialogues", _FORMAT, kind, *tokens, sorted(self.columns.items()), self.on_invalid)

    def _each(self, spec: object, read: Callable[[dict[str, Any], object], Row]) -> Iterator[Row]:
        """Every parsed row; invalid ones are refused, or dropped and counted."""
        report = ReadReport()
        for shard in open_rows(spec):
            yield from self._read(shard, read, report)
        report.check(spec)

    def _read(
        self, shard: RecordShard, read: Callable[[dict[str, Any], object], Row], report: ReadReport
    ) -> Iterator[Row]:
        for location, row in _rows(shard, self.columns):
            report.num_rows += 1
            try:
                example = read(row, location)
            except DataError as error:
                if self.on_invalid == "refuse":
                    raise
                report.num_refused += 1
                report.first_refused = report.first_refused or str(error)
                continue
            if not report.unread and row.get("completion") is not None:
                others = [name for name in ("messages", "text") if row.get(name) is not None]
                report.unread = f"{location} has {' and '.join(others)}" if others else ""
            yield example

    def _demonstration(self, row: dict[str, Any], location: object) -> TokenizedExample:
        others = [name for name in ("messages", "text") if row.get(name) is not None]
        if row.get("completion") is None and others:
            said = self._text_or_messages(row, others[0], location)
            if not said:
                raise DataError(f"{location} has an empty {others[0]}", expected="at least one token", fix=_LEAVE_OUT)
            return self._full_sequence(said, self._inputs(row, location), location)
        return self._prompt_completion(row, location)

    def _pair(self, row: dict[str, Any], location: object) -> PreferencePair:
        prompt, chosen, rejected = self._pair_parts(row, location)
        if chosen == rejected:
            raise DataError(f"{location} prefers a response to itself", fix=_LEAVE_OUT)
        inputs = self._inputs(row, location)
        return PreferencePair(
            chosen=self._response(prompt, chosen, inputs, location),
            rejected=self._response(prompt, rejected, inputs, location),
            margin=_number(row, "margin", location),
            source=str(row.get("source", "")),
        )

    def _pair_parts(self, row: Mapping[str, Any], location: object) -> tuple[Said, Said, Said]:
        """The prompt of a pair and its responses."""
        chosen, rejected = (
            self._text_or_messages(row, "chosen", location),
            self._text_or_messages(row, "rejected", location),
        )
        if row.get("prompt") is None or (_is_conversation(chosen) and _is_conversation(rejected)):
            prompt, chosen, rejected = _common_prompt(chosen, rejected)
            self._check_prompt(row, prompt, location)
            return prompt, chosen, rejected
        return self._prompt(row, location), chosen, rejected

    def _unpaired(self, row: dict[str, Any], location: object) -> UnpairedExample:
        label = _required(row, "label", location)
        if label not in (True, False):
            raise DataError(f"{location} has no verdict", got=f"label {label!r}", expected="true or false")
        return UnpairedExample(response=self._prompt_completion(row, location), is_desirable=bool(label))

    def _prompt_completion(self, row: Mapping[str, Any], location: object) -> TokenizedExample:
        """The prompt of a row with its completion, which as in UltraFeedback may begin with the prompt's messages."""
        completion, prompt = self._text_or_messages(row, "completion", location), self._prompt(row, location)
        if _is_conversation(completion):
            replies = (number for number, each in enumerate(completion) if each["role"] == "assistant")
            length = next(replies, len(completion))
            prompt, completion = completion[:length], completion[length:]
            self._check_prompt(row, prompt, location)
        return self._response(prompt, completion, self._inputs(row, location), location)

    def _check_prompt(self, row: Mapping[str, Any], opening: Said, location: object) -> None:
        """Raise DataError where a row has a prompt that the messages before its responses do not hold."""
        if row.get("prompt") is None:
            return
        prompt = self._prompt(row, location)
        if isinstance(prompt, str):
            is_held = any(
                str(each["content"]).strip() == prompt.strip() for each in opening if isinstance(each, Mapping)
            )
        else:
            is_held = list(opening[: len(prompt)]) == list(prompt)
        if not is_held:
            raise DataError(
                f"{location} has responses to another prompt than its own",
                got=f"{str(prompt)[:60]!r} beside {str(opening)[:60]!r}",
                expected="responses without a prompt, or with that one",
                fix=_LEAVE_OUT,
            )

    def _question(self, row: dict[str, Any], location: object) -> PromptExample:
        has_pair = row.get("chosen") is not None and row.get("rejected") is not None
        opening = self._pair_parts(row, location)[0] if has_pair else self._prompt(row, location)
        inputs = self._inputs(row, location)
        tokens = self._prompt_tokens(opening, inputs)
        if not opening or not tokens:
            raise DataError(f"{location} has an empty prompt", expected="at least one token", fix=_LEAVE_OUT)
        messages = tuple(opening) if _is_chat(opening) else None
        return PromptExample(tokens=tuple(tokens), columns=row, messages=messages, inputs=inputs)

    def _prompt(self, row: Mapping[str, Any], location: object) -> Said:
        return self._text_or_messages(row, "prompt", location)

    def _text_or_messages(self, row: Mapping[str, Any], name: str, location: object) -> Said:
        value = _required(row, name, location)
        if isinstance(value, str):
            return messages_of(value) if _TURN.match(value) else value
        items = list(value) if isinstance(value, (list, tuple)) else None
        if items is not None and all(isinstance(item, Mapping) for item in items):
            return [_message(item, location) for item in items]
        if items is not None and all(isinstance(item, int) for item in items):
            return items
        raise DataError(
            f"{location} cannot be read in column {name!r}",
            got=f"{type(value).__name__} {str(value)[:60]!r}",
            expected="text, a list of messages with role and content, or a list of tokens",
        )

    def _inputs(self, row: Mapping[str, Any], location: object) -> dict[str, Any]:
        """What the chat template is given beside the messages: the columns tools and chat_template_kwargs, each of
        which may be spelt as JSON."""
        inputs: dict[str, Any] = {}
        for name, kind, expected in _INPUTS:
            value: Any = row.get(name)
            if isinstance(value, str):
                try:
                    value = json.loads(value or "null")
                except ValueError:
                    value = row[name]
            members: Any = value if kind is list and isinstance(value, list) else []
            if not isinstance(value, kind | None) or not all(isinstance(each, dict) for each in members):
                raise DataError(f"{location} cannot be read in column {name!r}", got=str(value)[:60], expected=expected)
            # Tables fill in what other rows have.
            if isinstance(value, dict):
                value = {key: each for key, each in value.items() if each is not None}
            inputs[name] = value or None
        return inputs

    def _full_sequence(self, said: Said, inputs: Mapping[str, Any], location: object) -> TokenizedExample:
        """Mark every token of a plain text as trained, and in a conversation the assistant's replies."""
        if not _is_chat(said):
            before, after = document_frame(self._tokenizer) if isinstance(said, str) else ([], [self._tokenizer.eos_id])
            text = self._tokenizer.encode(said) if isinstance(said, str) else cast(Sequence[int], said)
            tokens = (*before, *map(int, text), *after)
            return TokenizedExample(tokens=tokens, loss_mask=(True,) * len(tokens))
        chat = _with_contents(self._template.training, said, **inputs)
        loss_mask = chat.loss_mask()
        if not any(loss_mask):
            raise DataError(f"{location} has nothing to learn", got="no reply", expected="a message of the assistant")
        return TokenizedExample(tokens=chat.tokens, loss_mask=loss_mask)

    def _response(
        self, prompt: Said, completion: Said, inputs: Mapping[str, Any], location: object
    ) -> TokenizedExample:
        if not completion:
            raise DataError(f"{location} has an empty response", expected="at least one token", fix=_LEAVE_OUT)
        if not _is_chat(prompt) and not _is_chat(completion):
            said = cast(str | Sequence[int], prompt), cast(str | Sequence[int], completion)
            opening, completion_tokens = encode_completion(self._tokenizer, *said)
            completion_tokens.append(self._tokenizer.eos_id)
            return TokenizedExample(
                tokens=(*opening, *completion_tokens),
                loss_mask=(False,) * len(opening) + (True,) * len(completion_tokens),
            )
        if not isinstance(prompt, str) and not _is_chat(prompt):
            raise DataError(f"{location} has messages beside tokens", expected="a prompt of text or messages")
        # A plain text next to a chat is a message of its speaker.
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        replies = completion if _is_chat(completion) else [{"role": "assistant", "content": completion}]
        if not isinstance(completion, str) and not _is_chat(completion):
            raise DataError(f"{location} has tokens beside messages", expected="a response of text or messages")
        chat = _with_contents(self._template.training, [*asked, *replies], **inputs)
        # Replies within the prompt are no answer to it.
        loss_mask = chat.loss_mask(first_message=len(asked))
        if not any(loss_mask):
            raise DataError(f"{location}: the chat template leaves the response out", fix=_LEAVE_OUT)
        return TokenizedExample(tokens=chat.tokens, loss_mask=loss_mask)

    def _prompt_tokens(self, prompt: Said, inputs: Mapping[str, Any]) -> list[int]:
        if _is_chat(prompt):
            return _with_contents(self._template.tokens, prompt, opens_reply=True, **inputs)
        return encode_completion(self._tokenizer, cast(str | Sequence[int], prompt), ())[0]


def iter_texts(spec: object, columns: Mapping[str, str] | None = None) -> Iterator[str]:
    """Everything that is said in rows of any kind, messages one by one, for training a tokenizer."""
    for _, row in (each for shard in open_rows(spec) for each in _rows(shard, columns or {})):
        for value in (row.get(name) for name in _SAID):
            if isinstance(value, str):
                yield value
            elif isinstance(value, (list, tuple)):
                parts = (part.get("content", part.get("value")) for part in value if isinstance(part, Mapping))
                yield from (part for part in parts if isinstance(part, str))


def _rows(shard: RecordShard, columns: Mapping[str, str]) -> Iterator[tuple[object, dict[str, Any]]]:
    """Every row with normalized column names, and its location."""
    for location, row in shard.rows():
        if not isinstance(row, Mapping):
            raise DataError(f"{location} is no row", got=type(row).__name__, expected="a mapping of columns")
        renamed = {name: row[own] for name, own in columns.items() if own in row}
        yield location, to_standard_columns({**row, **renamed})


def to_standard_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the columns of Alpaca (instruction, input, output) or ShareGPT (conversations) under our names."""
    columns = dict(row)
    if "instruction" in columns and "prompt" not in columns:
        extra = columns.get("input") or ""
        columns["prompt"] = f"{columns['instruction']}\n\n{extra}" if extra else columns["instruction"]
        if "output" in columns:
            columns.setdefault("completion", columns["output"])
    if "conversations" in columns:
        # Next to a chosen and a rejected reply, the conversation is their prompt.
        columns.setdefault("prompt" if "chosen" in columns else "messages", columns.pop("conversations"))
        for name in ("chosen", "rejected"):
            if isinstance(columns.get(name), Mapping):
                columns[name] = [columns[name]]
    return columns


def messages_of(text: str) -> list[Message]:
    """The messages of a dialogue that is spelt "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    _, *parts = _TURN.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": content.strip()} for speaker, content in pairs]


def _message(item: Mapping[str, Any], location: object) -> Message:
    """A message with the keys that templates read."""
    if _CALL in (item.get("from"), item.get("role")):
        return _tool_call(item, location)
    role = item.get("role", _ROLES.get(str(item.get("from")), item.get("from")))
    content = item.get("content", item.get("value"))
    # A reply may be calls or thoughts alone, and a content a list of parts.
    has_more = any(item.get(name) for name in ("tool_calls", "reasoning_content", "thinking", "reasoning"))
    if not isinstance(role, str) or not (isinstance(content, (str, list, tuple)) or (content is None and has_more)):
        raise DataError(f"{location} holds a message without role or content", got=str(dict(item))[:80])
    if not isinstance(content, str) and content and all(isinstance(part, Mapping) for part in content):
        # Templates for text alone leave parts out, or write them as a list.
        is_text = all(part.get("type", "text") == "text" and isinstance(part.get("text"), str) for part in content)
        content = "".join(part["text"] for part in content) if is_text else content
    return {**item, "role": role, "content": content}


def _tool_call(item: Mapping[str, Any], location: object) -> Message:
    """A call of a function, which is the assistant's."""
    value = item.get("value", item.get("content"))
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
        "tool_calls": [{"type": "function", "function": dict(each)} for each in calls],
    }


def _with_contents(write: Callable[..., Row], messages: Sequence[Message], **inputs: Any) -> Row:
    """The messages as the template reads them: null contents become empty texts."""
    try:
        return write(messages, **inputs)
    except DataError:
        if all(each.get("content") is not None for each in messages):
            raise
        return write(
            [each if each.get("content") is not None else {**each, "content": ""} for each in messages], **inputs
        )


def _common_prompt(chosen: Said, rejected: Said) -> tuple[Said, Said, Said]:
    """The common prompt of two responses and the rest of each, split at whole messages, words or tokens."""
    length = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        length += 1
    if isinstance(chosen, str):
        # A common first word belongs to the responses, not to the prompt.
        length = chosen.rfind(" ", 0, length) + 1 if length < min(len(chosen), len(rejected)) else length
    return chosen[:length], chosen[length:], rejected[length:]


def _is_chat(said: Said) -> TypeGuard[Sequence[Message]]:
    return not isinstance(said, str) and bool(said) and isinstance(said[0], Mapping)


def _is_conversation(completion: Said) -> TypeGuard[Sequence[Message]]:
    """Whether it is messages that hold the prompt too, and not what follows one."""
    return _is_chat(completion) and completion[0]["role"] in ("system", "user")


def _required(row: Mapping[str, Any], name: str, location: object) -> Any:
    if name in row and row[name] is None:
        expected = "text, messages or tokens" if name in _SAID else "a value"
        raise DataError(f"{location} has null in column {name!r}", expected=expected, fix=_LEAVE_OUT)
    if name not in row:
        raise DataError(
            f"{location} has no column {name!r}",
            got=f"columns {', '.join(map(str, row))}",
            expected=name,
            fix=f"data.columns.{name}=NAME; {nearest(name, map(str, row))}",
        )
    return row[name]


def _number(row: Mapping[str, Any], name: str, location: object) -> float:
    value = 0.0 if row.get(name) is None else row[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"{location} has a {name} that is no number", got=repr(value), expected="a number")
    return float(value)
