"""What every text should be: chosen token by token, each from a plain forward pass over all tokens before it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.inference.engine import Completion, Engine, Output
from kitforge.inference.sampling import SampleRequest, SamplingOptions, sample_tokens
from tests.core.nn.networks import CONFIGS, build

# Beyond the original length of the scaled positions, so that both of their regimes occur.
LENGTH = 40


@cache
def network(name: str, dtype: torch.dtype = torch.float64) -> Decoder:
    """A network of that position scheme with room for some text; to be read and never written."""
    return build(replace(CONFIGS[name], max_length=LENGTH), dtype=dtype).requires_grad_(False).eval()


def logits_of(model: Decoder, tokens: Sequence[int], final_length: int) -> Tensor:
    """Logits [length, vocab] of a text that will come to `final_length` tokens, as a trainer finds them."""
    lengths = torch.tensor([[final_length]])
    logits: Tensor = model(torch.tensor([list(tokens)]), Context(lengths=lengths))[0]
    return logits


def until_end(engine: Engine) -> Iterator[Output]:
    """What an engine tells until it has nothing left to do."""
    while engine.has_work:
        yield from engine.step()


def by_sample(engine: Engine) -> dict[tuple[int, int], list[Output]]:
    """The same by request and sample."""
    found: dict[tuple[int, int], list[Output]] = {}
    for output in until_end(engine):
        found.setdefault((output.request, output.sample), []).append(output)
    return found


def alone(engine: Engine, prompt: list[int], options: SamplingOptions, key: int | str = 0) -> Completion:
    """The text of the only request of an engine."""
    engine.submit(prompt, options, key=key)
    found = Completion(tokens=[], logprobs=[])
    for output in until_end(engine):
        found.tokens += output.tokens
        found.logprobs += output.logprobs
    return found


def recomputed(
    model: Decoder, prompt: Sequence[int], options: SamplingOptions, key: str | int = 0, stop_ids: Collection[int] = ()
) -> Completion:
    """The continuation of a prompt without a cache, an engine or batch mates."""
    completion = Completion(tokens=[], logprobs=[])
    final_length = len(prompt) + options.max_new_tokens
    while completion.finish_reason is None:
        text = [*prompt, *completion.tokens]
        place = {"prompt_length": len(prompt), "position": len(completion.tokens), "key": key}
        draw = SampleRequest(options=options, signature=(), history=text, **place)  # type: ignore[arg-type]
        tokens, logprobs, _ = sample_tokens(logits_of(model, text, final_length)[-1:], [draw])
        completion.tokens += tokens
        completion.logprobs += logprobs
        if tokens[0] in stop_ids or tokens[0] in options.stop_ids:
            completion.finish_reason = "stop"
        elif len(completion.tokens) == options.max_new_tokens:
            completion.finish_reason = "length"
    return completion
