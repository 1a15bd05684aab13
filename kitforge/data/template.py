"""Conversations as tokens: the template that came with a tokenizer, in a sandbox, or a plain one. Knows no training.

What people and models said is marked while the template runs, so that no content can pass for a special token and it
is known which tokens are a reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from kitforge.data.extras import load_extra
from kitforge.data.huggingface_tokenizer import HuggingFaceTokenizer
from kitforge.data.tokens import Tokenizer
from kitforge.foundation.errors import DataError

# {"role": ..., "content": ...} and whatever else a template reads of it.
Message = Mapping[str, Any]

# Private characters that enclose content; Unicode gives them no meaning.
_BEGIN, _END, _BEGIN_REPLY, _END_REPLY = "\ue0f0", "\ue0f1", "\ue0f2", "\ue0f3"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}-{_END_REPLY}]*){_END}|{_BEGIN_REPLY}([^{_BEGIN}-{_END_REPLY}]*){_END_REPLY}")
_MARK = re.compile(f"[{_BEGIN}-{_END_REPLY}]")
_SPEAKERS = {"user": "Human", "assistant": "Assistant"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Tokens in a row that are either all of a reply, its end included, or none."""

    tokens: tuple[int, ...]
    is_reply: bool


@final
class ChatTemplate:
    """Turns messages into tokens. `source` is Jinja; None stands for a plain text of "\\n\\nHuman: ..." and
    "\\n\\nAssistant: ...", in which every reply ends with the tokenizer's end token."""

    def __init__(self, tokenizer: Tokenizer, source: str | None, special_tokens: Mapping[str, int]) -> None:
        self._tokenizer = tokenizer
        self._special = dict(special_tokens)
        spelt = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._spelt = re.compile(f"({'|'.join(spelt)})") if spelt else None
        self._template = None if source is None else _sandboxed(source)

    def turns(self, messages: Sequence[Message], *, opens_reply: bool = False) -> list[Turn]:
        """The conversation in turns; `opens_reply` adds what comes before the next reply. Raises DataError for
        messages that the template refuses or rewrites."""
        marked = self._render([_marked(message) for message in messages], opens_reply)
        turns: list[Turn] = []
        after, at = False, 0
        for found in _MARKED.finditer(marked):
            self._add_frame(turns, marked[at : found.start()], after)
            is_reply = found.group(2) is not None
            tokens = self._tokenizer.encode(found.group(2) if is_reply else found.group(1))
            turns.append(Turn(tokens=tuple(tokens), is_reply=is_reply))
            after, at = is_reply, found.end()
        self._add_frame(turns, marked[at:], after)
        if _MARK.search(_MARKED.sub("", marked)):
            raise DataError("the chat template takes a message apart", fix="give the conversations as texts instead")
        return turns

    def tokens(self, messages: Sequence[Message], *, opens_reply: bool = False) -> list[int]:
        """The conversation as tokens."""
        return [token for turn in self.turns(messages, opens_reply=opens_reply) for token in turn.tokens]

    def _add_frame(self, turns: list[Turn], text: str, after_reply: bool) -> None:
        """What the template itself writes. The end token behind a reply belongs to the reply."""
        tokens = self._encode(text)
        if after_reply:
            has_end = bool(tokens) and tokens[0] in self._tokenizer.eos_ids
            end, tokens = (tokens[:1], tokens[1:]) if has_end else ([self._tokenizer.eos_id], tokens)
            turns.append(Turn(tokens=tuple(end), is_reply=True))
        if tokens:
            turns.append(Turn(tokens=tuple(tokens), is_reply=False))

    def _encode(self, text: str) -> list[int]:
        """Tokens of a text in which special tokens may be spelt."""
        pieces = [text] if self._spelt is None else self._spelt.split(text)
        tokens: list[int] = []
        for piece in filter(None, pieces):
            tokens += [self._special[piece]] if piece in self._special else self._tokenizer.encode(piece)
        return tokens

    def _render(self, messages: Sequence[Message], opens_reply: bool) -> str:
        if self._template is None:
            lines = [f"\n\n{_speaker(message)}: {message['content']}" for message in messages]
            return "".join(lines) + ("\n\nAssistant: " if opens_reply else "")
        known = {number: text for text, number in self._special.items()}
        ends = {
            name: known.get(number, "")
            for name, number in (("bos_token", self._tokenizer.bos_id), ("eos_token", self._tokenizer.eos_id))
            if number is not None
        }
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=opens_reply, **ends))
        except Exception as error:  # noqa: BLE001 (a template is data, and may fail in any way)
            raise DataError("the chat template cannot write this conversation", got=error) from None


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The template that came with a tokenizer, or the plain one."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return ChatTemplate(tokenizer, tokenizer.chat_template, tokenizer.special_tokens)
    return ChatTemplate(tokenizer, None, {})


def _marked(message: Message) -> dict[str, Any]:
    content = message["content"]
    if _MARK.search(content):
        raise DataError("a message holds a private character that marks its ends", got=repr(content[:60]))
    begin, end = (_BEGIN_REPLY, _END_REPLY) if message["role"] == "assistant" else (_BEGIN, _END)
    return {**message, "content": f"{begin}{content}{end}"}


def _speaker(message: Message) -> str:
    role = str(message["role"])
    return _SPEAKERS.get(role, role.capitalize())


def _sandboxed(source: str) -> Any:
    """A template that can neither reach attributes of Python nor change what it is given."""
    sandbox = load_extra("jinja2.sandbox", needed_for="a chat template", extra="transformers")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except Exception as error:  # noqa: BLE001 (a template is data, and may fail in any way)
        raise DataError("the tokenizer's chat template cannot be read", got=error) from None


def _refuse(message: str) -> None:
    raise DataError(message)
