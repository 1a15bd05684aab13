"""Positions of the assistant's replies in a rendered conversation."""

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from os.path import commonprefix

import numpy as np
from numpy.typing import NDArray

from kitforge.data.chat.render import ChatRender
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
    render: ChatRender, text: str, said: NDArray[np.bool_], own: Sequence[AddedTokenSpan], end_tokens: Collection[int]
) -> list[ReplySpan]:
    """The replies in `text`, which is all that the template writes. `said` are the characters that come from contents,
    [characters], and `own` the added tokens that the template wrote itself.

    A reply is what stands in `{% generation %}`; without such marks it is what the template writes for the message
    more than for the prompt before it. Raises DataError where that cannot be told.
    """
    closing = [each for each in own if each.is_special or each.token in end_tokens]
    finder = _Finder(render, text, said, closing, end_tokens)
    marked = finder.marked()
    if marked is not None:
        return marked
    replies: list[ReplySpan] = []
    for message in render.replies:
        replies.append(finder.reply(message, replies[-1].stop if replies else 0))
    return replies


class _Finder:
    def __init__(
        self,
        render: ChatRender,
        text: str,
        said: NDArray[np.bool_],
        own: Sequence[AddedTokenSpan],
        end_tokens: Collection[int],
    ) -> None:
        self._render = render
        self._text = text
        self._said = said
        self._own = own
        self._ends = end_tokens

    def marked(self) -> list[ReplySpan] | None:
        """The replies that the template marks; None where it marks none."""
        if not self._render.marks_replies:
            return None
        nonce = secrets.token_hex(16)
        begin, end = f"<{nonce}>", f"</{nonce}>"
        parts = re.split(f"({begin}|{end})", self._render.text(marks=(begin, end)))
        if parts[1::2] != [begin, end] * (len(parts) // 4) or "".join(parts[::2]) != self._text:
            raise DataError("the chat template marks its replies in a way that cannot be followed")
        stops = [int(stop) for stop in np.cumsum([len(part) for part in parts[::2]])]
        numbers = self._owners(parts, nonce)
        spans = list(zip(numbers, stops[::2], stops[1::2], strict=False))
        # A reply of several blocks ends within one of them.
        ended = {number for number, start, stop in spans if self._has_end_token(start, stop)}
        return [
            ReplySpan(message=each, start=start, stop=stop, has_end=each in ended, is_marked=True)
            for each, start, stop in spans
        ]

    def _has_end_token(self, start: int, stop: int) -> bool:
        within = [each for each in self._own if start <= each.start and each.stop <= stop]
        return any(each.token in self._ends or not self._text[each.stop : stop].strip() for each in within)

    def _owners(self, parts: Sequence[str], nonce: str) -> Sequence[int | None]:
        """The replies to which marked blocks belong, one or several each: `parts` of the text, and marks between them.
        Signs behind all contents tell; a block between the contents of two replies is of the first if it follows that
        directly, and else of the second."""
        replies, num_blocks = self._render.replies, len(parts) // 4
        by_count = replies if len(replies) == num_blocks else [None] * num_blocks
        begin, end = parts[1:4:2] if num_blocks else ("", "")
        signs = [f"[{nonce}:{number}]" for number in range(len(self._render.messages))]
        try:
            signed = re.split(rf"({begin}|{end}|\[{nonce}:\d+\])", self._render.signed((begin, end), signs))
        except DataError:
            return by_count
        is_same = "".join("".join(signed[::2]).split()) == "".join("".join(parts[::2]).split())
        if not num_blocks or not is_same or [each for each in signed[1::2] if each in (begin, end)] != parts[1::2]:
            return by_count
        marks = [each if each in (begin, end) else int(each[len(nonce) + 2 : -1]) for each in signed[1::2]]
        owners: list[int | None] = []
        for at in (at for at, each in enumerate(marks) if each == begin):
            stop = marks.index(end, at)
            before = next((each for each in reversed(marks[:at]) if isinstance(each, int)), -1)
            behind = next((each for each in marks[at:] if isinstance(each, int)), len(signs))
            inside = [each for each in marks[at:stop] if each in replies]
            between = [each for each in replies if before <= each <= behind]
            owners.append(next((int(each) for each in [*inside, *between]), None))
        return by_count if None in owners else owners

    def reply(self, message: int, after: int) -> ReplySpan:
        """The reply of a message behind that character."""
        start = self._start(message, after)
        written = self._written(message + 1)
        if written is not None and self._text.startswith(written):
            return self._span(message, start, max(len(written), start))
        # The template renders this reply differently once the conversation continues: it drops the reasoning.
        following = self._contents(message + 1, start)
        limit = following[0] if following else len(self._text)
        closing = [each for each in self._own if start <= each.start and each.stop <= limit]
        tail = (written or "").rstrip()
        # As much as it says itself is enough: of replies that are alike the first one is meant.
        said = self._render.messages[message]
        is_text = isinstance(said.get("content"), str) and not said.get("tool_calls")
        most = len(said["content"].strip()) if is_text else len(tail)
        likeness = {each: min(self._alike(each, tail), most + each.stop - each.start) for each in closing}
        alike = max(closing, key=likeness.__getitem__, default=None)
        if alike is not None and self._alike(alike, tail):
            rest = (written or "")[len(tail) :]
            stop = alike.stop + len(rest) * self._text.startswith(rest, alike.stop)
            return ReplySpan(message=message, start=start, stop=stop, has_end=True)
        contents = [each for each in self._contents(message, start) if each < limit]
        return self._until_token(message, start, contents[-1] + 1 if contents else start)

    def _start(self, message: int, after: int) -> int:
        """Where the prompt of a reply ends."""
        opened, closed = self._written(message, opens_reply=True), self._written(message)
        if opened is not None and self._text.startswith(opened):
            return max(len(opened), after)
        if opened is not None and closed is not None and opened.startswith(closed):
            # The template opens a reply otherwise than it writes one, as by an empty thought.
            if self._text.startswith(closed):
                return max(len(commonprefix([opened, self._text])), after)
            # It writes the prompt of this reply otherwise once that is answered.
            contents = self._contents(message, after)
            start = self._behind_header(opened[len(closed) :], after, contents[0] if contents else after)
            if start is not None:
                return start
        raise DataError(
            "cannot locate the assistant's reply in the rendered chat",
            got=f"message {message}, which does not begin where the prompt before it ends",
            fix="enclose replies in {% generation %} in the template",
        )

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

    def _contents(self, message: int, after: int) -> list[int]:
        """The characters behind that one that come from a message."""
        indices = np.flatnonzero(self._render.contents(self._text, self._render.text, message))
        return [int(each) for each in indices[indices >= after]]

    def _alike(self, token: AddedTokenSpan, tail: str) -> int:
        """How many characters up to a token are those that `tail` ends with; 0 if these are fewer than the token's."""
        text = self._text[max(token.stop - len(tail), 0) : token.stop]
        length = len(commonprefix([text[::-1], tail[::-1]]))
        return length if length >= token.stop - token.start else 0

    def _written(self, num_messages: int, *, opens_reply: bool = False) -> str | None:
        """The rendered first messages; None if the template refuses them."""
        try:
            return self._render.text(num_messages=num_messages, opens_reply=opens_reply)
        except DataError:
            return None

    def _span(self, message: int, start: int, stop: int) -> ReplySpan:
        """The reply that the template writes in [start, stop), and the end token right behind it if none is there."""
        within = [each for each in self._own if start <= each.start and each.stop <= stop]
        if any(each.token in self._ends or not self._text[each.stop : stop].strip() for each in within):
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
