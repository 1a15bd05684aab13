"""Where the replies of a conversation lie in what a chat template writes for it. Knows no vocabulary."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.chat_render import ChatRender
from kitforge.data.tokens import AddedTokenSpan
from kitforge.foundation.errors import DataError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySpan:
    """A reply in characters [start, stop) of a text, its end token included. `message` is its number among the
    messages; None where the template does not tell."""

    message: int | None
    start: int
    stop: int
    has_end: bool


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
    found: list[ReplySpan] = []
    for message in render.replies:
        found.append(finder.reply(message, found[-1].stop if found else 0))
    return found


@final
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
        stops = np.cumsum([len(part) for part in parts[::2]])
        numbers = self._render.replies if len(self._render.replies) == len(parts) // 4 else [None] * (len(parts) // 4)
        spans = zip(numbers, stops[::2], stops[1::2], strict=False)
        return [self._span(message, int(start), int(stop)) for message, start, stop in spans]

    def reply(self, message: int, after: int) -> ReplySpan:
        """The reply of a message behind that character."""
        before, whole = self._written(message, opens_reply=True), self._written(message + 1, opens_reply=False)
        contents: NDArray[np.intp] | None = None
        if before is None or whole is None:
            contents = np.flatnonzero(self._render.contents(self._text, self._render.text, message))
        if before is None:
            # The template writes the prompt of this reply otherwise once it is answered.
            if contents is None or not len(contents):
                raise DataError(
                    "it cannot be told what the chat template writes for a reply",
                    got=f"message {message}, which is not where the prompt before it ends",
                )
            before = int(contents[0])
        start = max(before, after)
        if whole is not None:
            return self._span(message, start, max(whole, start))
        last = max(start, int(contents[-1]) + 1) if contents is not None and len(contents) else start
        return self._until_token(message, start, last)

    def _written(self, num_messages: int, *, opens_reply: bool) -> int | None:
        """How much of the text the first messages are; None if the template writes them otherwise when they are all."""
        try:
            text = self._render.text(num_messages=num_messages, opens_reply=opens_reply)
        except DataError:
            return None
        return len(text) if self._text.startswith(text) else None

    def _span(self, message: int | None, start: int, stop: int) -> ReplySpan:
        """The reply that the template writes in [start, stop), up to its end token there, or right behind it."""
        within = [each for each in self._own if start <= each.start and each.stop <= stop]
        for each in reversed(within):
            if each.token in self._ends or not self._text[each.stop : stop].strip():
                return ReplySpan(message=message, start=start, stop=each.stop, has_end=True)
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
