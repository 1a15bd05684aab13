"""Many texts at once from one model. Knows token ids only; `text_engine` has the words.

The engine runs the very module that a trainer trains, so there is nothing to convert and nothing to disagree. In a
world of several ranks every rank has an engine, and all submit and step alike. Threads may share an engine: every call
holds its lock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Numbers
from dataclasses import dataclass, replace
from math import isnan
from typing import cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.quantized import Int8Linear, int8_copy
from kitforge.foundation import device as devices
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.block_manager import BlockManager
from kitforge.inference.cuda_graphs import CudaGraphRunner
from kitforge.inference.fair_lock import FairLock
from kitforge.inference.logprobs import PromptLogprob, token_logprobs
from kitforge.inference.model_runner import ModelRunner, decodes_first
from kitforge.inference.options import EngineOptions
from kitforge.inference.paged_attention import KeyValueCache
from kitforge.inference.sampling import SamplingOptions, TopLogprobs, sample_tokens, top_logprobs
from kitforge.inference.scheduler import ScheduledTokens, Scheduler
from kitforge.inference.sequence import FinishReason, Sequence

# Bytes of keys and values that an engine does not exceed on CPU unless it is told to, except for a single text.
DEFAULT_KV_CACHE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a step added to one sample of a request."""

    request: int
    sample: int
    tokens: list[int]  # the token that stops a text is the last one of it
    logprobs: list[float]  # in the distribution that each token was drawn from; see sampling.process_logits
    top_logprobs: list[TopLogprobs]  # the most likely tokens of that distribution, as many as were asked for
    finish_reason: FinishReason | None
    version: int  # of the weights
    prompt_logprobs: list[PromptLogprob] | None = (
        None  # of its tokens but the first: once, with the first sample's first tokens
    )


@dataclass(slots=True, kw_only=True)
class Completion:
    """A whole sample."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None

    @property
    def content(self) -> list[int]:
        """The tokens without the one that stopped them."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


def kv_bytes_per_token(model: nn.Module) -> int:
    """Bytes of the keys and values of one token."""
    network = cast(CausalLM, model)
    geometry = network.geometry
    return 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * network.head_weight.element_size()


@final
class Engine:
    """Generates from `model`, whose weights it shares. `stop_ids` end every text."""

    def __init__(
        self, model: nn.Module, options: EngineOptions | None = None, *, stop_ids: Collection[int] = ()
    ) -> None:
        self.model = model
        self.options = EngineOptions() if options is None else options
        self.version = 0
        self.lock = FairLock()  # for those who need several calls to be one
        self._geometry = cast(CausalLM, model).geometry
        self._stop_ids = frozenset(stop_ids)
        self._num_requests = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._live: dict[int, list[Sequence]] = {}
        self._undelivered: list[Output] = []
        self._generated: dict[int, list[Completion]] = {}  # what becomes of the requests of `generate`
        num_blocks = self._num_blocks()
        is_contiguous = self._is_contiguous()
        size = self.options.block_size
        self._blocks = BlockManager(
            num_blocks,
            size,
            self.options.max_num_seqs,
            is_contiguous=is_contiguous,
            has_prefix_cache=self.options.prefix_cache,
        )
        self._scheduler = Scheduler(
            self._blocks,
            self.options.max_num_seqs,
            self.options.max_num_batched_tokens,
            self.options.prompt_lookup_tokens,
        )
        self._int8: Int8Linear | None = None
        running = model
        if self.options.quantization == "int8":
            running, self._int8 = int8_copy(model)
        cache = KeyValueCache(num_blocks, size)
        recorded = CudaGraphRunner(running, cache) if self._uses_cuda_graphs(is_contiguous) else None
        self._runner = ModelRunner(running, cache, is_paged=not is_contiguous, cuda_graphs=recorded)

    @property
    def has_work(self) -> bool:
        """Whether a step would give something, now or later."""
        return bool(self._live or self._undelivered)

    @property
    def num_slots(self) -> int:
        """How many tokens the cache holds, and so the most that a text may come to."""
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def admitted(self) -> list[int]:
        """The requests whose prompts the last step began to read."""
        return self._scheduler.admitted

    def submit(
        self,
        prompt: Numbers[int],
        options: SamplingOptions | None = None,
        *,
        priority: int = 0,
        num_samples: int = 1,
        key: str | int | None = None,
        num_top_logprobs: int = 0,
    ) -> int:
        """Ask for `num_samples` continuations of a prompt; returns the number of the request. Higher priorities go
        first. Noise is keyed by `key`, by default the request's number. With every token come the `num_top_logprobs`
        most likely ones.

        Raises DataError for a prompt that is empty or has unknown tokens, and ConfigError for a text that would be
        longer than the model or the cache allows.
        """
        options = SamplingOptions() if options is None else options
        self._validate(prompt, options)
        signature, stop_ids = options.signature(), self._stop_ids_of(options)
        bias = options.bias(cast(CausalLM, self.model).head_weight.device)
        with self.lock:
            request, self._num_requests = self._num_requests, self._num_requests + 1
            key = request if key is None else key
            samples = [
                Sequence(
                    request=request,
                    sample=sample,
                    prompt_length=len(prompt),
                    options=options,
                    signature=signature,
                    stop_ids=stop_ids,
                    key=key if sample == 0 else f"{key}/{sample}",
                    num_top_logprobs=num_top_logprobs,
                    priority=priority,
                    arrival=self._num_arrivals + sample,
                    cache_salt=self._cache_salt(len(prompt) + options.max_new_tokens),
                    tokens=list(prompt),
                    bias=bias,
                    prompt_logprobs=[] if sample == 0 and options.prompt_logprobs is not None else None,
                )
                for sample in range(num_samples)
            ]
            self._num_arrivals += num_samples
            samples[0].forks = samples[1:]
            self._live[request] = list(samples)
            self._scheduler.add(samples[0])
        return request

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Stop what is left of a request, or one sample of it; the next step says so once for every sample that had
        not ended."""
        with self.lock:
            for sequence in list(self._live.get(request, [])):
                if sample is None or sequence.sample == sample:
                    self._emit(self._abort(sequence, "cancelled"))

    def step(self) -> list[Output]:
        """Run the model once; returns what came of it, sample by sample.

        Where the model raises, nothing has been read and nothing is lost: the next step tries again.
        """
        with self.lock:
            self._run_step()
            outputs, self._undelivered = self._undelivered, []
        return outputs

    def generate(
        self, prompts: Iterable[Numbers[int]], options: SamplingOptions | None = None, *, num_samples: int = 1
    ) -> list[list[Completion]]:
        """`num_samples` completions of every prompt, in order. The noise of a prompt is keyed by its place."""
        own: dict[int, list[Completion]] = {}
        try:
            for index, prompt in enumerate(prompts):
                with self.lock:
                    request = self.submit(prompt, options, num_samples=num_samples, key=index)
                    own[request] = [Completion(tokens=[], logprobs=[]) for _ in range(num_samples)]
                    self._generated[request] = own[request]
            # The lock is let go between two steps, so that others can submit and step in turn.
            while any(sample.finish_reason is None for samples in own.values() for sample in samples):
                self._run_step()
        finally:
            with self.lock:
                for request in own:
                    self.cancel(request)
                    del self._generated[request]
        return list(own.values())

    def score(self, sequences: Iterable[Numbers[int]]) -> list[list[float]]:
        """The log-probability of every token but the first, given those before it."""
        texts = [list(sequence) for sequence in sequences]
        with self.lock:
            return token_logprobs(self._runner.model, texts, self.options.max_num_batched_tokens)

    def update_weights(self, version: int) -> None:
        """The weights have changed: whatever was read with the old ones is read anew."""
        with self.lock:
            self.version = version
            if self._int8 is not None:
                self._int8.forget()
            self._runner.on_weights_changed()
            self._scheduler.preempt_all()
            self._blocks.reset_prefix_cache()

    def stats(self) -> dict[str, int]:
        """Counts for people and metrics."""
        blocks = self._blocks
        with self.lock:
            return {
                "running": len(self._scheduler.running),
                "waiting": len(self._scheduler.waiting),
                "steps": self._num_steps,
                "preemptions": self._scheduler.num_preemptions,
                "prefix_cache_queries": self._scheduler.num_prefix_queries,
                "prefix_cache_hits": self._scheduler.num_prefix_hits,
                "blocks": blocks.num_blocks,
                "blocks_used": blocks.num_blocks - blocks.num_free,
                "blocks_kept": blocks.num_evictable,
                "cache_bytes": self._runner.cache.num_bytes(),
            }

    @torch.no_grad()
    def _run_step(self) -> None:
        """Run the model once and book what comes of it."""
        with self.lock:
            works = decodes_first(self._scheduler.schedule())
            if not works:
                return
            self._num_steps += 1
            model = self._runner.model
            was_training = model.training
            if was_training:
                model.eval()
            try:
                if self._blocks.copies:
                    self._runner.cache.copy(self._blocks.copies)
                    self._blocks.copies.clear()
                logits, diverged = self._runner.run(works)
            finally:
                if was_training:
                    model.train()
            self._sample(works, logits, diverged)

    def _sample(self, works: list[ScheduledTokens], logits: Tensor, diverged: set[int]) -> None:
        """Choose the next tokens and book what was read; `diverged` are the places of works that cannot go on."""
        ready = [work for work in works if work.needs_logits]
        draws = [
            work.sequence.sample_request(work.draft_tokens[:count])
            for work in ready
            for count in range(len(work.draft_tokens) + 1)
        ]
        tokens, logprobs = sample_tokens(logits, draws) if draws else ([], [])
        top = top_logprobs(logits, draws)
        end = 0
        for index, work in enumerate(works):
            start, end = end, end + (len(work.draft_tokens) + 1 if work.needs_logits else 0)
            if index in diverged or any(map(isnan, logprobs[start:end])):
                self._emit(self._abort_diverged(work.sequence))
            elif work.needs_logits:
                self._emit(self._append_tokens(work, tokens[start:end], logprobs[start:end], top[start:end]))
            else:
                self._blocks.advance(work.sequence, work.num_tokens)

    def _emit(self, output: Output) -> None:
        """Keep an output for the next step to return, or add it to what `generate` will return."""
        samples = self._generated.get(output.request)
        if samples is None:
            self._undelivered.append(output)
            return
        completion = samples[output.sample]
        completion.tokens += output.tokens
        completion.logprobs += output.logprobs
        completion.finish_reason = output.finish_reason

    def _abort_diverged(self, sequence: Sequence) -> Output:
        """End a text whose keys may not be numbers, and leave none of them to the texts that get its blocks."""
        self._runner.cache.clear(sequence.block_table[sequence.num_cached // self.options.block_size :])
        return self._abort(sequence, "diverged")

    def _abort(self, sequence: Sequence, reason: FinishReason) -> Output:
        sequence.finish_reason = reason
        for sibling in self._live[sequence.request]:
            if sequence in sibling.forks:
                sibling.forks.remove(sequence)
        # The samples that wait for this one to read the prompt find another to wait for.
        if sequence.forks:
            heir, *heir.forks = sequence.forks
            self._scheduler.add(heir)
        self._finish(sequence)
        return self._output(sequence, [], [], [])

    def _append_tokens(
        self, work: ScheduledTokens, sampled: list[int], logprobs: list[float], top: list[TopLogprobs]
    ) -> Output:
        """Append the chosen tokens as far as the drafts before them were right."""
        sequence, before = work.sequence, len(work.sequence.tokens)
        if before == sequence.max_length:
            # Nothing but the prompt was asked for.
            sampled, sequence.finish_reason = [], "length"
        for token, draft in zip(sampled, [*work.draft_tokens, None], strict=False):
            sequence.append(token)
            if sequence.finish_reason is not None or token != draft:
                break
        new_tokens = sequence.tokens[before:]
        # The last token has been chosen but not yet read.
        self._blocks.advance(sequence, work.num_tokens + len(new_tokens) - 1)
        for fork in sequence.forks:
            self._scheduler.fork(sequence, fork)
        sequence.forks = []
        output = self._output(sequence, new_tokens, logprobs[: len(new_tokens)], top[: len(new_tokens)])
        if before == sequence.prompt_length:
            output = replace(output, prompt_logprobs=sequence.prompt_logprobs)
        if sequence.finish_reason is not None:
            self._finish(sequence)
        return output

    def _finish(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        samples = self._live[sequence.request]
        samples.remove(sequence)
        if not samples:
            del self._live[sequence.request]

    def _output(
        self, sequence: Sequence, tokens: list[int], logprobs: list[float], top_logprobs: list[TopLogprobs]
    ) -> Output:
        return Output(
            request=sequence.request,
            sample=sequence.sample,
            tokens=tokens,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            finish_reason=sequence.finish_reason,
            version=self.version,
        )

    def _cache_salt(self, max_length: int) -> bytes:
        return max_length.to_bytes(8, "little") if self._geometry.depends_on_length else b""

    def _stop_ids_of(self, options: SamplingOptions) -> frozenset[int]:
        """What ends a text, as far as the model knows it. Raises ConfigError where no token is left to begin with."""
        stops = frozenset(options.stop_ids) | (frozenset() if options.ignore_eos else self._stop_ids)
        known = frozenset(token for token in stops if 0 <= token < self._geometry.vocab_size)
        check(
            not options.min_new_tokens or len(known) < self._geometry.vocab_size,
            "inference.min_new_tokens",
            f"{options.min_new_tokens}, where every token ends a text",
            "fewer stop tokens than the model has tokens",
        )
        return known

    def _validate(self, prompt: Numbers[int], options: SamplingOptions) -> None:
        size, new = len(prompt), options.max_new_tokens
        if not size:
            raise DataError(
                "a prompt is empty", got="no tokens", expected="at least one token", fix="give it some text"
            )
        if not 0 <= min(prompt) <= max(prompt) < self._geometry.vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < self._geometry.vocab_size)
            raise DataError(
                "a prompt has an unknown token", got=unknown, expected=f"0 to {self._geometry.vocab_size - 1}"
            )
        most = max(map(int, options.logit_bias), default=0)
        if most >= self._geometry.vocab_size:
            expected = f"0 to {self._geometry.vocab_size - 1}"
            raise ConfigError("logit_bias has an unknown token", got=most, expected=expected)
        room = self._blocks.num_blocks * self._blocks.block_size
        for limit, what, wider in (
            (self._geometry.max_length, "the model allows", "max_length"),
            (room, "its keys have room for", "inference.engine.kv_cache_bytes"),
        ):
            if size + new > limit:
                raise ConfigError(
                    f"the text would become longer than {what}",
                    got=f"{size} prompt tokens + {new} new ones = {size + new}",
                    expected=f"at most {wider}={limit}" if wider == "max_length" else f"at most {limit} tokens",
                    fix="shorten the prompt or lower max_new_tokens",
                )

    def _num_blocks(self) -> int:
        """As many as the memory holds, or as all texts at full length need, but no more than `ROOM` bytes."""
        geometry, options = self._geometry, self.options
        block = kv_bytes_per_token(self.model) * options.block_size
        blocks_per_sequence = -(-geometry.max_length // options.block_size)
        if options.kv_cache_bytes is None:
            free = devices.free_memory(cast(CausalLM, self.model).head_weight.device)
            budget = DEFAULT_KV_CACHE_BYTES if free is None else free // 2
            return max(blocks_per_sequence, min(blocks_per_sequence * options.max_num_seqs, budget // block))
        if options.kv_cache_bytes < block:
            raise ConfigError(
                "inference.engine.kv_cache_bytes holds no text at all",
                got=f"{options.kv_cache_bytes} bytes",
                expected=f"at least {block}",
            )
        return options.kv_cache_bytes // block

    def _is_contiguous(self) -> bool:
        if self.options.kv_layout != "auto":
            return self.options.kv_layout == "contiguous"
        return cast(CausalLM, self.model).head_weight.device.type == "cpu"

    def _uses_cuda_graphs(self, is_contiguous: bool) -> bool:
        """Whether decoding steps are recorded: on devices that can, and not where ranks talk in the middle of them."""
        alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        able = devices.can_record(cast(CausalLM, self.model).head_weight.device)
        return self.options.cuda_graphs and able and alone and not is_contiguous
