"""From planned work to logits: lays the tokens of a step in one row and lets the model read it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.nn.single_tokens import SingleTokens
from kitforge.inference.cached_attention import CachedAttend, KeyValueCache, Pages, Part, Singles, Stretch
from kitforge.inference.recording import RecordedSteps, padded
from kitforge.inference.scheduler import Work
from kitforge.inference.score import prompt_logprobs_of
from kitforge.inference.sequence import Sequence


@final
class Runner:
    """Runs a model over sequences whose keys lie in `cache`. With `is_paged` the texts of a batch are gathered from
    wherever their blocks are; else they are read in place as far as they lie one after another."""

    def __init__(
        self, model: nn.Module, cache: KeyValueCache, *, is_paged: bool, recorded: RecordedSteps | None = None
    ) -> None:
        self.model = model
        self.cache = cache
        self._is_paged = is_paged
        self._recorded = recorded
        self._single_tokens = SingleTokens(model, cache.layer)
        self._size = cache.block_size

    def forget(self) -> None:
        """The weights have changed."""
        self._single_tokens.forget()
        if self._recorded is not None:
            self._recorded.forget_moved_weights()

    def run(self, works: list[Work]) -> tuple[Tensor, set[int]]:
        """Logits [R, vocab]: for each work in order that completes its text, one row for the last of its tokens and one
        for each of its drafts; and the places of the works whose keys may not be numbers. Works must be ordered as by
        `arranged`. Sequences that ask for log-probabilities of their prompts are given those of the tokens read."""
        if self._recorded is not None and all(work.is_single and work.completes for work in works):
            # Single tokens all have logits, which tell as much.
            return self._recorded.run([work.sequence for work in works]), set()
        if not self._is_paged and all(_is_simple(work) for work in works):
            found = self._run_singles(works)
            if found is not None:
                return found
        network = cast(CausalLM, self.model)
        device = network.head_weight.device
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        for work in works:
            sequence, start = work.sequence, work.sequence.num_cached
            end = start + work.num_tokens
            tokens += sequence.tokens[start:end] + work.drafts
            positions += range(start, end + len(work.drafts))
            slots += self._slots(sequence, start, end + len(work.drafts))
            if work.completes:
                rows += range(len(tokens) - len(work.drafts) - 1, len(tokens))
        parts, kernel = self._parts(works, device), network.kernels.token_attention
        attend = CachedAttend(self.cache, torch.tensor(slots, device=device), parts, kernel)
        context = Context(
            positions=torch.tensor([positions], device=device), lengths=self._lengths(works, device), attend=attend
        )
        hidden = network.hidden(torch.tensor([tokens], device=device), context)[0]
        self._score_prompts(works, hidden)
        return network.head(hidden if len(rows) == len(tokens) else hidden[rows]), _diverged(works, hidden)

    def _score_prompts(self, works: list[Work], hidden: Tensor) -> None:
        """Log-probabilities of prompts from hidden [N, dim]. A token is predicted by the row of the one before it."""
        first = 0
        for work in works:
            sequence = work.sequence
            logprobs = sequence.prompt_logprobs
            if logprobs is not None and sequence.scores_prompt:
                # A prompt that was given up half-way is read again from its beginning.
                start, known = first - sequence.num_cached, len(logprobs)
                end = min(sequence.num_cached + work.num_tokens, sequence.prompt_length - 1)
                if end > known:
                    rows = hidden[start + known : start + end]
                    targets = torch.tensor(sequence.tokens[known + 1 : end + 1], device=hidden.device)
                    num_alternatives = sequence.options.prompt_logprobs or 0
                    network = cast(CausalLM, self.model)
                    logprobs += prompt_logprobs_of(network, rows, targets, num_alternatives)
            first += work.num_tokens + len(work.drafts)

    def _run_singles(self, works: list[Work]) -> tuple[Tensor, set[int]] | None:
        """The same for single tokens of texts that lie in place, in one call where that can be."""
        texts = [work.sequence for work in works]
        tokens, positions, starts, lengths = torch.tensor(
            [
                [text.tokens[text.num_cached] for text in texts],
                [text.num_cached for text in texts],
                [text.blocks[0] * self._size for text in texts],
                [text.num_cached + 1 for text in texts],
            ]
        )
        finals = self._lengths(works, tokens.device)
        context = Context(positions=positions.unsqueeze(0), lengths=finals)
        found = self._single_tokens(tokens.unsqueeze(0), context, starts, lengths)
        if found is None:
            return None
        hidden, logits = found
        return logits, _diverged(works, hidden)

    def _slots(self, sequence: Sequence, start: int, end: int) -> Iterable[int]:
        """Where positions start .. end - 1 of the sequence lie."""
        size, table = self._size, sequence.blocks
        if sequence.is_consecutive:
            return range(table[0] * size + start, table[0] * size + end)
        return [table[position // size] * size + position % size for position in range(start, end)]

    def _lengths(self, works: list[Work], device: torch.device) -> Tensor | None:
        """[1, N], for models whose positions depend on how long a text becomes."""
        if not cast(CausalLM, self.model).geometry.depends_on_length:
            return None
        lengths = [work.sequence.final_length for work in works for _ in range(work.num_tokens + len(work.drafts))]
        return torch.tensor([lengths], device=device)

    def _parts(self, works: list[Work], device: torch.device) -> list[Part]:
        singles = 0
        while singles < len(works) and works[singles].is_single:
            singles += 1
        parts: list[Part] = []
        if self._is_paged and singles:
            parts.append(self._pages([work.sequence for work in works[:singles]], device))
        elif singles:
            parts += self._singles([work.sequence for work in works[:singles]], device)
        first = singles
        for work in works[singles:]:
            count = work.num_tokens + len(work.drafts)
            parts.append(self._stretch(work.sequence, first, count, device))
            first += count
        return parts

    def _stretch(self, sequence: Sequence, first: int, num_tokens: int, device: torch.device) -> Stretch:
        length = sequence.num_cached + num_tokens
        start, slots = sequence.blocks[0] * self._size, None
        if not sequence.is_consecutive:
            slots = torch.tensor(list(self._slots(sequence, 0, length)), device=device)
        return Stretch(
            first=first, num_tokens=num_tokens, length=length, start=start if slots is None else None, slots=slots
        )

    def _pages(self, sequences: list[Sequence], device: torch.device) -> Pages:
        lengths = [sequence.num_cached + 1 for sequence in sequences]
        num_blocks = -(-max(lengths) // self._size)
        tables = [padded(sequence.blocks, num_blocks) for sequence in sequences]
        return Pages(first=0, tables=torch.tensor(tables, device=device), lengths=torch.tensor(lengths, device=device))

    def _singles(self, sequences: list[Sequence], device: torch.device) -> list[Part]:
        """Single tokens, as many as can be in one part."""
        parts: list[Part] = []
        first = 0
        for is_consecutive, group in groupby(sequences, key=lambda sequence: sequence.is_consecutive):
            texts = list(group)
            if is_consecutive:
                starts = torch.tensor([text.blocks[0] * self._size for text in texts], device=device)
                lengths = torch.tensor([text.num_cached + 1 for text in texts], device=device)
                parts.append(Singles(first=first, starts=starts, lengths=lengths))
            else:
                parts += [self._stretch(text, first + place, 1, device) for place, text in enumerate(texts)]
            first += len(texts)
        return parts


def _is_simple(work: Work) -> bool:
    return work.is_single and work.completes and work.sequence.is_consecutive


def _diverged(works: list[Work], hidden: Tensor) -> set[int]:
    """The places of works with hidden [N, dim] that is not finite; so is that of every token with such a key."""
    if torch.isfinite(hidden.sum()):
        return set()
    sizes = [work.num_tokens + len(work.drafts) for work in works]
    return {place for place, part in enumerate(torch.split(hidden, sizes)) if not part.isfinite().all()}


def arranged(works: list[Work]) -> list[Work]:
    """Single tokens first, in the order in which they lie in the cache."""
    return sorted(works, key=lambda work: (not work.is_single, work.sequence.blocks[0]))
