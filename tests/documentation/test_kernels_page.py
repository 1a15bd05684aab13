"""docs/kernels.md has a row for every operation, with the implementations that are chosen for a device."""

import re
from pathlib import Path

import pytest

from kitforge.core.kernels.dispatch import IMPLEMENTATIONS, preferred

PAGE = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
ROWS = {
    match[1]: [cell.strip() for cell in match[2].split("|")]
    for match in re.finditer(r"^\| `(\w+)` \|(.*)\|$", PAGE, re.M)
}
NAMES = {name for found in IMPLEMENTATIONS.values() for name in found} | {"reference"}


def named(cell: str) -> set[str]:
    """The implementations that a cell names before any comment in brackets."""
    return set(re.findall(r"\w+", re.sub(r"\([^)]*\)", "", cell))) & NAMES


@pytest.mark.parametrize("operation", IMPLEMENTATIONS)
def test_a_row_names_what_is_chosen(operation: str) -> None:
    row = ROWS[operation]
    assert named(row[0]) == set(preferred(operation, "cpu") or ["reference"])
    elsewhere = preferred(operation, "cuda")
    if operation != "fused_decode_step":
        assert named(row[1]) == set(elsewhere or ["reference"])
    if len(row) == 4 and operation != "fused_decode_step":
        assert named(row[2]) == set(
            preferred(operation, "cpu", "O2") + preferred(operation, "cuda", "O2") or ["reference"]
        )


def test_no_row_is_of_an_operation_that_is_gone() -> None:
    assert set(ROWS) == set(IMPLEMENTATIONS)
