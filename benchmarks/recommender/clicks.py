"""Batches of the Wide & Deep benchmark, the same for us and for every peer. Imports nothing of ours.

26 categorical fields of Criteo's sizes, scaled to 5,860,000 rows in all, with Zipf ids (1.15); 13 numbers; a click in
four.
"""

import numpy as np

ROWS = 5_860_000
BATCH = 16_000
NUM_DENSE = 13
# Criteo's terabyte log, days as its users count them; those above 20,000 are scaled so that all add up to ROWS.
SIZES = """1461 584 10131227 2202608 306 24 12518 634 4 93146 5684 8351593 3195 28 14993 5461306 11 5653 2173 4 7046547
18 16 286181 105 142572"""


def sizes() -> list[int]:
    """Rows of each field."""
    found = np.array([int(size) for size in SIZES.split()], dtype=np.float64)
    is_large = found > 20_000
    small = found[~is_large].sum()
    found[is_large] = np.floor(found[is_large] * (ROWS - small) / found[is_large].sum())
    whole = found.astype(np.int64)
    whole[2] += ROWS - whole.sum()
    return [int(size) for size in whole]


def batch(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids [B, 26] within each field, numbers [B, 13], labels [B]."""
    generator = np.random.default_rng(seed)
    columns = []
    for size in sizes():
        ranks = generator.zipf(1.15, BATCH).astype(np.uint64)
        columns.append(((ranks * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)) % np.uint64(size))
    labels = (generator.random(BATCH) < 0.25).astype(np.float32)
    return np.stack(columns, axis=1).astype(np.int64), generator.random((BATCH, NUM_DENSE), dtype=np.float32), labels
