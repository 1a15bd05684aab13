"""How fast packed rows come out of the cache in the shuffled order of training, and the memory that documents take.

Run from the checkout: `python -m benchmarks.data.loader [--date 2026-11-22]`; it writes its table to
benchmarks/data/loader.md.
"""

import platform
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge.data.schedule import shuffled_indices
from kitforge.data.source import open_source
from kitforge.data.text.packing import DocumentSplit, PackedRows, split_documents
from kitforge.data.text.token_cache import TokenCache, build_token_cache
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.device import describe, keep_malloc_arenas
from kitforge.foundation.log import console

SHAPES = ((8, 256), (32, 256), (8, 2048))
NUM_TOKENS = 40_000_000
# Rows fetched by one call, of which each batch takes its share as a view; 1 is a call for every batch.
BATCHES_A_CALL = (1, 16)
REPEATS = 7
MANY_DOCUMENTS = 4_000_000
SECONDS = 0.5
SMOKE = {"SHAPES": ((2, 16),), "NUM_TOKENS": 95_000, "REPEATS": 1, "MANY_DOCUMENTS": 1000, "SECONDS": 0.001}


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    date = parser.parse(SMOKE, globals()).date
    torch.set_num_threads(1)
    # As the trainer does.
    keep_malloc_arenas()
    with tempfile.TemporaryDirectory() as folder:
        cache = _cache(Path(folder))
        train, _ = split_documents(cache, 0.05, seed=0)
        lines = [_line(cache, train, *shape) for shape in SHAPES]
    text = _page(cache, lines, date)
    console.print(text, markup=False, soft_wrap=True)
    write_result(Path(__file__).with_suffix(".md"), text)


def _cache(folder: Path) -> TokenCache:
    """Documents from a few tokens to some ten thousand, most of them a few hundred long."""
    lengths = np.random.default_rng(0).lognormal(mean=6, sigma=1.3, size=NUM_TOKENS // 950).astype(int) + 1
    text = "lorem ipsum dolor sit amet " * 20_000
    source = open_source(text[:length] for length in lengths)
    return build_token_cache(source, ByteTokenizer(), folder, num_workers=1)


def _line(cache: TokenCache, part: DocumentSplit, batch_size: int, length: int) -> str:
    rows = PackedRows(cache, length=length, part=part, pad_id=257)
    speeds = [_speed(rows, batch_size, batches) for batches in BATCHES_A_CALL]
    cells = [f"{statistics.median(speed):.0f} ({min(speed):.0f} to {max(speed):.0f})" for speed in speeds]
    return f"| {batch_size} x {length} | {' | '.join(cells)} |"


def _speed(rows: PackedRows, batch_size: int, batches: int) -> list[float]:
    """Million tokens a second, once for each repeat. What else the machine does meanwhile does not count."""
    speeds, start = [], 0
    for _ in range(REPEATS):
        begin, tokens = time.process_time(), 0
        while time.process_time() - begin < SECONDS:
            found = rows.rows(shuffled_indices(0, rows.num_rows, start, batch_size * batches))
            tokens += sum(part.numel() for part in found["tokens"].split(batch_size))
            start += batch_size * batches
        speeds.append(tokens / (time.process_time() - begin) / 1e6)
    return speeds


def _memory() -> tuple[float, float]:
    """Bytes a document that packed rows to train on and to evaluate on keep, and that making them takes at most."""
    offsets = np.arange(MANY_DOCUMENTS + 1, dtype=np.int64) * 2
    tokens = np.zeros(offsets[-1], dtype=np.uint16)
    cache = TokenCache(folder=Path(), fingerprint="", tokens=tokens, offsets=offsets)
    tracemalloc.start()
    rows = [PackedRows(cache, length=256, part=part, pad_id=257) for part in split_documents(cache, 0.05, seed=0)]
    held, highest = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert rows
    return held / MANY_DOCUMENTS, highest / MANY_DOCUMENTS


def _page(cache: TokenCache, lines: list[str], date: str) -> str:
    machine = f"{describe(torch.device('cpu'))}; Python {platform.python_version()}, numpy {np.__version__}"
    head = " | ".join("one batch a call" if batches == 1 else f"{batches} batches a call" for batches in BATCHES_A_CALL)
    held, highest = _memory()
    return "\n".join(
        [
            "# Packed rows out of the token cache",
            "",
            "Million tokens a second of one core's time, order and rows together (`tokens`, `targets`, `positions`,",
            f"`documents`), with the batches taken as views: the median of {REPEATS} runs and their range. The cache",
            f"holds {cache.num_tokens:,} tokens in {cache.num_documents:,} documents of mixed length, of which a",
            "twentieth is taken out for validation.",
            "",
            f"{machine}, torch {torch.__version__}; {date}. Made by `python -m benchmarks.data.loader`.",
            "",
            f"| rows x length | {head} |",
            "|---|---|---|",
            *lines,
            "",
            f"Memory of a process for the rows of both parts, with {MANY_DOCUMENTS:,} documents: {held:.2f} bytes a",
            f"document, and {highest:.2f} at most while they are made.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
