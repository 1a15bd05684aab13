"""From logits to the next token. Noise is a pure function of (seed, request, position), so a request's text does not
depend on its batch mates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when to stop."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: always the most likely token
    top_k: int | None = None  # only the k most likely tokens
    top_p: float | None = None  # only the smallest set of tokens that holds this much probability
    seed: int = 0

    def __post_init__(self) -> None:
        check(self.max_new_tokens > 0, "inference.max_new_tokens", self.max_new_tokens, "at least 1")
        check(self.temperature >= 0, "inference.temperature", self.temperature, "a number of at least 0")
        check(self.top_k is None or self.top_k > 0, "inference.top_k", self.top_k, "at least 1")
        check(self.top_p is None or 0 < self.top_p <= 1, "inference.top_p", self.top_p, "above 0, at most 1")


def probabilities(logits: Tensor, options: SamplingOptions) -> Tensor:
    """The distribution [B, vocab] that tokens are drawn from, for logits [B, vocab] and a temperature above 0."""
    scores = logits.float() / options.temperature
    if options.top_k is not None and options.top_k < scores.shape[-1]:
        smallest = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    if options.top_p is None or options.top_p >= 1:
        return weights
    ordered, index = weights.sort(descending=True, stable=True)
    # A token stays while those before it do not yet hold top_p; so the most likely one always stays.
    dropped = ordered.cumsum(-1) - ordered >= options.top_p
    kept = torch.zeros_like(weights).scatter(-1, index, ordered.masked_fill(dropped, 0.0))
    return kept / kept.sum(-1, keepdim=True)


def choose(logits: Tensor, options: SamplingOptions, requests: list[int], position: int) -> Tensor:
    """The next token [B] of every request, for logits [B, vocab]; `position` counts the tokens generated so far."""
    if options.temperature == 0:
        return logits.argmax(-1)
    weights = probabilities(logits, options).cpu()
    # The largest of weight / exponential noise falls on each token with its probability (the Gumbel trick).
    noise = torch.stack(
        [
            torch.empty(weights.shape[1]).exponential_(generator=seeds.generator(options.seed, request, position))
            for request in requests
        ]
    )
    return (weights / noise).argmax(-1).to(logits.device)
