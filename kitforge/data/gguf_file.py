"""Reading of GGUF files: the metadata and the table of tensors. Specification: `docs/gguf.md` of ggml-org/ggml.

The header is parsed here, since the reader of the package `gguf` takes three seconds for a vocabulary of 49,152 tokens;
blocks of quantized weights are decoded by that package.
"""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import ModelError

GGUF_SUFFIX = ".gguf"
_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
# struct's format of each scalar type; arrays of them are numpy's of the same letter.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
# Tensor types by number: name, elements of a block, and bytes of a block. Specification: `ggml-common.h` of ggml.
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Limits of a header that is not an attack: dimensions of a tensor, and nesting of arrays.
_MAX_DIMENSIONS, _MAX_NESTING = 4, 2


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file that exists."""
    return path.suffix == GGUF_SUFFIX and path.is_file()


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """An entry of the table of tensors."""

    shape: tuple[int, ...]  # row-major, as torch counts: the reverse of the file's order
    kind: str  # F32, Q4_1, ...
    number: int  # of the kind
    start: int  # first byte within the file
    num_bytes: int


class GgufFile:
    """A GGUF file, memory-mapped. Raises ModelError for a file that is damaged, cut off, or of unknown types."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read", got=error, expected="a GGUF file") from None
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        _Header(self._bytes, path).read(self.metadata, self.tensors)

    def values(self, name: str) -> NDArray[Any]:
        """The weights of a tensor: float32 or float16 as stored, the bits of bfloat16 as uint16, and float32 decoded
        from blocks."""
        entry = self.tensors[name]
        data = np.frombuffer(self._bytes, np.uint8, entry.num_bytes, entry.start)
        if entry.kind in ("F32", "F16", "BF16"):
            dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.kind]
            return data.view(dtype).reshape(entry.shape)
        quants = import_optional("gguf", needed_for="quantized weights of a GGUF file", extra="transformers").quants
        kind = quants.GGMLQuantizationType(entry.number)
        blocks = data.reshape(math.prod(entry.shape[:-1]), -1)
        decoded: NDArray[Any] = quants.dequantize(blocks, kind).reshape(entry.shape)
        return decoded

    def has_blocks(self, name: str) -> bool:
        """Whether a tensor is a matrix in Q8_0 or Q4_0."""
        return self.tensors[name].kind in ("Q8_0", "Q4_0") and len(self.tensors[name].shape) == 2

    def blocks(self, name: str) -> tuple[NDArray[Any], NDArray[np.float16]]:
        """Whole numbers and scales [rows, columns / 32] of a matrix that `has_blocks`: of Q8_0 int8 [rows, columns], of
        Q4_0 uint8 [rows, columns / 2], two adjacent columns plus 8, the first in the lower half."""
        entry = self.tensors[name]
        size = _TENSOR_TYPES[entry.number][2]
        data = np.frombuffer(self._bytes, np.uint8, entry.num_bytes, entry.start).reshape(entry.shape[0], -1, size)
        scales, numbers = np.ascontiguousarray(data[..., :2]).view("<f2")[..., 0].copy(), data[..., 2:]
        if entry.kind == "Q8_0":
            return np.ascontiguousarray(numbers).view(np.int8).reshape(entry.shape), scales
        # A byte of a block holds column n and, in the upper half, n + 16.
        columns = np.concatenate([numbers & 15, numbers >> 4], axis=2)
        return (columns[..., ::2] | columns[..., 1::2] << 4).reshape(entry.shape[0], -1), scales


class _Header:
    """The header of a file, read front to back; every length is checked against the file's before it is used."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self._content, self._path, self._at = content, path, 0
        self._readers: dict[int, Callable[[], Any]] = {
            number: lambda letter=letter: self._scalar(letter)  # type: ignore[misc]
            for number, letter in _SCALARS.items()
        }
        self._readers[_STRING] = self._string

    def read(self, metadata: dict[str, Any], tensors: dict[str, GgufTensor]) -> None:
        """Fill the metadata and the table of tensors."""
        magic, version = bytes(self._content[:4]), int.from_bytes(self._content[4:8], "little")
        if magic != _MAGIC or version not in _VERSIONS:
            got = f"{magic!r}, version {version}" if magic == _MAGIC else f"{magic!r}"
            raise ModelError(f"{self._path} is not a GGUF file", got=got, expected="GGUF, version 2 or 3")
        self._at = 8
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_values):
            name = self._string()
            metadata[name] = self._value(self._scalar("I"), _MAX_NESTING)
        table = []
        for _ in range(num_tensors):
            name, dimensions = self._string(), self._scalar("I")
            self._require(1 <= dimensions <= _MAX_DIMENSIONS, f"{name!r} of {dimensions} dimensions")
            shape = tuple(self._scalar("Q") for _ in range(dimensions))
            table.append((name, shape[::-1], self._scalar("I"), self._scalar("Q")))
        alignment = metadata.get("general.alignment", 32)
        self._require(isinstance(alignment, int) and 0 < alignment <= 1 << 20, f"general.alignment={alignment!r}")
        data = -(-self._at // alignment) * alignment
        for name, shape, number, offset in table:
            self._require(name not in tensors, f"two tensors called {name!r}")
            tensors[name] = self._entry(name, shape, number, data + offset)

    def _entry(self, name: str, shape: tuple[int, ...], number: int, start: int) -> GgufTensor:
        if number not in _TENSOR_TYPES:
            known = ", ".join(kind for kind, _, _ in _TENSOR_TYPES.values())
            raise ModelError(f"{self._path}: tensor {name!r} has an unknown type", got=number, expected=known)
        kind, elements, size = _TENSOR_TYPES[number]
        self._require(shape[-1] % elements == 0, f"{name!r} with rows of {shape[-1]}, in blocks of {elements}")
        num_bytes = math.prod(shape) // elements * size
        if start + num_bytes > len(self._content):
            raise ModelError(
                f"{self._path} is cut off",
                got=f"{len(self._content):,} bytes",
                expected=f"at least {start + num_bytes:,}, by tensor {name!r}",
                fix="fetch the file again",
            )
        return GgufTensor(shape=shape, kind=kind, number=number, start=start, num_bytes=num_bytes)

    def _value(self, kind: int, depth: int) -> Any:
        if kind in self._readers:
            return self._readers[kind]()
        self._require(kind == _ARRAY and depth > 0, f"a value of type {kind}")
        item, count = self._scalar("I"), self._scalar("Q")
        if item in _SCALARS:
            values = np.frombuffer(self._take(count * struct.calcsize(f"<{_SCALARS[item]}")), f"<{_SCALARS[item]}")
            return values.tolist()
        # An item takes at least a byte, so a count beyond the file is refused before anything is allocated.
        self._require(count <= len(self._content) - self._at, f"an array of {count} values")
        if item == _STRING:
            return [self._string() for _ in range(count)]
        return [self._value(item, depth - 1) for _ in range(count)]

    def _scalar(self, letter: str) -> Any:
        layout = f"<{letter}"
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _string(self) -> str:
        length = int.from_bytes(self._take(8), "little")
        return self._take(length).decode("utf-8", "replace")

    def _take(self, size: int) -> bytes:
        if self._at + size > len(self._content):
            got = f"{len(self._content):,} bytes"
            raise ModelError(f"{self._path} is cut off within its header", got=got, fix="fetch the file again")
        self._at += size
        return self._content[self._at - size : self._at]

    def _require(self, condition: bool, got: str) -> None:
        if not condition:
            raise ModelError(f"{self._path} is damaged", got=got, expected="a GGUF header", fix="fetch the file again")
