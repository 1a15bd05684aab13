"""Rows of conversations, preferences and prompts, whatever project's columns they have. Knows no training.

Read are TRL's types (language modelling, prompt-completion, preference with or without a prompt of its own, unpaired
preference, prompt-only), each as text, as chat messages or as tokens; Alpaca's and ShareGPT's columns; and dialogues
spelt "\\n\\nHuman: ... \\n\\nAssistant: ...", as in hh-rlhf. Other names are mapped by `columns`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, final

from kitforge.data.source import open_rows
from kitforge.data.template import ChatTemplate, Message
from kitforge.data.tokens import Tokenizer, document_frame
from kitforge.foundation.errors import DataError, nearest
from kitforge.foundation.log import logger

# Text, messages or tokens.
Said = str | Sequence[Message] | Sequence[int]

_TURN = re.compile(r"\n\n(Human|Assistant): ?")
_ROLES = {"Human": "user", "Assistant": "assistant", "human": "user", "gpt": "assistant"}
_LEAVE_OUT = "leave such rows out, with data.unusable=drop"
_log = logger(__name__)
Row = TypeVar("Row")
# Columns in which something is said.
_SAID = ("text", "messages", "prompt", "completion", "chosen", "rejected")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """Tokens of a text; `learnt` marks those that a model is to write itself."""

    tokens: tuple[int, ...]
    learnt: tuple[bool, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two responses to one prompt, of which the first was preferred."""

    chosen: Response
    rejected: Response
    margin: float = 0.0
    source: str = ""  # which collection it is from, for separate figures


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One response that was found good or bad."""

    response: Response
    is_desirable: bool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a policy answers; all columns of its row go on to the rewards."""

    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)


@final
class DialogueReader:
    """Reads rows into tokens. `columns` maps a name of ours to the one that the rows have."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        columns: Mapping[str, str] | None = None,
        unusable: Literal["refuse", "drop"] = "refuse",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._columns = dict(columns or {})
        self._drops = unusable == "drop"

    def demonstrations(self, spec: object) -> Iterator[Response]:
        """Texts, conversations, or completions of prompts."""
        return self._each(spec, self._demonstration)

    def pairs(self, spec: object) -> Iterator[Pair]:
        """A preferred and a rejected response to each prompt."""
        return self._each(spec, self._pair)

    def judged(self, spec: object) -> Iterator[Judged]:
        """Responses with a verdict each."""
        return self._each(spec, self._verdict)

    def prompts(self, spec: object) -> Iterator[Prompt]:
        """What is to be answered; of pairs without a prompt of their own, what both begin with."""
        return self._each(spec, self._question)

    def _each(self, spec: object, read: Callable[[dict[str, Any], object], Row]) -> Iterator[Row]:
        """What is read of every row; those that mean nothing are refused, or left out and counted."""
        num_rows, refused = 0, []
        for place, row in _rows(spec, self._columns):
            num_rows += 1
            try:
                found = read(row, place)
            except DataError as error:
                if not self._drops:
                    raise
                refused.append(error)
                continue
            yield found
        if len(refused) == num_rows:
            raise refused[0]
        if refused:
            _log.warning(
                "%d of %d rows cannot be used and are left out; the first: %s", len(refused), num_rows, refused[0]
            )

    def _demonstration(self, row: dict[str, Any], place: object) -> Response:
        for name in ("messages", "text"):
            if name in row:
                return self._whole(self._said(row, name, place), place)
        return self._response(self._prompt(row, place), self._said(row, "completion", place), place)

    def _pair(self, row: dict[str, Any], place: object) -> Pair:
        chosen, rejected = self._said(row, "chosen", place), self._said(row, "rejected", place)
        if chosen == rejected:
            raise DataError(f"{place} prefers a response to itself", fix=_LEAVE_OUT)
        prompt: Said
        if "prompt" in row:
            prompt = self._prompt(row, place)
        else:
            prompt, chosen, rejected = _shared(chosen, rejected)
        return Pair(
            chosen=self._response(prompt, chosen, place),
            rejected=self._response(prompt, rejected, place),
            margin=_number(row, "margin", place),
            source=str(row.get("source", "")),
        )

    def _verdict(self, row: dict[str, Any], place: object) -> Judged:
        label = _required(row, "label", place)
        if label not in (True, False):
            raise DataError(f"{place} has no verdict", got=f"label {label!r}", expected="true or false")
        completion = self._said(row, "completion", place)
        return Judged(response=self._response(self._prompt(row, place), completion, place), is_desirable=bool(label))

    def _question(self, row: dict[str, Any], place: object) -> Prompt:
        if "prompt" not in row and "chosen" in row and "rejected" in row:
            opening, _, _ = _shared(self._said(row, "chosen", place), self._said(row, "rejected", place))
        else:
            opening = self._prompt(row, place)
        tokens = self._prompt_tokens(opening)
        if not opening or not tokens:
            raise DataError(f"{place} has an empty prompt", expected="at least one token", fix=_LEAVE_OUT)
        return Prompt(tokens=tuple(tokens), columns=row)

    def _prompt(self, row: Mapping[str, Any], place: object) -> Said:
        return self._said(row, "prompt", place)

    def _said(self, row: Mapping[str, Any], name: str, place: object) -> Said:
        value = _required(row, name, place)
        if isinstance(value, str):
            return messages_of(value) if _TURN.match(value) else value
        items = list(value) if isinstance(value, (list, tuple)) else []
        if items and all(isinstance(item, Mapping) for item in items):
            return [_message(item, place) for item in items]
        if items and all(isinstance(item, int) for item in items):
            return items
        raise DataError(
            f"{place} cannot be read in column {name!r}",
            got=f"{type(value).__name__} {str(value)[:60]!r}",
            expected="text, a list of messages with role and content, or a list of tokens",
        )

    def _whole(self, said: Said, place: object) -> Response:
        """All of a text is learnt; of a conversation the replies."""
        if not _is_chat(said):
            before, after = document_frame(self._tokenizer) if isinstance(said, str) else ([], [self._tokenizer.eos_id])
            tokens = (*before, *self._plain(said), *after)
            return Response(tokens=tokens, learnt=(True,) * len(tokens))
        chat = self._template.training(said)  # type: ignore[arg-type]
        learnt = chat.loss_mask()
        if not any(learnt):
            raise DataError(f"{place} has nothing to learn", got="no reply", expected="a message of the assistant")
        return Response(tokens=chat.tokens, learnt=learnt)

    def _response(self, prompt: Said, completion: Said, place: object) -> Response:
        if not completion:
            raise DataError(f"{place} has an empty response", expected="at least one token", fix=_LEAVE_OUT)
        if not _is_chat(prompt):
            opening = self._prompt_tokens(prompt)
            answer = [*self._plain(completion), self._tokenizer.eos_id]
            return Response(tokens=(*opening, *answer), learnt=(False,) * len(opening) + (True,) * len(answer))
        replies = completion if _is_chat(completion) else [{"role": "assistant", "content": completion}]
        chat = self._template.training([*prompt, *replies])
        # Replies within the prompt are no answer to it.
        learnt = chat.loss_mask(first_message=len(prompt))
        if not any(learnt):
            raise DataError(f"{place}: the chat template leaves the response out", fix=_LEAVE_OUT)
        return Response(tokens=chat.tokens, learnt=learnt)

    def _prompt_tokens(self, prompt: Said) -> list[int]:
        if _is_chat(prompt):
            return self._template.tokens(prompt, opens_reply=True)  # type: ignore[arg-type]
        return self._tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else self._plain(prompt)

    def _plain(self, said: Said) -> list[int]:
        return self._tokenizer.encode(said) if isinstance(said, str) else list(said)  # type: ignore[arg-type]


def texts(spec: object, columns: Mapping[str, str] | None = None) -> Iterator[str]:
    """Everything that is said in rows of any kind, messages one by one, for training a tokenizer."""
    for _, row in _rows(spec, columns or {}):
        for value in (row.get(name) for name in _SAID):
            if isinstance(value, str):
                yield value
            elif isinstance(value, (list, tuple)):
                parts = (part.get("content", part.get("value")) for part in value if isinstance(part, Mapping))
                yield from (part for part in parts if isinstance(part, str))


def _rows(spec: object, columns: Mapping[str, str]) -> Iterator[tuple[object, dict[str, Any]]]:
    """Every row under our names, with where it stands."""
    is_empty = True
    for place, row in open_rows(spec):
        if not isinstance(row, Mapping):
            raise DataError(f"{place} is no row", got=type(row).__name__, expected="a mapping of columns")
        is_empty = False
        renamed = {name: row[own] for name, own in columns.items() if own in row}
        yield place, imported({**row, **renamed})
    if is_empty:
        name = spec if isinstance(spec, (str, os.PathLike)) else "the data"
        raise DataError(f"there are no rows in {name}", expected="at least one")


def imported(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with the columns of Alpaca (instruction, input, output) or ShareGPT (conversations) under our names."""
    found = dict(row)
    if "instruction" in found and "prompt" not in found:
        extra = found.get("input") or ""
        found["prompt"] = f"{found['instruction']}\n\n{extra}" if extra else found["instruction"]
        found.setdefault("completion", found.get("output"))
    if "conversations" in found:
        # Beside a chosen and a rejected reply the conversation is what they answer.
        found.setdefault("prompt" if "chosen" in found else "messages", found.pop("conversations"))
        for name in ("chosen", "rejected"):
            if isinstance(found.get(name), Mapping):
                found[name] = [found[name]]
    return found


def messages_of(text: str) -> list[Message]:
    """The messages of a dialogue that is spelt "\\n\\nHuman: ... \\n\\nAssistant: ..."."""
    _, *parts = _TURN.split(text)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return [{"role": _ROLES[speaker], "content": content.strip()} for speaker, content in pairs]


def _message(item: Mapping[str, Any], place: object) -> Message:
    """A message under the names that templates know."""
    role = item.get("role", _ROLES.get(str(item.get("from")), item.get("from")))
    content = item.get("content", item.get("value"))
    # A reply may be calls or thoughts alone, and a content a list of parts.
    has_more = any(item.get(name) for name in ("tool_calls", "reasoning_content", "thinking", "reasoning"))
    if not isinstance(role, str) or not (isinstance(content, (str, list, tuple)) or (content is None and has_more)):
        raise DataError(f"{place} holds a message without role or content", got=str(dict(item))[:80])
    return {**item, "role": role, "content": content}


def _shared(chosen: Said, rejected: Said) -> tuple[Said, Said, Said]:
    """The prompt that two responses begin with, and what is left of each: whole messages, whole words or tokens."""
    length = 0
    for left, right in zip(chosen, rejected, strict=False):
        if left != right:
            break
        length += 1
    if isinstance(chosen, str):
        # A word that both begin with belongs to what they differ in.
        length = chosen.rfind(" ", 0, length) + 1 if length < min(len(chosen), len(rejected)) else length
    return chosen[:length], chosen[length:], rejected[length:]


def _is_chat(said: Said) -> bool:
    return not isinstance(said, str) and bool(said) and isinstance(said[0], Mapping)


def _required(row: Mapping[str, Any], name: str, place: object) -> Any:
    if row.get(name) is None:
        raise DataError(
            f"{place} has no column {name!r}",
            got=f"columns {', '.join(map(str, row))}",
            expected=name,
            fix=f"data.columns.{name}=NAME; {nearest(name, map(str, row))}",
        )
    return row[name]


def _number(row: Mapping[str, Any], name: str, place: object) -> float:
    value = row.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DataError(f"{place} has a {name} that is no number", got=repr(value), expected="a number")
    return float(value)
