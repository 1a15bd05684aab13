"""Continues texts and answers chats. Gives Hugging Face's shapes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, final

from torch import nn

from kitforge.data.template import Message, template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.text import InferenceOptions, Piece, TextEngine

Prompt = str | Sequence[Message]


@final
class TextGenerationPipeline:
    """`pipeline("text")` gives `[{"generated_text": ...}]`; a list of texts, of any size, gives a list of those.

    A chat is a list of messages `{"role": ..., "content": ...}`; what is generated is then the chat with its reply.
    The engine behind it keeps what it has read, for texts that begin alike, until a weight changes. Threads may share a
    pipeline: their texts are generated together, and each is the one that it is alone.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: InferenceOptions) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self._texts = TextEngine(Engine(model, options.engine, stop_ids=tokenizer.eos_ids), tokenizer)
        self._pieces: dict[int, deque[Piece]] = {}  # what has come of each request and was not yet fetched
        self._left: deque[int] = deque()  # requests of streams that were given up
        self._weights = _state(model)

    def __call__(self, texts: Prompt | Sequence[Prompt], *, num_samples: int = 1, **options: Any) -> list[Any]:
        """The texts, each with `num_samples` continuations; `options` are those of InferenceOptions, for this call."""
        several = _several(texts)
        if several is None:
            result: list[Any] = self([cast(Prompt, texts)], num_samples=num_samples, **options)[0]
            return result
        chosen = self._chosen(options)
        requests: list[int] = []
        try:
            for place, text in enumerate(several):
                requests.append(self._submit(text, chosen, num_samples, place))
            answers = [self._answer(request, num_samples) for request in requests]
        finally:
            self._forget(requests)
        return [
            [{"generated_text": _continued(text, sample)} for sample in samples]
            for text, samples in zip(several, answers, strict=True)
        ]

    def stream(self, text: Prompt, **options: Any) -> Iterator[str]:
        """The continuation piece by piece, each ending with a whole character. Several streams may be read in turn, and
        by several threads, each stream by one."""
        request = self._submit(text, self._chosen(options), 1, 0)
        try:
            for piece in self._until_end(request, 1):
                if piece.text:
                    yield piece.text
        finally:
            # A stream that nobody holds is closed by whatever thread collects it, perhaps in the middle of a step, so
            # no lock may be asked for here.
            self._left.append(request)

    def _submit(self, text: Prompt, options: InferenceOptions, num_samples: int, place: int) -> int:
        tokens = self._tokens(text)
        with self._texts.engine.lock:
            request = self._texts.submit(tokens, options, num_samples=num_samples, key=place)
            self._pieces[request] = deque()
        return request

    def _tokens(self, text: Prompt) -> list[int]:
        if isinstance(text, str):
            return self.tokenizer.encode_prompt(text)
        return template_of(self.tokenizer).tokens(text, opens_reply=True)

    def _answer(self, request: int, num_samples: int) -> list[str]:
        samples = [""] * num_samples
        for piece in self._until_end(request, num_samples):
            samples[piece.sample] += piece.text
        return samples

    def _until_end(self, request: int, num_samples: int) -> Iterator[Piece]:
        """All pieces of a request. What comes of others meanwhile is kept for them."""
        while num_samples:
            piece = self._next(request)
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason == "diverged":
                raise ModelError(
                    "what the model makes of this text is not a number",
                    got="NaN or infinity",
                    expected="finite logits",
                    fix="take a checkpoint from before the training diverged",
                )
            num_samples -= piece.finish_reason is not None
            yield piece

    def _next(self, request: int) -> Piece:
        """The next piece of a request. Pieces are handed out before the lock is let go, so none overtakes another; and
        it is let go after every step, so that nobody waits for more than a step of each of the others."""
        while True:
            with self._texts.engine.lock:
                self._forget([self._left.popleft() for _ in range(len(self._left))])
                if not self._pieces[request]:
                    for piece in self._texts.step():
                        self._pieces[piece.request].append(piece)
                if self._pieces[request]:
                    return self._pieces[request].popleft()

    def _forget(self, requests: list[int]) -> None:
        with self._texts.engine.lock:
            for request in requests:
                self._texts.cancel(request)
                self._pieces.pop(request, None)

    def _chosen(self, options: dict[str, Any]) -> InferenceOptions:
        """The options of a call, and an engine that knows of the weights as they are now."""
        if "engine" in options:
            raise ConfigError(
                "an engine is chosen once for a pipeline",
                got=f"engine={options['engine']!r} for one call",
                fix='pipeline(..., options={"inference.engine.max_sequences": 8})',
            )
        with self._texts.engine.lock:
            weights = _state(self.model)
            if weights != self._weights:
                self._weights = weights
                self._texts.engine.update_weights(self._texts.engine.version + 1)
        return from_dict(InferenceOptions, dataclasses.asdict(self.options) | options, "inference")


def _several(texts: Prompt | Sequence[Prompt]) -> Sequence[Prompt] | None:
    """The texts or chats where there is a list of them; None for a single one."""
    is_one = isinstance(texts, str) or (bool(texts) and isinstance(texts[0], Mapping))
    return None if is_one else cast(Sequence[Prompt], texts)


def _continued(text: Prompt, sample: str) -> str | list[Message]:
    return text + sample if isinstance(text, str) else [*text, {"role": "assistant", "content": sample}]


def _state(model: nn.Module) -> int:
    """Changes whenever a parameter is replaced or written to."""
    return hash(tuple((id(each), each._version) for each in model.parameters()))
