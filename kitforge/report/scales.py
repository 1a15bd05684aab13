"""The arithmetic of a chart: axes and ticks, thinning of long series, detection and smoothing of noise."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kitforge.report.metrics import Series

# A curve is noisy if its absolute changes sum to more than this multiple of its range.
_NOISE = 4.0
# Above this ratio of largest to smallest value the axis is logarithmic.
_WIDE = 20.0
# Values are clamped to the first; those below the second count as zero. Neither overflows nor underflows afterwards.
_LARGEST, _SMALLEST = 1e300, 1e-280


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """An axis from `low` to `high`, which differ; a logarithmic one has `low` > 0."""

    low: float
    high: float
    is_log: bool = False

    def position(self, value: float) -> float:
        """The position of `value`: 0 at `low`, 1 at `high`; values outside are clamped."""
        held = min(max(value, self.low), self.high)
        if self.is_log:
            return (math.log(held) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (held - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        """About `most` round values between `low` and `high`, in rising order."""
        return _log_ticks(self.low, self.high, most) if self.is_log else _even_ticks(self.low, self.high, most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring points that share one position on the screen."""

    # Indices of the smallest and the largest finite value, in order; there may be one or none.
    kept: tuple[int, ...]
    middle: int
    # Index of the first value that is not finite.
    gap: int | None
    # Whether the line ends here: after a gap, or at a rollback of the run.
    ends: bool


def step_scale(steps: Iterable[int]) -> Scale:
    """The axis of steps that holds all of `steps`."""
    known = list(steps)
    low, high = min(known, default=0), max(known, default=1)
    return Scale(low=low, high=high) if high > low else Scale(low=low - 0.5, high=high + 0.5)


def size_scale(sizes: Sequence[int]) -> Scale:
    """The axis of sizes: logarithmic where they span more than a power of ten."""
    even = step_scale(sizes)
    return Scale(low=even.low, high=even.high, is_log=True) if 0 < 10 * even.low < even.high else even


def value_scale(values: Sequence[float], *, may_be_log: bool) -> Scale:
    """The axis of the finite `values`, up to 1e300, with a margin."""
    low, high = _held(min(values, default=0.0)), _held(max(values, default=1.0))
    if may_be_log and low > 0 and high / _WIDE > low:
        air = min((high / low) ** 0.04, 10.0)
        return Scale(low=low / air, high=high * air, is_log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        reach = max(abs(low), abs(high)) or 1.0
        return Scale(low=0.0 if low > 0 else low - reach / 2, high=high + reach / 4)
    air = (high - low) * 0.05
    # The axis begins at zero if the values come near it.
    is_near_zero = 0 <= low < high * 0.4
    return Scale(low=0.0 if is_near_zero else low - air, high=high + air)


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


def thin(series: Series, scale: Scale, buckets: int) -> list[Group]:
    """At most about `buckets` groups along `scale` that keep minima and maxima; a short series is kept whole."""
    is_short = len(series.steps) <= 2 * buckets
    groups, members, previous = [], list[int](), None
    for index, step in enumerate(series.steps):
        bucket = index if is_short else int(scale.position(step) * buckets)
        if members and bucket != previous:
            groups.append(_group(series, members, goes_back=step < series.steps[index - 1]))
            members = []
        members.append(index)
        previous = bucket
    return [*groups, _group(series, members, goes_back=True)] if members else groups


def _fit(values: Sequence[float], index: int, window: range) -> float:
    """The value at `index` of the least-squares line through the finite values of `window`, clamped to their range."""
    known = {index: _held(values[index]) for index in window if math.isfinite(values[index])}
    if not known:
        return math.nan
    mean = math.fsum(value / len(known) for value in known.values())
    centre = sum(known) / len(known)
    spread = sum((index - centre) ** 2 for index in known)
    slope = math.fsum((index - centre) / spread * (value - mean) for index, value in known.items()) if spread else 0.0
    return min(max(mean + slope * (index - centre), min(known.values())), max(known.values()))


def _held(value: float) -> float:
    held = min(max(value, -_LARGEST), _LARGEST)
    return 0.0 if abs(held) < _SMALLEST else held


def _group(series: Series, members: list[int], *, goes_back: bool) -> Group:
    finite = [index for index in members if math.isfinite(series.values[index])]
    extremes = (
        {min(finite, key=series.values.__getitem__), max(finite, key=series.values.__getitem__)} if finite else ()
    )
    gap = next((index for index in members if not math.isfinite(series.values[index])), None)
    middle = finite[len(finite) // 2] if finite else members[0]
    return Group(kept=tuple(sorted(extremes)), middle=middle, gap=gap, ends=goes_back or gap is not None)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    spacing = next((power * factor for factor in (1, 2, 5) if power * factor >= rough * 0.85), power * 10)
    first, last = math.ceil(low / spacing - 1e-9), math.floor(high / spacing + 1e-9)
    return [index * spacing for index in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    stride = max(1, math.ceil((last - first) / most))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    ticks = [factor * 10.0**power for power in range(first, last + 1, stride) for factor in factors]
    return [tick for tick in ticks if low <= tick <= high]
