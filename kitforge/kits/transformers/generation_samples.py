"""Generates samples from a few prompts at every evaluation."""

import dataclasses
import json
from collections.abc import Sequence

from torch import nn

from kitforge.data.text.continuation import decode_continuation
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.files import write_text
from kitforge.inference.capacity import kv_bytes_per_token
from kitforge.inference.engine import Engine
from kitforge.inference.folder_defaults import with_folder_defaults
from kitforge.inference.options import EngineOptions
from kitforge.inference.text_engine import InferenceOptions
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

# Limit of weights in bytes that a rank gathers for the samples of one evaluation: about a second between local GPUs.
GATHERED = 64 * 2**30


class GenerationSamples(Callback):
    """Writes samples/step_N.json."""

    def __init__(self, prompts: Sequence[str], tokenizer: Tokenizer, options: InferenceOptions) -> None:
        self._prompts = list(prompts)
        self._tokenizer = tokenizer
        settings = tokenizer.generation_config if prompts else {}
        self._options = with_folder_defaults(options, settings, in_training=True)
        self._is_reported = False

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind != "evaluate" or run.folder is None or not self._prompts:
            return
        prompts = [self._tokenizer.encode_prompt(prompt) for prompt in self._prompts]
        # A collective: each rank may hold only a shard of the model.
        if self._costs_too_much(run):
            return
        chosen = engine_options(run.model, self._options, [len(prompt) for prompt in prompts])
        engine = Engine(run.model, chosen, stop_ids=self._tokenizer.eos_ids)
        completions = engine.generate(prompts, self._options)
        run.state.parallel.reshard()
        if run.world.rank != 0:
            return
        texts = [
            decode_continuation(self._tokenizer, prompt, samples[0].content)
            for prompt, samples in zip(prompts, completions, strict=True)
        ]
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, texts, strict=True)]
        step = run.state.cursor.step
        page = json.dumps({"step": step, "samples": samples}, ensure_ascii=False, indent=1)
        write_text(run.folder / "samples" / f"step_{step}.json", page)

    def _costs_too_much(self, run: RunContext) -> bool:
        """Whether generation would gather too many weights; logged once. Under ZeRO 3 every token gathers every block
        on every rank."""
        mesh = run.world.mesh
        if mesh is None or mesh.degree("shard") == 1 or mesh.degrees.zero_stage < 3:
            return False
        once = sum(each.numel() * each.element_size() for each in run.model.parameters())
        affordable = GATHERED // max(once, 1)
        if self._options.max_new_tokens <= affordable:
            return False
        if not self._is_reported:
            self._is_reported = True
            size = f"left out: each new token would gather {once / 2**30:.1f} GiB of weights"
            run.log_event("samples", f"{size}; inference.max_new_tokens={affordable} would do" if affordable else size)
        return True


def engine_options(model: nn.Module, options: InferenceOptions, lengths: Sequence[int]) -> EngineOptions:
    """Engine options with KV cache for exactly these prompts, all in one batch."""
    given, device = options.engine, next(model.parameters()).device
    # One more block each: the scheduler needs a free block to admit a sequence.
    blocks = sum(-(-(length + options.max_new_tokens) // given.block_size) + 1 for length in lengths)
    memory = blocks * given.block_size * kv_bytes_per_token(model)
    return dataclasses.replace(
        given,
        max_num_seqs=len(lengths),
        max_num_batched_tokens=max(given.batched_tokens(device.type), len(lengths)),
        kv_cache_bytes=memory if given.kv_cache_bytes is None else min(memory, given.kv_cache_bytes),
    )
