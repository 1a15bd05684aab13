"""The noise of dropout is Philox4x32-10 to the bit, on every layout, and looks like noise."""

import math

import pytest
import torch

from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.keep_mask import reference
from kitforge.core.kernels.keep_mask.reference import KeepMaskKernel

ONES = 0xFFFFFFFF
KERNELS = ["reference", "numba"]
ROWS = torch.tensor([0, 7, 2**40 + 5, -3])


def kernel(name: str) -> KeepMaskKernel:
    if name == "reference":
        return reference.keep_mask
    pytest.importorskip("numba")
    found = select("O1", "cpu").keep_mask
    assert found is not reference.keep_mask
    return found


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_generator_gives_the_published_words(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """The known answers that Random123 comes with."""
    one, two, three, four = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in reference.philox((one, two, three, four), key)) == words


def test_an_element_is_a_word_of_its_row_and_place() -> None:
    """Element by element, with Python's own whole numbers."""

    def word(key: int, row: int, element: int) -> int:
        group, row = element // 4, row % 2**64
        counter = [group & ONES, group >> 32, row & ONES, row >> 32]
        low, high = key & ONES, key >> 32
        for _ in range(10):
            left, right = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
            counter = [(right >> 32) ^ counter[1] ^ low, right & ONES, (left >> 32) ^ counter[3] ^ high, left & ONES]
            low, high = (low + 0x9E3779B9) & ONES, (high + 0xBB67AE85) & ONES
        return counter[element % 4]

    key, start = 0x7123456789ABCDEF, 2**34 - 3
    kept = reference.keep_mask(key, ROWS, start, 9, 0.25)
    wanted = [[word(key, row, start + place) >= 2**30 for place in range(9)] for row in ROWS.tolist()]
    assert kept.tolist() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 3, 4, 1023, 5000])
@pytest.mark.parametrize("start", [0, 1, 6, 2**34 - 2])
@pytest.mark.parametrize("num_rows", [0, 1, 4, 300])
def test_the_compiled_loop_is_the_reference(num_rows: int, start: int, count: int) -> None:
    rows = torch.arange(num_rows) * 2**31 - 3
    assert torch.equal(
        kernel("numba")(2**63 - 9, rows, start, count, 0.3), reference.keep_mask(2**63 - 9, rows, start, count, 0.3)
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(2, 70_001), (40_000, 6)])
def test_threads_change_no_bit(threads: int, shape: tuple[int, int]) -> None:
    rows, before = torch.arange(shape[0]), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = kernel("numba")(5, rows, 0, shape[1], 0.5)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, reference.keep_mask(5, rows, 0, shape[1], 0.5))


@pytest.mark.parametrize("name", KERNELS)
def test_a_part_is_cut_from_the_whole(name: str) -> None:
    whole = kernel(name)(11, ROWS, 0, 40_000, 0.4)
    for start, count in ((0, 7), (13, 1), (16_383 * 2 + 1, 5_000)):
        for rows in (slice(1, 3), slice(3, 4)):
            part = kernel(name)(11, ROWS[rows], start, count, 0.4)
            assert torch.equal(part, whole[rows, start : start + count])


@pytest.mark.parametrize("rate", [0.0, 2.0**-33, 1 - 2.0**-33])
def test_rates_at_the_ends(rate: float) -> None:
    for name in KERNELS:
        kept = kernel(name)(3, ROWS, 0, 4096, rate)
        assert bool(kept.all()) if rate < 0.5 else not bool(kept.any())


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_masks_have_their_rate_and_no_pattern(rate: float) -> None:
    """Within four and a half deviations: shares of rows, of words, of neighbours, and of pairs of rows and keys."""
    num_rows, count = 64, 4096
    kept = reference.keep_mask(123, torch.arange(num_rows), 0, count, rate)
    other = reference.keep_mask(124, torch.arange(num_rows), 0, count, rate)

    def differs(events: torch.Tensor, chance: float) -> float:
        return abs(float(events.double().mean()) - chance) / math.sqrt(chance * (1 - chance) / events.numel())

    both = (1 - rate) ** 2
    assert differs(kept, 1 - rate) < 4.5
    assert max(differs(row, 1 - rate) for row in kept) < 4.5
    assert max(differs(kept[:, word::4], 1 - rate) for word in range(4)) < 4.5
    assert max(differs(kept[:, :-lag] & kept[:, lag:], both) for lag in (1, 2, 3, 4, 64)) < 4.5
    assert max(differs(kept[:-lag] & kept[lag:], both) for lag in (1, 2, 32)) < 4.5
    assert differs(kept & other, both) < 4.5
