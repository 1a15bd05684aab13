"""Which ranks of a pipeline are traced, and with how many micro-batches."""

from collections.abc import Mapping, Sequence

from kitforge.core.parallel.schedules import Pipeline


def num_traced(pipeline: Pipeline, num_micro_batches: int) -> int:
    """As many micro-batches as a trace needs to see every number of them that is in flight in a step of so many."""
    if pipeline.num_ranks == 1:
        return min(num_micro_batches, 3)  # gradients are added to from the second one on, and reduced in the last
    if pipeline.schedule != "interleaved":
        return min(num_micro_batches, pipeline.num_stages + 1)
    # Rounds of as many micro-batches as there are ranks, of which two may have one more. A few longer ones are all.
    rounds, rest = divmod(num_micro_batches, pipeline.num_ranks)
    enough = pipeline.num_stages + pipeline.num_ranks + min(rest, 2)
    return num_micro_batches if rounds <= rest + 1 else min(num_micro_batches, enough)


def most_in_flight(pipeline: Pipeline, rank: int, num_micro_batches: int, layers: Mapping[int, int]) -> int:
    """The most layers that hold activations of a micro-batch on a rank, whose stages have so many layers."""
    now, most = 0, 0
    for kind, stage, _ in pipeline.passes(rank, num_micro_batches):
        now += {"F": layers[stage], "I": 0}.get(kind, -layers[stage])
        most = max(most, now)
    return most


def traced_ranks(pipeline: Pipeline, num_micro_batches: int, layers: Sequence[int]) -> list[int]:
    """The first rank, the last, and of those between, which have neither end, the fullest. `layers` are the numbers of
    those of all stages."""
    by_stage = dict(enumerate(layers))
    inner = range(1, pipeline.num_ranks - 1)
    fullest = max(inner, key=lambda rank: most_in_flight(pipeline, rank, num_micro_batches, by_stage), default=0)
    return sorted({0, fullest, pipeline.num_ranks - 1})
