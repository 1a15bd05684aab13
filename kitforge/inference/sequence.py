"""A sequence that is being generated: its tokens, its place in the KV cache, and its options."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from kitforge.foundation.errors import KitforgeError
from kitforge.inference.constraint import Constraint
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.sampling import LogitBias, SampleRequest, SamplingOptions

# diverged: the model's outputs are not finite. failed: its tokens could not be decoded to text, or its constraint
# allows none.
FinishReason = Literal["stop", "length", "cancelled", "diverged", "failed"]


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One sample of a request. The scheduler moves it between queues, the block manager fills its block table."""

    request: int
    sample: int
    prompt_length: int
    options: SamplingOptions
    signature: Hashable
    stop_ids: frozenset[int]
    key: str | int
    priority: int
    arrival: int
    adapter: int = -1  # its number in the engine; -1: the base model
    cache_salt: bytes = b""  # separates prefixes of equal tokens whose keys differ
    tokens: list[int]  # prompt and generated tokens
    num_cached: int = 0  # positions whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)  # one for each full block
    cache_region: int | None = None  # the region of the cache that its blocks preferably come from
    is_consecutive: bool = True  # whether its block numbers are consecutive
    is_running: bool = False
    finish_reason: FinishReason | None = None
    forks: list[Sequence] = field(default_factory=list)  # further samples, which wait for the prefill of the prompt
    bias: LogitBias | None = None  # the tensors of `options.logit_bias`
    constraint: Constraint | None = None  # its own, after the generated tokens
    error: KitforgeError | None = None  # of the constraint, where finish_reason is "failed"
    # Of all prompt tokens but the first, as far as they are computed; None: not requested.
    prompt_logprobs: list[PromptLogprob] | None = None
    pooled: list[Tensor] = field(default_factory=list)  # outputs [tokens, dim] of its prompt that pooling needs
    max_length: int = field(init=False)  # the most tokens that it can have

    def __post_init__(self) -> None:
        self.max_length = self.prompt_length + self.options.max_new_tokens

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt tokens still have to be computed for their log-probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length - 1

    @property
    def needs_all_outputs(self) -> bool:
        """Whether the outputs of prompt tokens are needed, which the prefix cache does not hold."""
        return self.needs_prompt_logprobs or self.options.pooling in ("mean", "cls")

    @property
    def is_pooling(self) -> bool:
        """Whether the outputs of its next tokens are pooled."""
        return self.options.pooling is not None and self.num_cached < self.prompt_length

    def keep_outputs(self, outputs: Tensor) -> None:
        """Keep what pooling needs of the outputs [tokens, dim] of the prompt tokens from `num_cached` on."""
        mode = self.options.pooling
        if self.num_cached == 0 or mode == "last":
            # A sequence preempted during prefill is computed again from its beginning.
            self.pooled = []
        if mode == "mean" or not self.pooled:
            rows = {"last": slice(-1, None), "cls": slice(1), "mean": slice(None)}[mode or "last"]
            self.pooled.append(outputs[rows].clone())

    @property
    def needs_host(self) -> bool:
        """Whether the host has to see each token before the next: for penalties, some constraints, alternatives."""
        reads = self.constraint is not None and self.constraint.reads_tokens
        return bool(reads or self.options.needs_history or self.options.num_top_logprobs)

    @property
    def sort_key(self) -> tuple[int, int]:
        """Ascending: by priority, then by arrival."""
        return -self.priority, self.arrival

    @property
    def num_pending_tokens(self) -> int:
        """Tokens to be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_cached

    def sample_requests(self, drafts: list[int]) -> list[SampleRequest]:
        """The requests to sample its next token and the ones after each of `drafts`, which are assumed accepted. Sets
        `error` where the constraint has failed."""
        masks = None
        if self.constraint is not None:
            try:
                masks = self.constraint.masks(drafts)
            except KitforgeError as error:
                self.error = error
        return [
            SampleRequest(
                options=self.options,
                signature=self.signature,
                history=self.tokens + drafts[:count] if self.options.needs_history else (),
                prompt_length=self.prompt_length,
                position=len(self.tokens) + count - self.prompt_length,
                key=self.key,
                num_top_logprobs=self.options.num_top_logprobs,
                bias=self.bias,
                allowed=None if masks is None else masks[count],
            )
            for count in range(1 + len(drafts))
        ]

    def append(self, token: int) -> None:
        """Append a sampled token, and finish at a stop token or the maximum length."""
        self.tokens.append(token)
        if token in self.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.max_length:
            self.finish_reason = "length"
        elif self.constraint is not None:
            self.constraint.advance(token)
