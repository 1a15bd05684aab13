"""The definition of `keep_mask`: dropout masks by Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

Element e of row r is word e % 4 of Philox at the counter (e // 4, r), each in two words of 32 bits, the low one first.
It is kept where that word is at least rate * 2**32. All arithmetic is of integers and works on any device. B rows.
"""

from typing import Protocol

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
INCREMENTS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF
# Counters of one chunk: few enough for a CPU cache, or enough to fill a GPU.
_CHUNK = {"cpu": 2**14}
_GPU_CHUNK = 2**24

Words = tuple[Tensor, Tensor, Tensor, Tensor]


class KeepMaskKernel(Protocol):
    """Boolean [rows, count]: True where dropout keeps an element, of elements `start` to `start + count` of each row.

    Rows are any int64, the key has 64 bits. Each element is dropped with probability `rate`. All implementations give
    the same bits.
    """

    def __call__(self, key: int, rows: Tensor, start: int, count: int, rate: float) -> Tensor: ...


def keep_mask(key: int, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
    device = rows.device
    first, last = start // 4, -(-(start + count) // 4)
    kept = torch.empty(len(rows), 4 * (last - first), dtype=torch.bool, device=device)
    size = _CHUNK.get(device.type, _GPU_CHUNK)
    num_rows = max(1, size // max(last - first, 1))
    for top in range(0, len(rows), num_rows):
        part = rows[top : top + num_rows].unsqueeze(1)
        for begin in range(first, last, size):
            groups = torch.arange(begin, min(begin + size, last), device=device)
            counter = groups & WORD, groups >> 32, part & WORD, (part >> 32) & WORD
            words = philox(counter, (key & WORD, (key >> 32) & WORD))
            here = kept[top : top + num_rows, 4 * (begin - first) :][:, : 4 * len(groups)]
            here.copy_((torch.stack(words, dim=-1) >= threshold(rate)).flatten(1))
    return kept[:, start - 4 * first :][:, :count].contiguous()


def threshold(rate: float) -> int:
    """The smallest word of a kept element."""
    return round(rate * 2**32)


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Four random words from a counter of four words, each of 32 bits in an int64."""
    one, two, three, four = counter
    low, high = key
    for _ in range(ROUNDS):
        # The product of two words fills all 64 bits; the mask removes the sign extension of the shift.
        left, right = one * MULTIPLIERS[0], three * MULTIPLIERS[1]
        one, two, three, four = (
            ((right >> 32) & WORD) ^ two ^ low,
            right & WORD,
            ((left >> 32) & WORD) ^ four ^ high,
            left & WORD,
        )
        low, high = (low + INCREMENTS[0]) & WORD, (high + INCREMENTS[1]) & WORD
    return one, two, three, four
