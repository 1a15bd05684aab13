"""A rank of any world in one process, without memory: a process group that sends nothing, tensors without values."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.fsdp import local_tensor
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.plan.memory import MemoryTrace
from kitforge.core.parallel.plan.work import UPDATE, tensors_in
from kitforge.core.parallel.schedules import Pass, PassKind
from kitforge.core.parallel.stage import Flight
from kitforge.core.parallel.world import World
from kitforge.foundation.dtype import Precision
from kitforge.foundation.errors import ModelError
from kitforge.foundation.host_values import EXPERT_SKEW, is_fake

# Elements up to which what follows from known values is computed; larger masks are known by their shapes.
MOST_KNOWN = 2**24
# Operations that make whole numbers, unless they are told otherwise.
_WHOLE = (torch.ops.aten.arange, torch.ops.aten.randint, torch.ops.aten.randperm)
_META = torch.device("meta")
_HERE = str(Path(__file__).parent)


class KnownData(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Tensors have no values, except those of the data of a step: tokens, masks, positions, lengths. What follows from
    these alone has values too, so that a step may select by its masks and read its lengths."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # As `MemoryTrace`.
        return False

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.makes_data = False  # whether new tensors have values
        self._is_within = False  # an operation of which shapes are found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, for its values or for its shapes."""
        if self._is_within:
            return super().__torch_dispatch__(function, types, args, kwargs)
        given = tensors_in((args, kwargs))
        if any(map(is_fake, given)):
            if function is torch.ops.aten.index.Tensor:
                args = (args[0], [part for each in args[1] for part in _positions(each)])
            return self._shapes(function, types, args, kwargs)
        kwargs = kwargs or {}
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if any(each.is_meta for each in given) or (device == _META and not given):
            is_kept = device in (None, _META)
            return function(*args, **kwargs) if is_kept else self._shapes(function, types, args, kwargs)
        if function.namespace == "c10d":
            return _as_if_equal(function, args, kwargs)
        is_whole = dtype is not None and not dtype.is_floating_point
        is_whole |= dtype is None and function.overloadpacket is torch.ops.aten.full and isinstance(args[1], int)
        if self.makes_data:
            return function(*args, **kwargs)
        if not given and not is_whole and function.overloadpacket not in _WHOLE:
            return self._shapes(function, types, args, kwargs)
        with suppress(DataDependentOutputException, DynamicOutputShapeException):
            shaped = self._shapes(function, types, args, kwargs)
            if any(each.numel() > MOST_KNOWN for each in tensors_in(shaped)):
                return shaped
        return function(*args, **kwargs)

    def _shapes(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The output without values, and so whatever is made on the way to it."""
        self._is_within = True
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._is_within = False


def _as_if_equal(function: Any, args: Any, kwargs: Any) -> Any:
    """A collective of values that other ranks have as well: numbers of rows and ids of tables."""
    result = function(*args, **kwargs)
    if function.name() == "c10d::alltoall_base_":
        args[0].copy_(args[1])
    elif function.name() == "c10d::_allgather_base_":
        args[0].view(-1, args[1].numel()).copy_(args[1].view(1, -1))
    return result


@contextmanager
def data_values() -> Iterator[None]:
    """What is made within has values, unless it follows from what has none: data, in a `dry_world`."""
    modes = [each for each in _get_current_dispatch_mode_stack() if isinstance(each, KnownData)]
    for each in modes:
        each.makes_data = True
    try:
        yield
    finally:
        for each in modes:
            each.makes_data = False


def _positions(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """An index of a tensor without values; of a mask that is known the positions in it."""
    is_mask = index is not None and index.dtype is torch.bool and not is_fake(index)
    return index.nonzero().unbind(1) if index is not None and is_mask else (index,)


@contextmanager
def dry_world(
    degrees: ParallelConfig, precision: Precision, index: int = 0, device_type: str = "cpu", expert_skew: float = 1.0
) -> Iterator[World]:
    """The world of the first rank with an index along `pipeline`, in which the CPU stands in for a device of that type
    and tensors have no values, see `KnownData`; its experts get `expert_skew` times the rows of a usual rank. Raises
    ModelError, with the line, where a network reads a value."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 (half a second, for plans alone)

    size, before = degrees.world_size, EXPERT_SKEW.set(expert_skew)
    if size > 1:
        rank = index * size // degrees.pipeline
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        mesh = Mesh(degrees, "cpu") if size > 1 else None
        world = World(device=torch.device("cpu"), mesh=mesh, precision=precision, planned_type=device_type)
        with KnownData():
            yield world
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _value_read(error) from None
    finally:
        EXPERT_SKEW.reset(before)
        if size > 1:
            from torch.distributed.tensor import DTensor  # noqa: PLC0415 (half a second, for shards alone)

            # torch's memory of the shapes of rank 0, which ranks that are forked later would take for theirs, as
            # torch.distributed.tensor.debug clears it, which imports the compiler for it.
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[no-untyped-call]
            torch._C._clear_DTensor_sharding_propagator_cache()
            dist.destroy_process_group()


def _value_read(error: Exception) -> ModelError:
    """The error of a network that reads a value, at the line that is its own."""
    lines, traced = [], error.__traceback__
    while traced is not None:
        lines.append((traced.tb_frame.f_code.co_filename, traced.tb_lineno))
        traced = traced.tb_next
    own = (each for each in reversed(lines) if "/torch/" not in each[0] and not each[0].startswith(_HERE))
    file, number = next(own, lines[-1])
    return ModelError(
        "a step without values cannot be traced through a network that reads one",
        got=f"{file}:{number} calls {error.args[0]}",
        expected="shapes that follow from shapes, and no branch on the value of a tensor",
        fix="keep the value on the device (torch.where, masks), or read it with kitforge.foundation.host_values",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMoments:
    """Tells a trace which part of a step is under way: the passes of the first and the last block, and of those
    between, which are alike."""

    trace: MemoryTrace
    parallel: ParallelModel

    def forward(self, autocast: Callable[[], AbstractContextManager[Any]]) -> Callable[[], AbstractContextManager[Any]]:
        """`autocast`, which encloses the forward pass of a micro-batch, with that pass as a moment."""

        numbers = itertools.count()

        @contextmanager
        def forward_pass() -> Iterator[None]:
            number = next(numbers)
            self._enter_pass(None if self.parallel.relays else Pass("F", 0, number))
            self.trace.enter("forward pass")
            with autocast():
                yield
            self.trace.enter("backward pass")
            self._enter_pass(None if self.parallel.relays else Pass("B", 0, number))

        return forward_pass

    def _enter_pass(self, at: Pass | None) -> None:
        # Stages say themselves which pass is theirs.
        if (work := self.trace.work) is not None and (at is not None or not self.parallel.relays):
            work.enter(at)

    def watch_passes(self) -> None:
        """Tell the work of each stage of a pipeline apart, and the reductions at the end of a step from the passes."""
        parallel, counts = self.parallel, Counter[tuple[PassKind, int]]()

        def begun(owner: Any, name: str, kind: PassKind) -> None:
            function = getattr(owner, name)

            @functools.wraps(function)
            def run(*args: Any, **options: Any) -> Any:
                stage = args[0].stage if isinstance(args[0], Flight) else args[0]
                self._enter_pass(Pass(kind, stage, counts[kind, stage]))
                counts[kind, stage] += 1
                return function(*args, **options)

            setattr(owner, name, run)

        if relay := parallel.relays.get(parallel.model):
            begun(relay.stages, "forward", "F")
            queue = parallel.weight_gradients
            begun(relay.stages, "backward", "I" if queue is not None and queue.is_deferred else "B")
            if queue is not None:
                begun(queue, "run", "W")
        reduce = parallel.reduce_gradients

        def reduce_gradients() -> None:
            self._enter_pass(UPDATE)
            reduce()

        parallel.reduce_gradients = reduce_gradients  # type: ignore[method-assign]

    def watch(self) -> None:
        """Follow the blocks and the gradients from now on."""
        outer = [each for each in self.parallel.model.modules() if isinstance(each, nn.ModuleList) and len(each)]
        inner = {id(module) for blocks in outer for each in blocks if each for module in each.modules()}
        for blocks in (each for each in outer if id(each) not in inner):
            ends = {-1: "embedding", len(blocks) - 1: "last block", 0: "first block"}
            for index, block in ((index, each) for index, each in enumerate(blocks) if each is not None):
                names = ends.get(index, "inner blocks"), ends.get(index - 1, "inner blocks")
                block.register_forward_pre_hook(functools.partial(self._before, *names))
            if blocks[-1] is not None:
                blocks[-1].register_forward_hook(self._after_last)

    def _before(self, name: str, name_before: str, block: nn.Module, inputs: Any) -> None:
        # Of FSDP the gathered weights, which exist from its own hook on.
        self.watch_gradients(block)
        if not self.trace.is_forward:
            return  # the pass is computed again
        self.trace.enter(f"forward pass, {name}")
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: self.trace.enter(f"backward pass, {name_before}"))

    def _after_last(self, _block: nn.Module, _inputs: Any, output: Tensor) -> None:
        if self.trace.is_forward:
            self.trace.enter("head")
            if output.requires_grad:
                output.register_hook(lambda _: self.trace.enter("backward pass, last block"))  # type: ignore[no-untyped-call]

    def watch_gradients(self, module: nn.Module) -> None:
        """Note which storages are gradients of the parameters of a module when these arrive."""
        for parameter in module.parameters():
            if parameter.requires_grad and not hasattr(parameter, "is_watched"):
                parameter.is_watched = True  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.trace.attribute([local_tensor(parameter.grad)], "gradients")
