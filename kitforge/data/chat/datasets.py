"""Datasets of conversations, preference pairs and prompts, in the column formats of common projects.

Read are TRL's types (language modelling, prompt-completion, preference with or without a prompt of its own, unpaired
preference, prompt-only), each as text, as chat messages or as tokens; Alpaca's and ShareGPT's columns; and dialogues
spelt "\\n\\nHuman: ... \\n\\nAssistant: ...", as in hh-rlhf. Other names are mapped by `columns`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kitforge.data.chat.rows import (
    CONTEXT,
    LEAVE_OUT,
    MEANT,
    SAID,
    ChatRow,
    Said,
    chat_rows,
    common_prompt,
    is_chat,
    is_dialogue,
    iter_said,
    messages_of,
    with_open_end,
)
from kitforge.data.chat.template import BegunMessage, ChatTemplate, Message
from kitforge.data.document_shard import RecordShard, fingerprint_of
from kitforge.data.features import Features
from kitforge.data.source import open_rows
from kitforge.data.text.continuation import encode_completion
from kitforge.data.tokenizers.protocol import Tokenizer, document_frame
from kitforge.foundation.errors import DataError, nearest
from kitforge.foundation.log import logger
from kitforge.foundation.types import OnInvalid

_FORMAT = 5  # changes with what a row becomes, so that no older cache is read
_log = logger(__name__)
Row = TypeVar("Row")
ExampleKind = Literal["demonstrations", "pairs", "unpaired"]
# What data.columns may name for examples.
_COLUMNS = (
    *SAID,
    *MEANT,
    "margin",
    "source",
    "label",
    "instruction",
    "input",
    "output",
    "conversations",
    "rejected_response",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedExample:
    """Tokens of a text; `loss_mask` is true for the tokens that the loss counts. From a cache both are arrays."""

    tokens: Sequence[int] | NDArray[np.integer[Any]]
    loss_mask: Sequence[bool] | NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferencePair:
    """Two completions to one prompt, of which the first was preferred."""

    chosen: TokenizedExample
    rejected: TokenizedExample
    margin: float = 0.0
    source: str = ""  # which collection it is from, for separate figures


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedExample:
    """One completion that was found good or bad."""

    completion: TokenizedExample
    is_desirable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptExample:
    """A prompt for the policy; the rewards get all columns of its row."""

    tokens: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None  # of which the tokens are; None where it is not a chat
    inputs: Mapping[str, Any] = field(default_factory=dict)  # the other variables of the chat template
    teacher_tokens: tuple[int, ...] = ()  # the prompt of a teacher that reads another one; (): the same


@dataclass(slots=True, kw_only=True)
class ReadReport:
    """What became of rows: how many there are, how many were left out and the first reason, what is to be said once,
    by its kind, and which columns the rows have, if some are renamed."""

    num_rows: int = 0
    num_refused: int = 0
    first_refused: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)

    def __add__(self, other: ReadReport) -> ReadReport:
        return ReadReport(
            num_rows=self.num_rows + other.num_rows,
            num_refused=self.num_refused + other.num_refused,
            first_refused=self.first_refused or other.first_refused,
            notes={**other.notes, **self.notes},
            columns=list(dict.fromkeys([*self.columns, *other.columns])),
        )

    def check(self, spec: object, columns: Mapping[str, str]) -> None:
        """Warn of dropped rows. Raises DataError if no row is left, and for a column of `columns` that no row has."""
        if self.num_rows == 0:
            name = spec if isinstance(spec, (str, os.PathLike)) else "the data"
            raise DataError(f"there are no rows in {name}", expected="at least one")
        if self.num_refused == self.num_rows:
            raise DataError(self.first_refused)
        for name, own in columns.items():
            if own not in self.columns:
                raise DataError(
                    f"no row has the column {own!r}",
                    got=f"columns {', '.join(self.columns)}",
                    expected=f"{own}, as data.columns.{name} says",
                    fix=nearest(own, self.columns),
                )
        if self.num_refused:
            _log.warning(
                "%d of %d rows cannot be used and are left out; the first: %s",
                self.num_refused,
                self.num_rows,
                self.first_refused,
            )
        for note in self.notes.values():
            _log.warning("%s", note)


class ChatDatasetReader:
    """Reads rows into tokens. `columns` maps a name of ours to the one that the rows have."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        columns: Mapping[str, str] | None = None,
        on_invalid: OnInvalid = "refuse",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._marks = template.marks
        self.columns = dict(columns or {})
        self.on_invalid = on_invalid

    def with_columns(self, columns: Mapping[str, str]) -> ChatDatasetReader:
        """The same reader for rows with other names of columns."""
        return ChatDatasetReader(self._tokenizer, self._template, columns, self.on_invalid)

    def demonstrations(self, spec: object) -> Iterator[TokenizedExample]:
        """Texts, conversations, or completions of prompts."""
        return self._each(spec, self._demonstration)

    def demonstration(self, row: Mapping[str, Any], location: object, features: Features) -> TokenizedExample:
        """One row of these. Raises DataError where it cannot be used."""
        return self._demonstration(ChatRow(row, location, self.columns, features))

    def pairs(self, spec: object) -> Iterator[PreferencePair]:
        """A preferred and a rejected completion to each prompt."""
        return self._each(spec, self._pair)

    def unpaired(self, spec: object) -> Iterator[UnpairedExample]:
        """Completions with a verdict each."""
        return self._each(spec, self._unpaired)

    def prompts(self, spec: object) -> Iterator[PromptExample]:
        """The prompts; for pairs without a prompt column, the common beginning of both completions."""
        return self._each(spec, self._question)

    def shard(
        self, kind: ExampleKind, shard: RecordShard, report: ReadReport
    ) -> Iterator[TokenizedExample | PreferencePair | UnpairedExample]:
        """The rows of one shard; what becomes of them is counted in `report`."""
        reads = {"demonstrations": self._demonstration, "pairs": self._pair, "unpaired": self._unpaired}
        return self._read(shard, cast(Callable[[ChatRow], TokenizedExample], reads[kind]), report)

    def fingerprint(self, kind: ExampleKind) -> str:
        """Equal for readers that make the same of the same rows."""
        tokens = (self._tokenizer.fingerprint, self._template.fingerprint)
        return fingerprint_of("dialogues", _FORMAT, kind, *tokens, sorted(self.columns.items()), self.on_invalid)

    def _each(self, spec: object, read: Callable[[ChatRow], Row]) -> Iterator[Row]:
        """Every parsed row; invalid ones are refused, or dropped and counted."""
        report = ReadReport()
        for shard in open_rows(spec):
            yield from self._read(shard, read, report)
        report.check(spec, self.columns)

    def _read(self, shard: RecordShard, read: Callable[[ChatRow], Row], report: ReadReport) -> Iterator[Row]:
        if read != self._question:
            self._check_columns()
        for given, row in chat_rows(shard, self.columns):
            report.num_rows += 1
            if self.columns:
                report.columns += [str(name) for name in given if name not in report.columns]
            try:
                example = read(row)
            except DataError as error:
                if self.on_invalid == "refuse":
                    raise _located(error, row) from None
                report.num_refused += 1
                report.first_refused = report.first_refused or str(_located(error, row))
                continue
            report.notes = {**row.notes, **report.notes} if row.notes else report.notes
            yield example

    def _check_columns(self) -> None:
        """Raise DataError for a misspelt name of ours; rewards may have columns of any name."""
        for name in self.columns:
            if name not in _COLUMNS and (close := get_close_matches(name, _COLUMNS, n=1, cutoff=0.75)):
                raise DataError(
                    f"there is no column {name!r} to read",
                    got=f"data.columns.{name}={self.columns[name]}",
                    expected=", ".join(_COLUMNS),
                    fix=f"did you mean data.columns.{close[0]}?",
                )

    def _demonstration(self, row: ChatRow) -> TokenizedExample:
        others = [name for name in ("messages", "text") if row.has(name)]
        if row.has("completion") or not others:
            return self._completions(row, "completion")[0]
        said = self._said(row, others[0])
        said = row.with_context(said) if others[0] == "messages" else said
        if not said:
            raise row.refusal(f"has an empty {others[0]}", expected="at least one token")
        if is_chat(said):
            example = self._chat(said, row, 0, ())
        else:
            # Every token of a plain text is trained on.
            before, after = document_frame(self._tokenizer) if isinstance(said, str) else ([], [self._tokenizer.eos_id])
            text = self._tokenizer.encode(said) if isinstance(said, str) else cast(Sequence[int], said)
            tokens = (*before, *map(int, text), *after)
            example = TokenizedExample(tokens=tokens, loss_mask=(True,) * len(tokens))
        row.note_unread(MEANT)
        return example

    def _pair(self, row: ChatRow) -> PreferencePair:
        chosen, rejected = self._completions(row, "chosen", "rejected")
        source = str(row.values["source"]) if row.has("source") else ""
        pair = PreferencePair(chosen=chosen, rejected=rejected, margin=row.number("margin"), source=source)
        if list(chosen.tokens) == list(rejected.tokens):
            got, expected = "the same tokens as chosen and as rejected", "two that the chat template tells apart"
            raise row.refusal("prefers a completion to itself", got=got, expected=expected)
        return pair

    def _unpaired(self, row: ChatRow) -> UnpairedExample:
        label = row.required("label")
        if isinstance(label, str):
            # As tables spell it.
            label = {"true": True, "false": False, "1": True, "0": False}.get(label.strip().lower(), label)
        if label not in (True, False):
            raise row.refusal("has no verdict", got=f"label {label!r}", expected="true or false")
        return UnpairedExample(completion=self._completions(row, "completion")[0], is_desirable=bool(label))

    def _completions(self, row: ChatRow, *names: str) -> list[TokenizedExample]:
        """The completion of a row, or the chosen and the rejected one."""
        prompt, replies = self._exchange(row, *names)
        found = [self._completion(prompt, reply, row) for reply in replies]
        row.note_unread(("messages", "text", *MEANT) if row.has("completion") and len(names) == 1 else MEANT)
        return found

    def _exchange(self, row: ChatRow, *names: str) -> tuple[Said, list[Said]]:
        """The prompt of a row and the completions of these columns."""
        is_pair = len(names) == 2
        if row.has("messages") and not row.has(names[0]) and (not is_pair or row.has("rejected_response")):
            # The completion that is judged ends the conversation; in ms-swift so does the one that is preferred.
            said = self._said(row, "messages")
            if not is_chat(said) or said[-1]["role"] != "assistant":
                got = f"{said[-1]['role']} last" if is_chat(said) else "no messages"
                raise row.refusal("has no completion in its messages", got=got, expected="a reply as the last one")
            prompt, others = row.with_context(said[:-1]), [self._said(row, "rejected_response")] if is_pair else []
            return prompt, [said[-1:], *(_as_reply(each) if isinstance(each, str) else each for each in others)]
        whole = [self._said(row, name) for name in names]
        # Whether the completions are messages that hold the prompt too, and not what follows one.
        is_whole = all(is_chat(each) and each[0]["role"] in ("system", "developer", "user") for each in whole)
        prompt = [] if is_pair and not row.has("prompt") else self._prompt(row)
        if not is_whole and (row.has("prompt") or not is_pair):
            return row.with_context(prompt), [self._continued(row, name) for name in names]
        if is_pair:
            prompt, *replies = common_prompt(whole[0], whole[1], row.refusal)
        else:
            # As in UltraFeedback, a completion may begin with the messages of its prompt.
            (said,) = cast(list[Sequence[Message]], whole)
            at = next((at for at, each in enumerate(said) if each["role"] == "assistant"), len(said))
            prompt, replies = said[:at], [said[at:]]
        self._check_prompt(row, prompt)
        return row.with_context(prompt) if is_chat(prompt) else prompt, replies

    def _check_prompt(self, row: ChatRow, opening: Said) -> None:
        """Raise DataError where a row has a prompt that the messages before its completions do not hold."""
        if not row.has("prompt"):
            return
        prompt = self._prompt(row)
        if isinstance(prompt, str):
            is_held = any(
                str(each["content"]).strip() == prompt.strip() for each in opening if isinstance(each, Mapping)
            )
        else:
            is_held = list(opening[: len(prompt)]) == list(prompt)
        if not is_held:
            got = f"{str(prompt)[:60]!r} beside {str(opening)[:60]!r}"
            expected = "completions without a prompt, or with that one"
            raise row.refusal("has completions to another prompt than its own", got=got, expected=expected)

    def _question(self, row: ChatRow) -> PromptExample:
        if row.has("chosen") and row.has("rejected"):
            opening, _ = self._exchange(row, "chosen", "rejected")
        else:
            opening = self._prompt(row) if row.has("chosen") else row.with_context(self._prompt(row))
        inputs = row.inputs()
        messages = tuple(opening) if is_chat(opening) else None
        if messages is None:
            tokens, _ = encode_completion(self._tokenizer, cast(str | Sequence[int], opening), ())
        else:
            with_contents(partial(self._template.check_written, trained={}, inputs=inputs), messages)
            row.note_keys(self._template.unread_keys(messages, inputs))
            tokens = with_contents(partial(self._template.prompt, **inputs), messages)
        if not opening or not tokens:
            raise row.refusal("has an empty prompt", expected="at least one token")
        row.note_unread(CONTEXT)
        return PromptExample(tokens=tuple(tokens), columns=row.all_values, messages=messages, inputs=inputs)

    def _prompt(self, row: ChatRow) -> Said:
        return with_open_end(self._said(row, "prompt"))

    def _said(self, row: ChatRow, name: str) -> Said:
        """What a column says. Raises DataError for tokens beyond the vocabulary."""
        said = row.said(name, self._template.names_role)
        if isinstance(said, str):
            spelt = [mark for mark in self._marks if mark in said]
            if spelt:
                row.notes["marks"] = (
                    f"{row.location} spells {', '.join(spelt)} in the column {name!r}, which stay plain text: the chat "
                    "template seems to be applied already; give the rows as messages (role and content), which the "
                    "template turns into these tokens, or as lists of tokens"
                )
        elif not is_chat(said):
            wrong = [token for token in said if not 0 <= token < self._tokenizer.vocab_size]  # type: ignore[operator]
            if wrong:
                what, expected = "that the tokenizer does not know", f"0 to {self._tokenizer.vocab_size - 1}"
                fix = f"the tokenizer that the rows were made with, or {LEAVE_OUT}"
                raise row.refusal(f"has a token in column {name!r} {what}", got=wrong[0], expected=expected, fix=fix)
        return said

    def _continued(self, row: ChatRow, name: str) -> Said:
        """The completion of a column. A text behind a dialogue with an open end is the rest of that dialogue."""
        said = self._said(row, name)
        prompt: Any = row.values.get("prompt")
        asked = messages_of(prompt) if isinstance(prompt, str) and is_dialogue(prompt) else []
        if not isinstance(said, str) or not asked or asked[-1]["role"] != "assistant":
            return said
        first, *others = messages_of(prompt + said)[len(asked) - 1 :]
        return [{**first, "content": first["content"].removeprefix(asked[-1]["content"])}, *others]

    def _completion(self, prompt: Said, completion: Said, row: ChatRow) -> TokenizedExample:
        if not completion:
            raise row.refusal("has an empty completion", expected="at least one token")
        if not is_chat(prompt) and not is_chat(completion):
            said = cast(str | Sequence[int], prompt), cast(str | Sequence[int], completion)
            opening, completion_tokens = encode_completion(self._tokenizer, *said)
            completion_tokens.append(self._tokenizer.eos_id)
            if not set(completion_tokens) - set(self._tokenizer.eos_ids):
                raise row.refusal("has an empty completion", got="no token but an end", expected="one")
            return TokenizedExample(
                tokens=(*opening, *completion_tokens),
                loss_mask=(False,) * len(opening) + (True,) * len(completion_tokens),
            )
        if prompt and not isinstance(prompt, str) and not is_chat(prompt):
            raise row.refusal("has messages beside tokens", expected="a prompt of text or messages")
        # A plain text next to a chat is a message of its speaker.
        asked: list[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        replies = list(completion) if is_chat(completion) else _as_reply(completion)
        if not isinstance(completion, str) and not is_chat(completion):
            raise row.refusal("has tokens beside messages", expected="a completion of text or messages")
        # Replies within the prompt are no answer to it.
        first, opened = len(asked), asked
        if asked and isinstance(asked[-1], BegunMessage) and replies[0]["role"] == "assistant":
            first, asked, replies = first - 1, asked[:-1], [_joined(asked[-1], replies[0]), *replies[1:]]
        return self._chat([*asked, *replies], row, first, opened)

    def _chat(
        self, messages: Sequence[Message], row: ChatRow, first: int, prompt: Sequence[Message]
    ) -> TokenizedExample:
        """A conversation of which the replies from that message on are trained on; the first of them may go on with the
        last message of the prompt. Raises DataError where the template loses a part of it."""
        inputs, untrained = row.inputs(), {number for number, each in enumerate(messages) if each.get("train") is False}
        replies = [number for number, each in enumerate(messages) if number >= first and each["role"] == "assistant"]
        trained = {number: "" for number in replies if number not in untrained}
        if first < len(prompt) and first in trained:
            trained[first] = prompt[-1]["content"]
        with_contents(partial(self._template.check_written, trained=trained, inputs=inputs), messages)
        row.note_keys(self._template.unread_keys(messages, inputs))
        chat = with_contents(partial(self._template.training, prompt=prompt, **inputs), messages)
        loss_mask = chat.loss_mask(first, untrained)
        if not any(loss_mask):
            got = "no reply that is trained on" if replies else "no reply"
            raise row.refusal("has nothing to learn", got=got, expected="a message of the assistant")
        if chat.has_unmarked_end:
            row.notes["ends"] = (
                f"{row.location}: the chat template leaves the end token out of what {{% generation %}} encloses, so "
                "the model does not learn to stop; put the end token before {% endgeneration %}"
            )
        return TokenizedExample(tokens=chat.tokens, loss_mask=loss_mask)


def iter_texts(spec: object, columns: Mapping[str, str] | None = None) -> Iterator[str]:
    """Everything that is said in rows of any kind, messages one by one, for training a tokenizer."""
    for shard in open_rows(spec):
        for _, row in chat_rows(shard, columns or {}):
            yield from iter_said(row)


def _as_reply(said: Any) -> list[Message]:
    return [{"role": "assistant", "content": said}]


def _located(error: DataError, row: ChatRow) -> DataError:
    location = str(row.location)
    return error if location in str(error) else DataError(f"{location}: {error}")


def _joined(begun: Message, reply: Message) -> Message:
    """The whole reply, of which the prompt holds the beginning."""
    if not isinstance(begun["content"], str) or not isinstance(reply["content"], str | None):
        raise DataError("a message to continue is not text", got=str(begun["content"])[:60], expected="text")
    kept = {name: value for name, value in begun.items() if name != "train"}
    return {**kept, **reply, "content": begun["content"] + (reply["content"] or "")}


def with_contents(write: Callable[[Sequence[Message]], Row], messages: Sequence[Message]) -> Row:
    """The messages as the template reads them: null contents become empty texts."""
    try:
        return write(messages)
    except DataError:
        if all(each.get("content") is not None for each in messages):
            raise
        return write([each if each.get("content") is not None else {**each, "content": ""} for each in messages])
