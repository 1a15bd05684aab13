"""The memory of a deep network from traces of shallow ones, whose blocks are the same."""

from collections import Counter
from collections.abc import Callable, Sequence

from kitforge.core.parallel.plan.memory import StepMemory

# Blocks of the shallowest trace: a first, a last, and one between, each with a peak of its own.
SHALLOWEST = 3
# Periods that are looked for in the kinds of blocks: gemma's is six.
LONGEST_PERIOD = 8
# How far, over the peak, a third trace may lie off the line through two.
TOLERANCE = 1e-3


def trace_depths(kinds: Callable[[int], Sequence[object]], num_blocks: int) -> tuple[int, ...]:
    """Three depths one period of blocks apart, from which memory goes on by whole periods up to `num_blocks`; that
    alone where there are none. `kinds` names the kinds of the blocks of a network of a given depth."""
    whole = Counter(map(repr, kinds(num_blocks)))
    for period in range(1, LONGEST_PERIOD + 1):
        first = SHALLOWEST + (num_blocks - SHALLOWEST) % period
        depths = first, first + period, first + 2 * period
        if depths[-1] >= num_blocks:
            break
        one, two, three = (Counter(map(repr, kinds(depth))) for depth in depths)
        further = (num_blocks - first) // period
        grown = {kind: one[kind] + further * (two[kind] - one[kind]) for kind in whole}
        if two - one == three - two and one.keys() <= whole.keys() and grown == whole:
            return depths
    return (num_blocks,)


def extrapolate(traced: dict[int, StepMemory], num_blocks: int) -> StepMemory | None:
    """The memory at `num_blocks`, on the line through the last two of three traces, by moment and cause; None if the
    three do not lie on one line."""
    (_, first), (depth, second), (last, third) = traced.items()
    if not first.moments.keys() == second.moments.keys() == third.moments.keys():
        return None
    further = (num_blocks - last) // (last - depth)
    found = {}
    for moment, sizes in third.moments.items():
        totals = [sum(each.moments[moment].values()) for each in (first, second, third)]
        if abs(totals[2] - 2 * totals[1] + totals[0]) > TOLERANCE * third.peak:
            return None
        before = second.moments[moment]
        found[moment] = {cause: size + further * (size - before[cause]) for cause, size in sizes.items()}
    return StepMemory(moments=found, host=third.host + further * (third.host - second.host))
