"""Rows of a checkpoint laid into the tiers of a table, whatever their number, sizes and placement were then."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from kitforge.core.optim.row_optimizers import RowLayout
from kitforge.core.optim.table_protocols import ROWS, RowSource
from kitforge.core.parallel.table import owner
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.snapshot import ADMISSION
from kitforge.foundation.errors import CheckpointError

COLUMN_PART = re.compile(r"rows-(\d+)-(\d+)")


def part_name(columns: slice | None) -> str:
    """Under which name rows go that hold these columns of the table."""
    return ROWS if columns is None else f"{ROWS}-{columns.start}-{columns.stop}"


def restore(rows: RowCache, source: RowSource, columns: slice | None, owned_shard: tuple[int, int] | None) -> None:
    """Become what `source` holds. `columns`: those that are here, None: all. `owned`: the share of ids that is here,
    None: no ids at all.

    Raises ConfigError while batches are on their way, CheckpointError where columns are missing.
    """
    with rows.exclusive():
        rows.manager.require_idle()
        rows.clear()
        rows.num_steps = int(source.state["steps"])
        if "rates" in source.state:
            rates = source.state["rates"]
            rows.rates = torch.cat([rates, torch.zeros(len(rates) + 1, dtype=torch.float64)])
        if "admission" in source.state:
            rows.admission.step = int(source.state["admission"])
        row_parts = [part for part in source.parts if part != ADMISSION]
        for part in row_parts if owned_shard is not None else []:
            for keys, records in source.chunks(part):
                mine = _is_mine(keys, owned_shard)
                if part == part_name(columns):
                    rows.insert_rows(keys[mine], records[mine])
                else:
                    _insert_columns(rows, keys[mine], records[mine], (part, columns or slice(0, rows.config.dim)))
        for keys, counts in source.chunks(ADMISSION) if ADMISSION in source.parts and owned_shard is not None else ():
            mine = _is_mine(keys, owned_shard)
            rows.admission.restore(keys[mine], counts[mine])


def _is_mine(keys: Tensor, owned_shard: tuple[int, int] | None) -> Tensor:
    assert owned_shard is not None
    rank, count = owned_shard
    return owner(keys, count) == rank if count > 1 else torch.ones(len(keys), dtype=torch.bool)


def _insert_columns(rows: RowCache, keys: Tensor, records: Tensor, which: tuple[str, slice]) -> None:
    """Add to rows those columns of other pieces that are theirs."""
    part, own = which
    match = COLUMN_PART.fullmatch(part)
    if part != ROWS and match is None:
        raise CheckpointError("rows of an unknown part", got=part, expected="rows, or rows-FROM-TO")
    there = slice(0, rows.config.dim) if match is None else slice(int(match[1]), int(match[2]))
    if max(own.start, there.start) < min(own.stop, there.stop):
        mixed = torch.empty(len(keys), rows.layout.width)
        rows.peek(keys, mixed)
        _copy_columns(rows, (mixed, own), (records, there))
        rows.insert_rows(keys, mixed)


def _copy_columns(rows: RowCache, target: tuple[Tensor, slice], source: tuple[Tensor, slice]) -> None:
    """Copy the columns that records have in common, and whatever of them is no column."""
    (to, to_columns), (given, given_columns) = target, source
    start, stop = max(to_columns.start, given_columns.start), min(to_columns.stop, given_columns.stop)
    layouts = [rows.optimizer.layout(each.stop - each.start) for each in (to_columns, given_columns)]
    full = rows.optimizer.layout(rows.config.dim)
    for part, to_part, given_part in zip(*map(_layout_slices, (full, *layouts)), strict=True):
        if part.stop - part.start == full.dim:
            into = slice(to_part.start + start - to_columns.start, to_part.start + stop - to_columns.start)
            outof = slice(given_part.start + start - given_columns.start, given_part.start + stop - given_columns.start)
            to[:, into] = given[:, outof]
        else:
            to[:, to_part] = given[:, given_part]


def _layout_slices(layout: RowLayout) -> list[slice]:
    """The embedding, every state, and the whole numbers at the end."""
    end = max([layout.dim, *(state.stop for state in layout.states.values())])
    return [slice(0, layout.dim), *layout.states.values(), slice(end, layout.width)]
