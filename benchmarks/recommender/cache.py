"""Overhead of the cache over a table in one tier, tables larger than memory, cold rows, sizes of tables.

Run from the checkout, parts by name: `python -m benchmarks.recommender.cache overhead larger cold sizes`. Each part
writes its section of benchmarks/recommender/cache.md. A step is lookup, backward pass and update of one table; there
is no network, whose time would hide the difference. Rounds are interleaved, and the median of ratios is shown.
"""

import ctypes
import mmap
import os
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.kernels.dispatch import select_table
from kitforge.embedding_cache.miss_ratio_curve import stack_distances
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.foundation.device import describe, keep_malloc_arenas, pick

TABLE = Path(__file__).with_suffix(".md")
BATCH, FIELDS, DIM, VOCABULARY = 4000, 26, 16, 300_000
# Rows of the table that is larger than its memory, and of the one that is read cold.
LARGER, COLD = 2_000_000, 12_000_000
PAGE = 4096


def zipf(random: np.random.Generator, shape: tuple[int, ...], vocabulary: int, exponent: float = 1.05) -> Tensor:
    """Ids of which few are frequent, scattered over the vocabulary."""
    power = 1.0 - exponent
    ranks = ((vocabulary**power - 1.0) * random.random(shape) + 1.0) ** (1.0 / power)
    ranks = np.minimum(ranks.astype(np.int64), vocabulary - 1)
    return torch.from_numpy(ranks * 2654435761 % vocabulary)


def step(table: CachedEmbedding, ids: Tensor, gradient: Tensor) -> None:
    table(ids).backward(gradient)
    table.step(0.05)


def timed(table: CachedEmbedding, batches: list[Tensor], gradient: Tensor, depth: int) -> float:
    """Milliseconds of a step."""
    start = time.perf_counter()
    for ids in table.prefetch(batches, depth):
        step(table, ids, gradient)
    return 1000 * (time.perf_counter() - start) / len(batches)


def overhead(_folder: str) -> list[str]:
    random = np.random.default_rng(0)
    batches = [zipf(random, (BATCH, FIELDS), VOCABULARY) for _ in range(100)]
    gradient = torch.randn(BATCH, DIM) * 0.01
    everything = [ids.view(-1, FIELDS) for ids in torch.split(torch.arange(VOCABULARY // FIELDS * FIELDS), 52_000)]
    whole = CachedEmbedding(None, DIM, optimizer="adagrad")
    # Of the needs in the batches that are timed: all rows have been needed before them, so that none is a first need.
    told = whole.estimate(batches)
    needs = [torch.unique(ids).numpy() for ids in everything + batches]
    timed_needs = sum(map(len, needs[-60:]))
    distances = np.sort(stack_distances(needs)[-timed_needs:])
    ahead = CachedEmbedding(None, DIM, optimizer="adagrad")
    plans: dict[tuple[str, int], CachedEmbedding] = {("uncached", 0): whole, ("uncached", 2): ahead}
    for target in (0.95, 0.56):
        rows = int(distances[int(target * timed_needs)]) + 1
        for depth in (0, 2):
            table = CachedEmbedding(
                None, DIM, optimizer="adagrad", device_rows=max(rows, int(1.05 * told.largest_batch))
            )
            plans[f"cached, {target:.0%}", depth] = table
    for (_, depth), table in plans.items():
        for ids in everything:
            step(table, ids, torch.ones(len(ids), DIM))
        timed(table, batches[:40], gradient, depth)
    times: dict[tuple[str, int], list[float]] = {plan: [] for plan in plans}
    before = {plan: table.stats() for plan, table in plans.items()}
    for first in range(40, 100, 10):
        for plan, table in plans.items():
            times[plan].append(timed(table, batches[first : first + 10], gradient, plan[1]))
    lines = [
        f"Batch {BATCH} x {FIELDS} ids, {told.largest_batch:,} distinct, {VOCABULARY:,} in all, dim {DIM}, adagrad; "
        "rows that are not on the device are in the host tier.",
        "",
        "| table | rows on the device | hit rate | look-ahead | ms a step | against uncached | with its look-ahead |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan, table in plans.items():
        after = table.stats()
        hits = (after.hits["device"] - before[plan].hits["device"]) / (after.rows - before[plan].rows)
        against, alike = (
            statistics.median(a / b for a, b in zip(times[plan], times["uncached", depth], strict=True))
            for depth in (0, plan[1])
        )
        size = table.options.device_rows
        lines.append(
            f"| {plan[0]} | {f'{size:,}' if size else 'all'} | {hits:.3f} | {plan[1]} "
            f"| {statistics.median(times[plan]):.1f} | {against:.2f} | {alike:.2f} |"
        )
    return lines


def larger(folder: str) -> list[str]:
    num_rows, budget = LARGER, LARGER // 10
    random = np.random.default_rng(1)
    batches = [torch.from_numpy(random.permutation(num_rows)[: num_rows // 100].reshape(-1, 1)) for _ in range(40)]
    batches += [part.view(-1, 1) for part in torch.arange(num_rows).split(num_rows // 40)]
    results = []
    tiers: dict[str, Any] = {"device_rows": budget // 4, "host_rows": budget - budget // 4, "path": folder}
    for options in ({}, tiers):
        with CachedEmbedding(num_rows, DIM, optimizer="lazy_adam", seed=1, **options) as table:
            start = time.perf_counter()
            for ids in table.prefetch(batches, 2 if options else 0):
                step(table, ids, torch.tanh(torch.arange(len(ids) * DIM).view(-1, DIM) * 0.37))
            seconds = time.perf_counter() - start
            chunks = [(ids.clone(), rows.clone()) for ids, rows in table.begin_snapshot().chunks()]
            ids, rows = (torch.cat(parts) for parts in zip(*chunks, strict=True))
            results.append((ids[ids.argsort()], rows[ids.argsort()], seconds, table.stats()))
            del chunks
    (ids, rows, whole_seconds, _), (other_ids, other_rows, seconds, stats) = results
    is_same = torch.equal(ids, other_ids) and torch.equal(rows.view(torch.int32), other_rows.view(torch.int32))
    if not is_same:
        raise SystemExit("the cached table differs from the uncached one")
    return [
        f"{num_rows:,} rows of {rows.shape[1]} numbers (lazy_adam, dim {DIM}), {budget:,} of them in memory, the "
        f"others in the file tier; {len(batches)} steps in which every row moves at least once.",
        "",
        f"All {len(ids):,} records are those of the uncached table, bit for bit. "
        f"{1000 * seconds / len(batches):.0f} ms a step, in memory {1000 * whole_seconds / len(batches):.0f} ms; "
        f"{stats.hits['file']:,} rows read from the file, {stats.moved.get('file', 0):,} written to it, "
        f"{stats.waits} waits, {stats.overflow_rows} rows of overflow.",
    ]


def resident(store: FileStore) -> float:
    """The share of the file that is in the page cache, by mincore."""
    size = os.fstat(store._file).st_size
    with mmap.mmap(store._file, size) as memory:
        flags = (ctypes.c_ubyte * ((size + PAGE - 1) // PAGE))()
        view = (ctypes.c_char * size).from_buffer(memory)
        ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(size), flags)
        del view
    return float(np.frombuffer(bytes(flags), np.uint8).mean())


def cold(folder: str) -> list[str]:
    width, num_rows, asked = 48, COLD, COLD // 600
    random, rates = np.random.default_rng(2), []
    with FileStore(folder, "cold", width, select_table()) as store:
        for keys in torch.split(torch.arange(num_rows), 500_000):
            store.write(keys, torch.randn(len(keys), width))
        os.fsync(store._file)
        out = torch.empty(asked, width)
        share = 0.0
        for _ in range(6):
            # A mapping holds its pages, so it is taken anew after they are dropped.
            store._slab = torch.empty(0, width)
            os.posix_fadvise(store._file, 0, 0, os.POSIX_FADV_DONTNEED)
            share = max(share, resident(store))
            memory = mmap.mmap(store._file, store._index.room * 4 * width)
            memory.madvise(mmap.MADV_RANDOM)
            store._slab = torch.frombuffer(memory, dtype=torch.float32).view(-1, width)
            keys = torch.from_numpy(random.permutation(num_rows)[:asked])
            start = time.perf_counter()
            found = store.read(keys, out)
            rates.append(asked / (time.perf_counter() - start))
            if not bool(found.all()):
                raise SystemExit("rows were lost")
    return [
        f"{num_rows:,} rows of {4 * width} bytes ({num_rows * 4 * width / 2**30:.1f} GiB), {asked:,} at random read at "
        f"a time, after posix_fadvise(DONTNEED); at most {share:.2%} of the pages were in memory before (mincore).",
        "",
        f"{statistics.median(rates) / 1000:.0f} thousand rows/s (median of {len(rates)}; "
        f"{min(rates) / 1000:.0f} to {max(rates) / 1000:.0f}).",
    ]


def sizes(_folder: str) -> list[str]:
    """Batches with the same number of distinct ids, drawn from vocabularies of different sizes."""
    gradient = torch.randn(BATCH, DIM) * 0.01
    tables, batches = {}, {}
    for power in (6, 7, 8, 9):
        vocabulary = 10**power
        stride = vocabulary // 1_000_000
        random = np.random.default_rng(3)
        batches[power] = [zipf(random, (BATCH, FIELDS), 1_000_000) * stride for _ in range(50)]
        tables[power] = CachedEmbedding(vocabulary, DIM, optimizer="adagrad", device_rows=120_000)
        timed(tables[power], batches[power][:20], gradient, 2)
    times: dict[int, list[float]] = {power: [] for power in tables}
    for first in range(20, 50, 5):
        for power, table in tables.items():
            times[power].append(timed(table, batches[power][first : first + 5], gradient, 2))
    lines = ["| ids in the table | ms a step | against 10^6 |", "|---|---|---|"]
    for power, values in times.items():
        ratio = statistics.median(a / b for a, b in zip(values, times[6], strict=True))
        lines.append(f"| 10^{power} | {statistics.median(values):.1f} | {ratio:.2f} |")
    return [f"Batch {BATCH} x {FIELDS}, dim {DIM}, adagrad, 120,000 rows on the device, look-ahead 2.", "", *lines]


PARTS: dict[str, tuple[str, Any]] = {
    "overhead": ("Overhead of the cache", overhead),
    "larger": ("A table ten times its memory", larger),
    "cold": ("Cold rows", cold),
    "sizes": ("From a million ids to a billion", sizes),
}


SMOKE = {"BATCH": 8, "VOCABULARY": 26 * 20, "LARGER": 4000, "COLD": 6000, "parts": list(PARTS)}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """Title and body of every section of the page."""
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        yield title, body.strip("\n")


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--folder", help="on the disk that is to be measured; default: a temporary one")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse(SMOKE, globals())
    keep_malloc_arenas()
    for part in arguments.parts:
        title, measure = PARTS[part]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            lines = measure(folder)
        write_part(title, lines, arguments.date)


def write_part(title: str, lines: list[str], date: str) -> None:
    """Put the section of that title into the page, in the order of the parts."""
    where = f"{date}, {describe(pick('cpu'))}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}."
    kept = dict(sections(TABLE.read_text(encoding="utf-8"))) if TABLE.exists() else {}
    kept[title] = "\n".join(["", where, "", *lines])
    page = ["# The embedding cache", ""]
    for name, _ in PARTS.values():
        page += [f"## {name}", "", kept[name].strip("\n"), ""] if name in kept else []
    write_result(TABLE, "\n".join(page))
    print("\n".join([where, *lines]))


if __name__ == "__main__":
    main()
