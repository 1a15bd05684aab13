"""The decoding loop: one batch from its prompts to its ends. It knows token ids only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.cache import ContiguousCache
from kitforge.inference.sampling import SamplingOptions, choose


@torch.no_grad()
def stream(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    stop_ids: Collection[int],
    first_request: int = 0,
) -> Iterator[list[int | None]]:
    """Yields the next token of every prompt, None for those that have ended, until all have. `first_request` numbers
    the first prompt; a request's number and the seed make its noise.

    A request ends after `max_new_tokens` or with one of `stop_ids`, which is not yielded. Raises DataError for an
    empty prompt and ConfigError for a text longer than the model's max_length.
    """
    network = cast(CausalLM, model)
    _check_lengths(network, prompts, options)
    cache, tokens, lengths = _start(network, prompts, options)
    requests = list(range(first_request, first_request + len(prompts)))
    live = [True] * len(prompts)
    was_training = model.training
    model.eval()
    try:
        for position in range(options.max_new_tokens):
            context = Context(positions=cache.begin(tokens.shape[1]), lengths=lengths, attend=cache)
            logits = network.head(network.hidden(tokens, context)[:, -1])
            chosen = choose(logits, options, requests, position)
            picked = chosen.tolist()
            live = [alive and token not in stop_ids for alive, token in zip(live, picked, strict=True)]
            if not any(live):
                return
            yield [token if alive else None for alive, token in zip(live, picked, strict=True)]
            tokens = chosen.unsqueeze(1)
    finally:
        model.train(was_training)


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    options: SamplingOptions,
    stop_ids: Collection[int] = (),
    first_request: int = 0,
) -> list[list[int]]:
    """The new tokens of every prompt, in order."""
    outputs: list[list[int]] = [[] for _ in prompts]
    if not prompts:
        return outputs
    for tokens in stream(model, prompts, options, stop_ids, first_request):
        for output, token in zip(outputs, tokens, strict=True):
            if token is not None:
                output.append(token)
    return outputs


def _start(
    network: CausalLM, prompts: Sequence[Sequence[int]], options: SamplingOptions
) -> tuple[ContiguousCache, Tensor, Tensor]:
    """An empty cache, the prompts padded on the left [B, T], and the final length of every row [B, 1]."""
    weight = network.head_weight
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    sizes = torch.tensor([len(prompt) for prompt in prompts], device=weight.device)
    cache = ContiguousCache(network.geometry, longest - sizes, longest + options.max_new_tokens, weight.dtype)
    lengths = (sizes + options.max_new_tokens).unsqueeze(1)
    return cache, torch.tensor(padded, device=weight.device), lengths


def _check_lengths(network: CausalLM, prompts: Sequence[Sequence[int]], options: SamplingOptions) -> None:
    if any(len(prompt) == 0 for prompt in prompts):
        raise DataError("a prompt is empty", got="no tokens", expected="at least one token", fix="give it some text")
    needed, limit = max(map(len, prompts)) + options.max_new_tokens, network.geometry.max_length
    if needed > limit:
        raise ConfigError(
            "the text would become longer than the model allows",
            got=f"{needed - options.max_new_tokens} prompt tokens + {options.max_new_tokens} new ones = {needed}",
            expected=f"at most max_length={limit}",
            fix="shorten the prompt or lower max_new_tokens",
        )
