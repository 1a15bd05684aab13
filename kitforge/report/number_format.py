"""Formats numbers, counts, durations and byte sizes for the report."""

import math

_MULTIPLES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """Four significant digits: 3.214, 12,345, 0.0003, 1.5e-5; from a million on three: 1.23 M."""
    if not math.isfinite(value):
        return "not finite"
    if abs(value) >= 0.9995e15:
        return _scientific(f"{value:.3e}")
    if abs(value) >= 1e6:
        return short_count(value)
    if abs(value) >= 1e3:
        return f"{value:,.0f}"
    return _scientific(f"{value:.4g}")


def short_count(value: float) -> str:
    """A count with a letter for its thousands: 950, 12.3 k, 4.1 M, 7 B."""
    for multiple, letter in _MULTIPLES:
        # A hair below the multiple would be rounded up to "1000".
        if abs(value) >= multiple * 0.9995:
            return f"{value / multiple:.3g}\N{NO-BREAK SPACE}{letter}"
    return f"{value:.3g}"


def duration(seconds: float) -> str:
    """A duration in its two largest units: 0.42 s, 2 min 14 s, 3 h 5 min, 2 d 4 h."""
    if not math.isfinite(seconds):
        return number(seconds)
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    for unit, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def memory_unit(largest: float) -> tuple[float, str]:
    """The size in bytes and the name of the unit for values up to `largest` bytes, of which it has less than 1000."""
    units = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
    return next(((size, name) for size, name in units if largest >= size * 999.5 / 1024), (1.0, "B"))


def memory(size: float) -> str:
    """A number of bytes: 1.21 GiB."""
    unit, name = memory_unit(size)
    return f"{size / unit:.3g} {name}"


def _scientific(text: str) -> str:
    """Without the padding that Python gives to exponents."""
    mantissa, mark, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if mark else text
