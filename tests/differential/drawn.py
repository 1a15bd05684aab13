"""How many inputs a drawn comparison looks at: a seeded sample in the gate, thousands in `make prove`."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

WHOLE = "KITFORGE_PROVE" in os.environ


def drawn(examples: int, *, whole: int = 2_000, shrinks: bool = True) -> Callable[[Any], Any]:
    """The mark of a drawn comparison: `examples` inputs in the gate, the same ones every time; `whole` fresh ones in
    `make prove`. One that fails is made smaller, unless that takes longer than to look at it."""
    without = set() if shrinks else {Phase.shrink, Phase.explain}
    limits = settings(
        phases=[phase for phase in Phase if phase not in without],
        max_examples=whole if WHOLE else examples,
        derandomize=not WHOLE,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        print_blob=WHOLE,
    )
    return lambda test: pytest.mark.prove(limits(test))
