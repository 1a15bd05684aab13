"""Which texts take part in the next step, and with how many tokens.

Texts are served by rank: higher priority first, then in order of arrival. Those that run go on; a prompt is read in
pieces that fill what the others leave of a step. Where the cache is full, the last in rank gives up its blocks and is
read anew later, which costs time and changes nothing.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from kitforge.inference.block_manager import BlockManager
from kitforge.inference.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledTokens:
    """The share of one sequence in a step: its tokens from `num_cached` on, then `draft_tokens` to be verified."""

    sequence: Sequence
    num_tokens: int  # of its own
    draft_tokens: list[int]

    @property
    def is_single_token(self) -> bool:
        """Whether it reads one token."""
        return self.num_tokens == 1 and not self.draft_tokens

    @property
    def needs_logits(self) -> bool:
        """Whether its next token can be chosen afterwards."""
        return self.num_tokens == self.sequence.num_pending_tokens


@final
class Scheduler:
    """Queues of sequences, waiting and running."""

    def __init__(
        self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, prompt_lookup_tokens: int = 0
    ) -> None:
        self.running: list[Sequence] = []
        self.admitted: list[int] = []  # requests that the last plan began to read, or to read anew
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens of prompts that were admitted
        self.num_prefix_hits = 0  # those of them that were in the cache already
        self._blocks = blocks
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prompt_lookup_tokens = prompt_lookup_tokens
        self._scheduled: dict[int, ScheduledTokens] = {}
        self._token_budget = 0

    @property
    def waiting(self) -> list[Sequence]:
        """Those that have no blocks, in no particular order."""
        return [sequence for _, sequence in self._waiting if sequence.finish_reason is None]

    def add(self, sequence: Sequence) -> None:
        """Let it wait for its turn."""
        heappush(self._waiting, (sequence.sort_key, sequence))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let a sample go on from the prompt that its parent has read, or wait for its turn to read it itself."""
        if len(self.running) < self._max_num_seqs and self._blocks.fork(parent, child):
            self._start(child)
        else:
            self.add(child)

    def finish(self, sequence: Sequence) -> None:
        """Take out a sequence that has ended; one in the queue is passed over when its turn comes."""
        if sequence.is_running:
            self._stop(sequence)

    def preempt_all(self) -> None:
        """Have every sequence read anew."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def schedule(self) -> list[ScheduledTokens]:
        """The next step. Empty only where nothing waits or runs."""
        self._scheduled, self._token_budget, self.admitted = {}, self._max_num_batched_tokens, []
        for is_reading in (False, True):
            for sequence in list(self.running):
                if sequence.is_running and (sequence.num_pending_tokens > 1) == is_reading and self._token_budget:
                    self._schedule_running(sequence)
        while self._waiting and self._token_budget and self._admit_next():
            pass
        return list(self._scheduled.values())

    def _schedule_running(self, sequence: Sequence) -> None:
        """Plan for a running sequence, at the expense of those behind it."""
        num_tokens = min(sequence.num_pending_tokens, self._token_budget)
        draft_tokens = self._propose_draft_tokens(sequence, num_tokens)
        while not self._blocks.reserve(sequence, num_tokens + len(draft_tokens)):
            if draft_tokens:
                draft_tokens = []
                continue
            last = self.running[-1]
            self._preempt(last)
            if last is sequence:
                return
        self._schedule_tokens(sequence, num_tokens, draft_tokens)

    def _admit_next(self) -> bool:
        """Start the first in the queue; False where there is no room for it."""
        sequence = self._waiting[0][1]
        if sequence.finish_reason is not None:
            heappop(self._waiting)
            return True
        if len(self.running) == self._max_num_seqs and not self._preempt_lower_priority(sequence):
            return False
        self._blocks.admit(sequence)
        num_tokens = min(sequence.num_pending_tokens, self._token_budget)
        while not self._reserve_with_margin(sequence, num_tokens):
            if not self._preempt_lower_priority(sequence):
                self._blocks.release(sequence)
                return False
        heappop(self._waiting)
        self._start(sequence)
        self._schedule_tokens(sequence, num_tokens, [])
        self.admitted.append(sequence.request)
        self.num_prefix_queries += len(sequence.tokens)
        self.num_prefix_hits += sequence.num_cached
        return True

    def _reserve_with_margin(self, sequence: Sequence, num_tokens: int) -> bool:
        """Reserve, if every running sequence could still grow by a block; else those would soon be thrown out."""
        margin = len(self.running)
        lacking = self._blocks.num_missing(sequence, num_tokens) + margin > self._blocks.num_free
        return not lacking and self._blocks.reserve(sequence, num_tokens)

    def _preempt_lower_priority(self, sequence: Sequence) -> bool:
        """Whether the last in rank made room, having less priority."""
        if not self.running or self.running[-1].priority >= sequence.priority:
            return False
        self._preempt(self.running[-1])
        return True

    def _propose_draft_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """A guess at what follows, where the sequence is about to choose a token and there is room."""
        if not self._prompt_lookup_tokens or num_tokens < sequence.num_pending_tokens:
            return []
        most = min(
            self._prompt_lookup_tokens, self._token_budget - num_tokens, sequence.max_length - len(sequence.tokens) - 1
        )
        return prompt_lookup(sequence.tokens, most)

    def _schedule_tokens(self, sequence: Sequence, num_tokens: int, draft_tokens: list[int]) -> None:
        self._scheduled[sequence.arrival] = ScheduledTokens(
            sequence=sequence, num_tokens=num_tokens, draft_tokens=draft_tokens
        )
        self._token_budget -= num_tokens + len(draft_tokens)

    def _start(self, sequence: Sequence) -> None:
        sequence.is_running = True
        insort(self.running, sequence, key=lambda each: each.sort_key)

    def _stop(self, sequence: Sequence) -> None:
        sequence.is_running = False
        self.running.remove(sequence)
        self._blocks.release(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        work = self._scheduled.pop(sequence.arrival, None)
        if work is not None:
            self._token_budget += work.num_tokens + len(work.draft_tokens)
        self.num_preemptions += 1
        self._stop(sequence)
        self.add(sequence)


def prompt_lookup(tokens: list[int], max_tokens: int, max_ngram: int = 3) -> list[int]:
    """Up to `max_tokens` tokens that followed the last ones where they stood before: the longest ending of up to
    `max_ngram` tokens that occurs earlier, in its latest place (prompt lookup, Saxena 2023)."""
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        ngram = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if max_tokens > 0 and tokens[start : start + size] == ngram:
                return tokens[start + size : start + size + max_tokens]
    return []
