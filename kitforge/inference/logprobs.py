"""Log-probabilities of given sequences, without a KV cache. B sequences, T the longest of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context

# Logits are computed for so many rows at a time.
LOGIT_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprob:
    """The log-probability of one prompt token, given those before it."""

    logprob: float
    rank: int  # 1: the most likely token
    top_logprobs: list[tuple[int, float]]  # the most likely tokens at its position


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, and afterwards those of its modules back that were in training mode."""
    training = [module for module in model.modules() if module.training] if model.training else []
    _set_mode(training, False)
    try:
        yield
    finally:
        _set_mode(training, True)


def _set_mode(modules: list[nn.Module], is_training: bool) -> None:
    for module in modules:
        # That of torch first looks for a parameter of this name, which takes many times as long.
        is_plain = type(module).__setattr__ is nn.Module.__setattr__
        (object.__setattr__ if is_plain else setattr)(module, "training", is_training)


@torch.no_grad()
def token_logprobs(model: nn.Module, texts: list[list[int]], max_tokens: int) -> list[list[float]]:
    """For each sequence the log-probability of every token but the first. Sequences of similar length share a pass of
    at most `max_tokens` tokens; a longer sequence has a pass of its own."""
    scores: list[list[float]] = [[] for _ in texts]
    batches: list[list[int]] = []
    for index in sorted(range(len(texts)), key=lambda index: len(texts[index])):
        length = len(texts[index])
        # The latest sequence is the longest so far, and all of a batch are padded to it.
        if length > 1 and batches and (len(batches[-1]) + 1) * length <= max_tokens:
            batches[-1].append(index)
        elif length > 1:
            batches.append([index])
    with eval_mode(model):
        for batch in batches:
            result = _score_batch(cast(CausalLM, model), [texts[index] for index in batch])
            for index, logprobs in zip(batch, result, strict=True):
                scores[index] = logprobs
    return scores


def _score_batch(network: CausalLM, texts: list[list[int]]) -> list[list[float]]:
    """Log-probabilities of one padded batch. Causal attention hides the padding on the right, so it needs no mask."""
    device = network.head_weight.device
    longest = max(map(len, texts))
    tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
    lengths = torch.tensor([[len(text)] for text in texts], device=device)
    hidden = network.hidden(tokens, Context(lengths=lengths))
    is_scored = torch.arange(1, longest, device=device) < lengths
    logprobs, _ = greedy_logprobs_of(network, hidden[:, :-1][is_scored], tokens[:, 1:][is_scored])
    return [part.tolist() for part in torch.split(logprobs, [len(text) - 1 for text in texts])]


def greedy_logprobs_of(network: CausalLM, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [rows] of targets [rows] for hidden [rows, dim], and each row's most likely token [rows]."""
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
    """Log-probability, rank and most likely tokens of each target [rows], for hidden [rows, dim]."""
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
