"""How a step is filled where texts push one another out."""

from kitforge.inference.block_manager import BlockManager
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.scheduler import ScheduledTokens, Scheduler
from kitforge.inference.sequence import Sequence


def text(length: int, priority: int) -> Sequence:
    return Sequence(
        request=priority,
        sample=0,
        prompt_length=length,
        options=SamplingOptions(max_new_tokens=9),
        signature=(),
        stop_ids=frozenset(),
        key=0,
        priority=priority,
        arrival=priority,
        tokens=[1] * length,
    )


def carry_out(works: list[ScheduledTokens], blocks: BlockManager) -> None:
    for work in works:
        if work.needs_logits:
            work.sequence.append(1)
        blocks.advance(work.sequence, work.num_tokens)


def test_the_room_of_a_text_that_is_pushed_out_is_given_to_others_in_the_same_step() -> None:
    blocks = BlockManager(5, 4, 2, is_contiguous=False, has_prefix_cache=False)
    scheduler = Scheduler(blocks, 2, 4)
    common, urgent = text(9, 0), text(18, 1)
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
