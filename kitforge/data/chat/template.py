"""Conversations as tokens, by a tokenizer's own chat template in a sandbox, or by a plain one.

The tokens are those of Hugging Face's `apply_chat_template`, with one exception: no text of a conversation passes for a
special token that the template did not write itself.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from os.path import commonprefix
from typing import Any

import numpy as np

from kitforge.data.chat.jinja_sandbox import sandboxed
from kitforge.data.chat.render import REASONING, ChatRender, TemplateLanguage
from kitforge.data.chat.replies import ReplySpan, find_replies
from kitforge.data.chat.tool_calls import call_format_of, thought_of
from kitforge.data.chat.written import check_plain, check_written, is_written
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.text.continuation import ReplyMarks, encode_continuation
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.data.tokenizers.protocol import AddedTokenSpan, Tokenizer
from kitforge.data.tokenizers.sentencepiece import SentencePieceTokenizer
from kitforge.foundation.errors import DataError

# {"role": ..., "content": ...} and whatever else a template reads of it.
Message = Mapping[str, Any]


class BegunMessage(dict[str, Any]):
    """A last message that is begun and not ended: a prompt goes on within it."""


_SPEAKERS = {"user": "Human", "assistant": "Assistant"}
# Tokenizers that know special tokens and templates.
_MARKING = (HuggingFaceTokenizer, SentencePieceTokenizer)
# Keys of messages that are read by their meaning; the id of a call only joins it to its result.
_KEYS = ("role", "content", "from", "value", "train", "tool_calls", "tool_call_id", *REASONING)
# Options that callers cannot set.
_RESERVED = ("messages", "add_generation_prompt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply of the assistant: tokens [start, stop) of a conversation, all that the template writes for it, the token
    that ends it included. `message` is its number among the messages; None where the template does not tell."""

    message: int | None
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedChat:
    """A whole conversation to learn from."""

    tokens: tuple[int, ...]
    replies: tuple[Reply, ...]
    # A reply that the template marks without the token that ends it, so that its end is not learnt.
    has_unmarked_end: bool = False

    def loss_mask(self, first_message: int = 0, untrained: Collection[int] = ()) -> tuple[bool, ...]:
        """Which tokens are of replies, [tokens]; those before that message do not count, nor the `untrained` messages.
        Raises DataError where it cannot be told which reply does."""
        if (first_message or untrained) and any(reply.message is None for reply in self.replies):
            raise DataError(
                "it cannot be told which reply the chat template marks",
                got="other {% generation %} blocks than replies, of which not all are trained on",
                fix="enclose each reply in one block in the template",
            )
        mask = np.zeros(len(self.tokens), dtype=np.bool_)
        for reply in self.replies:
            is_trained = reply.message is None or (reply.message >= first_message and reply.message not in untrained)
            mask[reply.start : reply.stop] = is_trained
        return tuple(mask.tolist())


class ChatTemplate:
    """Turns messages into tokens. `source` is Jinja, or several templates by name, of which "tool_use" is for
    conversations with tools and "default" for the others; None stands for a plain text of "\\n\\nHuman: ..." and
    "\\n\\nAssistant: ...", in which every reply ends with the tokenizer's end token. `named_tokens` are what templates
    know as `bos_token`, `eos_token` and so on."""

    def __init__(
        self, tokenizer: Tokenizer, source: str | Mapping[str, str] | None, named_tokens: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._named = dict(named_tokens)
        self._tried: dict[str, set[str]] = {}  # keys of messages, by role
        sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self.fingerprint = fingerprint_of("chat template", sources, self._named)
        self.calls = call_format_of("".join(sources.values()))
        self.thought = thought_of("".join(sources.values()))
        self._languages = {name: TemplateLanguage(sandboxed(each), self._find_added) for name, each in sources.items()}

    def tokens(
        self,
        messages: Sequence[Message],
        *,
        opens_reply: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation as tokens. `opens_reply` adds what comes before the next reply (`add_generation_prompt` of
        Hugging Face); `continue_final_message` leaves the last message open. Raises DataError for messages that the
        template refuses."""
        if not messages or (opens_reply and continue_final_message):
            raise DataError(
                "this is not a prompt",
                got="a message to continue and a reply to open" if messages else "no messages",
                expected="messages, and one of the two",
            )
        if not self._languages:
            chat = list(_plain_chat(self._tokenizer, messages, opens_reply=opens_reply).tokens)
            is_closed = continue_final_message and messages[-1]["role"] == "assistant"
            return chat[:-1] if is_closed else chat
        inputs = {"tools": tools, "documents": documents, **_checked(chat_template_kwargs)}
        language, render = self._render(messages, inputs)
        again = render.continued if continue_final_message else partial(render.text, opens_reply=opens_reply)
        text = again()
        own, foreign = language.parted(text, render.origins(text, again) > 0)
        return self._encode(text, own, foreign, [])[0]

    def prompt(self, messages: Sequence[Message], **inputs: Any) -> list[int]:
        """The tokens that a reply follows: what opens it, or the last message without its end if that is begun."""
        is_begun = bool(messages) and isinstance(messages[-1], BegunMessage)
        return self.tokens(messages, opens_reply=not is_begun, continue_final_message=is_begun, **inputs)

    def reply_marks(self, messages: Sequence[Message], inputs: Mapping[str, Any], *, opens_reply: bool) -> ReplyMarks:
        """What marks the parts of the reply to a prompt, and whether that has begun a thought. One that has ended it
        leaves none."""
        thought, has_tools = self.thought, inputs.get("tools") is not None
        is_continued = inputs.get("continue_final_message", False)
        spelled = {token: text for token, text in self.spelled.items() if has_tools or text in (thought or ())}
        if thought is None:
            return ReplyMarks(spelled=spelled)
        render = self._render_plain(messages, inputs)
        text = render.continued() if is_continued else render.text(opens_reply=opens_reply)
        before = render.messages[: len(messages) - is_continued]
        # What users say about thoughts is none.
        written = text[len(commonprefix([text, render.text(messages=before) if before else ""])) :]
        begun, ended = map(written.rfind, thought)
        return ReplyMarks(spelled=spelled, thought=None if ended > begun else thought, is_thinking=begun > ended)

    @cached_property
    def mark_ids(self) -> dict[str, int]:
        """The marks of thoughts and calls in replies that are tokens."""
        marks = (*(self.thought or ()), *(self.calls.marks if self.calls is not None else ()))
        found = {text: self._find_added(text) for text in marks}
        return {text: spans[0].token for text, spans in found.items() if len(spans) == 1}

    @cached_property
    def spelled(self) -> dict[int, str]:
        """Those that are special tokens."""
        return {token: text for text, token in self.mark_ids.items() if not self._tokenizer.token_bytes(token)}

    def writes_tools(self, messages: Sequence[Message], inputs: Mapping[str, Any]) -> bool:
        """Whether the conversation is another without the tools."""
        is_plain = not self._languages
        return not is_plain and self._text(messages, inputs) != self._text(messages, {**inputs, "tools": None})

    def prompt_text(self, messages: Sequence[Message], *, opens_reply: bool) -> str:
        """The text of a prompt that a reply opens, or of one whose last message is to be continued."""
        render = self._render_plain(messages, {})
        return render.text(opens_reply=True) if opens_reply else render.continued()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text in which special tokens are those of the template."""
        return self._encode(text, self._find_added(text), [], [])[0]

    def check_written(self, messages: Sequence[Message], trained: Mapping[int, str], inputs: Mapping[str, Any]) -> None:
        """Raise DataError for what the template leaves out of a conversation, and for one of the `trained` replies of
        which nothing is written but what is so for an empty one: one with that content."""
        if not self._languages:
            check_plain(messages, trained, inputs)
        else:
            check_written(self._text, self._render_plain(messages, inputs), messages, trained, inputs)

    def unread_keys(self, messages: Sequence[Message], inputs: Mapping[str, Any]) -> list[str]:
        """The keys of messages without which the conversation is the same. Each is tried once for a role."""
        found = []
        for number, message in enumerate(messages):
            known = self._tried.setdefault(message["role"], set(_KEYS))
            for name in sorted(name for name, value in message.items() if value is not None and name not in known):
                known.add(name)
                # Null contents are empty texts, as templates read them.
                read = [each if each.get("content") is not None else {**each, "content": ""} for each in messages]
                if not (self._languages and is_written(self._text, read, number, name, inputs)):
                    found.append(name)
        return found

    def names_role(self, role: str) -> bool:
        """Whether the template has a word for that role."""
        return any(role in language.template.constants for language in self._languages.values())

    @property
    def marks(self) -> list[str]:
        """The special tokens that the template writes, as text."""
        if not isinstance(self._tokenizer, HuggingFaceTokenizer):
            return []
        written = [each for language in self._languages.values() for each in language.template.constants]
        ends = [self._named[each] for each in ("bos_token", "eos_token") if each in self._named]
        special = self._tokenizer.special_tokens
        return [each for each in special if each in ends or any(each in text for text in written)]

    def training(
        self,
        messages: Sequence[Message],
        *,
        prompt: Sequence[Message] = (),
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> TokenizedChat:
        """The conversation as tokens with its replies: what stands in `{% generation %}`, or what the template writes
        for a reply more than for the prompt before it. A reply that goes on with the last message of a `prompt`, which
        is begun, is what follows that. Raises DataError where it cannot be told what a reply is, or where no token ends
        one."""
        begun = prompt[-1] if prompt and isinstance(prompt[-1], BegunMessage) else None
        if not self._languages:
            return _plain_chat(self._tokenizer, messages, begun=None if begun is None else (len(prompt) - 1, begun))
        inputs = {"tools": tools, "documents": documents, **_checked(chat_template_kwargs)}
        language, render = self._render(messages, inputs, is_training=True)
        text = render.text()
        origins = render.origins(text, render.text)
        own, foreign = language.parted(text, origins > 0)
        spans = find_replies(render, text, origins, own, self._tokenizer.eos_ids)
        border = None
        if begun is not None:
            opened = self._render(prompt, inputs)[1].continued()
            if not text.startswith(opened):
                raise DataError(
                    "the chat template writes the beginning of a reply otherwise once the reply goes on",
                    got=f"{opened[-40:]!r} at the end of the prompt",
                    expected="a conversation that begins with its prompt",
                )
            border, last = len(opened), len(prompt) - 1
            spans = [each for each in spans if each.message != last or each.stop > border]
            spans = [replace(each, start=max(each.start, border)) if each.message == last else each for each in spans]
        tokens, offsets = self._encode(text, own, foreign, spans)
        if border is not None and any(start < border < stop for start, stop in offsets):
            # The prompt has the same tokens alone.
            cut = AddedTokenSpan(token=-1, start=border - 1, stop=border, is_special=False)
            tokens, offsets = self._encode(text, own, [*foreign, cut], spans)
        endless = next((each for each in spans if not each.has_end and not each.is_marked), None)
        if endless is not None:
            raise DataError(
                "the chat template writes no end token behind a reply, so the model would not learn to stop",
                got=f"message {endless.message}, which ends with {text[endless.start : endless.stop][-40:]!r}",
                expected="a special token where a reply ends",
                fix="end replies with {{ eos_token }} in the template, or enclose them in {% generation %}",
            )
        return TokenizedChat(
            tokens=tuple(tokens),
            replies=tuple(_replies(spans, offsets)),
            has_unmarked_end=any(not each.has_end for each in spans),
        )

    def continuation(
        self,
        messages: Sequence[Message],
        reply: str,
        following: Sequence[Message],
        *,
        has_end: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens that the template writes after a `reply` to `messages`: the end of the reply unless it `has_end`
        already, the `following` messages, and what opens the next reply. They are those of the whole conversation.

        Raises DataError where the template writes `messages` or the reply differently once messages follow it, and
        where it leaves out one that follows."""
        if not self._languages:
            end = [] if has_end else [self._tokenizer.eos_id]
            said = self._tokenizer.encode(_opening("assistant") + reply)
            return [*end, *_plain_chat(self._tokenizer, following, said, opens_reply=True).tokens]
        inputs = {"tools": tools, "documents": None, **_checked(chat_template_kwargs)}
        assistant_message = {"role": "assistant", "content": reply}
        language, render = self._render([*messages, assistant_message, *following], inputs, is_training=True)
        text = render.text(opens_reply=True)
        origins = render.origins(text, partial(render.text, opens_reply=True))
        cut = render.end_of_reply(len(messages), text, origins)
        own, foreign = language.parted(text, origins > 0)
        if has_end:
            behind = [each for each in own if each.start >= cut and each.token in self._tokenizer.eos_ids]
            cut = behind[0].stop if behind and not text[cut : behind[0].start].strip() else cut
        starts = [each.start for each in own if each.is_special]
        if cut not in starts:
            # No token lies across the end of the reply, whose tokens are there already.
            foreign = [*foreign, AddedTokenSpan(token=-1, start=cut - 1, stop=cut, is_special=False)]
        border = ReplySpan(message=None, start=cut, stop=cut, has_end=False)
        tokens, offsets = self._encode(text, own, foreign, [border])
        # Up to the next mark the text continues the reply.
        ends = (mark for mark in (*starts, *(each.start + 1 for each in foreign)) if mark > cut)
        stop = cut if cut in starts else min(ends, default=len(text))
        before = [token for token, (_, last) in zip(tokens, offsets, strict=True) if last <= cut]
        after = [token for token, (start, _) in zip(tokens, offsets, strict=True) if start >= stop]
        return [*encode_continuation(self._tokenizer, before, text[cut:stop]), *after]

    def _render(
        self, messages: Sequence[Message], inputs: Mapping[str, Any], *, is_training: bool = False
    ) -> tuple[TemplateLanguage, ChatRender]:
        has_tools = inputs["tools"] is not None and "tool_use" in self._languages
        language = self._languages.get("tool_use" if has_tools else "default")
        if language is None:
            raise DataError("the tokenizer has no default chat template", got=", ".join(self._languages))
        return language, ChatRender(language, self._named, messages, inputs, is_training=is_training)

    def _text(self, messages: Sequence[Message], inputs: Mapping[str, Any]) -> str:
        return self._render_plain(messages, inputs).text()

    def _render_plain(self, messages: Sequence[Message], inputs: Mapping[str, Any]) -> ChatRender:
        kwargs = _checked(inputs.get("chat_template_kwargs"))
        return self._render(messages, {"tools": inputs.get("tools"), "documents": None, **kwargs})[1]

    def _find_added(self, text: str) -> list[AddedTokenSpan]:
        tokenizer = self._tokenizer
        return tokenizer.find_added(text) if isinstance(tokenizer, _MARKING) else []

    def _encode(
        self, text: str, own: Sequence[AddedTokenSpan], foreign: Sequence[AddedTokenSpan], spans: Sequence[ReplySpan]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens and the characters [start, stop) of each. A text between two special tokens is one piece."""
        if isinstance(self._tokenizer, _MARKING):
            # A token of the template's language that a content spells is cut in two.
            cuts = [
                AddedTokenSpan(token=-1, start=each.start + 1, stop=each.start + 1, is_special=False)
                for each in foreign
            ]
            marks = sorted([*(each for each in own if each.is_special), *cuts], key=lambda each: each.start)
            return self._tokenizer.encode_marked(text, marks)
        tokens: list[int] = []
        offsets: list[tuple[int, int]] = []
        borders = sorted({0, len(text), *(span.start for span in spans), *(span.stop for span in spans)})
        for start, stop in pairwise(borders):
            encoding = encode_continuation(self._tokenizer, tokens, text[start:stop])
            tokens += encoding
            offsets += [(start, stop)] * len(encoding)
        return tokens, offsets


def template_of(tokenizer: Tokenizer) -> ChatTemplate:
    """The template that came with a tokenizer, or the plain one."""
    if isinstance(tokenizer, _MARKING) and tokenizer.chat_templates:
        return _template_of_folder(tokenizer)
    return ChatTemplate(tokenizer, None, {})


@lru_cache(maxsize=4)
def _template_of_folder(tokenizer: HuggingFaceTokenizer | SentencePieceTokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer, tokenizer.chat_templates, tokenizer.named_tokens)


def _checked(chat_template_kwargs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for name in _RESERVED:
        if name in (chat_template_kwargs or {}):
            raise DataError(f"chat_template_kwargs cannot hold {name!r}", expected="what only the template knows")
    return chat_template_kwargs or {}


def _replies(spans: Sequence[ReplySpan], offsets: Sequence[tuple[int, int]]) -> list[Reply]:
    """Where replies lie among the tokens. As in Hugging Face, a token across the first or last character of a reply
    belongs to it."""
    starts, stops = [start for start, _ in offsets], [stop for _, stop in offsets]
    replies: list[Reply] = []
    for span in spans:
        first = max(bisect_right(stops, span.start), replies[-1].stop if replies else 0)
        last = max(bisect_left(starts, span.stop), first)
        replies.append(Reply(message=span.message, start=first, stop=last))
    return replies


def _plain_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    before: Sequence[int] = (),
    *,
    opens_reply: bool = False,
    begun: tuple[int, Message] | None = None,
) -> TokenizedChat:
    """The conversation where there is no template, as it goes on after the tokens `before`. `begun` is the number of a
    reply and its message so far."""
    tokens: list[int] = []
    replies = []
    for number, message in enumerate(messages):
        # Contents are encoded apart, so that a prompt is how its answered conversation begins.
        tokens += encode_continuation(tokenizer, [*before, *tokens], _opening(str(message["role"])))
        content = _plain_content(message)
        if begun is not None and begun[0] == number:
            opening = _plain_content(begun[1])
            tokens += encode_continuation(tokenizer, [*before, *tokens], opening)
            content = content.removeprefix(opening)
        start = len(tokens)
        tokens += encode_continuation(tokenizer, [*before, *tokens], content)
        if message["role"] == "assistant":
            tokens.append(tokenizer.eos_id)
            replies.append(Reply(message=number, start=start, stop=len(tokens)))
    if opens_reply:
        tokens += encode_continuation(tokenizer, [*before, *tokens], _opening("assistant"))
    return TokenizedChat(tokens=tuple(tokens), replies=tuple(replies))


def _opening(role: str) -> str:
    return f"\n\n{_SPEAKERS.get(role, role.capitalize())}: "


def _plain_content(message: Message) -> str:
    """The text of a content, which may be null or a list of parts."""
    content = message.get("content")
    if message.get("tool_calls") or (isinstance(content, list) and any("text" not in part for part in content)):
        raise DataError(
            "this conversation needs a chat template", got=str(dict(message))[:80], fix="a tokenizer with a template"
        )
    return "".join(part["text"] for part in content) if isinstance(content, list) else str(content or "")
