"""Positions of the assistant's replies in a rendered conversation."""

import operator
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.chat.render import ChatRender, message_numbers, origin_of
from kitforge.data.tokenizers.protocol import AddedTokenSpan
from kitforge.foundation.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpan:
    """A reply in characters [start, stop) of a text, its end token included. `message` is its number among the
    messages; None where the template does not tell. `has_end`: a token ends it. `is_marked`: the template marks where
    it, or a part of it, begins and ends."""

    message: int | None
    start: int
    stop: int
    has_end: bool
    is_marked: bool = False


def find_replies(
    render: ChatRender,
    text: str,
    origins: NDArray[np.int64],
    own: Sequence[AddedTokenSpan],
    end_tokens: Collection[int],
) -> list[ReplySpan]:
    """The replies in `text`, which is all that the template writes. `origins` are what characters come from,
    [characters], and `own` the added tokens that the template wrote itself.

    A reply is what stands in `{% generation %}`; without such marks it is what the template writes for the message
    more than for the prompt before it. What that begins and ends with is learnt from one reply for all. Raises
    DataError where that cannot be told.
    """
    closing = [each for each in own if each.is_special or each.token in end_tokens]
    finder = _Finder(render, text, origins, closing, end_tokens)
    if render.marks_replies:
        return finder.marked()
    replies: list[ReplySpan] = []
    for message in render.replies:
        replies.append(finder.reply(message, replies[-1].stop if replies else 0))
    return replies


class _Finder:
    def __init__(
        self,
        render: ChatRender,
        text: str,
        origins: NDArray[np.int64],
        own: Sequence[AddedTokenSpan],
        end_tokens: Collection[int],
    ) -> None:
        self._render = render
        self._text = text
        self._said = origins > 0
        self._origins, self._messages = origins, message_numbers(origins)
        self._own = own
        self._ends = end_tokens
        # What follows the contents of a role, and the part of it that opens a reply; None where that is not told.
        self._openings: dict[str, tuple[str, str] | None] = {}
        self._closing = self._behind_mark(render.replies[0], "assistant") if render.replies else None

    def marked(self) -> list[ReplySpan]:
        """The replies that the template marks."""
        nonce = secrets.token_hex(16)
        begin, end = f"<{nonce}>", f"</{nonce}>"
        parts = re.split(f"({begin}|{end})", self._render.text(marks=(begin, end)))
        if parts[1::2] != [begin, end] * (len(parts) // 4) or "".join(parts[::2]) != self._text:
            raise DataError("the chat template marks its replies in a way that cannot be followed")
        stops = [int(stop) for stop in np.cumsum([len(part) for part in parts[::2]])]
        blocks = list(zip(stops[::2], stops[1::2], strict=False))
        replies, candidates = self._render.replies, list[list[int]]()
        for block in blocks:
            # A block between the contents of two replies is of the first if it follows directly, else of the second.
            before, inside, behind = (part[part >= 0].tolist() for part in np.split(self._messages, block))
            first, last = [-1, *before][-1], [*inside, *behind, len(self._render.messages)][0]
            candidates.append([each for each in [*inside, *range(first, last + 1)] if each in replies])
        owners: list[int | None] = [next(iter(each), None) for each in candidates]
        if len(replies) == len(blocks) and all(map(operator.contains, candidates, replies)):
            owners = [*replies]
        # A reply of several blocks ends within one of them.
        ended = {owner for owner, block in zip(owners, blocks, strict=True) if self._has_end_token(*block)}
        return [
            ReplySpan(message=owner, start=start, stop=stop, has_end=owner in ended, is_marked=True)
            for owner, (start, stop) in zip(owners, blocks, strict=True)
        ]

    def _has_end_token(self, start: int, stop: int) -> bool:
        within = [each for each in self._own if start <= each.start and each.stop <= stop]
        return any(each.token in self._ends or not self._text[each.stop : stop].strip() for each in within)

    def reply(self, message: int, after: int) -> ReplySpan:
        """The reply of a message behind that character."""
        start = self._start(message, after)
        said = np.flatnonzero(self._messages == message)
        last = int(said[-1]) + 1 if len(said) else start
        stop = self._following(message, self._closing)
        if stop is None and self._closing:
            # Up to the first character that comes from a message after it.
            later = np.flatnonzero(self._messages[start:] > message)
            at = self._text.find(self._closing, last, start + int(later[0]) if len(later) else len(self._text))
            stop = None if at < 0 else at + len(self._closing)
        return self._until_token(message, start, last) if stop is None else self._span(message, start, max(stop, start))

    def _start(self, message: int, after: int) -> int:
        """Where the prompt of a reply ends."""
        opening, header = self._opening(message) or (None, None)
        start, said = self._following(message - 1, opening), np.flatnonzero(self._messages == message)
        if start is None and header and len(said):
            start = self._behind_header(header, after, int(said[0]))
        if start is None:
            before = self._render.messages[:message]
            opened, closed = self._attempt(before, True), self._attempt(before, False)
            if opened is not None and self._text.startswith(opened):
                start = len(opened)
            elif opened is not None and closed is not None and opened.startswith(closed):
                # The template opens a reply otherwise than it writes one, as by an empty thought.
                if self._text.startswith(closed):
                    start = len(commonprefix([opened, self._text]))
                elif len(said):
                    start = self._behind_header(opened[len(closed) :], after, int(said[0]))
        if start is not None:
            return max(start, after)
        raise DataError(
            "cannot locate the assistant's reply in the rendered chat",
            got=f"message {message}, which does not begin where the prompt before it ends",
            fix="enclose replies in {% generation %} in the template",
        )

    def _opening(self, message: int) -> tuple[str, str] | None:
        """What the template writes between the content before a reply and the reply, and the part of it that opens
        that; learnt from the first reply behind a message of that role."""
        if message == 0:
            return None
        role = str(self._render.messages[message - 1].get("role"))
        if role not in self._openings:
            whole, closed = (self._behind_mark(message - 1, role, opens_reply=each) for each in (True, False))
            is_known = whole is not None and closed is not None and whole.startswith(closed)
            self._openings[role] = (str(whole), str(whole)[len(str(closed)) :]) if is_known else None
        return self._openings[role]

    def _behind_mark(self, message: int, role: str, *, opens_reply: bool = False) -> str | None:
        """What the template writes behind a content of that message, when it is the last one."""
        mark, kept = f"content{secrets.token_hex(16)}", self._render.messages
        named: dict[str, Any] = {
            name: kept[message][name] for name in ("tool_call_id", "name") if name in kept[message]
        }
        text = self._attempt([*kept[:message], {**named, "role": role, "content": mark}], opens_reply) or ""
        return text.partition(mark)[2] if text.count(mark) == 1 else None

    def _following(self, message: int, text: str | None) -> int | None:
        """The end of that text right behind the content of a message; None where it does not stand there."""
        said = np.flatnonzero(self._messages == message)
        if text is None or not len(said) or message < 0 or self._origins[said[-1]] != origin_of(message):
            return None
        signs, last = self._render.last_signs(message), int(said[-1]) + 1
        # Templates may trim contents.
        found = (each for each in (signs, signs.rstrip(), "") if self._text.startswith(each + text, last))
        return next((last + len(each) + len(text) for each in found), None)

    def _behind_header(self, header: str, after: int, limit: int) -> int | None:
        """The end of the last reply header before `limit`, or of the part of it that is there."""
        at = self._text.rfind(header, after, limit)
        if header and at >= 0 and not self._said[at:limit].any():
            return at + len(header)
        for token in reversed([each for each in self._own if after <= each.start and each.stop <= limit]):
            length = len(commonprefix([header, self._text[token.start :]]))
            if length >= token.stop - token.start and not self._said[token.start : limit].any():
                return token.start + length
        return None

    def _attempt(self, messages: Sequence[dict[str, Any]], opens_reply: bool) -> str | None:
        """What the template writes for messages; None if it refuses them."""
        try:
            return self._render.text(messages=messages, opens_reply=opens_reply)
        except DataError:
            return None

    def _span(self, message: int, start: int, stop: int) -> ReplySpan:
        """The reply that the template writes in [start, stop), and the end token right behind it if none is there."""
        if self._has_end_token(start, stop):
            return ReplySpan(message=message, start=start, stop=stop, has_end=True)
        for each in self._own:
            if each.start >= stop and each.token in self._ends and not self._text[stop : each.start].strip():
                return ReplySpan(message=message, start=start, stop=each.stop, has_end=True)
        return ReplySpan(message=message, start=start, stop=stop, has_end=False)

    def _until_token(self, message: int, start: int, last: int) -> ReplySpan:
        """The reply whose content ends at `last`, up to the special token behind it; of several in a row up to the one
        that ends texts."""
        behind = [each for each in self._own if each.start >= last]
        if not behind or self._said[last : behind[0].start].any():
            return ReplySpan(message=message, start=start, stop=last, has_end=False)
        row = behind[:1]
        for each in behind[1:]:
            if each.start != row[-1].stop:
                break
            row.append(each)
        ends = [each for each in row if each.token in self._ends]
        return ReplySpan(message=message, start=start, stop=(ends or row)[0].stop, has_end=True)
