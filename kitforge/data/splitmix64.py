"""SplitMix64: a keyed hash of integer arrays."""

import numpy as np
from numpy.typing import NDArray


def hash_array(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014) of each number plus `key`."""
    mixed = numbers + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
