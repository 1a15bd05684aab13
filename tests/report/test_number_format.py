"""How numbers are written."""

import math

import pytest

from kitforge.report.number_format import duration, memory, number, short_count


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (3.21412, "3.214"),
        (-2.5, "-2.5"),
        (0.0003, "0.0003"),
        (1.5e-5, "1.5e-5"),
        (999.96, "1000"),
        (12345.6, "12,346"),
        (1234567, "1.23\N{NO-BREAK SPACE}M"),
        (1.5e20, "1.500e20"),
        (math.nan, "not finite"),
        (-math.inf, "not finite"),
    ],
)
def test_number(value, text) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (950, "950"), (12300, "12.3 k"), (999_900, "1 M"), (4.1e6, "4.1 M"), (7e9, "7 B")]
)
def test_count(value, text) -> None:
    assert short_count(value).replace("\N{NO-BREAK SPACE}", " ") == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.42 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (134, "2 min 14 s"),
        (11100, "3 h 5 min"),
        (187200, "2 d 4 h"),
    ],
)
def test_duration(seconds, text) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(12, "12 B"), (1536, "1.5 KiB"), (1.3e9, "1.21 GiB"), (2**41, "2 TiB")])
def test_memory(size, text) -> None:
    assert memory(size) == text
