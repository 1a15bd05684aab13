"""Vectors of a compiled loop: each operation has the bits of numpy's or torch's in fp32, lane by lane."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, HALF
from kitforge.core.kernels.cpu_engine.vectors import (
    LANES,
    above,
    fused,
    keep_lanes,
    lane_numbers,
    larger,
    largest_of,
    part_at,
    powers_of_e,
    smaller,
    sum_of,
    to_precision,
    vector_at,
    vector_of,
    write_part,
    write_vector,
)

FACTOR = np.float32(-1.7)


@njit
def calculate(one: int, other: int, results: int) -> None:
    """Write one vector of each operation."""
    x, y, step = vector_at(one, FLOAT), vector_at(other, FLOAT), 4 * LANES
    write_vector(x + y, results, FLOAT)
    write_vector(x - y, results + step, FLOAT)
    write_vector(x * y, results + 2 * step, FLOAT)
    write_vector(x / y, results + 3 * step, FLOAT)
    write_vector(FACTOR - x, results + 4 * step, FLOAT)
    write_vector(fused(x, y, FACTOR), results + 5 * step, FLOAT)
    write_vector(larger(x, y), results + 6 * step, FLOAT)
    write_vector(smaller(x, y), results + 7 * step, FLOAT)
    write_vector(lane_numbers() + vector_of(FACTOR), results + 8 * step, FLOAT)
    write_vector(above(x, y), results + 9 * step, FLOAT)


@njit
def reduce(numbers: int) -> Any:
    return sum_of(vector_at(numbers, FLOAT)), largest_of(vector_at(numbers, FLOAT))


@njit
def copy(source: int, target: int, like_source: Any, like_target: Any, count: int) -> None:
    write_part(part_at(source, like_source, count), target, like_target, count)


@njit
def read(source: int, target: int, like: Any, count: int) -> None:
    write_vector(part_at(source, like, count), target, FLOAT)


@njit
def keep(numbers: int, start: int, stop: int) -> None:
    write_vector(keep_lanes(vector_at(numbers, FLOAT), start, stop, FACTOR), numbers, FLOAT)


@njit
def precisely(numbers: int, like: Any) -> None:
    write_vector(to_precision(vector_at(numbers, FLOAT), like), numbers, FLOAT)


@njit
def exponentiate(numbers: int, count: int) -> None:
    for k in range(0, count, LANES):
        write_vector(powers_of_e(vector_at(numbers + 4 * k, FLOAT)), numbers + 4 * k, FLOAT)


def random(count: int = LANES) -> Any:
    return np.random.default_rng(count).normal(size=count).astype(np.float32)


def same_bits(one: Any, other: Any) -> bool:
    return bool((one.view(np.uint32) == other.view(np.uint32)).all())


def test_arithmetic_has_the_bits_of_numpy() -> None:
    x, y, found = random(2 * LANES)[:LANES].copy(), random(2 * LANES)[LANES:].copy(), np.zeros((10, LANES), np.float32)
    calculate(x.ctypes.data, y.ctypes.data, found.ctypes.data)
    exact = (x.astype(np.float64) * y + np.float64(FACTOR)).astype(np.float32)
    lanes = np.arange(LANES, dtype=np.float32) + FACTOR
    expected = [x + y, x - y, x * y, x / y, FACTOR - x, exact, np.maximum(x, y), np.minimum(x, y), lanes]
    expected.append(np.where(x > y, x, np.float32(0)))
    for own, other in zip(found, expected, strict=True):
        assert same_bits(own, other)


def test_a_number_that_is_none_stays_so() -> None:
    x, found = np.full(LANES, np.nan, dtype=np.float32), np.zeros((10, LANES), np.float32)
    calculate(x.ctypes.data, random().ctypes.data, found.ctypes.data)
    assert np.isnan(found[[*range(8), 9]]).all()
    exponentiate(x.ctypes.data, LANES)
    assert np.isnan(x).all()


def test_sums_add_the_halves_of_a_vector_first() -> None:
    numbers = random()
    total, largest = reduce(numbers.ctypes.data)
    expected = numbers
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert np.float32(total) == expected[0] and np.float32(largest) == numbers.max()


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [-2, 0, 1, LANES - 1, LANES, LANES + 3])
def test_a_part_neither_reads_nor_writes_behind_its_count(count: int, kind: torch.dtype) -> None:
    source = torch.from_numpy(random(2 * LANES)).to(kind)
    target, read_numbers, like = (
        torch.full_like(source, 7),
        torch.zeros(LANES),
        FLOAT if kind is torch.float32 else HALF,
    )
    copy(source.data_ptr(), target.data_ptr(), like, like, count)
    kept = max(0, min(count, LANES))
    assert torch.equal(target[:kept], source[:kept]) and (target[kept:] == 7).all()
    read(source.data_ptr(), read_numbers.data_ptr(), like, count)
    assert torch.equal(read_numbers[:kept], source[:kept].float()) and not read_numbers[kept:].any()


@pytest.mark.parametrize(("start", "stop"), [(0, LANES), (2, 5), (-3, 2), (LANES - 1, 3 * LANES), (5, 5), (LANES, 99)])
def test_lanes_outside_of_a_range_are_replaced(start: int, stop: int) -> None:
    numbers = random()
    expected = np.where((np.arange(LANES) >= start) & (np.arange(LANES) < stop), numbers, FACTOR)
    keep(numbers.ctypes.data, start, stop)
    assert same_bits(numbers, expected)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, size=400 * LANES, dtype=np.uint32)
    bits[: 4 * LANES] = (bits[: 4 * LANES] & 0xFFFF0000) | 0x8000  # halfway between two
    bits[4 * LANES] = 0x7F800001  # a NaN whose upper half is infinite
    numbers = torch.from_numpy(bits.view(np.float32).copy())
    expected, found = numbers.bfloat16(), torch.zeros(len(numbers), dtype=torch.bfloat16)
    precise = numbers.clone()
    for k in range(0, len(numbers), LANES):
        copy(numbers.data_ptr() + 4 * k, found.data_ptr() + 2 * k, FLOAT, HALF, LANES)
        precisely(precise.data_ptr() + 4 * k, HALF)
    is_number = ~expected.isnan()
    assert torch.equal(found[is_number], expected[is_number]) and found[~is_number].isnan().all()
    assert torch.equal(precise[is_number], expected[is_number].float()) and precise[~is_number].isnan().all()


def test_powers_are_as_exact_as_their_argument() -> None:
    numbers = np.linspace(-87, 88, 4000 * LANES).astype(np.float32)
    powers = numbers.copy()
    exponentiate(powers.ctypes.data, len(powers))
    # The argument is multiplied by a constant, and both are rounded.
    bound = 2.0**-24 * (2 * np.abs(numbers) + 8)
    assert (np.abs(powers / np.exp(numbers.astype(np.float64)) - 1) < bound).all()
    least = np.full(LANES, -1000, dtype=np.float32)
    exponentiate(least.ctypes.data, LANES)
    assert (least == 2.0**-126).all()
