"""pass@k is the mean over all ways to choose k of n samples."""

import itertools
import statistics

import pytest

from kitforge.kits.rlhf.algorithms.pass_at_k import measured_k, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5])
def test_it_is_the_share_of_choices_that_hold_a_correct_one(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        correct = [place < num_correct for place in range(num_samples)]
        for k in range(1, num_samples + 1):
            wanted = statistics.fmean(any(chosen) for chosen in itertools.combinations(correct, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(wanted)


def test_powers_of_two_are_measured_and_all_samples() -> None:
    assert [measured_k(each) for each in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]
