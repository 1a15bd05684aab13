"""Blocks are counted right whatever happens: a machine of Hypothesis plays the scheduler and a dict plays the cache."""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kitforge.inference.block_manager import BlockManager
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.scheduler import ScheduledTokens, Scheduler
from kitforge.inference.sequence import Sequence

NUM_BLOCKS, NUM_REGIONS = 12, 4
Chance = Any


def sequence(tokens: list[int], number: int = 0) -> Sequence:
    """That comes later and is more urgent with its number."""
    own: dict[str, Any] = {"options": SamplingOptions(), "signature": (), "stop_ids": frozenset(), "key": 0}
    place = {"request": number, "priority": number, "arrival": number, "prompt_length": len(tokens)}
    return Sequence(tokens=list(tokens), sample=0, **own, **place)


class Blocks(RuleBasedStateMachine):
    """`memory` maps each slot to the text that it was written for, so that a wrong block is a wrong text."""

    is_contiguous = True
    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(
            NUM_BLOCKS, self.size, NUM_REGIONS, is_contiguous=self.is_contiguous, has_prefix_cache=True
        )
        self.running: list[Sequence] = []
        self.memory: dict[int, tuple[int, ...]] = {}
        self.version = 0

    def slot(self, each: Sequence, position: int) -> int:
        return each.block_table[position // self.size] * self.size + position % self.size

    def copy(self) -> None:
        pairs = [
            (to * self.size + place, source * self.size + place)
            for to, source in self.blocks.copies.items()
            for place in range(self.size)
        ]
        read = {to: self.memory.get(source, ()) for to, source in pairs}
        self.memory |= read
        self.blocks.copies.clear()

    @precondition(lambda self: len(self.running) < NUM_REGIONS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> None:
        each = sequence(tokens)
        self.blocks.admit(each)
        assert each.num_cached < len(tokens)
        self.running.append(each)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 5), drafts=st.integers(0, 3))
    def step(self, data: Chance, count: int, drafts: int) -> None:
        each = data.draw(st.sampled_from(self.running))
        count = min(count, len(each.tokens) - each.num_cached)
        free, missing = self.blocks.num_free, self.blocks.num_missing(each, count + drafts)
        done = self.blocks.reserve(each, count + drafts)
        assert done == (missing <= free)
        assert self.blocks.num_free == free - (missing if done else 0)
        if not done:
            return
        self.copy()
        for position in range(each.num_cached, each.num_cached + count):
            self.memory[self.slot(each, position)] = (self.version, *each.tokens[: position + 1])
        for position in range(each.num_cached + count, each.num_cached + count + drafts):
            self.memory[self.slot(each, position)] = (-1,)
        self.blocks.advance(each, count)
        if each.num_cached == len(each.tokens) and len(each.tokens) < 14:
            each.tokens.append(data.draw(st.integers(0, 1)))

    @precondition(lambda self: 0 < len(self.running) < NUM_REGIONS)
    @rule(data=st.data())
    def fork(self, data: Chance) -> None:
        parents = [each for each in self.running if each.num_cached >= each.prompt_length]
        if not parents:
            return
        parent = data.draw(st.sampled_from(parents))
        child = sequence(parent.tokens[: parent.prompt_length])
        assert self.blocks.fork(parent, child)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: Chance) -> None:
        each = data.draw(st.sampled_from(self.running))
        self.running.remove(each)
        self.blocks.release(each)

    @rule()
    def change_weights(self) -> None:
        for each in self.running:
            self.blocks.release(each)
        self.running = []
        self.blocks.reset_prefix_cache()
        self.version += 1

    @invariant()
    def every_text_reads_what_was_written_for_it(self) -> None:
        pending = {
            to * self.size + place: source * self.size + place
            for to, source in self.blocks.copies.items()
            for place in range(self.size)
        }
        for each in self.running:
            for position in range(each.num_cached):
                slot = self.slot(each, position)
                wanted = (self.version, *each.tokens[: position + 1])
                assert self.memory[pending.get(slot, slot)] == wanted

    @invariant()
    def blocks_are_counted(self) -> None:
        held = {block for each in self.running for block in each.block_table}
        assert self.blocks.num_free == NUM_BLOCKS - len(held)
        assert 0 <= self.blocks.num_evictable <= self.blocks.num_free
        for each in self.running:
            assert each.is_consecutive == (
                each.block_table == list(range(each.block_table[0], each.block_table[0] + len(each.block_table)))
                if each.block_table
                else True
            )

    def teardown(self) -> None:
        for each in self.running:
            self.blocks.release(each)
        assert self.blocks.num_free == NUM_BLOCKS
        assert not self.blocks.copies


class PagedBlocks(Blocks):
    is_contiguous = False


class LargerBlocks(Blocks):
    size = 3


PLAY = settings(max_examples=60, stateful_step_count=40, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Blocks, PagedBlocks, LargerBlocks])
def test_blocks_are_counted_and_hold_what_their_texts_read(machine: type[Blocks]) -> None:
    run_state_machine_as_test(machine, settings=PLAY)


def test_the_end_of_an_old_text_makes_room_before_its_beginning() -> None:
    blocks = BlockManager(4, 1, 2, is_contiguous=False, has_prefix_cache=True)
    old = sequence([1, 2, 3, 4])
    blocks.admit(old)
    assert blocks.reserve(old, 4)
    blocks.advance(old, 4)
    blocks.release(old)
    other = sequence([9])
    blocks.admit(other)
    assert blocks.reserve(other, 1)
    again = sequence([1, 2, 3, 4])
    blocks.admit(again)
    assert again.num_cached >= 2


def test_a_text_at_home_lies_in_one_piece_and_a_shared_beginning_is_copied_there() -> None:
    blocks = BlockManager(16, 2, 2, is_contiguous=True, has_prefix_cache=True)
    first, second = sequence([1, 2, 3, 4, 5, 6]), sequence([1, 2, 3, 4, 7])
    blocks.admit(first)
    assert blocks.reserve(first, 6)
    blocks.advance(first, 6)
    blocks.admit(second)
    assert (second.num_cached, second.block_table, blocks.copies) == (4, [8, 9], {8: 0, 9: 1})
    assert first.is_consecutive and second.is_consecutive


def test_without_neighbours_a_text_takes_over_the_place_of_its_beginning() -> None:
    blocks = BlockManager(16, 2, 2, is_contiguous=True, has_prefix_cache=True)
    first = sequence([1, 2, 3, 4, 5])
    blocks.admit(first)
    assert blocks.reserve(first, 5)
    blocks.advance(first, 5)
    blocks.release(first)
    second = sequence([1, 2, 3, 4, 6])
    blocks.admit(second)
    assert (second.block_table, blocks.copies, second.cache_region) == ([0, 1], {}, 0)


def carry_out(works: list[ScheduledTokens], blocks: BlockManager) -> None:
    for work in works:
        if work.needs_logits:
            work.sequence.append(1)
        blocks.advance(work.sequence, work.num_tokens)


def test_the_room_of_a_text_that_is_pushed_out_is_given_to_others_in_the_same_step() -> None:
    blocks = BlockManager(5, 4, 2, is_contiguous=False, has_prefix_cache=False)
    scheduler = Scheduler(blocks, 2, 4)
    common, urgent = sequence([1] * 9), sequence([1] * 18, 1)
    scheduler.add(common)
    for _ in range(3):
        carry_out(scheduler.schedule(), blocks)
    scheduler.add(urgent)
    for _ in range(2):
        works = scheduler.schedule()
        assert {work.sequence.request: work.num_tokens for work in works} == {0: 1, 1: 3}
        carry_out(works, blocks)
    # The common text is planned first, since it goes on, and then makes way for a block of the urgent one. The token
    # that it would have read is free again, and enough blocks for it to begin anew.
    works = scheduler.schedule()
    assert scheduler.num_preemptions == 1
    assert {work.sequence.request: work.num_tokens for work in works} == {1: 3, 0: 1}
