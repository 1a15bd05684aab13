"""Texts in parts: what continues a text is encoded and decoded as its continuation.

Many tokenizers treat the beginning of a text apart: they put a space before it, or strip white space, and their
decoders take a space from the first token. Encoded or decoded alone, a continuation gains or loses a space.
"""

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix

from kitforge.data.tokenizers.protocol import NO_TOKEN, Tokenizer

# Decoders write it for bytes that are not a whole character.
_REPLACEMENT_CHARACTER = "\ufffd"
# Characters of decoded text before a continuation that is encoded, and tokens that are searched for a whole word.
_CONTEXT_SIZE = 64
# Texts that may stand before a continuation where the text before it cannot: a token of the continuation would lie
# across the border. One of each class of characters that vocabularies keep apart.
_NEUTRAL_CONTEXTS = ("\n", ".", "a", "0", ")", "\u4e00", "\x01")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyMarks:
    """What marks the parts of a reply."""

    spelled: Mapping[int, str] = field(default_factory=dict)  # special tokens that have a text in it
    thought: tuple[str, str] | None = None  # what begins and what ends one; None: the reply has none
    is_thinking: bool = False  # the prompt has begun the thought


class Detokenizer:
    """Decodes one sample token by token, as the continuation of `prompt`. The pieces joined are what the tokens add to
    the text of the prompt, up to the first stop string behind a thought. Text that may become a stop string, and
    incomplete characters, are held back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt: Sequence[int] = (),
        marks: ReplyMarks | None = None,
    ) -> None:
        marks = marks or ReplyMarks()
        self._spelled = marks.spelled
        # What is awaited before stop strings apply: the beginning of a thought, then its end.
        self._awaited = (marks.thought or ())[marks.is_thinking :] if stop else ()
        self.is_stopped = False
        self.offsets: list[int] = []  # of every token: the index of its first character
        self._length = 0  # of the decoded text
        # Decodes the tokens of an incomplete character, and counts its whole characters.
        self._partial = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_partial = 0
        self._tokenizer = tokenizer
        self._stop = stop
        # Tokens before `_known` have been decoded, to `_known_text`. They are decoded again with the next ones, since
        # the text of a token may depend on those before it: the last ones, after some that have a text of their own.
        self._tokens = prompt_end(tokenizer, prompt)
        self._known = len(self._tokens)
        self._known_text = tokenizer.decode(self._tokens) if self._tokens else ""
        self._anchor = self._tokens[:]
        if self._known_text.endswith(_REPLACEMENT_CHARACTER):
            self._partial.decode(b"".join(map(tokenizer.token_bytes, self._tokens)))
        self._held = ""

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The text that these tokens complete; with `is_last` all text that was held back."""
        for token in tokens:
            if token in self._spelled:
                self._decode(is_last=True)
                self.offsets.append(self._length)
                self._held += self._spelled[token]
                self._length += len(self._spelled[token])
                self._partial.reset()
                self._num_partial = 0
                continue
            was_held = self._known < len(self._tokens)
            self.offsets.append(self._length + (self._character_index(token) if was_held else 0))
            self._tokens.append(token)
            self._decode(is_last=False)
            if self._known == len(self._tokens):
                self._partial.reset()
                self._num_partial = 0
            elif not was_held:
                self._character_index(token)
        if is_last:
            self._decode(is_last=True)
        start, num_held = self._thought(is_last=is_last)
        said = self._held[start:]
        stop_index = min((start + at for at in map(said.find, self._stop) if at >= 0), default=None)
        size = len(self._held) - (0 if is_last else max(num_held, num_open(said, self._stop)))
        if stop_index is not None:
            self.is_stopped, size = True, stop_index
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _character_index(self, token: int) -> int:
        """The index, among the held-back characters, of the one in which the token begins."""
        content = self._tokenizer.token_bytes(token)
        was_open = bool(self._partial.getstate()[0])
        first = self._partial.decode(content[:1])
        # Its first byte either continues the last character or leaves that one incomplete for good.
        begins = was_open and (len(first) > 1 or (len(first) == 1 and bool(self._partial.getstate()[0])))
        index = self._num_partial + begins
        self._num_partial += len(first) + len(self._partial.decode(content[1:]))
        return index

    def _decode(self, *, is_last: bool) -> None:
        """Decode the tokens after `_known`, unless they end in an incomplete character."""
        pending = self._tokens[self._known :]
        if not any(map(self._tokenizer.token_bytes, pending)):
            # Special tokens have no text, and there may be any number of them.
            del self._tokens[self._known :]
            return
        whole = self._tokenizer.decode(self._tokens)
        if whole.endswith(_REPLACEMENT_CHARACTER) and not is_last:
            return
        # The prompt may end within a character, of which it shows a replacement.
        text = whole[len(commonprefix([self._known_text, whole])) :]
        self._held += text
        self._length += len(text)
        self._set_context(pending, whole)

    def _set_context(self, pending: list[int], whole: str) -> None:
        """Take the tokens with which the next ones are decoded."""
        alone = self._tokenizer.decode(pending)
        if alone and _REPLACEMENT_CHARACTER not in alone:
            self._anchor, self._tokens, self._known_text = pending, pending[:], alone
        elif self._known_text:
            self._tokens = [*self._anchor, *pending]
            self._known_text = self._tokenizer.decode(self._tokens)
        else:
            # Nothing but what the beginning of a text loses.
            self._anchor, self._known_text = self._tokens[:], whole
        self._known = len(self._tokens)

    def _thought(self, *, is_last: bool) -> tuple[int, int]:
        """How much of the held text is of a thought, in which stop strings do not apply, and how much at its end may
        be of a mark of one."""
        held = self._held
        if len(self._awaited) == 2:
            begin, said = self._awaited[0], held.lstrip()
            if not is_last and len(said) < len(begin) and begin.startswith(said):
                return len(held), len(held)
            self._awaited = self._awaited[1:] if said.startswith(begin) else ()
        if not self._awaited:
            return 0, 0
        # The line breaks behind a thought only lay it out.
        end = self._awaited[0]
        found = re.search(rf"{re.escape(end)}\n*(?=[^\n])", held)
        if found is None:
            return len(held), len(held[held.find(end) :]) if end in held else num_open(held, [end])
        self._awaited = ()
        return found.end(), 0


def num_open(text: str, marks: Iterable[str]) -> int:
    """The length of the longest end of a text that one of the marks may begin with."""
    marks = tuple(marks)
    for size in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def prompt_end(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The last tokens of a prompt: enough to decode what follows them as it is decoded after the whole prompt. They
    begin with a token of whole characters, of more than one byte where one is near, since a single byte may belong to
    the bytes before it."""
    start = 0
    for index in range(len(prompt) - 1, -1, -1):
        if start and len(prompt) - index > _CONTEXT_SIZE:
            break
        content = tokenizer.token_bytes(prompt[index])
        if not content.strip() or content == NO_TOKEN or not _is_whole(content):
            continue
        start = start or index
        if len(content) > 1:
            start = index
            break
    return [int(token) for token in prompt[start:]]


def decode_continuation(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """What the tokens add to the text of the prompt."""
    context = prompt_end(tokenizer, prompt)
    before, whole = tokenizer.decode(context), tokenizer.decode([*context, *tokens])
    return whole[len(commonprefix([before, whole])) :]


def encode_continuation(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """The tokens of a text after those of a prompt, which stay as they are. Decoded after the prompt they are the text,
    except for what the tokenizer replaces in any text."""
    tokens = tokenizer.encode(text)
    if not text or not prompt or decode_continuation(tokenizer, prompt, tokens) == text:
        return tokens
    candidates = list(_after_contexts(tokenizer, prompt, text))
    texts = [decode_continuation(tokenizer, prompt, each) for each in candidates]
    if text in texts:
        return candidates[texts.index(text)]
    # The tokenizer replaces something in the text, both alone and as a continuation.
    is_kept = not candidates or decode_continuation(tokenizer, prompt, tokens) == texts[0]
    return tokens if is_kept else candidates[0]


def encode_completion(
    tokenizer: Tokenizer, prompt: str | Sequence[int], completion: str | Sequence[int]
) -> tuple[list[int], list[int]]:
    """The tokens of a prompt, with the tokenizer's special tokens around it, and of its completion. Two texts are
    encoded as one, and the tokens that this text and the prompt alone begin with are the prompt's: a token across the
    border belongs to the completion, as in lm-evaluation-harness."""
    if not isinstance(completion, str):
        opening = tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        return opening, [int(token) for token in completion]
    if not isinstance(prompt, str):
        return [int(token) for token in prompt], encode_continuation(tokenizer, prompt, completion)
    opening, own, joined = (
        tokenizer.encode_prompt(prompt),
        tokenizer.encode(prompt),
        tokenizer.encode(prompt + completion),
    )
    starts = range(len(opening) - len(own) + 1)
    start = next((each for each in starts if opening[each : each + len(own)] == own), None)
    if start is None:
        return opening, encode_continuation(tokenizer, opening, completion)
    size = _num_equal(own, joined)
    return [*opening[:start], *joined[:size], *opening[start + len(own) :]], joined[size:]


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context, with the tokenizer's prefix, and of its continuation.

    As in lm-evaluation-harness (`_encode_pair`): trailing white space of the context moves to the continuation, both
    are encoded as one text, and the tokens beyond the length of the context are the continuation's. An empty context is
    BOS, or else EOS.
    """
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    prefix = tokenizer.encode_prompt(stripped) if context else []
    if prefix:
        return prefix, tokenizer.encode_prompt(stripped + continuation)[len(prefix) :]
    return [prefix_token(tokenizer)], tokenizer.encode(continuation)


def prefix_token(tokenizer: Tokenizer) -> int:
    """The token before a text without context: BOS, or else EOS."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id


def _after_contexts(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> Iterator[list[int]]:
    """The tokens of a text within longer texts, of those in which none of its tokens lies across its beginning."""
    said = tokenizer.decode(prompt_end(tokenizer, prompt))[-_CONTEXT_SIZE:]
    for context in (said, *_NEUTRAL_CONTEXTS):
        before, whole = tokenizer.encode(context), tokenizer.encode(context + text)
        if before and _num_equal(before, whole) == len(before):
            yield whole[len(before) :]


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _is_whole(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
