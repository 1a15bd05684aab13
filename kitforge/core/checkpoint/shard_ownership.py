"""The owner of each shard of a tensor, which writes it. Every rank computes the same without communication."""

from collections.abc import Iterable

from kitforge.core.checkpoint.regions import num_elements
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout


def assign_shards(tensors: Iterable[tuple[Layout, int]], grid: Grid, rank: int) -> list[bool]:
    """For each tensor, given by its layout and element size, whether that rank owns its shard.

    Every shard has one owner among its ranks: the one with the fewest bytes so far.
    """
    loads = [0] * grid.size
    answers = []
    for layout, element_bytes in tensors:
        is_owned = False
        for shard in grid.shards(layout):
            owner = min(shard.holders, key=loads.__getitem__)
            loads[owner] += num_elements(shard.region) * element_bytes
            is_owned |= owner == rank
        answers.append(is_owned)
    return answers
