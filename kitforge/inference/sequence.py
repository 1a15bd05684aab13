"""One text that is being generated: its tokens, how far its keys are in the cache, and what its owner asked for."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.sampling import LogitBias, SampleRequest, SamplingOptions

# diverged: what the model makes of the text is not a number. failed: its tokens could not be put into words.
FinishReason = Literal["stop", "length", "cancelled", "diverged", "failed"]


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One of the samples of a request. The scheduler moves it, the block manager fills its table."""

    request: int
    sample: int
    prompt_length: int
    options: SamplingOptions
    signature: Hashable
    stop_ids: frozenset[int]
    key: str | int
    num_top_logprobs: int = 0  # likely tokens to be told with each that is chosen
    priority: int
    arrival: int
    cache_salt: bytes = b""  # keeps apart texts whose equal beginnings have unequal keys
    tokens: list[int]  # the prompt and what was generated so far
    num_cached: int = 0  # positions whose keys and values lie in the blocks
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one for each leading block that is full
    cache_region: int | None = None  # the region of the cache that its blocks come from if they can
    is_consecutive: bool = True  # whether each block is the one after the one before
    is_running: bool = False
    finish_reason: FinishReason | None = None
    forks: list[Sequence] = field(default_factory=list)  # further samples, waiting for the prompt to be read
    bias: LogitBias | None = None  # of its options
    # For the prompt's tokens but the first, as far as they have been read; None: nobody asks.
    prompt_logprobs: list[PromptLogprob] | None = None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the model still has to see tokens of its prompt for their log-probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def max_length(self) -> int:
        """The most tokens that it can come to."""
        return self.prompt_length + self.options.max_new_tokens

    @property
    def sort_key(self) -> tuple[int, int]:
        """Smaller goes first: by priority, then in order of arrival."""
        return -self.priority, self.arrival

    @property
    def num_pending_tokens(self) -> int:
        """Tokens that have to pass through the model before the next one can be chosen."""
        return len(self.tokens) - self.num_cached

    def sample_request(self, draft_tokens: list[int] | None = None) -> SampleRequest:
        """The choice of its next token, after `draft_tokens` that are taken for granted."""
        history = [*self.tokens, *(draft_tokens or ())] if self.options.needs_history else ()
        length = len(self.tokens) + len(draft_tokens or ())
        return SampleRequest(
            options=self.options,
            signature=self.signature,
            history=history,
            prompt_length=self.prompt_length,
            position=length - self.prompt_length,
            key=self.key,
            num_top_logprobs=self.num_top_logprobs,
            bias=self.bias,
            banned=tuple(self.stop_ids) if length - self.prompt_length < self.options.min_new_tokens else (),
        )

    def append(self, token: int) -> None:
        """Take the next token, which may be the last."""
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_length:
            self.finish_reason = "length"
