"""Numbers are read as people write them."""

import random

import pytest

from kitforge.kits.rlhf.roles.numbers import last_number
from kitforge.kits.rlhf.roles.rewards import gsm8k_match

MINUS = "-\u2212\u2011\u2013\uff0d"
SPACES = " \u00a0\u2009\u202f"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a 1,000.50 b", 1000.5),
        ("1. 2.", 2),
        (".5", 0.5),
        ("\u22123", -3),
        ("10-12", 12),
        ("x=10-4", 4),
        ("10 - 4", 4),
        ("x = -4", -4),
        ("f(3)-4", 4),
        ("10%-12%", 12),
        ("$5-$7", 7),
        ("-$5.50", -5.5),
        ("\u2212\u20ac1,200", -1200),
        ("GPT-4", 4),
        ("so --3", 3),
        ("**-3**", -3),
        ("(3,4)", 4),
        ("(3, -4)", -4),
        ("1,2,3", 3),
        ("1,,2", 2),
        ("12,34", 34),
        ("1,2345", 2345),
        ("1,23,456", 456),
        ("0,123", 123),
        ("12,345,678.5", 12345678.5),
        ("1 000", 1000),
        ("1\u202f000\u202f000", 1000000),
        ("2 3", 3),
        ("1e3", 1000),
        ("-2.5E-3", -0.0025),
        ("1e\u22123", 0.001),
        ("3 eggs", 3),
        ("5e", 5),
        ("wait... 7", 7),
        ("it is ...5", 5),
        ("version 1.2.3", 3),
        ("50%", 50),
        ("1/2", 0.5),
        ("-3/4", -0.75),
        ("2 1/2", 2.5),
        ("-2 1/2", -2.5),
        (r"\boxed{\frac{1}{4}}", 0.25),
        ("3/4/2020", 2020),
        ("1/0", 0),
        ("5.", 5),
        ("12.50.", 12.5),
        ("no number", None),
        ("", None),
    ],
)
def test_a_number_is_read_as_people_write_it(text: str, number: float | None) -> None:
    assert last_number(text) == number


def spelled(value: float, generator: random.Random) -> str:
    """One of the spellings of a number."""
    size = abs(value)
    digits = f"{int(size)}" if size == int(size) else f"{size!r}"
    kind = generator.choice(("plain", "comma", "space", "exponent", "bare", "zeros"))
    if kind in {"comma", "space"}:
        digits = f"{int(size):,}" + digits.removeprefix(str(int(size)))
        digits = digits.replace(",", "," if kind == "comma" else generator.choice(SPACES))
    elif kind == "exponent":
        digits = f"{size:.15e}".replace("e+", generator.choice(("e", "E+", "e+")))
    elif kind == "bare" and 0 < size < 1:
        digits = digits.removeprefix("0")
    elif kind == "zeros":
        digits += "00" if "." in digits else ".00"
    unit = generator.choice(("{}", "{}", "${}", "{}%", "{} dollars", "\u20ac{}")).format(digits)
    return (generator.choice(MINUS) if value < 0 else "") + unit


CONTEXTS = (
    "{}",
    "The answer is {}.",
    "**{}**",
    "(2, {})",
    "(7,\n{})",
    "1, 2, {}",
    "so x={}",
    "#### {}",
    "{}!",
    "a: {} b",
)


def test_every_spelling_of_a_number_is_that_number() -> None:
    generator = random.Random(0)
    for _ in range(4000):
        places = generator.choice((0, 0, 1, 2, 3))
        value = round(generator.uniform(-1, 1) * 10 ** generator.randint(0, 8), places)
        text = generator.choice(CONTEXTS).format(spelled(value, generator))
        assert last_number(text) == value, text


def test_a_difference_ends_in_what_is_subtracted() -> None:
    generator = random.Random(1)
    for _ in range(500):
        first, second = generator.randint(0, 10**4), generator.randint(0, 10**4)
        sign = generator.choice(MINUS)
        assert last_number(f"{first}{sign}{second}") == second
        assert last_number(f"{first} {sign} {second}") == second
        assert last_number(f"({first},{second % 100})") == second % 100


def test_the_check_pays_for_the_number_alone() -> None:
    pairs = [(".5", "5"), ("\u22123", "3"), ("10-12", "-12"), ("(3,4)", "34"), ("1,2,3", "123"), ("1e3", "3")]
    assert gsm8k_match(completions=[text for text, _ in pairs], answer=[f"#### {n}" for _, n in pairs]) == [0.0] * 6
    pairs = [(".5", "0.5"), ("\u22123", "-3"), ("10-12", "12"), ("(3,4)", "4"), ("1e3", "1,000"), ("1 000", "1000")]
    assert gsm8k_match(completions=[text for text, _ in pairs], answer=[f"#### {n}" for _, n in pairs]) == [1.0] * 6
    assert gsm8k_match(completions=["-2", "0.25"], answer=[-2, 0.25]) == [1.0, 1.0]
