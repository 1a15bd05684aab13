"""The key of one text, byte by byte: the reference of `data.tables.hashing`."""

import numpy as np

from kitforge.data.tables.hashing import _FOLD, hash_array


def hash_text(text: str) -> int:
    """The key of one text, as `hash_texts` has it."""
    raw = text.encode()
    state = len(raw) * _FOLD % 2**64
    for start in range(0, max(len(raw), 1), 8):
        word = int.from_bytes(raw[start : start + 8], "little")
        state = int(hash_array(np.array([state ^ word], np.uint64), _FOLD)[0])
    return state - 2**64 if state >= 2**63 else state
