"""What others got wrong is told apart from what is right, so that nobody here repeats it."""

from __future__ import annotations

import pytest

from tests.kits.rlhf.algorithms.known_bugs import MUSEUM


@pytest.mark.parametrize("name", MUSEUM)
def test_ours_has_the_property(name: str) -> None:
    assert MUSEUM[name].property(MUSEUM[name].ours)


@pytest.mark.parametrize("name", MUSEUM)
def test_theirs_is_found_out(name: str) -> None:
    assert not MUSEUM[name].property(MUSEUM[name].theirs)
