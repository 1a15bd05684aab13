"""Sampling: from logits to the next token and its log-probability. R rows, each the last position of a sequence.

Noise is a pure function of (seed, key, position), so the tokens of a sequence depend neither on the rest of its batch
nor on preemption.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding

from kitforge.core.kernels.cpu_engine.threads import single_thread
from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import INTERNAL, check
from kitforge.foundation.device import copy_to
from kitforge.inference.pooling import PoolingMode

# Up to so many logits on CPU are sampled on one thread, which leaves the other cores to the next forward pass.
SINGLE_THREAD_LOGITS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling and stopping of a request."""

    max_new_tokens: int = 128
    # 0: greedy. None: 0, and in a server that of the folder's generation_config.json, else 1.
    temperature: float | None = None
    top_k: int | None = None  # only the k most likely tokens
    top_p: float | None = None  # nucleus sampling: the smallest set of tokens with this much probability
    min_p: float | None = None  # only tokens at least this fraction as likely as the most likely one
    presence_penalty: float = 0.0  # subtracted from the logit of every token generated before
    frequency_penalty: float = 0.0  # subtracted once for each time that a token was generated
    # Divides positive and multiplies negative logits of tokens in prompt or output; None: that of the folder's
    # generation_config.json, else 1.
    repetition_penalty: float | None = None
    # Tokens that are never generated; None: those of the folder's generation_config.json.
    suppress_tokens: tuple[int, ...] | None = None
    # Words of several tokens that are never generated, nor ended where the prompt begins them.
    bad_words: tuple[tuple[int, ...], ...] = field(default=(), metadata=INTERNAL)
    # Keys of the folder's generation_config.json to generate without.
    ignored_settings: tuple[str, ...] = ()
    logit_bias: dict[str, float] = field(default_factory=dict)  # token id to a number added to its logit
    stop_ids: tuple[int, ...] = ()  # further stop tokens, besides the engine's
    ignore_eos: bool = field(default=False, metadata=INTERNAL)  # ignore the engine's stop tokens
    min_new_tokens: int = 0  # stop tokens are excluded before so many tokens
    # Return log-probabilities of the prompt tokens, with so many most likely tokens each; max_new_tokens may then be 0.
    prompt_logprobs: int | None = field(default=None, metadata=INTERNAL)
    # Return one vector of the prompt, pooled from the outputs of its tokens; max_new_tokens may then be 0.
    pooling: PoolingMode | None = field(default=None, metadata=INTERNAL)
    # Return so many of the most likely tokens beside each token.
    num_top_logprobs: int = field(default=0, metadata=INTERNAL)
    seed: int = 0  # of the sampling noise
    # The engine's adapter that computes the text; None: the base model.
    adapter: str | None = field(default=None, metadata=INTERNAL)
    cache_salt: str = field(default="", metadata=INTERNAL)  # cached prefixes are shared by texts of equal ones

    def __post_init__(self) -> None:
        least = 1 if self.prompt_logprobs is None and self.pooling is None else 0
        check(self.max_new_tokens >= least, "inference.max_new_tokens", self.max_new_tokens, f"at least {least}")
        new = self.min_new_tokens
        check(0 <= new <= self.max_new_tokens, "inference.min_new_tokens", new, f"0 to {self.max_new_tokens}")
        prompt = self.prompt_logprobs
        check(prompt is None or prompt >= 0, "inference.prompt_logprobs", prompt, "at least 0")
        heat = self.temperature
        check(heat is None or heat >= 0, "inference.temperature", heat, "a number of at least 0")
        check(self.top_k is None or self.top_k > 0, "inference.top_k", self.top_k, "at least 1")
        check(self.top_p is None or 0 < self.top_p <= 1, "inference.top_p", self.top_p, "above 0, at most 1")
        check(self.min_p is None or 0 <= self.min_p <= 1, "inference.min_p", self.min_p, "at least 0, at most 1")
        check(self.penalty > 0, "inference.repetition_penalty", self.penalty, "above 0; 1 changes nothing")
        negative = any(token < 0 for token in self.suppress_tokens or ())
        check(not negative, "inference.suppress_tokens", self.suppress_tokens, "token ids")
        words = all(len(word) > 1 and min(word) >= 0 for word in self.bad_words)
        check(words, "inference.bad_words", self.bad_words, "two token ids or more for each word")
        numbers = all(token.isdecimal() and token == str(int(token)) for token in self.logit_bias)
        check(numbers, "inference.logit_bias", list(self.logit_bias), "token ids as keys")

    @property
    def is_greedy(self) -> bool:
        """Whether decoding is greedy."""
        return not self.temperature

    @property
    def penalty(self) -> float:
        """The repetition penalty, 1 for none."""
        return 1.0 if self.repetition_penalty is None else self.repetition_penalty

    @property
    def needs_history(self) -> bool:
        """Whether penalties need the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.penalty != 1)

    @property
    def truncates(self) -> bool:
        """Whether unlikely tokens are excluded."""
        return bool(self.top_k or self.min_p) or (self.top_p or 1) < 1

    def signature(self) -> Hashable:
        """Equal for options that process logits alike."""
        shape = (self.temperature or 0.0, self.top_k, self.top_p, self.min_p)
        penalties = (self.presence_penalty, self.frequency_penalty, self.penalty)
        # A string caches its hash, and this is looked up for every token.
        return (*shape, *penalties, repr(sorted(self.logit_bias.items())))

    def bias(self, device: torch.device) -> LogitBias | None:
        """`logit_bias` as tensors on a device, made once for each request; None where there is none."""
        if not self.logit_bias:
            return None
        tokens = torch.tensor([int(token) for token in self.logit_bias], device=device)
        return tokens, torch.tensor(list(self.logit_bias.values()), device=device)


# Tokens [K] and what is added to their logits [K].
LogitBias = tuple[Tensor, Tensor]
# Tokens and their log-probabilities, the most likely first.
TopLogprobs = list[tuple[int, float]]


@dataclass(slots=True, kw_only=True)
class SampleRequest:
    """One token to be sampled."""

    options: SamplingOptions
    signature: Hashable  # of the options
    history: Sequence[int]  # the tokens before it; read for penalties only
    prompt_length: int  # how many of these are prompt tokens
    position: int  # how many tokens were generated before
    key: str | int  # of its noise, besides seed and position
    num_top_logprobs: int = 0  # most likely tokens to return
    bias: LogitBias | None = None  # of the options; made on demand where it is not given
    # Packed bits [ceil(vocab / 32)] of the tokens that may be drawn, as in `constraint`; None: all.
    allowed: NDArray[np.int32] | None = None


def uniforms(draws: Sequence[SampleRequest]) -> NDArray[np.float64]:
    """A number in [0, 1) for each, in steps of 2⁻³²."""
    keys = [seeds.key(draw.options.seed, "token", draw.key, draw.position) >> 31 for draw in draws]
    return np.array(keys, dtype=np.float64) * 2.0**-32


def sample_tokens(
    logits: Tensor, draws: Sequence[SampleRequest], hidden: Tensor | None = None, kernels: Kernels = REFERENCE
) -> tuple[list[int], list[float], bool]:
    """The next token of every row of logits [R, vocab], its log-probability under the distribution it was sampled from
    (see `process_logits`), and whether `hidden` is finite: read from the device in one transfer. A row with NaN has a
    log-probability of NaN and a meaningless token."""
    parts: list[Tensor] = []
    if draws:
        tokens, logprobs = draw_tokens(logits, draws, kernels)
        # Float64 holds both exactly, and is what all are joined in.
        parts = [tokens.double(), logprobs.double()]
    if hidden is not None:
        with single_thread() if hidden.is_cpu else nullcontext():
            parts.append(hidden.sum().view(1))
    numbers: list[float] = torch.cat(parts).tolist() if parts else []
    size = len(draws)
    return list(map(int, numbers[:size])), numbers[size : 2 * size], all(map(isfinite, numbers[2 * size :]))


def draw_tokens(logits: Tensor, draws: Sequence[SampleRequest], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Those of `sample_tokens` on the device of the logits: tokens [R] and log-probabilities [R]."""
    if logits.is_cpu and logits.numel() <= SINGLE_THREAD_LOGITS:
        with single_thread():
            return _sample_kinds(logits, draws, kernels)
    return _sample_kinds(logits, draws, kernels)


def _sample_kinds(logits: Tensor, draws: Sequence[SampleRequest], kernels: Kernels) -> tuple[Tensor, Tensor]:
    first = draws[0].signature
    if all(draw.signature == first for draw in draws):
        return _choose(logits, draws, kernels)
    kinds: dict[Hashable, list[int]] = {}
    for row, draw in enumerate(draws):
        kinds.setdefault(draw.signature, []).append(row)
    tokens = torch.empty(len(draws), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(draws), dtype=torch.float64, device=logits.device)
    for rows in kinds.values():
        chosen, own = _choose(logits[rows], [draws[row] for row in rows], kernels)
        tokens[rows], logprobs[rows] = chosen, own.double()
    return tokens, logprobs


def top_logprobs(logits: Tensor, draws: Sequence[SampleRequest], kernels: Kernels = REFERENCE) -> list[TopLogprobs]:
    """For every row of logits [R, vocab] the most likely tokens that it requests, without those that top_k, top_p or
    min_p exclude. That of the sampled token has the bits that `sample_tokens` gives."""
    if not any(draw.num_top_logprobs for draw in draws):
        return [[] for _ in draws]
    result: list[TopLogprobs] = []
    for row, draw in enumerate(draws):
        if not draw.num_top_logprobs:
            result.append([])
            continue
        own = logits[row : row + 1]
        scores = process_logits(own, draw.options, [draw])[0].double()
        (token,), (logprob,) = _choose(own, [draw], kernels)
        logprobs = scores - scores[token] + logprob
        values, tokens = logprobs.topk(min(draw.num_top_logprobs, len(logprobs)))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        result.append([(token, value) for token, value in pairs if value > float("-inf")])
    return result


def process_logits(logits: Tensor, options: SamplingOptions, draws: Sequence[SampleRequest] = ()) -> Tensor:
    """Scores [R, vocab] in fp32 at least, whose softmax is the distribution of the next token: after bias, penalties
    and temperature, and -inf where top_k, top_p, min_p or a constraint exclude a token. The others choose among the
    tokens that a constraint allows.

    At temperature 0 the scores are those of temperature 1 without truncation, so the log-probability of a greedy token
    is the model's own among the allowed. `draws` holds the tokens of each row and what it allows.
    """
    scores = _penalized(logits, options, draws)
    if options.is_greedy:
        return scores
    # The largest score is 0, which stays finite for any temperature.
    scores = (scores - scores.amax(-1, keepdim=True)) / max(options.temperature or 0.0, torch.finfo(scores.dtype).tiny)
    if options.top_k is not None and options.top_k < scores.shape[-1]:
        smallest = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if options.min_p:
        weights = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(weights < options.min_p * weights.amax(-1, keepdim=True), float("-inf"))
    if options.top_p is not None and options.top_p < 1:
        ordered, index = torch.softmax(scores, dim=-1).sort(descending=True, stable=True)
        # A token stays while those before it sum to less than top_p, so the most likely one always stays.
        dropped = ordered.cumsum(-1) - ordered >= options.top_p
        scores = scores.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), float("-inf"))
    return scores


def _choose(logits: Tensor, draws: Sequence[SampleRequest], kernels: Kernels) -> tuple[Tensor, Tensor]:
    """The token of each row and its log-probability, for the same options in all rows."""
    options = draws[0].options
    if options.is_greedy:
        return kernels.greedy_sample(process_logits(logits, options, draws))
    points = copy_to(torch.from_numpy(uniforms(draws)), logits.device)
    if options.truncates:
        return kernels.random_sample(process_logits(logits, options, draws), points, 1.0)
    return kernels.random_sample(_penalized(logits, options, draws), points, options.temperature or 0.0)


def _penalized(logits: Tensor, options: SamplingOptions, draws: Sequence[SampleRequest]) -> Tensor:
    """Logits in fp32 at least, after bias and penalties, and -inf where a constraint excludes a token."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    rows = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    if scores is logits and (options.needs_history or options.logit_bias or 0 < len(rows) < len(scores)):
        scores = scores.clone()
    if options.needs_history or options.logit_bias:
        _apply_penalties(scores, options, draws)
    if rows:
        # Of this step alone, and of these rows alone: a buffer that is kept would leak into other texts.
        packed = np.stack([allowed for draw in draws if (allowed := draw.allowed) is not None]).view(np.uint8)
        # By bytes: filling by a mask branches for every token, and takes ten times as long on a CPU.
        octets = copy_to(torch.from_numpy(packed), scores.device).int()
        excluded = embedding(octets, _octet_scores(scores.device)).flatten(1)[:, : scores.shape[-1]]
        if len(rows) == len(scores):
            return excluded.to(scores.dtype).add_(scores)
        scores.index_add_(0, copy_to(torch.tensor(rows), scores.device), excluded.to(scores.dtype))
    return scores


@cache
def _octet_scores(device: torch.device) -> Tensor:
    """What each of eight tokens adds to its score, by the byte of their bits: 0 for a 1, -inf for a 0. [256, 8]"""
    bits = torch.arange(256, device=device).unsqueeze(-1) >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill(bits == 0, float("-inf"))


def _apply_penalties(scores: Tensor, options: SamplingOptions, draws: Sequence[SampleRequest]) -> None:
    """Repetition penalty (Keskar et al., 2019), presence and frequency penalties, and bias; in place."""
    if options.needs_history:
        for row, draw in zip(scores, draws, strict=True):
            # On the CPU, since the number of distinct tokens depends on the tokens.
            history = torch.tensor(draw.history, device="cpu")
            seen = copy_to(torch.unique(history), scores.device)
            old = row[seen]
            row[seen] = torch.where(old > 0, old / options.penalty, old * options.penalty)
            tokens, counts = torch.unique(history[draw.prompt_length :], return_counts=True)
            falls = options.frequency_penalty * counts + options.presence_penalty
            row[copy_to(tokens, scores.device)] -= copy_to(falls, scores.device)
    bias = (draws[0].bias if draws else None) or options.bias(scores.device)
    if bias is not None:
        tokens, values = bias
        scores.index_add_(1, tokens, values.to(scores.dtype).expand(len(scores), -1))
