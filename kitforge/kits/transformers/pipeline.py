"""Continues texts. Gives Hugging Face's shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, final

from torch import nn

from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import from_dict
from kitforge.inference.generate import generate, stream
from kitforge.inference.sampling import SamplingOptions


@final
class TextGenerationPipeline:
    """`pipeline("text")` gives `[{"generated_text": ...}]`; a list of texts gives a list of those."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: SamplingOptions, batch_size: int = 16) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.batch_size = batch_size

    def __call__(self, texts: str | Sequence[str], **options: Any) -> list[Any]:
        """The texts with their continuations; `options` are those of SamplingOptions, for this call."""
        if isinstance(texts, str):
            result: list[Any] = self([texts], **options)[0]
            return result
        chosen = self._chosen(options)
        results = []
        for start in range(0, len(texts), self.batch_size):
            batch = texts[start : start + self.batch_size]
            prompts = [self.tokenizer.encode(text) for text in batch]
            outputs = generate(self.model, prompts, chosen, self.tokenizer.eos_ids, start)
            joined = (text + self.tokenizer.decode(output) for text, output in zip(batch, outputs, strict=True))
            results += [[{"generated_text": text}] for text in joined]
        return results

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """The continuation piece by piece, each ending with a whole character."""
        written = ""
        tokens: list[int] = []
        prompts = [self.tokenizer.encode(text)]
        for step in stream(self.model, prompts, self._chosen(options), self.tokenizer.eos_ids):
            tokens += [token for token in step if token is not None]
            decoded = self.tokenizer.decode(tokens)
            if not decoded.endswith("\ufffd"):
                yield decoded[len(written) :]
                written = decoded
        rest = self.tokenizer.decode(tokens)[len(written) :]
        if rest:
            yield rest

    def _chosen(self, options: dict[str, Any]) -> SamplingOptions:
        return from_dict(SamplingOptions, dataclasses.asdict(self.options) | options, "inference")
