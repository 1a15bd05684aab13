"""Follows the memory of a step: which storages live, what they hold, and the peak of each moment.

Bytes are those that the allocator hands out; what it keeps in reserve beside them is not counted.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from kitforge.core.parallel.plan.work import WorkTrace, tensors_in
from kitforge.foundation.host_values import is_fake

# What a storage holds, as reports name it. Frozen weights are those that the optimizer has no part of, of other roles
# too; gathered weights are those of FSDP in use; table rows are embeddings with their moments; temporaries were made in
# the backward pass or the update and are neither gradients nor sent; keys and values are those of rollouts.
CAUSES = (
    *("weights", "frozen weights", "gathered weights", "table rows", "gradients", "moments"),
    *("activations", "logits", "communication", "temporaries", "keys and values"),
)
# Of the course of memory, at most.
POINTS = 480
# In-place operations whose operand a CPU casts to the dtype of the target, in memory of its own.
_CASTS = ("aten::add_.Tensor", "aten::mul_.Tensor")
# Collectives for which gloo takes memory of its own, as much as this one of its tensors: the input or the output.
_GLOO_COPIES = {
    "c10d::_reduce_scatter_base_": -1,
    "c10d::reduce_scatter_tensor_coalesced_": -1,
    "c10d::_allgather_base_": 0,
}
# Attention in which each thread of a CPU holds blocks of scores: which tensor has the queries, and how many blocks.
_SCORES = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 1),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The bytes of a rank by moment of the step and by cause, at the peak within each moment."""

    moments: Mapping[str, Mapping[str, int]]
    host: int = 0  # bytes beside them in the memory of the host, of a device with memory of its own
    course: Sequence[tuple[str, Mapping[str, int]]] = ()  # the moment and the bytes by cause, at points of the step

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def by_cause(self) -> Mapping[str, int]:
        """Bytes at the peak by cause; those of all causes are the peak."""
        return self.moments[self.moment]

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return sum(self.by_cause.values())


@dataclass(slots=True)
class _Storage:
    size: int
    cause: str
    is_elsewhere: bool = False


class MemoryTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, by weak references, until they die or FSDP resizes them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch imports its compiler, which is not used, and asks it before each operation.
        return False

    def __init__(
        self, device_type: str, work: WorkTrace | None = None, *, is_building: bool = False, keeps_course: bool = False
    ) -> None:
        """`device_type`: that of the tensors, whose own copies within operations are counted on a CPU. `work` counts
        each operation beside. `is_building`: what is made before `begin` are weights without values, beside data, which
        are not counted. `keeps_course`: memory is followed over the step, beside its peaks."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_cpu, self._is_building = device_type == "cpu", is_building
        self.work = work
        self._live: dict[int, _Storage] = {}
        self._now = 0
        self._moment = "forward pass"
        self._peaks: dict[str, int] = {}
        self._at: dict[str, list[tuple[_Storage, int]]] = {}
        self._is_rising = False
        self._host = 0
        self._num_before = 0  # of them, what was there when the step began
        self._changes: list[tuple[_Storage, int, str]] | None = [] if keeps_course else None

    def enter(self, moment: str) -> None:
        """What follows belongs to that moment."""
        self._keep_peak()
        self._moment = moment
        self._note_peak()

    def begin(self, cause: str) -> None:
        """A step begins: what was built so far and lives has that cause, unless it gets another one."""
        for each in self._live.values():
            each.cause = cause
        self._is_building = False

    def forget_peaks(self) -> None:
        """Those so far do not count."""
        self._is_rising = False
        self._peaks.clear()
        self._at.clear()
        if self._changes is not None:
            self._changes = [(each, each.size, self._moment) for each in self._live.values()]
            self._num_before = len(self._changes)

    @property
    def is_forward(self) -> bool:
        """Whether the forward pass of a micro-batch is under way, rather than its backward pass or the update."""
        return self._moment.startswith("forward") or self._moment == "head"

    def attribute(self, tensors: Iterable[Tensor], cause: str) -> None:
        """The storages of these tensors hold `cause`; new ones are counted from now on."""
        for tensor in tensors:
            self._follow(tensor, cause)
            self._live[tensor.untyped_storage()._cdata].cause = cause

    def leave_on_host(self, tensors: Iterable[Tensor]) -> None:
        """These lie in the memory of the host, which on a CPU is that of the device."""
        for tensor in () if self._is_cpu else tensors:
            found = self._live[tensor.untyped_storage()._cdata]
            self._host += found.size
            self._resize(found, 0)
            found.is_elsewhere = True

    def result(self) -> StepMemory:
        """The peaks so far."""
        self._keep_peak()
        found = {}
        for moment, storages in self._at.items():
            sizes: Counter[str] = Counter(dict.fromkeys(CAUSES, 0))
            for storage, size in storages:
                sizes[storage.cause] += size
            found[moment] = dict(sizes)
        return StepMemory(moments=found, host=self._host, course=self._course())

    def _course(self) -> list[tuple[str, dict[str, int]]]:
        """The highest of each of at most POINTS chunks of the step."""
        changes, first = self._changes or [], self._num_before
        totals = list(itertools.accumulate(change for _, change, _ in changes))
        size = max(1, -(-(len(totals) - first) // POINTS))
        chunks = (range(at, min(at + size, len(totals))) for at in range(max(first - 1, 0), len(totals), size))
        kept = {max(chunk, key=totals.__getitem__) for chunk in chunks}
        found, sizes = list[tuple[str, dict[str, int]]](), dict.fromkeys(CAUSES, 0)
        for number, (storage, change, moment) in enumerate(changes):
            sizes[storage.cause] += change
            if number in kept:
                found.append((moment, dict(sizes)))
        return found

    @contextmanager
    def following_resizes(self) -> Iterator[None]:
        """FSDP frees and takes the memory of gathered weights by resizing storages, outside any operation."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (found := self._live.get(storage._cdata)) is not None:
                found.cause = "gathered weights"
                self._resize(found, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, and count the storages that it made."""
        output = function(*args, **(kwargs or {}))
        if self.work is not None and not self._is_building:
            self.work.count(function, args, output)
        name = function.name()
        cause = "logits" if self._moment == "head" else "activations" if self.is_forward else "temporaries"
        for tensor in tensors_in(output):
            if type(tensor) is torch.nn.Parameter:
                continue
            if is_fake(tensor) or not (self._is_building or self._is_data(tensor, args)):
                self._follow(tensor, cause)
        for tensor in tensors_in((args, kwargs)) if function.namespace in ("c10d", "_c10d_functional") else ():
            found = self._live.get(tensor.untyped_storage()._cdata)
            if found is not None and found.cause in ("activations", "temporaries"):
                found.cause = "communication"
        if self._is_cpu and (name in _CASTS or name in _GLOO_COPIES or name in _SCORES):
            self._count_inner(name, tensors_in(args))
        return output

    def _is_data(self, tensor: Tensor, inputs: Any) -> bool:
        """Whether it is a view of an input that was there before the step."""
        key = tensor.untyped_storage()._cdata
        given = (each for each in tensors_in(inputs) if not is_fake(each))
        return key not in self._live and any(key == each.untyped_storage()._cdata for each in given)

    def _follow(self, tensor: Tensor, cause: str) -> None:
        is_wrapper: bool = is_traceable_wrapper_subclass(tensor)
        if is_wrapper:
            return  # such as a DTensor, whose inner tensors are counted
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._live[key] = _Storage(0, cause)
            weakref.finalize(storage, self._die, key)
        # An operation may have resized its output.
        if not self._live[key].is_elsewhere:
            self._resize(self._live[key], storage.nbytes())

    def _die(self, key: int) -> None:
        self._resize(self._live[key], 0)
        del self._live[key]

    def _resize(self, storage: _Storage, size: int) -> None:
        if size < storage.size:
            self._keep_peak()
        self._now += size - storage.size
        if self._changes is not None:
            self._changes.append((storage, size - storage.size, self._moment))
        storage.size = size
        self._note_peak()

    def _note_peak(self) -> None:
        if self._now > self._peaks.get(self._moment, -1):
            self._peaks[self._moment] = self._now
            self._is_rising = True

    def _keep_peak(self) -> None:
        """Keep what lives before the first of it dies: a list for each peak, not for each operation."""
        if self._is_rising:
            self._at[self._moment] = [(each, each.size) for each in self._live.values()]
            self._is_rising = False

    def _count_inner(self, name: str, inputs: list[Tensor]) -> None:
        """What a CPU takes and frees within an operation."""
        size, cause = 0, "temporaries"
        if name in _CASTS and len(inputs) > 1 and inputs[1].dtype != inputs[0].dtype and inputs[1].numel() > 1:
            size = inputs[1].numel() * inputs[0].element_size()
        elif name in _GLOO_COPIES:
            size, cause = inputs[_GLOO_COPIES[name]].nbytes, "communication"
        elif name in _SCORES:
            first, num_blocks = _SCORES[name]
            queries, keys = (each.shape[2] for each in inputs[first : first + 2])
            rows = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
            size = torch.get_num_threads() * num_blocks * rows * min(keys, 512) * torch.float32.itemsize
        if size:
            copy = self._live[-1] = _Storage(0, cause)
            self._resize(copy, size)
            self._die(-1)
