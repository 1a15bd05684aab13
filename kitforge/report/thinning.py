"""Which points of a long series a chart is given, and the trend under its noise."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kitforge.report.metrics import Series

# A curve is noisy if its absolute changes sum to more than this multiple of its range.
_NOISE = 4.0
# Values are clamped to it, so that no sum of them overflows.
_LARGEST = 1e300


def thin(series: Series, buckets: int) -> list[int]:
    """The indices of at most about three points of each bucket: its smallest and largest finite values, and its first
    that is not finite. A short series is kept whole."""
    values, num = series.values, len(series.values)
    size = 1 if num <= 2 * buckets else math.ceil(num / buckets)
    # The sentence about a curve names its ends.
    kept = {0, num - 1} if num else set()
    for start in range(0, num, size):
        members = range(start, min(start + size, num))
        finite = [index for index in members if math.isfinite(values[index])]
        if finite:
            kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
        if len(finite) < len(members):
            kept.add(next(index for index in members if not math.isfinite(values[index])))
    return sorted(kept)


def is_noisy(series: Series) -> bool:
    """Whether the series is noise around a trend and should be smoothed (a schedule should not)."""
    values = [value for _, value in series.finite()]
    if len(values) < 30:
        return False
    spread = max(values) - min(values)
    return 0 < spread < math.inf and sum(abs(after - before) for before, after in pairwise(values)) > _NOISE * spread


def smooth(values: Sequence[float], indices: Iterable[int]) -> list[float]:
    """Local linear regression at `indices` over the finite neighbours (a window of about 4 %).

    Within the series it equals the mean; at its ends, where a mean would lag behind, it keeps the slope.
    """
    reach = max(3, len(values) // 50)
    return [_fit(values, index, range(max(0, index - reach), min(len(values), index + reach + 1))) for index in indices]


def _fit(values: Sequence[float], index: int, window: range) -> float:
    """The value at `index` of the least-squares line through the finite values of `window`, clamped to their range."""
    known = {index: min(max(values[index], -_LARGEST), _LARGEST) for index in window if math.isfinite(values[index])}
    if not known:
        return math.nan
    mean = math.fsum(value / len(known) for value in known.values())
    centre = sum(known) / len(known)
    spread = sum((index - centre) ** 2 for index in known)
    slope = math.fsum((index - centre) / spread * (value - mean) for index, value in known.items()) if spread else 0.0
    return min(max(mean + slope * (index - centre), min(known.values())), max(known.values()))
