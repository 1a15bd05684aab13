"""Texts to 64-bit keys, whole Arrow columns at a time; the same on every machine and in every process.

A text is read as little-endian words of 8 bytes, the last one filled up with zeros, and folded into a state that
begins with its length: state = scramble(state xor word). Two texts of equal length up to 8 bytes never share a key;
of n longer ones, a pair does with a probability of about n²/2^65.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array

_WORD = 8
_FOLD = 0x9E3779B97F4A7C15
# All bytes of a word up to the number that is left of the text.
_MASKS = np.array([(1 << (8 * count)) - 1 for count in range(_WORD)] + [2**64 - 1], dtype=np.uint64)


def hash_texts(texts: Any) -> NDArray[np.int64]:
    """A key for each value of a pyarrow array of texts [n]; undefined for nulls."""
    offsets, content = text_views(texts)
    # With a word of zeros behind the last byte.
    data = np.empty(int(offsets[-1] - offsets[0]) + _WORD, np.uint8)
    data[-_WORD:] = 0
    data[:-_WORD] = content[offsets[0] : offsets[-1]]
    offsets = (offsets - offsets[0]).astype(np.int64)
    starts, left = offsets[:-1], np.diff(offsets)
    state = left.astype(np.uint64) * np.uint64(_FOLD)
    # Every byte begins a word, so that a text may begin anywhere.
    words: NDArray[np.uint64] = np.ndarray((len(data) - _WORD + 1,), dtype="<u8", buffer=data, strides=(1,))
    state ^= words[starts] & _MASKS[np.minimum(left, _WORD)]
    state = hash_array(state, _FOLD)
    rows = np.flatnonzero(left > _WORD)
    starts, left = starts[rows], left[rows]
    while len(rows):
        starts, left = starts + _WORD, left - _WORD
        state[rows] = hash_array(state[rows] ^ (words[starts] & _MASKS[np.minimum(left, _WORD)]), _FOLD)
        goes_on = left > _WORD
        rows, starts, left = rows[goes_on], starts[goes_on], left[goes_on]
    return state.view(np.int64)


def text_views(texts: Any) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Offsets [n + 1] of a pyarrow array of texts into bytes, both as they lie in memory."""
    width = np.int64 if "large" in str(texts.type) else np.int32
    _, offsets, data = texts.buffers()
    if offsets is None or len(texts) == 0:
        return np.zeros(1, np.int64), np.zeros(1, np.uint8)
    begins = np.frombuffer(offsets, dtype=width, offset=texts.offset * np.dtype(width).itemsize, count=len(texts) + 1)
    return begins, np.frombuffer(data, dtype=np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
