"""Rendering of conversations by a chat template, and which characters of the text come from the contents.

A template may trim, split, compare or drop contents, so the text itself carries no markers. The positions of contents
come from further renders whose contents have other letters: the characters that differ belong to the contents.
"""

import functools
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.chat.jinja_sandbox import SandboxedTemplate, WorkBudget
from kitforge.data.tokenizers.protocol import AddedTokenSpan
from kitforge.foundation.errors import DataError

# Keys of a message's reasoning; templates read the first or the second.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Roles, types and names of fields are a template's own language as long as they are plain words.
_WORD = re.compile(r"[\w.\-]*")
# Substitutes of the ASCII letters and digits, and of all other characters.
_LETTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits
_PARTNERS = str.maketrans(_LETTERS, "".join(a + b for b, a in zip(_LETTERS[::2], _LETTERS[1::2], strict=True)))
# Marks in angle brackets, which templates put around contents.
_MARKS = re.compile(r"</?[\w|]+>")
_ANOTHER = "\ufffc"
# Another content for a content of the message with that number; None: of what is beside the messages.
Change = Callable[[str, int | None], str]


# Finds the added tokens in a text, in order.
FindTokens = Callable[[str], Sequence[AddedTokenSpan]]


class TemplateLanguage:
    """The literals of a template: the added tokens it writes, and the texts it may search contents for."""

    def __init__(self, template: SandboxedTemplate, find: FindTokens) -> None:
        self.template = template
        self._find = find
        spelt = {text[each.start : each.stop]: each for text in template.constants for each in find(text)}
        # Tokens that are not special and that the template alone is to write, such as the marks of speakers.
        plain = {text for text, each in spelt.items() if not each.is_special}
        self._plain = plain - template.looked_for
        pairs = {text[0]: _ANOTHER for text in spelt if text == text.translate(_PARTNERS)}
        self._partners = {**_PARTNERS, **{ord(letter): ord(other) for letter, other in pairs.items()}}
        special = [text for text in spelt if text not in plain]
        harmless = (text for text in template.looked_for if not any(text in each or each in text for each in special))
        self._looked_for = [text for text in harmless if len(text) > 1]

    def tokens(self, text: str) -> list[AddedTokenSpan]:
        """The special tokens, and the others of the template's own, that a text spells."""
        return [each for each in self._find(text) if each.is_special or text[each.start : each.stop] in self._plain]

    def parted(self, text: str, said: NDArray[np.bool_]) -> tuple[list[AddedTokenSpan], list[AddedTokenSpan]]:
        """The tokens that the template wrote itself, and those that are not special and that contents spell; `said` are
        the characters that come from contents, [characters]."""
        codes = _codes(text).copy()
        codes[said] = ord(_ANOTHER)
        covered = codes.tobytes().decode("utf-32-le", "surrogatepass")
        own = list(self._find(covered))
        if all(text.count(each) == covered.count(each) for each in self._plain):
            return own, []
        foreign = [each for each in self.tokens(text) if not each.is_special and said[each.start : each.stop].any()]
        return own, foreign

    def altered(self, text: str, is_reply: bool) -> str:
        """A text of the same length with substituted letters, except those that the template may search for."""
        kept = [each for each in self._looked_for if each in text]
        if is_reply:
            # The model's own words may be of the language that it was taught.
            kept += [each for each in self._plain if each in text]
        if not kept:
            return self.mirrored(text)
        parts = re.split(f"({'|'.join(map(re.escape, sorted(kept, key=len, reverse=True)))})", text)
        return "".join(part if index % 2 else self.mirrored(part) for index, part in enumerate(parts))

    def mirrored(self, text: str) -> str:
        """Every letter of ASCII becomes its partner."""
        return text.translate(self._partners)

    def without(self, text: str, spelling: str) -> str:
        """The text in which a token is misspelt by one letter."""
        for index, letter in enumerate(spelling):
            other = spelling[:index] + self.mirrored(letter) + spelling[index + 1 :]
            if other != spelling and not self._find(other):
                return text.replace(spelling, other)
        return text.replace(spelling, self.mirrored(spelling))


class ChatRender:
    """The renders of one conversation. `inputs` are whatever a template may read besides the messages."""

    def __init__(
        self,
        language: TemplateLanguage,
        named_tokens: Mapping[str, str],
        messages: Sequence[Mapping[str, Any]],
        inputs: Mapping[str, Any],
        *,
        is_training: bool = False,
    ) -> None:
        self._language = language
        self.marks_replies = language.template.marks_replies
        # The moment stays the same over all renders.
        self._named = {**named_tokens, "strftime_now": datetime.now().strftime}
        self._inputs = {name: _plain(value) for name, value in inputs.items()}
        self.messages: list[dict[str, Any]] = [_message(message) for message in messages]
        num_renders = 4 + (4 * len(self.replies) if is_training else 0)
        self._budget = WorkBudget([self.messages, self._inputs], num_renders=num_renders)

    @property
    def replies(self) -> list[int]:
        """The indices of the assistant's messages."""
        return [number for number, message in enumerate(self.messages) if message.get("role") == "assistant"]

    def text(
        self,
        change: Change | None = None,
        *,
        num_messages: int | None = None,
        opens_reply: bool = False,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """What the template writes for the first so many messages; `marks` enclose what stands in `{% generation %}`.
        Raises DataError where the template fails or refuses."""
        messages, inputs = self.messages[:num_messages], self._inputs
        if change is not None:
            said = (functools.partial(_swapped, change, number) for number in range(len(messages)))
            messages = [_rewritten(message, each) for message, each in zip(messages, said, strict=True)]
            inputs = _rewritten(inputs, functools.partial(_swapped, change, None))
        variables = {**self._named, **inputs, "messages": messages, "add_generation_prompt": opens_reply}
        return self._language.template.render(variables, self._budget, marks)

    def continued(self, change: Change | None = None) -> str:
        """The text up to where the content of the last message ends. Raises DataError where that does not occur."""
        mark = f"continue{secrets.token_hex(16)} "
        kept = self.messages
        _last_text(kept[-1])
        self.messages = [*kept[:-1], with_mark(kept[-1], mark)]
        try:
            text = self.text(None if change is None else functools.partial(_before_mark, mark, change))
        finally:
            self.messages = kept
        at = text.rfind(mark.strip())
        if at < 0 or (change is None and _last_text(kept[-1]).strip() not in text):
            raise DataError("the chat template leaves out the message that is to be continued")
        return text[:at] if text.startswith(mark, at) else text[:at].rstrip()

    def signed(self, marks: tuple[str, str], signs: Sequence[str]) -> str:
        """The text with the marks of `text`, and a sign behind each content that is text."""
        kept = self.messages
        self.messages = [with_mark(each, sign) for each, sign in zip(kept, signs, strict=True)]
        try:
            return self.text(marks=marks)
        finally:
            self.messages = kept

    def end_of_reply(self, message: int) -> int:
        """Where the reply of that message ends in the prompt that all messages make, without what closes it. Raises
        DataError where the template writes it, or what is before it, differently because of the messages after it, and
        where it leaves one of these out."""
        text, opened = self.text(opens_reply=True), self.text(num_messages=message, opens_reply=True)
        mark, kept = f"end{secrets.token_hex(16)}", self.messages
        reply = kept[message]
        self.messages = [*kept[:message], with_mark(reply, mark), *kept[message + 1 :]]
        try:
            before, separator, behind = self.text(opens_reply=True).partition(mark)
        finally:
            self.messages = kept
        stop = len(text) - len(behind)
        is_same = bool(separator) and text.endswith(behind) and text.startswith(opened)
        written = _bare(text[len(opened) : stop])
        if is_same and written != _bare(reply["content"]):
            # A reply may be tidied up, but not because others follow.
            is_same = written == _bare(self.text(num_messages=message + 1)[len(opened) :])
        if not is_same:
            role, closed = kept[message + 1]["role"], self.text(num_messages=message)
            got = f"another text for the first {message + 1} messages once {role!r} follows"
            fix = "" if role == "tool" else "answer with messages of the role tool, or "
            fix += "use a chat template that keeps earlier turns"
            if opened.startswith(closed) and text.startswith(closed) and not text.startswith(opened):
                got = f"{opened[len(closed) :]!r} opens the reply, and is gone once {role!r} follows"
                fix = (
                    "leave out what makes the template open a reply so, as enable_thinking=false of "
                    "chat_template_kwargs, or use one that keeps what opens a reply"
                )
            raise DataError(
                "the chat template rewrites earlier turns, so that a conversation cannot be gone on with as tokens",
                got=got,
                expected="a text that begins with that of the conversation before",
                fix=fix,
            )
        for number in range(message + 1, len(kept)):
            has_letters = any(each.isascii() and each.isalnum() for each in str(kept[number].get("content", "")))
            again = functools.partial(self.text, opens_reply=True)
            if has_letters and not self.contents(text, again, number)[stop:].any():
                raise DataError(f"the chat template leaves out messages of the role {kept[number]['role']!r}")
        return stop

    def contents(self, text: str, again: Callable[[Change], str], message: int | None = None) -> NDArray[np.bool_]:
        """Which characters of `text` come from contents, [characters], of one message or of all that is given; `again`
        writes the text with other contents.

        A content that the template takes for something else with other letters is looked at token by token. A special
        token that the template looks for in that very content keeps the meaning that the template gives it.
        """
        is_content = np.zeros(len(text), dtype=np.bool_)
        pending: list[list[int] | None] = [None]
        while pending:
            change = _Alteration(self, message, pending.pop())
            differing = self._differing(text, again, change)
            numbers = list(change.changed)
            if differing is not None:
                is_content |= differing
            elif len(numbers) > 1:
                pending += [numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :]]
            elif numbers:
                is_content |= self._spelt(text, again, numbers[0], change.changed[numbers[0]])
        return is_content

    def altered(self, said: str, message: int | None) -> str:
        """The content of a message with other letters."""
        return self._language.altered(said, message in self.replies)

    def misspelt(self, said: str, spelling: str) -> str:
        """The content without a token."""
        return self._language.without(said, spelling)

    def _spelt(self, text: str, again: Callable[[Change], str], number: int, said: str) -> NDArray[np.bool_]:
        """The added tokens in one content, without those that the template searches for."""
        is_content = np.zeros(len(text), dtype=np.bool_)
        for spelling in {said[each.start : each.stop] for each in self._language.tokens(said)}:
            differing = self._differing(text, again, _Alteration(self, None, [number], spelling))
            if differing is not None:
                is_content |= differing
        return is_content

    def _differing(self, text: str, again: Callable[[Change], str], change: Change) -> NDArray[np.bool_] | None:
        """Where the text with other contents differs; None if more than letters differ."""
        try:
            other = again(change)
        except DataError:
            self._budget.charge(0)
            return None
        if len(other) != len(text):
            return None
        was, became, mirrored = (_codes(each) for each in (text, other, self._language.mirrored(text)))
        differing: NDArray[np.bool_] = was != became
        return None if (differing & (became != mirrored)).any() else differing


class _Alteration:
    """A change of the contents with these numbers (None: of all), which it counts."""

    def __init__(
        self, render: ChatRender, message: int | None, numbers: Sequence[int] | None, spelling: str | None = None
    ) -> None:
        self.changed: dict[int, str] = {}
        self._render = render
        self._message = message
        self._numbers = None if numbers is None else frozenset(numbers)
        self._spelling = spelling
        self._count = 0

    def __call__(self, said: str, message: int | None) -> str:
        number, self._count = self._count, self._count + 1
        if self._numbers is None:
            is_meant = self._message is None or message == self._message
        else:
            is_meant = number in self._numbers
        if not is_meant:
            return said
        self.changed[number] = said
        if self._spelling is None:
            return self._render.altered(said, message)
        return self._render.misspelt(said, self._spelling)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as Hugging Face passes it: without null values, with the reasoning under the usual keys."""
    content = {name: value for name, value in _plain(dict(message)).items() if value is not None}
    thought = next((content[name] for name in REASONING if name in content), None)
    return content if thought is None else {"thinking": thought, **content, "reasoning_content": thought}


def _plain(value: Any) -> Any:
    """Rebuilt from the types of JSON, so that no template meets a method of anything else."""
    if isinstance(value, str):
        return str.__str__(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value] if isinstance(value, list) else tuple(_plain(each) for each in value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    return f"<{type(value).__name__}>"


def _rewritten(value: Any, change: Callable[[str], str], name: str = "") -> Any:
    """The value with every content changed."""
    if isinstance(value, str):
        return value if name in ("role", "type") and _WORD.fullmatch(value) else change(value)
    if isinstance(value, dict):
        return {
            each if not isinstance(each, str) or _WORD.fullmatch(each) else change(each): _rewritten(
                inner, change, str(each)
            )
            for each, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_rewritten(each, change, name) for each in value]
    return value


def _swapped(change: Change, message: int | None, said: str) -> str:
    return change(said, message)


def _bare(text: str) -> str:
    """The text of a reply without white space and marks such as <think> or <|im_end|>."""
    return "".join(_MARKS.sub("", text).split())


def _before_mark(mark: str, change: Change, said: str, message: int | None) -> str:
    return change(said[: -len(mark)], message) + mark if said.endswith(mark) else change(said, message)


def with_mark(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark behind the last text of its content, if it has one."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": content + mark}
    parts = list(content or ())
    for index, part in reversed(list(enumerate(parts))):
        if "text" in part:
            parts[index] = {**part, "text": part["text"] + mark}
            return {**message, "content": parts}
    return dict(message)


def _last_text(message: Mapping[str, Any]) -> str:
    """The last text of a content. Raises DataError where there is none."""
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or () if "text" in part]
    if not texts or not isinstance(texts[-1], str):
        raise DataError("the last message has no text to continue", got=str(dict(message))[:80])
    return texts[-1]


def _codes(text: str) -> NDArray[np.uint32]:
    """The characters as numbers, [characters]."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
