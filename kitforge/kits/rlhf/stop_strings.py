"""Stop strings in rollouts: an answer ends with the token that completes one, and keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from kitforge.data.tokenizer import Tokenizer
from kitforge.inference.engine import Engine, Output
from kitforge.inference.text_engine import Detokenizer


@final
class StoppingEngine:
    """Steps an engine, and ends each sample with the token that completes a stop string. What is drawn until then, and
    with what probability, is what the engine draws without stop strings."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop = stop
        self._texts: dict[tuple[int, int], Detokenizer] = {}
        self._stopped: set[tuple[int, int]] = set()

    def step(self) -> list[Output]:
        """What a step added; `finish_reason` is "stop" for a stop string too, see `is_stopped`."""
        if not self._stop:
            return self._engine.step()
        outputs = (each for each in self._engine.step() if not self.is_stopped(each))
        return [self._until_stop(each) for each in outputs]

    def is_stopped(self, output: Output) -> bool:
        """Whether a stop string, and no end token, has ended this sample."""
        return (output.request, output.sample) in self._stopped

    def _until_stop(self, output: Output) -> Output:
        name = output.request, output.sample
        text = self._texts.setdefault(name, Detokenizer(self._tokenizer, self._stop))
        num_kept = len(output.tokens) - (output.finish_reason == "stop")
        for count, token in enumerate(output.tokens[:num_kept], start=1):
            text.push([token])
            if text.is_stopped:
                self._stopped.add(name)
                if output.finish_reason is None:
                    self._engine.cancel(*name)
                tokens, logprobs = output.tokens[:count], output.logprobs[:count]
                return replace(output, tokens=tokens, logprobs=logprobs, finish_reason="stop")
        return output
