"""Where rows live changes nothing: outputs of every step and the final table, states and counters too, bit for bit."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest

from tests.embedding_cache.training import (
    DEPTHS,
    OPTIMIZERS,
    POLICIES,
    TIERS,
    Case,
    assert_same_bits,
    run,
    sampled,
    uncached,
)

SPARES = (0.0, 0.1, 0.5, 1.5)
AXES = list(itertools.product(OPTIMIZERS, POLICIES, DEPTHS, TIERS, SPARES, (0, 1)))
# Every other case, whatever else it is, with admission, micro-batches, evaluations and passes without gradients.
MIXED = np.random.default_rng(0).permutation(len(AXES)) % 2 == 0
PRODUCT = [
    Case(optimizer=optimizer, policy=policy, depth=depth, tiers=tiers, spare=spare, sleeps=sleeps, is_mixed=is_mixed)
    for (optimizer, policy, depth, tiers, spare, sleeps), is_mixed in zip(AXES, MIXED.tolist(), strict=True)
]
CASES = PRODUCT if os.environ.get("KITFORGE_PROVE") else sampled(PRODUCT, 12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_table_in_one_tier_equals_plain_indexing(optimizer: str, depth: int, is_mixed: bool, tmp_path: Path) -> None:
    case = Case(optimizer=optimizer, depth=depth, tiers="whole", is_mixed=is_mixed)
    assert_same_bits(run(case, tmp_path), uncached(optimizer, is_mixed))


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cached_equals_uncached(case: Case, tmp_path: Path) -> None:
    assert_same_bits(run(case, tmp_path), uncached(case.optimizer, case.is_mixed))
