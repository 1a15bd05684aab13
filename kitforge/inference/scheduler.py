"""Continuous batching with chunked prefill: which sequences take part in the next step, and with how many tokens.

Sequences are ordered by priority, then by arrival. Running sequences go on; prompts are prefilled in chunks that use
the rest of a step's token budget. Where the cache is full, the last sequence is preempted and recomputed later, which
costs time and changes no token.
"""

from bisect import insort
from dataclasses import dataclass
from heapq import heappop, heappush

from kitforge.inference.block_manager import BlockManager
from kitforge.inference.sequence import Sequence


@dataclass(slots=True, kw_only=True)
class ScheduledTokens:
    """The tokens of one sequence in a step: its own from `num_cached` on, then `draft_tokens` to be verified."""

    sequence: Sequence
    num_tokens: int  # without draft tokens
    draft_tokens: list[int]
    needs_logits: bool  # whether the next token is sampled after this step

    @property
    def is_single_token(self) -> bool:
        """Whether it is a decoding step without draft tokens."""
        return self.num_tokens == 1 and not self.draft_tokens


class Scheduler:
    """The queues of waiting and running sequences."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prompt_lookup_tokens: int = 0,
        *,
        drafts_forced: bool = False,
    ) -> None:
        """`drafts_forced`: tokens that a constraint forces are draft tokens."""
        self.running: list[Sequence] = []
        # Requests that the last step admitted, or admitted again, with the tokens found in the prefix cache.
        self.admitted: dict[int, int] = {}
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens of admitted sequences
        self.num_prefix_hits = 0  # those of them found in the prefix cache
        self._blocks = blocks
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prompt_lookup_tokens = prompt_lookup_tokens
        self._drafts_forced = drafts_forced
        self._scheduled: dict[int, ScheduledTokens] = {}
        self._token_budget = 0

    @property
    def waiting(self) -> list[Sequence]:
        """The waiting sequences, in no particular order."""
        return [sequence for _, sequence in self._waiting if sequence.finish_reason is None]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence into the waiting queue."""
        heappush(self._waiting, (sequence.sort_key, sequence))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Start a sample on the prompt blocks of its parent; without room it waits for a prefill of its own."""
        if len(self.running) < self._max_num_seqs and self._blocks.fork(parent, child):
            self._start(child)
        else:
            self.add(child)

    def finish(self, sequence: Sequence) -> None:
        """Remove a finished sequence; one that still waits is skipped when its turn comes."""
        if sequence.is_running:
            sequence.is_running = False
            self.running.remove(sequence)
            self._blocks.release(sequence)

    def preempt_all(self) -> None:
        """Preempt all sequences, so that they are recomputed."""
        for sequence in list(self.running):
            self._preempt(sequence)

    def schedule(self) -> list[ScheduledTokens]:
        """The next step; empty only where no sequence waits or runs."""
        self._scheduled, self._token_budget, self.admitted = {}, self._max_num_batched_tokens, {}
        reading = [sequence for sequence in self.running if sequence.num_pending_tokens > 1]
        decoding = [sequence for sequence in self.running if sequence.num_pending_tokens == 1]
        for sequence in decoding + reading:
            if sequence.is_running and self._token_budget:
                self._schedule_running(sequence)
        while self._waiting and self._token_budget and self._admit_next():
            pass
        return list(self._scheduled.values())

    def reserve_steps(self, sequences: list[Sequence], most: int) -> int:
        """How many decoding steps these running sequences can take one after another, at most `most`; their positions
        are writable."""
        remaining = [sequence.max_length - len(sequence.tokens) for sequence in sequences]
        num_steps = max(1, min(most, max(remaining)))
        for sequence, count in zip(sequences, remaining, strict=True):
            if num_steps > 1 and not self._blocks.reserve(sequence, max(1, min(count, num_steps))):
                return 1
        return num_steps

    def _schedule_running(self, sequence: Sequence) -> None:
        """Schedule a running sequence; later ones are preempted where blocks are missing."""
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
        """Admit the first waiting sequence; False where there is no room for it."""
        sequence = self._waiting[0][1]
        if sequence.finish_reason is not None:
            heappop(self._waiting)
            return True
        if len(self.running) == self._max_num_seqs and not self._preempt_lower_priority(sequence):
            return False
        self._blocks.admit(sequence)
        num_tokens = min(sequence.num_pending_tokens, self._token_budget)
        # Every running sequence must be able to grow by a block, or it would soon be preempted.
        while self._blocks.num_missing(sequence, num_tokens) + len(
            self.running
        ) > self._blocks.num_free or not self._blocks.reserve(sequence, num_tokens):
            if not self._preempt_lower_priority(sequence):
                self._blocks.release(sequence)
                return False
        heappop(self._waiting)
        self._start(sequence)
        self._schedule_tokens(sequence, num_tokens, [])
        self.admitted.setdefault(sequence.request, sequence.num_cached)
        self.num_prefix_queries += len(sequence.tokens)
        self.num_prefix_hits += sequence.num_cached
        return True

    def _preempt_lower_priority(self, sequence: Sequence) -> bool:
        """Preempt the last running sequence if its priority is lower; returns whether it was."""
        if not self.running or self.running[-1].priority >= sequence.priority:
            return False
        self._preempt(self.running[-1])
        return True

    def _propose_draft_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Draft tokens by prompt lookup or a constraint, where the sequence samples in this step and the budget
        allows."""
        constraint, lookup = sequence.constraint, self._prompt_lookup_tokens
        if num_tokens < sequence.num_pending_tokens or not (lookup or (constraint is not None and self._drafts_forced)):
            return []
        most = min(self._token_budget - num_tokens, sequence.max_length - len(sequence.tokens) - 1)
        guesses = prompt_lookup(sequence.tokens, min(most, lookup)) if lookup else []
        return (guesses if constraint is None else constraint.drafts(guesses))[: max(0, most)]

    def _schedule_tokens(self, sequence: Sequence, num_tokens: int, draft_tokens: list[int]) -> None:
        self._scheduled[sequence.arrival] = ScheduledTokens(
            sequence=sequence,
            num_tokens=num_tokens,
            draft_tokens=draft_tokens,
            needs_logits=num_tokens == sequence.num_pending_tokens,
        )
        self._token_budget -= num_tokens + len(draft_tokens)

    def _start(self, sequence: Sequence) -> None:
        sequence.is_running = True
        insort(self.running, sequence, key=lambda each: each.sort_key)

    def _preempt(self, sequence: Sequence) -> None:
        work = self._scheduled.pop(sequence.arrival, None)
        if work is not None:
            self._token_budget += work.num_tokens + len(work.draft_tokens)
        self.num_preemptions += 1
        self.finish(sequence)
        self.add(sequence)


def prompt_lookup(tokens: list[int], max_tokens: int, max_ngram: int = 3) -> list[int]:
    """Up to `max_tokens` tokens that followed the latest earlier occurrence of the longest suffix of at most
    `max_ngram` tokens (prompt lookup decoding, Saxena 2023)."""
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        ngram = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if max_tokens > 0 and tokens[start : start + size] == ngram:
                return tokens[start + size : start + size + max_tokens]
    return []
