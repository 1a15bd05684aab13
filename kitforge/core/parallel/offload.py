"""The optimizer on the host: master weights, moments and, in one mode, the sums of gradients (ZeRO-Offload; Ren et al.,
2021).

`optimizer`: gradients stay on the device until the step. `optimizer_and_gradients`: each leaves in the backward pass as
soon as it is complete, is added up on the host, and its part of the norm is taken on the device before. A step updates
a block of parameters at a time on the host, in the order of the forward pass, in which each block waits for its own
weights. All copies take the way through a few buffers of pinned memory and one stream.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.optim.build import OptimizerConfig, build_optimizer, load_states
from kitforge.core.optim.grad_norm import ChunkNorms, chunk_norms
from kitforge.core.optim.groups import ParameterGroup
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.host_values import is_fake

# One buffer's gradients arrive, one's are used for an update, one's weights return.
NUM_SLOTS = 3
# Bytes of the start of each tensor in a buffer: a multiple of the size of every dtype.
ALIGNMENT = 16
# Bytes on the host for a parameter in fp32: master weight and two moments, and the sum of its gradients.
STATE_BYTES, GRADIENT_BYTES = 12, 4
# A module that waits for its own parameters, and their names; None: a step waits for them.
OffloadBlock = tuple[nn.Module | None, Sequence[str]]


@dataclass(slots=True, kw_only=True)
class _Arrival:
    """The gradients of a block on their way to its update."""

    gradients: dict[str, Tensor]  # on the device, until they have been copied
    factors: dict[str, float]  # of the sums on the host, by which they are multiplied
    slot: int | None = None
    copied: dict[str, Tensor] = field(default_factory=dict)
    event: Any = None  # after the copies


class Offload:
    """Parameters of this rank whose optimizer is on the host: the copies there, and the ways to and from them."""

    def __init__(self, held: Mapping[str, nn.Parameter], blocks: Sequence[OffloadBlock], device: torch.device) -> None:
        """`held` are the parameters on the device; they may change their dtype later, to a smaller one."""
        self.masters = {
            name: nn.Parameter(torch.empty(each.shape, dtype=each.dtype).copy_(each.detach()))
            for name, each in held.items()
        }
        self.blocks = blocks
        self.held, self._device = held, device
        self._sums: dict[str, Tensor] = {}
        self._norms: dict[str, ChunkNorms | None] = {}  # of the gradients on the host; None: not known yet
        self._factors: dict[str, float] = {}
        sizes = [sum(_aligned(held[name].nbytes) for name in names) for _, names in blocks]
        words = -(-max(sizes, default=0) // 4)
        self._slots = [devices.host_memory(device, words).view(torch.uint8) for _ in range(NUM_SLOTS)]
        self._leave: list[Callable[[], object]] = [_at_once] * NUM_SLOTS  # waits until a slot may be used again
        self._next_slot = 0
        self._stream = devices.CopyStream(device)
        is_planned = any(map(is_fake, self.masters.values()))
        self._worker: Any = _AtOnce() if is_planned else ThreadPoolExecutor(1, thread_name_prefix="offload")
        self._pending: dict[int, Future[Any]] = {}
        self._hooks: list[Any] = []

    def add(self, name: str, gradient: Tensor) -> None:
        """Send a gradient to the host, where it is added to those of the step's other micro-batches in the dtype of the
        master weight. It is complete: nothing of it is on other ranks."""
        self.wait()
        is_first = name not in self._norms
        # The norm of a sum is known only where the sum is.
        self._norms[name] = ChunkNorms(chunk_norms([gradient])) if is_first else None
        if name not in self._sums:
            self._sums[name] = torch.empty_like(self.masters[name], requires_grad=False)
        slot, queued = self._take_slot(), devices.queued(self._device)
        (copied,) = self._views(slot, [gradient])
        with self._stream.copying(after=queued):
            copied.copy_(gradient, non_blocking=True)
            event = devices.queued(self._device)

        def arrive(_source: Tensor) -> None:
            devices.synchronize_event(event)
            total = self._sums[name]
            total.copy_(copied) if is_first else total.add_(copied)

        # The worker holds the gradient until it has been copied.
        self._leave[slot] = self._worker.submit(arrive, gradient).result

    def host_tensors(self, *, gradients: bool) -> dict[str, list[Tensor]]:
        """What lies on the host of a step, by what it holds."""
        if gradients:
            self._sums |= {name: torch.empty_like(each, requires_grad=False) for name, each in self.masters.items()}
        masters = [each.detach() for each in self.masters.values()]
        return {"weights": masters, "gradients": list(self._sums.values()), "communication": self._slots}

    def norms(self) -> dict[str, ChunkNorms]:
        """Of the gradients on the host, by the name of their parameter."""
        if None in self._norms.values():
            self._drain()
        known = {
            name: ChunkNorms(chunk_norms([self._sums[name]])) if each is None else each
            for name, each in self._norms.items()
        }
        self._norms = dict(known)
        return known

    def scale_gradients(self, factor: float, names: Collection[str] | None = None) -> None:
        """Let the update multiply the gradients on the host, or those of the named parameters, by the factor."""
        for name in self._norms if names is None else self._norms.keys() & set(names):
            self._factors[name] = self._factors.get(name, 1.0) * factor

    def drop_gradients(self, names: Collection[str] | None = None) -> None:
        """Forget the gradients on the host, or those of the named parameters."""
        for name in list(self._norms) if names is None else self._norms.keys() & set(names):
            del self._norms[name]
            self._factors.pop(name, None)

    def step(self, optimizers: Sequence[Any], scale: float) -> None:
        """Update the master weights of each block by its optimizer, beside the forward pass that waits for them."""
        self.wait()
        queued = devices.queued(self._device)
        arrivals = []
        for _, names in self.blocks:
            on_device = {name: each for name in names if (each := self.held[name].grad) is not None}
            factors = {name: self._factors.get(name, 1.0) for name in names if name in self._norms}
            arrivals.append(_Arrival(gradients=on_device, factors=factors))
        self.drop_gradients()
        for number, optimizer in enumerate(optimizers):
            self._pending[number] = self._worker.submit(self._update, number, optimizer, scale, arrivals, queued)
        for number, (module, _) in enumerate(self.blocks):
            if module is None:
                self.wait(number)
                continue
            # Before those of FSDP, and no longer than needed: a fused step of generation does without hooks.
            hook = module.register_forward_pre_hook(lambda *_, block=number: self.wait(block), prepend=True)
            self._hooks.append(hook)

    def wait(self, block: int | None = None) -> None:
        """Let computation that is queued from now on wait for the weights of a block, or of all."""
        for number in list(self._pending) if block is None else [block]:
            if (pending := self._pending.pop(number, None)) is not None:
                devices.wait_for(pending.result())
        if not self._pending:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy all master weights to the device."""
        self.wait()
        queued = devices.queued(self._device)
        for _, names in self.blocks:
            devices.wait_for(self._return(names, self._take_slot(), queued))

    def close(self) -> None:
        """Bring the last weights to the device, and let the worker go."""
        self.publish()
        self._drain()
        self._worker.shutdown()

    @torch.no_grad()
    def _update(self, number: int, optimizer: Any, scale: float, arrivals: list[_Arrival], queued: Any) -> Any:
        """Runs on the worker. Returns the event after which the weights are on the device."""
        # The next block's gradients arrive beside this one's update.
        for each in (each for each in arrivals[number : number + 2] if each.slot is None and each.gradients):
            each.slot = self._take_slot()
            views = self._views(each.slot, each.gradients.values())
            each.copied = dict(zip(each.gradients, views, strict=True))
            with self._stream.copying(after=queued):
                for name, gradient in each.gradients.items():
                    each.copied[name].copy_(gradient, non_blocking=True)
                each.event = devices.queued(self._device)
        own, names = arrivals[number], self.blocks[number][1]
        devices.synchronize_event(own.event)
        own.gradients.clear()
        gradients = own.copied | {name: self._sums[name] for name in own.factors}
        for name, factor in own.factors.items():
            if factor != 1.0:
                gradients[name].mul_(factor)
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient
        optimizer.step(scale)
        for name in names:
            self.masters[name].grad = None
        return self._return(list(gradients), self._take_slot() if own.slot is None else own.slot, queued)

    def _return(self, names: Sequence[str], slot: int, queued: Any) -> Any:
        """Copy master weights to the device through a slot, rounded to the dtype there."""
        held = [self.held[name] for name in names]
        views = self._views(slot, held)
        for name, view in zip(names, views, strict=True):
            view.copy_(self.masters[name])
        with self._stream.copying(after=queued):
            for parameter, view in zip(held, views, strict=True):
                parameter.copy_(view, non_blocking=True)
            event = devices.queued(self._device)
        self._leave[slot] = lambda: devices.synchronize_event(event)
        return event

    def _take_slot(self) -> int:
        """The next slot, once nobody needs what is in it."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % NUM_SLOTS
        self._leave[slot]()
        self._leave[slot] = _at_once
        return slot

    def _drain(self) -> None:
        for leave in self._leave:
            leave()

    def _views(self, slot: int, tensors: Collection[Tensor]) -> list[Tensor]:
        """Tensors within a slot, of the shapes and dtypes of these."""
        views, start = [], 0
        for each in tensors:
            views.append(self._slots[slot][start : start + each.nbytes].view(each.dtype).view(each.shape))
            start += _aligned(each.nbytes)
        return views


class _AtOnce:
    """Runs what a worker would run, in the thread whose operations a plan counts."""

    @staticmethod
    def submit(run: Callable[..., Any], *inputs: Any) -> Future[Any]:
        """A future that is done."""
        done: Future[Any] = Future()
        done.set_result(run(*inputs))
        return done


class HostOptimizer:
    """An `Optimizer` over parameters of which some are updated on the host. Names, states and results are those of one
    on the device."""

    def __init__(self, groups: Sequence[ParameterGroup], config: OptimizerConfig, offload: Offload) -> None:
        """`groups` hold the master weights of those parameters."""
        self._offload = offload
        self._groups = groups
        blocks = [set(names) for _, names in offload.blocks]
        others = {name for group in groups for name in group.names}.difference(*blocks)
        self._parts = [
            build_optimizer([_part(group, names) for group in groups], config) for names in (others, *blocks)
        ]

    def step(self, scale: float) -> None:
        """See `Optimizer.step`; what is on the host is updated beside the next forward pass."""
        self._parts[0].step(scale)
        self._offload.step(self._parts[1:], scale)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._parts[0].zero_grad()
        for parameter in self._offload.held.values():
            parameter.grad = None
        self._offload.drop_gradients()

    def init_state(self) -> None:
        """See `Optimizer.init_state`."""
        for part in self._parts:
            part.init_state()

    def host_tensors(self, *, gradients: bool) -> dict[str, list[Tensor]]:
        """See `Offload.host_tensors`; and the moments."""
        moments = [each for part in self._parts[1:] for _, each in part.tensors()]
        return {"moments": moments, **self._offload.host_tensors(gradients=gradients)}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See `Optimizer.tensors`, in the same order."""
        self._offload.wait()
        states: dict[str, list[tuple[str, Tensor]]] = {}
        for part in self._parts:
            for name, tensor in part.tensors():
                states.setdefault(name.rpartition(".")[0], []).append((name, tensor))
        for group in self._groups:
            for name in group.names:
                yield from states.get(name, ())

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `Optimizer.load`. The master weights have been loaded, and are copied to the device."""
        load_states(dict(self.tensors()), tensors)
        self._offload.publish()


def offloaded_blocks(blocks: Sequence[OffloadBlock], sizes: Mapping[str, int], fraction: float) -> list[OffloadBlock]:
    """Those of the blocks, in the order of the forward pass, whose optimizer is on the host: the last ones, with at
    most that fraction of all bytes. Their gradients come first and their weights are needed last."""
    left = fraction * sum(sizes[name] for _, names in blocks for name in names)
    chosen: list[OffloadBlock] = []
    for module, names in reversed(blocks):
        left -= sum(sizes[name] for name in names)
        if left < 0:
            break
        chosen.insert(0, (module, names))
    return chosen


def check_host_memory(num_parameters: float, *, gradients: bool) -> None:
    """Raise ConfigError unless the host has the memory for the states of so many parameters of all its ranks."""
    each, free = STATE_BYTES + GRADIENT_BYTES * gradients, devices.free_host_memory()
    asked = num_parameters * each
    if 0 < free < asked:
        raise ConfigError(
            "the host has too little memory for trainer.offload",
            got=f"{free / 1e9:.3g} GB free for {num_parameters / 1e9:.3g} billion parameters of the ranks on it",
            expected=f"{asked / 1e9:.3g} GB, {each} bytes a parameter",
            fix=f"trainer.offload_fraction={max(int(90 * free / asked), 1) / 100}, or parallel.shard over more hosts",
        )


def _part(group: ParameterGroup, names: Collection[str]) -> ParameterGroup:
    pairs = [pair for pair in zip(group.names, group.parameters, strict=True) if pair[0] in names]
    return replace(group, names=tuple(name for name, _ in pairs), parameters=tuple(each for _, each in pairs))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _at_once() -> None:
    """Nothing to wait for."""
