"""Runs the model on the scheduled tokens of a step, packed into one row, and returns logits."""

from collections.abc import Iterable
from itertools import accumulate, groupby
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.core.kernels.attention.packed_mask import takes_packed
from kitforge.core.kernels.fused_decode_step.reference import Locations
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.nn.decode_step import FusedDecodeStep
from kitforge.foundation.device import copy_to
from kitforge.inference.adapters import Adapters
from kitforge.inference.cuda_graphs import CudaGraphRunner, Sampler, pad_block_table
from kitforge.inference.logprobs import prompt_logprobs_of
from kitforge.inference.paged_attention import (
    AttentionSegment,
    DecodeBatch,
    KeyValueCache,
    PagedAttention,
    PagedBatch,
    PrefillBatch,
    PrefillSpan,
)
from kitforge.inference.scheduler import ScheduledTokens
from kitforge.inference.sequence import Sequence


class ModelRunner:
    """Runs a model over sequences whose keys are in `cache`. With `is_paged` the blocks of a batch are gathered; else
    sequences whose blocks are consecutive are read in place."""

    def __init__(
        self,
        model: nn.Module,
        cache: KeyValueCache,
        adapters: Adapters,
        *,
        is_paged: bool,
        cuda_graphs: CudaGraphRunner | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self.cache = cache
        self._is_paged = is_paged
        self._cuda_graphs = cuda_graphs
        self._fused_decode = FusedDecodeStep(model, cache.layer, adapters.updates)
        self._size = cache.block_size

    def on_weights_changed(self) -> None:
        """Forget what was derived from the old weights."""
        self._adapters.refresh()
        self._fused_decode.forget()
        if self._cuda_graphs is not None:
            self._cuda_graphs.drop_graphs_of_moved_weights()

    def on_admission(self) -> None:
        """A newly submitted text begins, with the weights as they are now: they may have changed in place."""
        self._fused_decode.reread()

    def run(self, works: list[ScheduledTokens]) -> tuple[Tensor, Tensor | None]:
        """Logits [R, vocab], and hidden states [N, dim] of all tokens. Each work that needs logits has, in order, one
        row for its last token and one for each draft token. Works must be ordered by `decodes_first`. Prompt
        log-probabilities and outputs to be pooled go to the sequences that request them. The hidden states are None
        where the logits of all tokens show whether they are finite."""
        if self.can_replay(works):
            return self.replay([work.sequence for work in works]), None
        numbers = None
        if any(work.sequence.adapter >= 0 for work in works):
            counts = torch.tensor([work.num_tokens + len(work.draft_tokens) for work in works])
            numbers = torch.tensor([work.sequence.adapter for work in works]).repeat_interleave(counts)
        device = cast(CausalLM, self.model).head_weight.device
        if device.type == "cpu":
            result = self._run_fused(works, numbers)
            if result is not None:
                logits, hidden = result
                self._keep_outputs(works, hidden)
                return logits, None if logits.shape[0] == hidden.shape[0] else hidden
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        for work in works:
            sequence, start = work.sequence, work.sequence.num_cached
            end = start + work.num_tokens
            tokens += sequence.tokens[start:end] + work.draft_tokens
            positions += range(start, end + len(work.draft_tokens))
            slots += self._slots(sequence, start, end + len(work.draft_tokens))
            if work.needs_logits:
                rows += range(len(tokens) - len(work.draft_tokens) - 1, len(tokens))
        network = cast(CausalLM, self.model if numbers is None else self._adapters.network(copy_to(numbers, device)))
        segments = self._attention_segments(works, device)
        attention = PagedAttention(self.cache, copy_to(torch.tensor(slots), device), segments, network.kernels)
        context = Context(
            positions=copy_to(torch.tensor([positions]), device),
            lengths=self._max_lengths(works, device),
            attend=attention,
        )
        hidden = network.hidden(copy_to(torch.tensor([tokens]), device), context)[0]
        self._keep_outputs(works, hidden)
        return network.head(hidden if len(rows) == len(tokens) else hidden[rows]), hidden

    def can_replay(self, works: list[ScheduledTokens]) -> bool:
        """Whether the step is one of a captured graph: each sequence has one token, and none an adapter or pooling."""
        return self._cuda_graphs is not None and all(
            work.is_single_token and work.needs_logits and work.sequence.adapter < 0 and not work.sequence.is_pooling
            for work in works
        )

    def replay(self, sequences: list[Sequence], num_steps: int = 1, sample: Sampler | None = None) -> Tensor:
        """See `CudaGraphRunner.run`."""
        assert self._cuda_graphs is not None
        return self._cuda_graphs.run(sequences, num_steps, sample)

    def _keep_outputs(self, works: list[ScheduledTokens], hidden: Tensor) -> None:
        """Append prompt log-probabilities from hidden [N, dim], in which the row of a token predicts the next one, and
        keep the rows that are pooled."""
        first = 0
        for work in works:
            sequence = work.sequence
            logprobs = sequence.prompt_logprobs
            if sequence.is_pooling:
                sequence.keep_outputs(hidden[first : first + work.num_tokens])
            if logprobs is not None and sequence.needs_prompt_logprobs:
                # A sequence preempted during prefill is computed again from its beginning.
                start, known = first - sequence.num_cached, len(logprobs)
                end = min(sequence.num_cached + work.num_tokens, sequence.prompt_length - 1)
                if end > known:
                    rows = hidden[start + known : start + end]
                    targets = torch.tensor(sequence.tokens[known + 1 : end + 1], device=hidden.device)
                    num_alternatives = sequence.options.prompt_logprobs or 0
                    network = cast(CausalLM, self.model)
                    logprobs += prompt_logprobs_of(network, rows, targets, num_alternatives)
            first += work.num_tokens + len(work.draft_tokens)

    def _run_fused(self, works: list[ScheduledTokens], adapters: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """`run` in one fused call; None where impossible."""
        tokens: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        rows: list[int] = []
        slots: list[int] = []
        for work in works:
            sequence, first = work.sequence, work.sequence.num_cached
            count = work.num_tokens + len(work.draft_tokens)
            tokens += sequence.tokens[first : first + work.num_tokens]
            tokens += work.draft_tokens
            positions += range(first, first + count)
            start = sequence.block_table[0] * self._size
            if not sequence.is_consecutive:
                start = -1 - len(slots)
                slots += self._slots(sequence, 0, first + count)
            starts += [start] * count
            if work.needs_logits:
                rows += range(len(tokens) - len(work.draft_tokens) - 1, len(tokens))
        own, position, start_slots = torch.tensor([tokens, positions, starts])
        locations = Locations(
            starts=start_slots,
            lengths=position + 1,
            slots=torch.tensor(slots, dtype=torch.long),
            rows=torch.tensor(rows, dtype=torch.long),
            adapters=adapters,
        )
        context = Context(positions=position.unsqueeze(0), lengths=self._max_lengths(works, own.device))
        result = self._fused_decode(own.unsqueeze(0), context, locations)
        return None if result is None else (result[1], result[0])

    def _slots(self, sequence: Sequence, start: int, end: int) -> Iterable[int]:
        """The slots of positions start .. end - 1 of the sequence."""
        size, table = self._size, sequence.block_table
        if sequence.is_consecutive:
            return range(table[0] * size + start, table[0] * size + end)
        return [table[position // size] * size + position % size for position in range(start, end)]

    def _max_lengths(self, works: list[ScheduledTokens], device: torch.device) -> Tensor | None:
        """Final lengths [1, N], for models whose positions depend on them."""
        if not cast(CausalLM, self.model).geometry.depends_on_length:
            return None
        lengths = [work.sequence.max_length for work in works for _ in range(work.num_tokens + len(work.draft_tokens))]
        return copy_to(torch.tensor([lengths]), device)

    def _attention_segments(self, works: list[ScheduledTokens], device: torch.device) -> list[AttentionSegment]:
        num_decodes = 0
        while num_decodes < len(works) and works[num_decodes].is_single_token:
            num_decodes += 1
        segments: list[AttentionSegment] = []
        if self._is_paged and num_decodes:
            sequences = [work.sequence for work in works[:num_decodes]]
            lengths = [each.num_cached + 1 for each in sequences]
            blocks = [pad_block_table(each.block_table, -(-max(lengths) // self._size)) for each in sequences]
            tables = torch.tensor(blocks, device=device)
            segments.append(PagedBatch(first=0, tables=tables, lengths=torch.tensor(lengths, device=device)))
        elif num_decodes:
            segments += self._decode_batches([work.sequence for work in works[:num_decodes]], device)
        network, prefills = cast(CausalLM, self.model), works[num_decodes:]
        if len(prefills) > 1 and takes_packed(network.head_weight, network.geometry.head_dim):
            return [*segments, self._prefill_batch(prefills, num_decodes, device)]
        first = num_decodes
        for work in prefills:
            count = work.num_tokens + len(work.draft_tokens)
            segments.append(self._prefill_span(work.sequence, first, count, device))
            first += count
        return segments

    def _prefill_batch(self, works: list[ScheduledTokens], first: int, device: torch.device) -> PrefillBatch:
        counts = [work.num_tokens + len(work.draft_tokens) for work in works]
        lengths = [work.sequence.num_cached + count for work, count in zip(works, counts, strict=True)]
        within = np.arange(self._size)
        tables = [np.array(work.sequence.block_table)[:, None] * self._size + within for work in works]
        numbers = [table.ravel()[:length] for table, length in zip(tables, lengths, strict=True)]
        slots = copy_to(torch.from_numpy(np.concatenate(numbers)), device)
        spans = []
        for count, own in zip(counts, torch.split(slots, lengths), strict=True):
            spans.append(PrefillSpan(first=first, num_tokens=count, length=len(own), start=None, slots=own))
            first += count
        queries, keys = (
            copy_to(torch.tensor([0, *accumulate(sizes)], dtype=torch.int32), device) for sizes in (counts, lengths)
        )
        return PrefillBatch(spans=spans, slots=slots, queries=(queries, max(counts)), keys=(keys, max(lengths)))

    def _prefill_span(self, sequence: Sequence, first: int, num_tokens: int, device: torch.device) -> PrefillSpan:
        length = sequence.num_cached + num_tokens
        start, slots = sequence.block_table[0] * self._size, None
        if not sequence.is_consecutive:
            slots = torch.tensor(list(self._slots(sequence, 0, length)), device=device)
        return PrefillSpan(
            first=first, num_tokens=num_tokens, length=length, start=start if slots is None else None, slots=slots
        )

    def _decode_batches(self, sequences: list[Sequence], device: torch.device) -> list[AttentionSegment]:
        """The decoding tokens; runs of sequences with consecutive blocks form one batch."""
        segments: list[AttentionSegment] = []
        first = 0
        for is_consecutive, group in groupby(sequences, key=lambda sequence: sequence.is_consecutive):
            texts = list(group)
            if is_consecutive:
                starts = torch.tensor([text.block_table[0] * self._size for text in texts], device=device)
                lengths = torch.tensor([text.num_cached + 1 for text in texts], device=device)
                segments.append(DecodeBatch(first=first, starts=starts, lengths=lengths))
            else:
                segments += [self._prefill_span(text, first + index, 1, device) for index, text in enumerate(texts)]
            first += len(texts)
        return segments


def decodes_first(works: list[ScheduledTokens]) -> list[ScheduledTokens]:
    """Decoding tokens first, in the order of their blocks in the cache."""
    return sorted(works, key=lambda work: (not work.is_single_token, work.sequence.block_table[0]))
