"""One safetensors file: written as a stream with its checksum, read lazily through a memory map.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, a JSON header that gives
each tensor's dtype, shape and byte range, then the bytes. The library's own writer wants every tensor as one dict and
hashes nothing, so the thirty lines that write stand here; reading is the library's.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kitforge.core.checkpoint.layout import FileEntry
from kitforge.foundation.errors import CheckpointError, ModelError
from kitforge.foundation.files import atomic_file

# Small enough to stay in the processor's cache between the checksum and the write.
PIECE_BYTES = 2**20

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def check_storable(name: str, tensor: Tensor) -> None:
    """Raise CheckpointError unless the tensor has values, and a layout, dtype and name that safetensors can hold."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"tensor {name!r} cannot be stored",
            got=f"{tensor.dtype}, {tensor.layout}, on {tensor.device}",
            expected="a dense tensor with values, of a dtype that safetensors knows",
        )
    if name == "__metadata__":
        raise CheckpointError(f"a tensor cannot be called {name!r}", fix="safetensors keeps that name for itself")


def split(tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Group tensors, in order, into shards of at most `shard_bytes`; a larger tensor is a shard of its own."""
    shard: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += tensor.nbytes
    if shard:
        yield shard


def write(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> FileEntry:
    """Write storable tensors with distinct names; no more than one of them is copied at a time."""
    # Larger elements first: each tensor then starts at a multiple of its element's size, as a memory map wants it.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for piece in _pieces(ordered):
            digest.update(piece)
            file.write(piece)
        size = file.tell()
    return FileEntry(name=path.name, bytes=size, sha256=digest.hexdigest())


def checksum(data: bytes) -> str:
    """The SHA-256 of `data`, as the manifest spells it."""
    return hashlib.sha256(data).hexdigest()


@final
class TensorFile:
    """A safetensors file whose tensors are mapped when they are asked for.

    What is wrong with the file is raised as `error`: CheckpointError for our own, ModelError for others'.
    """

    def __init__(self, path: Path, error: type[CheckpointError] | type[ModelError]) -> None:
        self._path = path
        self._error = error
        try:
            # The library's reader carries no types.
            self._handle: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as cause:
            raise self._damaged(cause) from cause

    def names(self) -> list[str]:
        """The names of the tensors, as the file orders them."""
        return list(self._handle.keys())

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; its memory is the file's until it is written to."""
        try:
            tensor: Tensor = self._handle.get_tensor(name)
        except SafetensorError as cause:
            raise self._damaged(cause) from cause
        return tensor

    def _damaged(self, cause: Exception) -> CheckpointError | ModelError:
        return self._error(f"{self._path} cannot be read", got=cause, expected="a whole safetensors file")


def _pieces(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[bytes | memoryview]:
    yield _header(tensors)
    for _, tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        view = flat.numpy().data
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _header(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    # Readers of the Hugging Face kind refuse a file that does not say which library's tensors it holds.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
