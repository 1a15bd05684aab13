"""The tokenizer beside the run, and continuations of a few prompts at every evaluation, for people to read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import final

from kitforge.data.tokenizer import TOKENIZER_FOLDER, Tokenizer
from kitforge.foundation.files import write_text
from kitforge.inference.engine import Engine
from kitforge.inference.text import InferenceOptions
from kitforge.trainer.callbacks.callback import Callback, Event, Run


@final
class Samples(Callback):
    """Writes tokenizer/ when the run starts, then samples/step_N.json."""

    def __init__(self, prompts: Sequence[str], tokenizer: Tokenizer, options: InferenceOptions) -> None:
        self._prompts = list(prompts)
        self._tokenizer = tokenizer
        self._options = options

    def on_event(self, event: Event, run: Run) -> None:
        """Save the tokenizer at the start, generate after an evaluation."""
        is_first = run.world.rank == 0
        if event.kind == "start" and run.folder is not None and is_first:
            self._tokenizer.save(run.folder / TOKENIZER_FOLDER)
        if event.kind != "evaluate" or run.folder is None or not self._prompts:
            return
        prompts = [self._tokenizer.encode_prompt(prompt) for prompt in self._prompts]
        # Every rank takes part, since each may hold only pieces of the model.
        engine = Engine(run.model, self._options.engine, stop_ids=self._tokenizer.eos_ids)
        completions = engine.generate(prompts, self._options)
        run.state.parallel.rest()
        if not is_first:
            return
        texts = [self._tokenizer.decode(samples[0].content) for samples in completions]
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, texts, strict=True)]
        step = run.state.cursor.step
        page = json.dumps({"step": step, "samples": samples}, ensure_ascii=False, indent=1)
        write_text(run.folder / "samples" / f"step_{step}.json", page)
