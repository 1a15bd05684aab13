"""Rendering of conversations by a chat template, and which characters of the text come from which contents.

A template may trim, split, compare or drop contents, so the text itself carries no markers. A second render, whose
contents have marks in the place of their letters, tells where each of them is in the text.
"""

import functools
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
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
# What becomes a mark: white space and the signs of ASCII stay, as templates trim them, and JSON escapes them.
_LETTERS = r"[^\s\x00-/:-@\[-`{-\x7f]"
# The first mark, of characters for private use: one for each origin, which is 0 for what the template writes itself.
_MARK = 0xF0000
_ORIGINS = 0x10FFFE - _MARK
# Marks in angle brackets, which templates put around contents.
_TAGS = re.compile(r"</?[\w|]+>")
_ANOTHER = "\ufffc"
# What a letter of a token is misspelt as.
_MISSPELT = ("x", "z")
# Parts of a message, and what is beside the messages.
_PARTS = ("content", "tool_calls", REASONING[0])
_INPUTS = 1
# Another content for a content of that origin.
Change = Callable[[str, int], str]


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
        # Tokens without a letter are broken by their first character.
        signs = {re.escape(text[0]) for text in spelt if not re.search(_LETTERS, text)}
        self._letters = re.compile("|".join([f"{_LETTERS}+", *signs]))
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

    def marked(self, text: str, mark: str, is_reply: bool) -> str:
        """A text of the same length with the mark for each letter, except what the template may search for."""
        kept = [each for each in self._looked_for if each in text]
        if is_reply:
            # The model's own words may be of the language that it was taught.
            kept += [each for each in self._plain if each in text]
        literals = "|".join(map(re.escape, sorted(kept, key=len, reverse=True)))
        parts = re.split(f"({literals})", text) if kept else [text]
        parts[::2] = [self._letters.sub(lambda found: mark * len(found[0]), part) for part in parts[::2]]
        marked = "".join(parts)
        return marked if mark in marked or self._find(text) else re.sub(r"\S", mark, text)

    def without(self, text: str, spelling: str) -> str:
        """The text in which a token is misspelt by one letter."""
        others = [
            spelling[:index] + _MISSPELT[letter == _MISSPELT[0]] + spelling[index + 1 :]
            for index, letter in enumerate(spelling)
            if letter.isalnum()
        ]
        return text.replace(spelling, next((each for each in others if not self._find(each)), _ANOTHER * len(spelling)))


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
        self.messages: list[dict[str, Any]] = []
        for message in messages:
            # As Hugging Face passes it: without null values, with the reasoning under the usual keys.
            said = {name: value for name, value in _plain(dict(message)).items() if value is not None}
            thought = next((said[name] for name in REASONING if name in said), None)
            said = said if thought is None else {"thinking": thought, **said, "reasoning_content": thought}
            self.messages.append(said)
        # The indices of the assistant's messages.
        self.replies = [number for number, each in enumerate(self.messages) if each.get("role") == "assistant"]
        num_renders = 4 + (4 * len(self.replies) if is_training else 0)
        self._budget = WorkBudget([self.messages, self._inputs], num_renders=num_renders)

    def text(
        self,
        change: Change | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        opens_reply: bool = False,
        marks: tuple[str, str] | None = None,
    ) -> str:
        """What the template writes for all messages or for others; `marks` enclose what stands in `{% generation %}`.
        Raises DataError where the template fails or refuses."""
        messages, inputs = list(self.messages if messages is None else messages), self._inputs
        if change is not None:
            messages = [_changed(message, change, number) for number, message in enumerate(messages)]
            inputs = _rewritten(inputs, functools.partial(_swapped, change, _INPUTS))
        variables = {**self._named, **inputs, "messages": messages, "add_generation_prompt": opens_reply}
        return self._language.template.render(variables, self._budget, marks)

    def continued(self, change: Change | None = None) -> str:
        """The text up to where the content of the last message ends. Raises DataError where that does not occur."""
        mark, last = f"continue{secrets.token_hex(16)} ", self.messages[-1]
        said = _last_text(last)
        again = None if change is None else functools.partial(_before_mark, mark, change)
        text = self.text(again, messages=[*self.messages[:-1], with_mark(last, mark)])
        at = text.rfind(mark.strip())
        if at < 0 or (change is None and said.strip() not in text):
            raise DataError("the chat template leaves out the message that is to be continued")
        return text[:at] if text.startswith(mark, at) else text[:at].rstrip()

    def last_signs(self, message: int) -> str:
        """The characters of a content behind its last letter that is marked."""
        said = _last_text(self.messages[message])
        marked = self._language.marked(said, _ANOTHER, message in self.replies)
        return said[marked.rfind(_ANOTHER) + 1 :]

    def is_literal(self, message: int) -> bool:
        """Whether a content is a text of tokens that the template may search for, and of nothing else."""
        said = self.messages[message].get("content")
        is_text = isinstance(said, str) and bool(said.strip())
        return is_text and _ANOTHER not in self._language.marked(str(said), _ANOTHER, message in self.replies)

    def end_of_reply(self, message: int, text: str, origins: NDArray[np.int64]) -> int:
        """Where the reply of that message ends in `text`, the prompt of all messages, without what closes it. Raises
        DataError where the template writes it, or what is before it, differently because of the messages after it, and
        where it leaves one of these out."""
        mark, kept = f"end{secrets.token_hex(16)}", self.messages
        opened = self.text(messages=kept[:message], opens_reply=True)
        marked = [*kept[:message], with_mark(kept[message], mark), *kept[message + 1 :]]
        _, separator, behind = self.text(messages=marked, opens_reply=True).partition(mark)
        stop = len(text) - len(behind)
        is_same = bool(separator) and text.endswith(behind) and text.startswith(opened)
        written = _bare(text[len(opened) : stop])
        if is_same and written != _bare(kept[message]["content"]):
            # A reply may be tidied up, but not because others follow.
            is_same = written == _bare(self.text(messages=kept[: message + 1])[len(opened) :])
        if not is_same:
            role, closed = kept[message + 1]["role"], self.text(messages=kept[:message])
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
            has_letters = any(each.isalnum() for each in str(kept[number].get("content", "")))
            if has_letters and number not in message_numbers(origins[stop:]):
                raise DataError(f"the chat template leaves out messages of the role {kept[number]['role']!r}")
        return stop

    def origins(self, text: str, again: Callable[[Change], str]) -> NDArray[np.int64]:
        """Where the letters of `text` come from, [characters]; `again` writes the text with other contents.

        A content that the template takes for something else with marks is looked at token by token. A special token
        that the template looks for in that very content keeps the meaning that the template gives it.
        """
        origins = np.zeros(len(text), dtype=np.int64)
        parts = {origin_of(number, key): None for number, each in enumerate(self.messages) for key in each}
        pending = [[_INPUTS, *parts]]
        while pending:
            chosen, said = pending.pop(), list[str]()
            found = self._found(text, again, functools.partial(self._marked, said, frozenset(chosen)))
            if found is not None:
                origins = np.maximum(origins, found)
            elif len(chosen) > 1:
                pending += [chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]]
            else:
                for spelling in {each[at.start : at.stop] for each in said for at in self._language.tokens(each)}:
                    found = self._found(text, again, functools.partial(self._misspelt, spelling, chosen[0]), chosen[0])
                    origins = origins if found is None else np.maximum(origins, found)
        return origins

    def _marked(self, said: list[str], chosen: Collection[int], content: str, origin: int) -> str:
        if origin not in chosen:
            return content
        said.append(content)
        return self._language.marked(content, chr(_MARK + origin), origin // 4 - 1 in self.replies)

    def _misspelt(self, spelling: str, chosen: int, content: str, origin: int) -> str:
        return self._language.without(content, spelling) if origin == chosen else content

    def _found(
        self, text: str, again: Callable[[Change], str], change: Change, misspelt: int = 0
    ) -> NDArray[np.int64] | None:
        """The origins of what differs in the text with other contents; None if more than letters differ."""
        try:
            other = again(change)
        except DataError:
            self._budget.charge(0)
            return None
        if len(other) != len(text):
            return None
        became = _codes(other).astype(np.int64)
        origins = np.where(_codes(text) != became, np.maximum(became - _MARK, 0), -1)
        if misspelt:
            origins[(origins == 0) & np.isin(became, [*map(ord, (*_MISSPELT, _ANOTHER))])] = misspelt
        return None if (origins == 0).any() else np.maximum(origins, 0)


def origin_of(message: int, key: str = "content") -> int:
    """The origin of what a message says under a key."""
    part = REASONING[0] if key in REASONING else key
    number = _PARTS.index(part) if part in _PARTS else len(_PARTS)
    return min(4 * (message + 1) + number, _ORIGINS)


def message_numbers(origins: NDArray[np.int64]) -> NDArray[np.int64]:
    """The messages that characters come from, -1 for none, [characters]."""
    return origins // 4 - 1


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


def _changed(message: dict[str, Any], change: Change, number: int) -> dict[str, Any]:
    """The message with every content changed."""
    changed: dict[str, Any] = {}
    for name, each in message.items():
        changed |= _rewritten({name: each}, functools.partial(_swapped, change, origin_of(number, name)))
    return changed


def _swapped(change: Change, origin: int, said: str) -> str:
    return change(said, origin)


def _bare(text: str) -> str:
    """The text of a reply without white space and marks such as <think> or <|im_end|>."""
    return "".join(_TAGS.sub("", text).split())


def _before_mark(mark: str, change: Change, said: str, origin: int) -> str:
    return change(said[: -len(mark)], origin) + mark if said.endswith(mark) else change(said, origin)


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
