"""How likely a model finds given texts, without a cache. B texts, T the longest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context

# Rows of which logits exist at once.
LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """What a model makes of one token of a prompt, given those before it."""

    logprob: float
    rank: int  # 1: no token is likelier
    top_logprobs: list[tuple[int, float]]  # the most likely tokens in its place, with their log-probabilities


@torch.no_grad()
def token_logprobs(model: nn.Module, texts: list[list[int]], max_tokens: int) -> list[list[float]]:
    """For each text the log-probability of every token but the first. Texts of similar length share a pass of at most
    `max_tokens` tokens, or one text where that is longer."""
    scores: list[list[float]] = [[] for _ in texts]
    was_training = model.training
    model.eval()
    try:
        for batch in _batches(texts, max_tokens):
            result = _score_batch(cast(CausalLM, model), [texts[index] for index in batch])
            for index, logprobs in zip(batch, result, strict=True):
                scores[index] = logprobs
    finally:
        model.train(was_training)
    return scores


def _batches(texts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Places of the texts, in order of length; those too short to have a score are left out."""
    batches: list[list[int]] = []
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        length = len(texts[index])
        if length < 2:
            continue
        # The latest text is the longest so far, and all of a batch are padded to it.
        if batches and (len(batches[-1]) + 1) * length <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def _score_batch(network: CausalLM, texts: list[list[int]]) -> list[list[float]]:
    """Padding on the right is never seen by what stands before it, so it needs no mask."""
    device = network.head_weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    lengths = torch.tensor([[len(text)] for text in texts], device=device)
    hidden = network.hidden(tokens, Context(lengths=lengths))
    is_scored = torch.arange(1, longest, device=device) < lengths
    logprobs = logprobs_of(network, hidden[:, :-1][is_scored], tokens[:, 1:][is_scored])
    return [part.tolist() for part in torch.split(logprobs, [len(text) - 1 for text in texts])]


def logprobs_of(network: CausalLM, hidden: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [rows] of targets [rows] for hidden [rows, dim]."""
    return greedy_logprobs_of(network, hidden, targets)[0]


def greedy_logprobs_of(network: CausalLM, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same, and the most likely token of each row [rows]; the logits of a few rows exist at a time."""
    logprobs, likeliest = [], []
    for rows, wanted in zip(torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True):
        logits = network.head(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logprobs.append(logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1))
        likeliest.append(logits.argmax(-1))
    return torch.cat(logprobs), torch.cat(likeliest)


def prompt_logprobs_of(
    network: CausalLM, hidden: Tensor, targets: Tensor, num_top_logprobs: int
) -> list[PromptLogprob]:
    """The same with ranks and alternatives, for hidden [rows, dim] and targets [rows]."""
    result: list[PromptLogprob] = []
    for rows, wanted in zip(torch.split(hidden, LOGIT_ROWS), torch.split(targets, LOGIT_ROWS), strict=True):
        logits = network.head(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = logits.logsumexp(-1, keepdim=True)
        own = logits.gather(-1, wanted.unsqueeze(-1))
        ranks = (logits > own).sum(-1) + 1
        values, tokens = logits.topk(min(num_top_logprobs, logits.shape[-1]), dim=-1)
        columns = zip(
            (own - total)[:, 0].tolist(), ranks.tolist(), tokens.tolist(), (values - total).tolist(), strict=True
        )
        result += [
            PromptLogprob(logprob=logprob, rank=rank, top_logprobs=list(zip(names, others, strict=True)))
            for logprob, rank, names, others in columns
        ]
    return result
