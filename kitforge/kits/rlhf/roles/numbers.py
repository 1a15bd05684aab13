"""Reads numbers in texts as people write them."""

import re

# Hyphens, dashes and minus signs; an em dash is punctuation. The last one would be a range elsewhere in a class.
_MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d-"
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9"
# Between groups of three digits: comma, space, no-break, thin and narrow no-break space.
_SEPARATORS = ", \u00a0\u2009\u202f"
_NUMBER = re.compile(
    # A minus sign after a digit, a letter or a closing bracket subtracts or joins.
    rf"(?:(?<![\w)\]}}%.{_MINUS}])(?P<minus>[{_MINUS}])[{_CURRENCY}]?)?"
    r"(?P<digits>"
    # Digits in groups, as a whole: in 1,23,456 and 1,2,3 commas separate numbers.
    rf"(?<!\d,)(?!0)\d{{1,3}}(?P<separator>[{_SEPARATORS}])\d{{3}}(?:(?P=separator)\d{{3}})*(?!\d|(?P=separator)\d)(?:\.\d+)?"
    r"|\d+(?:\.\d+)?"
    # A leading point is none of an ellipsis or of a version.
    r"|(?<![\w.])\.\d+)"
    rf"(?P<exponent>[eE][+{_MINUS}]?\d+(?!\w))?"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}")
_TO_ASCII = str.maketrans(dict.fromkeys(_MINUS, "-") | dict.fromkeys(_SEPARATORS))


def last_number(text: str) -> float | None:
    """The last number in a text, None where there is none.

    A number has an optional minus sign, thousands separators between groups of three digits, decimals after a point
    and an exponent. A currency or percent sign is a unit: 50% is 50. `1/2` is 0.5, and `2 1/2` is 2.5; dates are no
    fractions.
    """
    text = _LATEX_FRACTION.sub(r"\1/\2", text)
    found = list(_NUMBER.finditer(text))
    if not found:
        return None
    last = found[-1]
    if len(found) == 1 or text[found[-2].end() : last.start()] != "/" or text[last.end() : last.end() + 1] == "/":
        return _value(last)
    return _fraction(text, found)


def _fraction(text: str, found: list[re.Match[str]]) -> float:
    """The value of the last two numbers, which a slash joins."""
    above, below = found[-2], found[-1]
    numerator, denominator = _value(above), _value(below)
    if denominator == 0 or text[above.start() - 1 : above.start()] == "/":
        return denominator
    before = found[-3] if len(found) > 2 else None
    is_proper = 0 < numerator < denominator and before is not None and before["digits"].isdigit()
    if before is None or not is_proper or text[before.end() : above.start()] != " ":
        return numerator / denominator
    whole = _value(before)
    return whole - numerator / denominator if before["minus"] else whole + numerator / denominator


def _value(number: re.Match[str]) -> float:
    sign = "-" if number["minus"] else ""
    return float(sign + (number["digits"] + (number["exponent"] or "")).translate(_TO_ASCII))
