"""Counts the work of a step: products, bytes of other operations, launches and messages, by pass.

Operations of torch are counted by their shapes. On devices whose kernels are compiled, which a trace on a CPU does not
run, a kernel is counted at its call, by what it reads and writes, and nothing within it. Knows no seconds.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.kernels.autograd.recomputation import is_computed_again
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.schedules import Pass
from kitforge.foundation.dtype import Precision

# Bytes below which an operation takes its launch alone, and a message is counted without its size.
SMALL = 2**14
# Kernels that are compiled on a GPU or NPU, where networks train with them.
KERNELS = (
    *("attention", "rms_norm", "layer_norm", "rotary", "swiglu", "geglu"),
    *("linear_cross_entropy", "linear_log_probs", "moe_permute", "moe_unpermute"),
)
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv")
# Operations that compute more for an element than the memory gives.
_FUNCTIONS = ("gelu", "gelu_backward", "tanh", "erf", "sin", "cos", "pow")
# Operations that read as many rows as they write, not the whole of their first operand; and those that only write it.
_GATHERS = ("embedding", "index", "index_select", "gather")
_WRITES = ("copy_", "fill_", "zero_", "index_put_", "index_add_", "scatter_", "scatter_add_")
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}
MESSAGE_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}
FUNCTION = "function"


class Operation(NamedTuple):
    """An operation, or what it does to one of a list of tensors."""

    kind: str  # the precision of a product, with "attention " before that of fused attention; FUNCTION; "" of any other
    flops: int  # of a function its elements
    bytes: int

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices or fused attention."""
        return self.kind not in ("", FUNCTION)


class Message(NamedTuple):
    """A collective over the ranks of an axis, or a message to one of them. `bytes` is 0 of one that is small or for
    which its caller waits: these are summed, as their time is a sum."""

    kind: str
    axis: str
    ranks: int
    is_hidden: bool  # starts behind the passes
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What a pass does."""

    operations: Counter[Operation] = field(default_factory=Counter)
    messages: Counter[Message] = field(default_factory=Counter)
    sent: Counter[Message] = field(default_factory=Counter)  # bytes of all messages of a kind
    counts: Counter[str] = field(default_factory=Counter)  # launches, views, recomputed FLOPs

    def counters(self) -> tuple[Counter[Any], ...]:
        """All of it."""
        return self.operations, self.messages, self.sent, self.counts

    def plus(self, other: "Work", times: float = 1) -> "Work":
        """The sum with so many times another."""
        sums = []
        for one, two in zip(self.counters(), other.counters(), strict=True):
            found = {key: one[key] + times * two[key] for key in {**one, **two}}
            sums.append(Counter({key: value for key, value in found.items() if value}))
        return Work(*sums)

    @property
    def flops(self) -> int:
        """Of products."""
        return sum(each.flops * count for each, count in self.operations.items() if each.is_product)


# By pass; the reductions and the update after all of them under UPDATE.
StepWork = Mapping[Pass, Work]
UPDATE = Pass("U", 0, 0)


def continued(first: StepWork, second: StepWork, third: StepWork, further: int) -> StepWork | None:
    """The work that lies `further` times the last difference beyond three traces; None if these are on no line."""
    if not first.keys() == second.keys() == third.keys():
        return None
    slopes = {at: third[at].plus(second[at], -1) for at in third}
    if any(slopes[at] != second[at].plus(first[at], -1) for at in slopes):
        return None
    return {at: third[at].plus(slopes[at], further) for at in third}


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors among arguments or results of an operation: a value, or nested lists, tuples and dicts of them. For
    each of many operations, of which torch's `tree_leaves` takes a quarter of the time."""
    if isinstance(values, Tensor):
        return [values]
    parts = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    return [tensor for each in parts for tensor in tensors_in(each)]


class WorkTrace:
    """Counts what it is told of, pass by pass. `precision` is that of products on a device but a CPU."""

    def __init__(self, device_type: str, precision: Precision, mesh: Mesh | None) -> None:
        self.passes: dict[Pass, Work] = {}
        self._is_cpu, self._precision = device_type == "cpu", precision
        groups = {} if mesh is None else {axis: mesh.group(axis) for axis in mesh.grid.degrees}
        self._mesh, self._axes = mesh, {each.group_name: axis for axis, each in groups.items() if each is not None}
        self._within = 0  # calls that are counted as a whole
        self._now: Work | None = None
        self._is_closed = False

    def enter(self, at: Pass | None) -> None:
        """What follows belongs to that pass. After None nothing is counted any more."""
        self._is_closed = self._is_closed or at is None
        self._now = None if at is None or self._is_closed else self.passes.setdefault(at, Work())

    def count(self, function: Any, args: Sequence[Any], output: Any) -> None:
        """Count an operation of torch."""
        if self._now is None or self._within or function.namespace == "prim":
            return
        name = function.name().partition("::")[2].partition(".")[0]
        if function.namespace == "c10d":
            self._count_message(name, args)
        elif function.is_view or name in ("_unsafe_view", "detach", "alias") or "empty" in name:
            self._now.counts["views"] += 1
        else:
            self._now.counts["launches"] += 1
            self._count_launch(name, args, tensors_in(output))

    def _count_launch(self, name: str, args: Sequence[Any], outputs: list[Tensor]) -> None:
        assert self._now is not None
        given = [each for each in args if isinstance(each, Tensor)]
        flops, dtype = _flops(name, args), _DTYPES.get(given[0].dtype, "fp32") if given else "fp32"
        kind = (dtype if self._is_cpu else self._precision) if flops else ""
        if name.startswith("_scaled_dot_product"):
            kind = f"attention {kind}"
        elif name in _FUNCTIONS:
            kind, flops = FUNCTION, outputs[0].numel()
        sizes = _moved(name, args, outputs)
        if name.startswith("grouped_linear") and self._is_cpu:
            # A loop over experts, each a product of its own with the views of its rows.
            parts = len(args[2] if name.endswith("backward") else args[1])
            self._now.counts.update({"launches": parts, "views": 3 * parts})
            flops, sizes = flops // parts, [sizes[0] // parts] * parts
        for size in sizes:
            self._add(kind, flops, size)

    def _add(self, kind: str, flops: int, size: int) -> None:
        assert self._now is not None
        operation = Operation(kind, flops, size)
        if operation.is_product or size >= SMALL:
            self._now.operations[operation] += 1
        if operation.is_product and is_computed_again():
            self._now.counts["recomputed"] += flops

    def _count_message(self, name: str, args: Sequence[Any]) -> None:
        if self._now is None or (kind := MESSAGE_KINDS.get(name)) is None:
            return
        assert self._mesh is not None
        group = next(each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each))
        axis, ranks = self._axis(dist.ProcessGroup.unbox(group))
        size = max((each.nbytes for each in tensors_in(args)), default=0)
        # torch's FSDP starts its messages on a stream of their own where a device has streams.
        is_started = name == "allreduce_" and (len(args) < 5 or args[4])
        is_hidden = is_started or (axis in ("fsdp", "expert_data") and not self._is_cpu)
        # A user has typed `data` or `shard`, which axes of other views may be alone.
        parts = {"fsdp": ("shard", "context"), "replicas": ("data", "shard"), "batch": ("data", "shard", "context")}
        typed = [each for each in parts.get(axis, ()) if self._mesh.degree(each) > 1]
        axis = typed[0] if typed in (["data"], ["shard"]) else axis
        key = Message(kind, axis, ranks, is_hidden, size if is_hidden and size >= SMALL else 0)
        self._now.messages[key] += 1
        self._now.sent[key] += size

    def _axis(self, group: dist.ProcessGroup) -> tuple[str, int]:
        """The axis of a view that a group is along, and its ranks; stages have groups of their own beside."""
        assert self._mesh is not None
        ranks, grid = dist.get_process_group_ranks(group), self._mesh.grid
        is_of_stages = any({*ranks} <= {*row} for row in grid.groups("pipeline"))
        axis = "pipeline" if is_of_stages else "all ranks" if len(ranks) == grid.size else "other"
        return self._axes.get(group.group_name, axis), len(ranks)

    def counted(self, operation: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel that is counted at its calls, unless a CPU runs it as the trace does."""
        if self._is_cpu or operation not in KERNELS:
            return kernel

        @functools.wraps(kernel, updated=())
        def run(*inputs: Any, **options: Any) -> Any:
            self._within += 1
            try:
                output = kernel(*inputs, **options)
            finally:
                self._within -= 1
            flops, read, written = kernel_cost(operation, inputs, output, options)
            if not (operation == "attention" and is_computed_again(keeps=True)):
                self._add_call(operation, flops, read + written)
            # What it read is read again, and has gradients as large.
            left = [(operation, 2 * flops, 2 * read + written)]
            for node in _nodes(output, inputs):
                self._watch(node, left)
            return output

        return run

    def _watch(self, node: Any, left: list[tuple[str, int, int]]) -> None:
        """Count what is left, once, when the backward pass reaches the first of the nodes of a kernel, and nothing else
        of them."""

        def before(_gradients: Any) -> None:
            if left:
                self._add_call(*left.pop())
            self._within += 1

        def after(*_: Any) -> None:
            self._within -= 1

        node.register_prehook(before)
        node.register_hook(after)

    def _add_call(self, operation: str, flops: int, size: int) -> None:
        if self._now is not None and not self._within:
            self._now.counts["launches"] += 1
            kind = f"attention {self._precision}" if operation == "attention" else self._precision
            self._add(kind if flops else "", flops, size)


def _nodes(output: Any, inputs: Sequence[Any]) -> list[Any]:
    """The nodes of the graph of a kernel's outputs, up to those of its inputs."""
    given = {each.grad_fn for each in inputs if isinstance(each, Tensor)}
    found = dict.fromkeys(each.grad_fn for each in tensors_in(output))
    waiting = list(found)
    while waiting:
        for node, _ in () if (one := waiting.pop()) is None or one in given else one.next_functions:
            if node not in found and not hasattr(node, "variable"):
                found[node] = None
                waiting.append(node)
    return [each for each in found if each is not None and each not in given]


def kernel_cost(operation: str, inputs: Sequence[Any], output: Any, options: Mapping[str, Any]) -> tuple[int, int, int]:
    """The FLOPs of a call, if these are products, and the bytes that it reads and writes."""
    tensors, flops = tensors_in(inputs), 0
    if operation == "attention":
        queries, keys = inputs[0].shape[2], inputs[1].shape[2]
        is_whole = options.get("mask") is not None or not options.get("causal")
        seen = queries * keys if is_whole else queries * (keys - queries) + queries * (queries + 1) // 2
        flops = 4 * inputs[0].numel() // queries * seen
    elif operation.startswith("linear"):
        flops = 2 * inputs[0].numel() * len(inputs[1])
    outputs = tensors_in(output)
    return flops, sum(each.nbytes for each in tensors), sum(each.nbytes for each in outputs)


def _moved(name: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> list[int]:
    """The bytes that an operation reads and writes: together, or of each tensor of a list."""
    inputs = [each for each in args if isinstance(each, Tensor)]
    lists = [each for each in args if isinstance(each, list | tuple)]
    if name in _GATHERS:
        inputs = [*inputs[1:], *outputs]
    elif name in _WRITES:
        inputs = inputs[1:]
    elif name.endswith("_like") or name.startswith("new_"):
        inputs = []
    elif listed := tensors_in(lists):
        return [2 * each.nbytes for each in listed]
    return [sum(each.nbytes for each in (*inputs, *outputs))]


def _flops(name: str, args: Sequence[Any]) -> int:
    """Those of a product by the shapes of its operands; a multiplication and an addition count as two."""
    shape = [tuple(each.shape) if isinstance(each, Tensor) else () for each in args]
    if name in _PRODUCTS:
        left, right = shape[-2:] if name in ("mm", "bmm", "mv") else shape[1:3]
        return 2 * prod(left) * (right[-1] if len(right) > 1 else 1)
    if name.startswith("_scaled_dot_product") and not name.endswith("math"):
        is_backward = "backward" in name
        query, key = shape[1:3] if is_backward else shape[:2]
        # Flash attention computes the scores again in its backward pass: five products for two.
        return (10 if is_backward else 4) * prod(query) * key[-2]
    if name == "grouped_linear":
        return 2 * prod(shape[0]) * shape[1][1]
    if name == "grouped_linear_backward":
        return 2 * prod(shape[0]) * shape[2][2] * (bool(args[4]) + bool(args[5]))
    return 0
