"""The orders of the passes of a pipeline: plain lists, which every rank computes alike and without communication."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

PassKind = Literal["F", "B", "I", "W", "U"]
ScheduleName = Literal["1f1b", "interleaved", "zero_bubble", "zero_bubble_v"]
# Times of a pass through all stages of a rank: the forward pass, each half of the backward pass, and both together.
_TIMES = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


class Pass(NamedTuple):
    """A pass of a micro-batch through a stage: forward (F), backward (B), or of the latter the gradients of inputs (I)
    and those of weights (W) by themselves. No schedule has the update after all passes (U)."""

    kind: PassKind
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of the ranks of a pipeline, and the order of their passes.

    - 1f1b: a few forward passes ahead, then one forward and one backward pass in turn (Narayanan et al., 2019,
      "PipeDream"; 2021, with a flush at the end of a step). Rank r has at most p - r micro-batches in flight.
    - interleaved: the same with several stages on a rank, every p-th of them (Narayanan et al., 2021, "Efficient
      Large-Scale Language Model Training on GPU Clusters").
    - zero_bubble: 1f1b with W apart, which fills the waiting at the end of a step (Qi et al., 2024, "Zero Bubble
      Pipeline Parallelism": ZB-H1). At most p micro-batches in flight.
    - zero_bubble_v: rank r has the stages r and 2p - 1 - r, so that the first rank has both ends (ZB-V there).
    """

    num_ranks: int
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1

    @property
    def num_stages(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights have passes of their own."""
        return self.schedule.startswith("zero_bubble")

    def rank_of(self, stage: int) -> int:
        """The rank that has a stage."""
        turn, at = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - at if turn and self.schedule == "zero_bubble_v" else at

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in their order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of(stage) == rank)

    def passes(self, rank: int, num_micro_batches: int) -> list[Pass]:
        """What a rank does in a step. Where there are fewer micro-batches than stages all ranks wait longer."""
        if self.schedule == "interleaved":
            return self._interleaved(rank, num_micro_batches)
        if self.schedule == "zero_bubble_v":
            return self._in_a_v(rank, num_micro_batches)
        forward: list[tuple[int, int]] = [(rank, each) for each in range(num_micro_batches)]
        order = _alternating(forward, forward, self.num_ranks - rank - 1)
        if self.schedule == "1f1b":
            return order
        # The same with I for B, and W so many micro-batches later as the rank has before it.
        found, waiting = list[Pass](), list[Pass]()
        for each in order:
            found.append(each._replace(kind="I") if each.kind == "B" else each)
            if each.kind == "B":
                waiting.append(each._replace(kind="W"))
            if len(waiting) > rank:
                found.append(waiting.pop(0))
        return found + waiting

    def _interleaved(self, rank: int, count: int) -> list[Pass]:
        """Rounds of at least p micro-batches, each through one stage of the rank after another."""
        num_rounds = max(1, count // self.num_ranks)
        size, longer = divmod(count, num_rounds)
        bounds = [size * each + min(each, longer) for each in range(num_rounds + 1)]
        rounds = [range(*bounds[each : each + 2]) for each in range(num_rounds)]
        own = self.stages_of(rank)
        forward = [(stage, each) for members in rounds for stage in own for each in members]
        backward = [(stage, each) for members in rounds for stage in reversed(own) for each in members]
        ahead = (self.stages_per_rank - 1) * len(rounds[0]) + 2 * (self.num_ranks - rank - 1)
        return _alternating(forward, backward, ahead)

    def _in_a_v(self, rank: int, count: int) -> list[Pass]:
        """As for 2p - 1 micro-batches or more, without those that there are not."""
        p, left, total = self.num_ranks, self.num_ranks - rank, max(count, 2 * self.num_ranks - 1)
        low, high = self.stages_of(rank)
        ahead, back = _each("F", low), _each("IW", low)
        turn = _each("FIW", high)
        kinds = ahead * (2 * left - 1) + (_each("F", high) + ahead) * rank + turn * left
        for each in range(total - p):
            kinds += ahead * (each < total - 2 * p + 1 + rank) + back + turn
        kinds += (_each("I", low) + _each("I", high)) * rank + back * left
        kinds += _each("W", high) * rank + _each("W", low) * rank
        return [each for each in _numbered(kinds) if each.micro_batch < count]


def _alternating(forward: Sequence[tuple[int, int]], backward: Sequence[tuple[int, int]], ahead: int) -> list[Pass]:
    """Forward and backward passes (stage, micro-batch) in turn, the former being so many ahead."""
    order = [Pass("F", *each) for each in forward[:ahead]]
    for number, each in enumerate(backward):
        order += [Pass("F", *next_one) for next_one in forward[ahead + number : ahead + number + 1]]
        order.append(Pass("B", *each))
    return order


def _each(kinds: Iterable[Any], stage: int) -> list[tuple[PassKind, int]]:
    return [(kind, stage) for kind in kinds]


def _numbered(kinds: Iterable[tuple[PassKind, int]]) -> list[Pass]:
    """Passes of a kind through a stage take one micro-batch after another."""
    counts: dict[tuple[PassKind, int], int] = {}
    order = []
    for key in kinds:
        order.append(Pass(*key, counts.get(key, 0)))
        counts[key] = counts.get(key, 0) + 1
    return order


def in_pairs(order: Iterable[Pass], *, are_apart: bool = False) -> Iterator[tuple[list[Pass], Pass | None]]:
    """The same order in pairs: a backward pass, with the gradients of weights behind it, beside the forward pass that
    comes next and needs nothing of them. Passes without another, and all that `are_apart`, have None beside them.

    No pair waits for itself over other ranks: what its forward pass receives they send before they need what its
    backward pass sends.
    """
    before = list[Pass]()
    for each in order:
        if each.kind == "W":
            before.append(each)
        elif each.kind == "F" and before and before[0].kind != "F" and not are_apart:
            yield before, each
            before = []
        else:
            if before:
                yield before, None
            before = [each]
    yield before, None


def idle_fraction(pipeline: Pipeline, num_micro_batches: int) -> float:
    """The part of a step in which a rank waits, by the order of its passes: if all stages take the same time, a
    backward pass twice that of a forward pass, and messages none."""
    busy, ends = simulated(pipeline, num_micro_batches, lambda each: _TIMES[each.kind])
    end = max(ends.values())
    return 1 - sum(busy) / (pipeline.num_ranks * end)


def simulated(
    pipeline: Pipeline, num_micro_batches: int, times: Callable[[Pass], float], message: float = 0.0
) -> tuple[list[float], dict[Pass, float]]:
    """How long each rank computes, and when each pass ends, by the order of their passes: if passes take `times`, and
    a message between two ranks `message`."""
    left = [pipeline.passes(rank, num_micro_batches)[::-1] for rank in range(pipeline.num_ranks)]
    busy = [sum(map(times, order)) for order in left]
    clocks, ends = [0.0] * pipeline.num_ranks, dict[Pass, float]()
    while any(left):
        for rank, order in enumerate(left):
            while order and (received := _received(order[-1], pipeline, ends, message)) is not None:
                clocks[rank] = max(clocks[rank], received) + times(order[-1])
                ends[order.pop()] = clocks[rank]
    return busy, ends


def _received(one: Pass, pipeline: Pipeline, ends: Mapping[Pass, float], message: float) -> float | None:
    """When there is what a pass waits for; None: not yet."""
    source = one.stage + (-1 if one.kind == "F" else 1)
    if one.kind == "W" or not 0 <= source < pipeline.num_stages:
        return 0.0
    end = ends.get(one._replace(stage=source))
    is_here = pipeline.rank_of(source) == pipeline.rank_of(one.stage)
    return end if end is None or is_here else end + message
