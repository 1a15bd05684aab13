"""A copy of everything at one instant. Training waits for the copying, so it goes as fast as memory allows."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.checkpoint import tensor_file
from kitforge.core.checkpoint.layout import Part, encode_state
from kitforge.foundation.device import synchronize
from kitforge.foundation.errors import CheckpointError

# Up to this size torch copies on the calling thread, and quickest of all.
SMALL_BYTES = 2**17
# Large enough to make the hand-over between threads cheap, small enough to give all of them equal work.
PIECE_BYTES = 2**21

Piece = tuple[NDArray[np.uint8], NDArray[np.uint8]]


@final
class Snapshot:
    """A copy of everything at one instant, in CPU buffers that the next instant uses again."""

    def __init__(self) -> None:
        self.step = 0
        self.state = b""
        # Names as they were given; a name in `aliases` has no buffer of its own.
        self.names: dict[Part, list[str]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that a checkpoint of it takes, headers and manifest aside."""
        return sum(buffer.nbytes for buffer in self.buffers.values()) + len(self.state)

    def take(
        self,
        step: int,
        *,
        model: Iterable[tuple[str, Tensor]],
        optimizer: Iterable[tuple[str, Tensor]],
        state: Mapping[str, Any],
    ) -> None:
        """Copy all tensors and the state as they are now.

        Raises CheckpointError for a name given twice, a tensor without values, or state that JSON cannot hold.
        """
        self.step = step
        self.state = encode_state(state)
        sources: dict[str, Tensor] = {}
        self.aliases = {}
        # Tied tensors are tied within the model; the optimizer has no reason to share memory with it.
        self.names = {
            "model": _collect(model, sources, self.aliases),
            "optimizer": _collect(optimizer, sources, self.aliases),
        }
        self.buffers = {name: _buffer(self.buffers.get(name), source) for name, source in sources.items()}
        _copy([(self.buffers[name], source) for name, source in sources.items()])
        for device in {source.device for source in sources.values()}:
            synchronize(device)


def _collect(tensors: Iterable[tuple[str, Tensor]], sources: dict[str, Tensor], aliases: dict[str, str]) -> list[str]:
    """Sort tensors into `sources`, and into `aliases` those that are the very same memory; returns all names."""
    names: list[str] = []
    owners: dict[Hashable, str] = {}
    # Tensors made on the way, e.g. a step counter, must live until they are copied, or a later one takes their address.
    for name, tensor in tensors:
        tensor_file.check_storable(name, tensor)
        if name in sources or name in aliases:
            raise CheckpointError(f"two tensors are called {name!r}", expected="distinct names")
        names.append(name)
        memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        owner = owners.setdefault(memory, name) if tensor.numel() else name
        if owner == name:
            sources[name] = tensor.detach()
        else:
            aliases[name] = owner
    return names


def _buffer(last: Tensor | None, source: Tensor) -> Tensor:
    """The buffer of the last snapshot where it fits, so that memory is mapped once."""
    # A CUDA device copies at full speed to page-locked memory only.
    is_pinned = source.device.type == "cuda"
    alike = (source.shape, source.dtype)
    if last is not None and (last.shape, last.dtype) == alike and (not is_pinned or last.is_pinned()):
        return last
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=is_pinned)


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first; devices may still be at it on return.

    torch's own copy makes its threads meet once a tensor, which costs several times the copy itself when other
    processes want the cores too. Here they meet once.
    """
    pieces: list[Piece] = []
    for target, source in pairs:
        is_plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_complex()
        if is_plain and source.nbytes > SMALL_BYTES:
            pieces.extend(_pieces(target, source))
        else:
            target.copy_(source, non_blocking=True)
    # All threads draw from one iterator, so that one which the system holds up leaves its share to the others.
    shared = iter(pieces)
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as threads:
        others = [threads.submit(_copy_pieces, shared) for _ in range(num_threads - 1)]
        _copy_pieces(shared)
        for other in others:
            other.result()


def _pieces(target: Tensor, source: Tensor) -> Iterator[Piece]:
    to, of = (tensor.view(-1).view(torch.uint8).numpy() for tensor in (target, source))
    for start in range(0, len(of), PIECE_BYTES):
        yield to[start : start + PIECE_BYTES], of[start : start + PIECE_BYTES]


def _copy_pieces(pieces: Iterator[Piece]) -> None:
    for to, of in pieces:
        np.copyto(to, of)
