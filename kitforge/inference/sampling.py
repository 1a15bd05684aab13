"""From logits to the next token and its log-probability. R rows, each the last position of some text.

Noise is a pure function of (seed, key, position): a text depends neither on its batch mates nor on how often its step
was tried.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kitforge.core.kernels.threads import single_thread
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check

# Logits, on CPU, for which no second thread is woken: the next step of the model wants that processor for itself.
SINGLE_THREAD_LOGITS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen and when to stop."""

    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: always the most likely token
    top_k: int | None = None  # only the k most likely tokens
    top_p: float | None = None  # only the smallest set of tokens that holds this much probability
    min_p: float | None = None  # only tokens at least this share as likely as the most likely one
    presence_penalty: float = 0.0  # taken from the logit of every token that was generated already
    frequency_penalty: float = 0.0  # the same, for each time that it was
    repetition_penalty: float = 1.0  # divides a positive logit, multiplies a negative one, of tokens of the whole text
    logit_bias: dict[str, float] = field(default_factory=dict)  # added to the logit of the token of that number
    stop_ids: tuple[int, ...] = ()  # tokens that end this text, besides those of the engine
    ignore_eos: bool = False  # those of the engine do not end it
    min_new_tokens: int = 0  # before so many, no token is chosen that would end the text
    # Log-probabilities of the prompt's own tokens, with so many of the most likely ones in the place of each. With them
    # max_new_tokens may be 0.
    prompt_logprobs: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        check(self.max_new_tokens >= least, "inference.max_new_tokens", self.max_new_tokens, f"at least {least}")
        new = self.min_new_tokens
        check(0 <= new <= self.max_new_tokens, "inference.min_new_tokens", new, f"0 to {self.max_new_tokens}")
        num_prompt_logprobs = self.prompt_logprobs
        check(
            num_prompt_logprobs is None or num_prompt_logprobs >= 0,
            "inference.prompt_logprobs",
            num_prompt_logprobs,
            "at least 0",
        )
        check(self.temperature >= 0, "inference.temperature", self.temperature, "a number of at least 0")
        check(self.top_k is None or self.top_k > 0, "inference.top_k", self.top_k, "at least 1")
        check(self.top_p is None or 0 < self.top_p <= 1, "inference.top_p", self.top_p, "above 0, at most 1")
        check(self.min_p is None or 0 <= self.min_p <= 1, "inference.min_p", self.min_p, "at least 0, at most 1")
        penalty = self.repetition_penalty
        check(penalty > 0, "inference.repetition_penalty", penalty, "above 0; 1 changes nothing")
        numbers = all(token.isdecimal() and token == str(int(token)) for token in self.logit_bias)
        check(numbers, "inference.logit_bias", list(self.logit_bias), "numbers of tokens as keys")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the text so far changes the logits."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    def signature(self) -> Hashable:
        """Equal for options that treat logits alike."""
        shape = (self.temperature, self.top_k, self.top_p, self.min_p)
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        # A text, as it keeps its hash: this is looked up for every token.
        return (*shape, *penalties, repr(sorted(self.logit_bias.items())))

    def bias(self, device: torch.device) -> LogitBias | None:
        """`logit_bias` as tensors on a device, to be made once a text; None where there is none."""
        if not self.logit_bias:
            return None
        tokens = torch.tensor([int(token) for token in self.logit_bias], device=device)
        return tokens, torch.tensor(list(self.logit_bias.values()), device=device)


# Tokens [K] and what is added to the logit of each [K].
LogitBias = tuple[Tensor, Tensor]
# Tokens that might have come, the most likely first, with their log-probabilities.
TopLogprobs = list[tuple[int, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One token to be chosen."""

    options: SamplingOptions
    signature: Hashable  # of the options, found once a text
    history: Sequence[int]  # the tokens before it; read only where a penalty looks back
    prompt_length: int  # how many of them were given rather than generated
    position: int  # how many tokens of this text were chosen before
    key: str | int  # what its noise is keyed by besides seed and position
    num_top_logprobs: int = 0  # how many of the most likely tokens are told
    bias: LogitBias | None = None  # of the options; made here where it is wanted and not given
    banned: tuple[int, ...] = ()  # tokens that may not be chosen

    def uniform(self) -> float:
        """A number in [0, 1), in steps of 2⁻³²."""
        return (seeds.key(self.options.seed, "token", self.key, self.position) >> 31) * 2.0**-32


def sample_tokens(logits: Tensor, draws: Sequence[SampleRequest]) -> tuple[list[int], list[float]]:
    """The next token of every row of logits [R, vocab], and its log-probability in the distribution that it was drawn
    from; see `process_logits`. A row that holds NaN has a log-probability of NaN, and its token means nothing."""
    if logits.is_cpu and logits.numel() <= SINGLE_THREAD_LOGITS:
        with single_thread():
            return _sample_tokens(logits, draws)
    return _sample_tokens(logits, draws)


def _sample_tokens(logits: Tensor, draws: Sequence[SampleRequest]) -> tuple[list[int], list[float]]:
    kinds: dict[Hashable, list[int]] = {}
    for row, draw in enumerate(draws):
        kinds.setdefault(draw.signature, []).append(row)
    if len(kinds) == 1:
        return _sample_with_same_options(logits, draws)
    tokens, logprobs = [0] * len(draws), [0.0] * len(draws)
    for rows in kinds.values():
        sampled = _sample_with_same_options(logits[rows], [draws[row] for row in rows])
        for row, token, logprob in zip(rows, *sampled, strict=True):
            tokens[row], logprobs[row] = token, logprob
    return tokens, logprobs


def top_logprobs(logits: Tensor, draws: Sequence[SampleRequest]) -> list[TopLogprobs]:
    """For every row of logits [R, vocab] as many of the most likely tokens as its draw wants, those left out that the
    options leave no room for."""
    result: list[TopLogprobs] = []
    for row, draw in enumerate(draws):
        if not draw.num_top_logprobs:
            result.append([])
            continue
        logprobs = torch.log_softmax(process_logits(logits[row : row + 1], draw.options, [draw])[0], dim=-1)
        values, tokens = logprobs.topk(min(draw.num_top_logprobs, len(logprobs)))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        result.append([(token, value) for token, value in pairs if value > float("-inf")])
    return result


def process_logits(logits: Tensor, options: SamplingOptions, draws: Sequence[SampleRequest] = ()) -> Tensor:
    """Scores [R, vocab] in fp32 at least, whose softmax is the distribution of the next token: after bias and
    penalties, temperature, and with -inf where top_k, top_p or min_p leave no room.

    At temperature 0, where no distribution is left, the scores are those of temperature 1 without truncation: the
    log-probability of a greedy token then still tells how sure the model was. `draws` holds the text of each row and
    is needed for penalties only.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_banned = any(draw.banned for draw in draws)
    if options.needs_history or options.logit_bias or is_banned:
        scores = _apply_penalties(scores.clone(), options, draws)
    if options.is_greedy:
        return scores
    # However small the temperature, the largest score stays a number.
    scores = (scores - scores.amax(-1, keepdim=True)) / max(options.temperature, torch.finfo(scores.dtype).tiny)
    if options.top_k is not None and options.top_k < scores.shape[-1]:
        smallest = scores.topk(options.top_k).values[:, -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if options.min_p:
        weights = torch.softmax(scores, dim=-1)
        scores = scores.masked_fill(weights < options.min_p * weights.amax(-1, keepdim=True), float("-inf"))
    if options.top_p is not None and options.top_p < 1:
        scores = _top_p_filter(scores, options.top_p)
    return scores


def _sample_with_same_options(logits: Tensor, draws: Sequence[SampleRequest]) -> tuple[list[int], list[float]]:
    options = draws[0].options
    scores = process_logits(logits, options, draws)
    if options.is_greedy:
        chosen = scores.argmax(-1, keepdim=True)
    else:
        # The token on which a point of the unit interval falls when tokens lie on it one after another, each as long
        # as it is likely; the sums are exact enough in double precision for any vocabulary.
        ends = torch.softmax(scores, dim=-1).cumsum(-1, dtype=torch.float64)
        points = torch.tensor([[draw.uniform()] for draw in draws], dtype=torch.float64, device=scores.device)
        chosen = torch.searchsorted(ends, points * ends[:, -1:], right=True).clamp_(max=scores.shape[-1] - 1)
    logprobs = torch.log_softmax(scores, dim=-1).gather(-1, chosen)
    return chosen.flatten().tolist(), logprobs.flatten().tolist()


def _apply_penalties(scores: Tensor, options: SamplingOptions, draws: Sequence[SampleRequest]) -> Tensor:
    """Repetition penalty (Keskar et al., 2019), presence and frequency penalties, bias, tokens that may not be chosen;
    in place."""
    if options.needs_history:
        for row, draw in zip(scores, draws, strict=True):
            history = torch.tensor(draw.history, device=scores.device)
            seen = torch.unique(history)
            old = row[seen]
            row[seen] = torch.where(old > 0, old / options.repetition_penalty, old * options.repetition_penalty)
            tokens, counts = torch.unique(history[draw.prompt_length :], return_counts=True)
            row[tokens] -= options.frequency_penalty * counts + options.presence_penalty
    bias = (draws[0].bias if draws else None) or options.bias(scores.device)
    if bias is not None:
        tokens, values = bias
        scores.index_add_(1, tokens, values.to(scores.dtype).expand(len(scores), -1))
    for row, draw in zip(scores, draws, strict=False):
        if draw.banned:
            row[list(draw.banned)] = float("-inf")
    return scores


def _top_p_filter(scores: Tensor, top_p: float) -> Tensor:
    ordered, index = torch.softmax(scores, dim=-1).sort(descending=True, stable=True)
    # A token stays while those before it do not yet hold top_p; so the most likely one always stays.
    dropped = ordered.cumsum(-1) - ordered >= top_p
    return scores.masked_fill(torch.zeros_like(dropped).scatter(-1, index, dropped), float("-inf"))
