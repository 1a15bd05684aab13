"""One safetensors file: written as a stream with its checksum, read lazily through a memory map.

The format (https://huggingface.co/docs/safetensors): eight bytes with the header's length, a JSON header that gives
each tensor's dtype, shape and byte range, then the bytes. The library's own writer wants every tensor as one dict and
computes no checksum, so writing is implemented here; reading uses the library.
"""

import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kitforge.core.checkpoint.manifest import FileEntry
from kitforge.foundation.errors import CheckpointError, ModelError
from kitforge.foundation.files import atomic_file

# Small enough to stay in the processor's cache between the checksum and the write.
READ_BYTES = 2**20
# A rank starts writeback to the disk after this many bytes.
WRITE_BYTES = 2**23

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
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
    ordered = _ordered(tensors)
    return write_stream(path, ordered, iter(ordered))


def write_stream(path: Path, outline: Sequence[tuple[str, Tensor]], tensors: Iterator[tuple[str, Tensor]]) -> FileEntry:
    """Write the next tensors of a stream, as many as the outline has, without holding two of them.

    `outline` has their names, shapes and dtypes, and needs no values; larger elements come first. Raises
    CheckpointError when the stream gives something else.
    """
    digest = hashlib.sha256()
    with atomic_file(path) as file:
        for chunk in _byte_chunks(outline, {}, tensors):
            digest.update(chunk)
            file.write(chunk)
            # It would keep its tensor until the next one is there.
            del chunk
        size = file.tell()
    return FileEntry(name=path.name, bytes=size, sha256=digest.hexdigest())


def write_shard(path: Path, tensors: Sequence[tuple[str, Tensor]], step: int) -> FileEntry:
    """`write` for one of many ranks, with the faster CRC-32 checksum. The file records its
    step. The tensors are on the CPU and must not change meanwhile."""
    ordered, notes = _ordered(tensors), {"step": str(step)}
    with atomic_file(path) as file:
        size = sent = 0
        for chunk in _byte_chunks(ordered, notes):
            size += file.write(chunk)
            if size - sent >= WRITE_BYTES:
                _send(file, sent)
                sent = size
        _send(file, sent)
        # The disk is at work now, and needs no processor.
        digest = Crc32()
        for chunk in _byte_chunks(ordered, notes):
            digest.update(chunk)
    return FileEntry(name=path.name, bytes=size, crc32=digest.hexdigest())


def checksum(data: bytes) -> str:
    """The SHA-256 of `data`, in the manifest's format."""
    return hashlib.sha256(data).hexdigest()


class Crc32:
    """The SHA-256 of the CRC-32 of every mebibyte and of the length: several times as fast as SHA-256 of it all, and
    one in four thousand million damages of a mebibyte may escape it."""

    def __init__(self) -> None:
        self._done = hashlib.sha256()
        self._num_bytes = 0
        self._last = 0

    def update(self, data: bytes | memoryview) -> None:
        """Take the bytes that follow; how they are divided among calls makes no difference."""
        view = memoryview(data)
        while view:
            part = view[: READ_BYTES - self._num_bytes % READ_BYTES]
            self._last = zlib.crc32(part, self._last)
            self._num_bytes += len(part)
            view = view[len(part) :]
            if self._num_bytes % READ_BYTES == 0:
                self._done.update(struct.pack("<I", self._last))
                self._last = 0

    def hexdigest(self) -> str:
        """The checksum of the bytes so far, in the manifest's format."""
        done = self._done.copy()
        done.update(struct.pack("<IQ", self._last, self._num_bytes))
        return done.hexdigest()


def crc32(path: Path) -> str:
    """The quick checksum of a file."""
    digest = Crc32()
    with open(path, "rb") as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest()


def step_of(path: Path) -> int | None:
    """The step recorded in a rank's file; None without a record or for a damaged file."""
    try:
        return TensorFile(path, CheckpointError).step
    except CheckpointError:
        return None


class TensorFile:
    """A safetensors file whose tensors are mapped when they are asked for.

    Faults of the file are raised as `error`: CheckpointError for our own files, ModelError for others.
    """

    def __init__(self, path: Path, error: type[CheckpointError] | type[ModelError]) -> None:
        self._path = path
        self._error = error
        try:
            # The library's reader carries no types.
            self._handle: Any = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as cause:
            raise self._damaged(cause) from cause

    @property
    def step(self) -> int | None:
        """The step recorded in the file, or None."""
        text = (self._handle.metadata() or {}).get("step", "")
        return int(text) if text.isdecimal() else None

    def names(self) -> list[str]:
        """The names of the tensors, as the file orders them."""
        return list(self._handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that the header gives."""
        return tuple(self._handle.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype that the header gives; None for one that torch does not have."""
        return DTYPES.get(self._handle.get_slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; its memory is the file's until it is written to."""
        try:
            tensor: Tensor = self._handle.get_tensor(name)
        except SafetensorError as cause:
            raise self._damaged(cause) from cause
        return tensor

    def _damaged(self, cause: Exception) -> CheckpointError | ModelError:
        return self._error(f"{self._path} cannot be read", got=cause, expected="a whole safetensors file")


def _ordered(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Larger elements first: each tensor then starts at a multiple of its element's size, as a memory map wants it."""
    return sorted(tensors, key=lambda item: -item[1].element_size())


def _send(file: IO[bytes], start: int) -> None:
    """Start writeback of the bytes from `start` on, without waiting for it."""
    file.flush()
    if sys.platform == "linux":
        os.posix_fadvise(file.fileno(), start, file.tell() - start, os.POSIX_FADV_DONTNEED)


def _byte_chunks(
    outline: Sequence[tuple[str, Tensor]], notes: Mapping[str, str], tensors: Iterator[tuple[str, Tensor]] | None = None
) -> Iterator[bytes | memoryview]:
    """The bytes of a file; the values are those of the stream, or of the outline itself."""
    yield _header(outline, notes)
    stream = iter(outline) if tensors is None else tensors
    for name, expected in outline:
        flat = _bytes_of(name, expected, next(stream, None))
        for start in range(0, len(flat), READ_BYTES):
            yield flat[start : start + READ_BYTES]
        del flat


def _bytes_of(name: str, expected: Tensor, found: tuple[str, Tensor] | None) -> memoryview:
    got = None if found is None else (found[0], found[1].dtype, found[1].shape)
    if found is None or got != (name, expected.dtype, expected.shape):
        raise CheckpointError(
            "the tensors that are written are not those that were announced",
            got=got,
            expected=(name, expected.dtype, expected.shape),
        )
    # An empty tensor may have a stride of 0, which no view of bytes takes.
    whole = found[1].detach().cpu().contiguous()
    flat = whole.reshape(-1).view(torch.uint8) if whole.numel() else torch.empty(0, dtype=torch.uint8)
    view: memoryview = flat.numpy().data
    return view


def _header(tensors: Sequence[tuple[str, Tensor]], notes: Mapping[str, str]) -> bytes:
    # Hugging Face's readers refuse a file without the name of its framework.
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
