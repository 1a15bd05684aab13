"""A prompt and its completion, as rewards see them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kitforge.data.chat.template import BegunMessage, Message, template_of
from kitforge.data.chat.tool_calls import parsed_reply
from kitforge.data.text.continuation import decode_continuation
from kitforge.data.tokenizers.loading import Tokenizer

# What an environment said: text, or messages.
Observation: TypeAlias = str | list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCompletion:
    """A prompt and its completion: one reply, or all turns of an episode with the observations between them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # with the EOS token, if generated
    is_finished: bool
    is_stopped: bool = False  # ended by a stop string, which it keeps, without an EOS token
    columns: Mapping[str, Any]  # of the prompt's row
    loss_mask: tuple[bool, ...] = ()  # False for observations of an environment; (): all are the policy's
    turn_lengths: tuple[int, ...] = ()  # tokens of the policy in each turn of an episode; (): no episode
    observations: tuple[Observation, ...] = ()  # before each turn; the first is the text of `reset`
    is_turn_ended: bool = False  # the last turn of an episode that did not end is whole
    prompt_messages: tuple[Message, ...] | None = None  # of a chat, for the rewards
    prompt_inputs: Mapping[str, Any] = field(default_factory=dict)  # what its template was given beside them

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The tokens without the EOS token."""
        return self.tokens[:-1] if self.is_finished and not self.is_stopped else self.tokens

    def text(self, tokenizer: Tokenizer) -> str:
        """What the completion adds to the text of the prompt."""
        return decode_continuation(tokenizer, self.prompt, self.text_tokens)

    @property
    def is_truncated(self) -> bool:
        """Whether a token limit ended the completion, or the last turn of an episode."""
        return not self.is_finished and not self.is_turn_ended

    @property
    def longest_turn(self) -> int:
        """The number of tokens of the policy in its longest turn, EOS included."""
        return max(self.turn_lengths, default=sum(self.loss_mask) or len(self.tokens))

    def turns(self, tokenizer: Tokenizer) -> list[str]:
        """The text of each turn of the policy, without the EOS token."""
        if not self.turn_lengths:
            return [self.text(tokenizer)]
        texts, start = [], 0
        for length in self.turn_lengths:
            start = self.loss_mask.index(True, start)
            before, turn = self.tokens[:start], self.tokens[start : start + length]
            said = turn[:-1] if turn[-1] in tokenizer.eos_ids else turn
            texts.append(decode_continuation(tokenizer, [*self.prompt, *before], said))
            start += length
        return texts

    def question(self, tokenizer: Tokenizer) -> list[Message]:
        """The prompt's messages; a plain text is one of the user."""
        return list(self.prompt_messages or [{"role": "user", "content": tokenizer.decode(self.prompt)}])

    def completion_messages(self, tokenizer: Tokenizer) -> list[Message]:
        """What `messages` has after the prompt, with thoughts of replies as `reasoning_content` and, of prompts with
        tools, calls as `tool_calls`, in OpenAI's form."""
        template, question = template_of(tokenizer), self.question(tokenizer)
        calls = template.calls if self.prompt_inputs.get("tools") else None
        after = self.messages(tokenizer)[len(question) - isinstance(question[-1], BegunMessage) :]
        return [parsed_reply(each, template.thought, calls) if each["role"] == "assistant" else each for each in after]

    def messages(self, tokenizer: Tokenizer) -> list[Message]:
        """The conversation: the prompt's messages (a plain text is one of the user), the replies, and the observations
        between them. A message that the prompt has begun, and text of an environment behind it, begin the first reply;
        later such text is a message of the user."""
        found: list[Message] = self.question(tokenizer)
        begun = dict(found.pop()) if isinstance(found[-1], BegunMessage) else {}
        opening, *observations = self.observations or ("",)
        for observation, turn in zip([None, *observations], self.turns(tokenizer), strict=True):
            if isinstance(observation, list):
                found += observation
            elif observation:
                found.append({"role": "user", "content": observation})
            begin = opening if observation is None and isinstance(opening, str) else ""
            found.append({"role": "assistant", **begun, "content": begun.get("content", "") + begin + turn})
            begun = {}
        return found
