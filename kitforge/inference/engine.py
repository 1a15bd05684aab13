"""Generation engine with continuous batching. It works on token ids; `text_engine` adds text.

The engine runs the module that a trainer trains, so weights are never converted. In a world of several ranks every rank
has an engine, and all submit and step alike. Threads may share an engine: every call holds its lock.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Numbers
from dataclasses import dataclass
from math import inf, isnan
from time import perf_counter
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.quantized import Int8Linear, WeightOnlyLinear, quantized_copy
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ContextLengthError, DataError, KitforgeError, ModelError
from kitforge.foundation.log import logger, warn_once
from kitforge.inference.adapters import Adapters, Factors
from kitforge.inference.block_manager import BlockManager
from kitforge.inference.capacity import max_num_seqs, num_cache_blocks
from kitforge.inference.constraint import Constraint, constraint_of
from kitforge.inference.cuda_graphs import CudaGraphRunner, can_record_steps
from kitforge.inference.fair_lock import FairLock
from kitforge.inference.logprobs import PromptLogprob, eval_mode, token_logprobs
from kitforge.inference.model_runner import ModelRunner, decodes_first
from kitforge.inference.options import EngineOptions
from kitforge.inference.paged_attention import KeyValueCache
from kitforge.inference.pooling import pooled
from kitforge.inference.sampling import SamplingOptions, TopLogprobs, draw_tokens, sample_tokens, top_logprobs
from kitforge.inference.scheduler import ScheduledTokens, Scheduler
from kitforge.inference.sequence import FinishReason, Sequence

_log = logger(__name__)
# Seconds of decoding steps after which a text is shown and others are let in.
LONG_STEP = 0.02


@dataclass(slots=True, kw_only=True)
class Output:
    """The tokens that a step added to one sample of a request."""

    request: int
    sample: int
    tokens: list[int]  # the stop token included
    logprobs: list[float]  # under the distribution it was sampled from; see sampling.process_logits
    top_logprobs: list[TopLogprobs]  # the most likely tokens of that distribution, as many as requested
    finish_reason: FinishReason | None
    version: int  # of the weights
    # Of all prompt tokens but the first; only in the output that holds the first sample's first tokens.
    prompt_logprobs: list[PromptLogprob] | None = None
    embedding: Tensor | None = None  # [dim] fp32 on the CPU, pooled from the prompt; in that output too
    error: KitforgeError | None = None  # of the constraint, where finish_reason is "failed"


@dataclass(slots=True, kw_only=True)
class Completion:
    """A finished sample."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None = None

    @property
    def content(self) -> list[int]:
        """The tokens without the stop token."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


class Engine:
    """Generates from `model` and shares its weights. `stop_ids` end every sequence. A request may name one of the
    adapters, each of which has factors for layers of the model."""

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions | None = None,
        *,
        stop_ids: Collection[int] = (),
        adapters: Mapping[str, Factors] | None = None,
    ) -> None:
        self.model = model
        self.options = EngineOptions() if options is None else options
        self.version = 0
        self.lock = FairLock()  # reentrant; hold it to make several calls atomic
        self._network = cast(CausalLM, model)
        if self._network.head_weight.is_cpu and not NATIVE_DTYPES.get(self._network.head_weight.dtype, True):
            name = str(self._network.head_weight.dtype).removeprefix("torch.")
            warn_once(
                _log, f"this processor has no {name} units: weights are kept in it, products are computed in fp32"
            )
        self._geometry = self._network.geometry
        if not self._geometry.is_causal:
            fix = "pipeline('fill_mask', ...) or pipeline('embedding', ...) reads it"
            raise ModelError(
                "an encoder writes no text", got=type(model).__name__, expected="a language model", fix=fix
            )
        self.vocab_size = self._geometry.vocab_size  # of the model, padding included
        self.stop_ids = frozenset(stop_ids)
        self._batched_tokens = self.options.batched_tokens(self._network.head_weight.device.type)
        self._num_requests = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._seconds = inf  # of the last step
        self._has_new_texts = False  # submitted since the step that last read the weights anew
        self._live: dict[int, list[Sequence]] = {}
        self._undelivered: list[Output] = []
        self._generated: dict[int, list[Completion]] = {}  # the completions of running `generate` calls
        num_blocks = num_cache_blocks(self._network, self.options)
        self.max_num_seqs = max_num_seqs(self._network, self.options, num_blocks)  # sequences generated at once
        device, layout = self._network.head_weight.device, self.options.kv_layout
        is_contiguous = layout == "contiguous" or (layout == "auto" and device.type == "cpu")
        size = self.options.block_size
        self._blocks = BlockManager(
            num_blocks, size, self.max_num_seqs, is_contiguous=is_contiguous, has_prefix_cache=self.options.prefix_cache
        )
        self._quantized: Int8Linear | WeightOnlyLinear | None = None
        running = model
        if self.options.quantization != "none":
            running, self._quantized = quantized_copy(model, self.options.quantization)
        cache = KeyValueCache(num_blocks, size)
        # Collectives cannot be captured in a graph, so only a single rank uses graphs.
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        uses_graphs = self.options.cuda_graphs and is_alone and not is_contiguous and can_record_steps(running)
        graphs = CudaGraphRunner(running, cache, fuses=self.options.fused_decode) if uses_graphs else None
        head = self._network.head_weight
        self.adapters = Adapters(running, adapters or {}, self._network.kernels.linear, head.dtype)
        self._runner = ModelRunner(running, cache, self.adapters, is_paged=not is_contiguous, cuda_graphs=graphs)
        lookup = self.options.prompt_lookup_tokens
        # One text with draft tokens takes the captured steps from all others.
        self._scheduler = Scheduler(
            self._blocks, self.max_num_seqs, self._batched_tokens, lookup, drafts_forced=graphs is None
        )

    @property
    def has_work(self) -> bool:
        """Whether further steps will return outputs."""
        return bool(self._live or self._undelivered)

    @property
    def num_slots(self) -> int:
        """Capacity of the KV cache in tokens, which limits the length of a sequence."""
        return self._blocks.num_blocks * self._blocks.block_size

    @property
    def admitted(self) -> dict[int, int]:
        """The requests that the last step admitted, with the tokens of each that were in the prefix cache."""
        return self._scheduler.admitted

    def submit(
        self,
        prompt: Numbers[int],
        options: SamplingOptions | None = None,
        *,
        priority: int = 0,
        num_samples: int = 1,
        key: str | int | None = None,
        constraint: Constraint | None = None,
    ) -> int:
        """Submit a prompt for `num_samples` completions; returns the request's number. Higher priorities run first.
        Sampling noise is keyed by `key`, by default the request's number. Every sample obeys a copy of the constraint.

        Raises DataError for a prompt that is empty or has unknown tokens, and ConfigError for an unknown adapter and a
        sequence that would exceed the model's length or the cache.
        """
        options = SamplingOptions() if options is None else options
        self.validate(prompt, options)
        signature, stop_ids = options.signature(), self._stop_ids_of(options)
        check(constraint is None or not options.ignore_eos, "inference.ignore_eos", "true", "false with a grammar")
        constraint = constraint_of(options, stop_ids, prompt, self.vocab_size, constraint)
        bias = options.bias(self._network.head_weight.device)
        length = len(prompt) + options.max_new_tokens
        # Equal beginnings have unequal keys where these depend on the length of the sequence.
        adapter = self.adapters.number(options.adapter)
        cache_salt = length.to_bytes(8, "little") if self._geometry.depends_on_length else b""
        cache_salt += self.adapters.digests[adapter] if adapter >= 0 else b""
        cache_salt += options.cache_salt.encode()
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
                    priority=priority,
                    arrival=self._num_arrivals + sample,
                    adapter=adapter,
                    cache_salt=cache_salt,
                    tokens=list(prompt),
                    bias=bias,
                    constraint=None if constraint is None else constraint.copy(),
                    prompt_logprobs=[] if sample == 0 and options.prompt_logprobs is not None else None,
                )
                for sample in range(num_samples)
            ]
            self._num_arrivals += num_samples
            self._has_new_texts = True
            samples[0].forks = samples[1:]
            self._live[request] = list(samples)
            self._scheduler.add(samples[0])
        return request

    def cancel(self, request: int, sample: int | None = None) -> None:
        """Cancel a request, or one sample of it. The next step returns one output for each sample that had not
        finished."""
        with self.lock:
            for sequence in list(self._live.get(request, [])):
                if sample is None or sequence.sample == sample:
                    self._emit(self._abort(sequence, "cancelled"))

    def step(self) -> list[Output]:
        """Run the model once; returns an output for each sample that got tokens.

        Where the model raises, no state has changed: the next step tries again.
        """
        with self.lock:
            self._run_step()
            outputs, self._undelivered = self._undelivered, []
        return outputs

    def generate(
        self, prompts: Iterable[Numbers[int]], options: SamplingOptions | None = None, *, num_samples: int = 1
    ) -> list[list[Completion]]:
        """`num_samples` completions of every prompt, in order. Noise is keyed by the prompt's index."""
        own: dict[int, list[Completion]] = {}
        try:
            for index, prompt in enumerate(prompts):
                with self.lock:
                    request = self.submit(prompt, options, num_samples=num_samples, key=index)
                    own[request] = [Completion(tokens=[], logprobs=[]) for _ in range(num_samples)]
                    self._generated[request] = own[request]
            # The lock is released between two steps, so that other threads can submit and step.
            # The mode is changed once: in a step, it would take as long as the step of a small batch on a GPU.
            with eval_mode(self._runner.model):
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
            return token_logprobs(self._runner.model, texts, self._batched_tokens)

    def update_weights(self, version: int) -> None:
        """Take up changed weights: drop the prefix cache, and recompute the keys of running sequences."""
        with self.lock:
            self.version = version
            if self._quantized is not None:
                self._quantized.forget()
            self._runner.on_weights_changed()
            self._scheduler.preempt_all()
            self._blocks.reset_prefix_cache()

    def stats(self) -> dict[str, int]:
        """Counters and gauges for metrics."""
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
        with self.lock:
            works = decodes_first(self._scheduler.schedule())
            if not works:
                return
            self._num_steps += 1
            if self._scheduler.admitted and self._has_new_texts:
                self._has_new_texts = False
                self._runner.on_admission()
            started, num_steps = perf_counter(), self._num_steps_at_once(works)
            with eval_mode(self._runner.model):
                if self._blocks.copies:
                    self._runner.cache.copy(self._blocks.copies)
                    self._blocks.copies.clear()
                if num_steps > 1:
                    self._decode(works, num_steps)
                else:
                    logits, hidden = self._runner.run(works)
                    self._sample(works, logits, hidden)
            self._seconds = (perf_counter() - started) / num_steps

    def _num_steps_at_once(self, works: list[ScheduledTokens]) -> int:
        """How many decoding steps follow each other on the device, before the host reads their tokens."""
        if self._seconds > LONG_STEP or self.options.num_scheduler_steps == 1 or not self._runner.can_replay(works):
            return 1
        if any(work.sequence.needs_host for work in works):
            return 1
        most = min(self.options.num_scheduler_steps, int(LONG_STEP / self._seconds))
        return self._scheduler.reserve_steps([each.sequence for each in works], most)

    def _decode(self, works: list[ScheduledTokens], num_steps: int) -> None:
        """Decoding steps that read each other's tokens on the device: drafts that are right, up to a stop token."""
        sequences = [work.sequence for work in works]
        # The tokens between are not known here, nor read.
        steps = list(zip(*(sequence.sample_requests([0] * (num_steps - 1)) for sequence in sequences), strict=True))
        found: list[Tensor] = []

        def sample(number: int, logits: Tensor) -> Tensor:
            chosen, values = draw_tokens(logits, steps[number], self._network.kernels)
            # Float64 holds both exactly.
            found.append(torch.stack([chosen.double(), values.double()]))
            return chosen

        sample(num_steps - 1, self._runner.replay(sequences, num_steps, sample))
        tokens: list[int] = []
        logprobs: list[float] = []
        for work, (own, values) in zip(works, torch.stack(found).permute(2, 1, 0).tolist(), strict=True):
            sequence = work.sequence
            most = max(1, min(num_steps, sequence.max_length - len(sequence.tokens)))
            # The step of a NaN that is not the first is repeated, and then ends the text.
            most = next((step for step in range(1, most) if isnan(values[step])), most)
            chosen = list(map(int, own[:most]))
            work.draft_tokens = chosen[:-1]
            tokens += chosen
            logprobs += values[:most]
        self._update(works, tokens, logprobs, [[] for _ in tokens], set())

    def _sample(self, works: list[ScheduledTokens], logits: Tensor, hidden: Tensor | None) -> None:
        """Sample the next tokens and advance the sequences; works whose hidden states are not finite are aborted."""
        ready = [work for work in works if work.needs_logits]
        draws = [draw for work in ready for draw in work.sequence.sample_requests(work.draft_tokens)]
        tokens, logprobs, is_finite = sample_tokens(logits, draws, hidden, self._network.kernels)
        diverged: set[int] = set()
        if hidden is not None and not is_finite:
            of_works = torch.split(hidden, [work.num_tokens + len(work.draft_tokens) for work in works])
            diverged = {index for index, rows in enumerate(of_works) if not rows.isfinite().all()}
        self._update(works, tokens, logprobs, top_logprobs(logits, draws, self._network.kernels), diverged)

    def _update(
        self,
        works: list[ScheduledTokens],
        tokens: list[int],
        logprobs: list[float],
        top: list[TopLogprobs],
        diverged: set[int],
    ) -> None:
        """Append the sampled tokens, one for each draft token and one more for each work that samples."""
        end = 0
        for index, work in enumerate(works):
            start, end = end, end + (len(work.draft_tokens) + 1 if work.needs_logits else 0)
            if work.sequence.error is not None:
                self._emit(self._abort(work.sequence, "failed"))
            elif index in diverged or any(map(isnan, logprobs[start:end])):
                # Its blocks may hold NaN, which the next owner's mask would not hide.
                first = work.sequence.num_cached // self.options.block_size
                self._runner.cache.clear(work.sequence.block_table[first:])
                self._emit(self._abort(work.sequence, "diverged"))
            elif work.needs_logits:
                self._emit(self._append_tokens(work, tokens[start:end], logprobs[start:end], top[start:end]))
            else:
                self._blocks.advance(work.sequence, work.num_tokens)

    def _emit(self, output: Output) -> None:
        """Queue an output for `step` to return, or add it to the completions of a `generate` call."""
        samples = self._generated.get(output.request)
        if samples is None:
            self._undelivered.append(output)
            return
        completion = samples[output.sample]
        completion.tokens += output.tokens
        completion.logprobs += output.logprobs
        completion.finish_reason = output.finish_reason

    def _abort(self, sequence: Sequence, reason: FinishReason) -> Output:
        sequence.finish_reason = reason
        for sibling in self._live[sequence.request]:
            if sequence in sibling.forks:
                sibling.forks.remove(sequence)
        # The forks wait for this sequence to prefill the prompt; the first of them takes over.
        if sequence.forks:
            heir, *heir.forks = sequence.forks
            self._scheduler.add(heir)
        self._finish(sequence)
        return self._output(sequence, [], [], [])

    def _append_tokens(
        self, work: ScheduledTokens, sampled: list[int], logprobs: list[float], top: list[TopLogprobs]
    ) -> Output:
        """Append the sampled tokens as far as the draft tokens before them were accepted."""
        sequence, before = work.sequence, len(work.sequence.tokens)
        if before == sequence.max_length:
            # max_new_tokens is 0: only prompt log-probabilities or an embedding were requested.
            sampled, sequence.finish_reason = [], "length"
        for token, draft in zip(sampled, [*work.draft_tokens, None], strict=False):
            sequence.append(token)
            if sequence.finish_reason is not None or token != draft:
                break
        new_tokens = sequence.tokens[before:]
        # The last token has been sampled but is not in the cache yet.
        self._blocks.advance(sequence, work.num_tokens + len(new_tokens) - 1)
        for fork in sequence.forks:
            self._scheduler.fork(sequence, fork)
        sequence.forks = []
        output = self._output(sequence, new_tokens, logprobs[: len(new_tokens)], top[: len(new_tokens)])
        if before == sequence.prompt_length:
            output.prompt_logprobs = sequence.prompt_logprobs
            if sequence.options.pooling is not None:
                output.embedding, sequence.pooled = pooled(sequence.pooled, sequence.options.pooling), []
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
            error=sequence.error,
        )

    def _stop_ids_of(self, options: SamplingOptions) -> frozenset[int]:
        """The stop tokens within the vocabulary. Raises ConfigError where no other token is left to sample."""
        stops = frozenset(options.stop_ids) | (frozenset() if options.ignore_eos else self.stop_ids)
        known = frozenset(token for token in stops if 0 <= token < self._geometry.vocab_size)
        check(
            not options.min_new_tokens or len(known) < self._geometry.vocab_size,
            "inference.min_new_tokens",
            f"{options.min_new_tokens}, but every token is a stop token",
            "fewer stop tokens than the model has tokens",
        )
        return known

    def validate(self, prompt: Numbers[int], options: SamplingOptions) -> None:
        """Raise ConfigError or DataError for what `submit` refuses. Needs no lock."""
        self.adapters.number(options.adapter)
        size, new, known = len(prompt), options.max_new_tokens, f"0 to {self._geometry.vocab_size - 1}"
        if not size:
            raise DataError("a prompt is empty", got="no tokens", expected="at least one token", fix="add some text")
        if not 0 <= min(prompt) <= max(prompt) < self._geometry.vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < self._geometry.vocab_size)
            raise DataError("a prompt has an unknown token", got=unknown, expected=known)
        most = max(map(int, options.logit_bias), default=0)
        if most >= self._geometry.vocab_size:
            raise ConfigError("logit_bias has an unknown token", got=most, expected=known)
        for limit, what, expected in (
            (self._geometry.max_length, "the model allows", f"at most max_length={self._geometry.max_length}"),
            (self.num_slots, "the KV cache holds", f"at most {self.num_slots} tokens"),
        ):
            if size + new > limit:
                raise ContextLengthError(
                    f"the sequence would become longer than {what}",
                    got=f"{size} prompt tokens + {new} new ones = {size + new}",
                    expected=expected,
                    fix="shorten the prompt or lower max_new_tokens",
                )
