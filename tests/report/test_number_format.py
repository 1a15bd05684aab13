"""How numbers are written."""

import math
import random
import re

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


@pytest.mark.parametrize(
    ("write", "base", "names"),
    [(memory, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]), (number, 1000, ["", "", "M", "B", "T"])],
)
def test_a_text_gives_its_value_in_three_digits_and_without_an_exponent(write, base, names) -> None:
    chance = random.Random(0)
    edges = [edge * base**power for power in range(5) for edge in (1, 999.4, 999.6, 1000, 1023.9)]
    for value in [*edges, *(10 ** chance.uniform(0, 15) for _ in range(2000))]:
        if value >= 999 * base**4:
            continue
        figure, name = re.fullmatch(r"([0-9.,]+)\s?(\w*)", write(value)).groups()
        factor = base ** names.index(name)
        assert float(figure.replace(",", "")) * factor == pytest.approx(value, rel=6e-3), value
