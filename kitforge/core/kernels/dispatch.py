"""Selects the implementation of each operation by compile level and device type. Callers never branch.

Level O0 is the references, O1 the fused implementations, O2 those that `torch.compile` can trace. A model gets one
`Kernels` when it is built, so levels and devices coexist in one process. The loops over rows of embedding tables are a
set of their own, `TableKernels`. The signature of an operation is the protocol in its `reference.py`.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kitforge.core.kernels.add_norm.reference import AddNormKernel, add_norm
from kitforge.core.kernels.attention.reference import AttentionKernel, attention
from kitforge.core.kernels.copy_rows.reference import CopyRowsKernel, copy_rows
from kitforge.core.kernels.cpu_engine import accepts as cpu
from kitforge.core.kernels.cpu_engine.custom_ops import custom_op_of, is_traced
from kitforge.core.kernels.decode_attention.reference import DecodeAttentionKernel, decode_attention
from kitforge.core.kernels.embedding_bag.reference import EmbeddingBagKernel, embedding_bag
from kitforge.core.kernels.embedding_bag_backward.reference import EmbeddingBagBackwardKernel, embedding_bag_backward
from kitforge.core.kernels.float8_linear.reference import Float8LinearKernel, float8_linear
from kitforge.core.kernels.fused_decode_step.reference import (
    DecoderWeights,
    DecodeStepFactory,
    DecodeStepKernel,
    ReferenceDecodeStep,
    Slabs,
)
from kitforge.core.kernels.geglu.reference import GeGLUKernel, geglu
from kitforge.core.kernels.greedy_sample.reference import GreedySampleKernel, greedy_sample
from kitforge.core.kernels.grouped_linear.reference import GroupedLinearKernel, grouped_linear
from kitforge.core.kernels.hash_map.reference import DictHashMap, HashMapFactory
from kitforge.core.kernels.keep_mask.reference import KeepMaskKernel, keep_mask
from kitforge.core.kernels.layer_norm.reference import LayerNormKernel, layer_norm
from kitforge.core.kernels.linear.reference import LinearKernel, linear
from kitforge.core.kernels.linear_cross_entropy.reference import LinearCrossEntropyKernel, linear_cross_entropy
from kitforge.core.kernels.linear_log_probs.reference import LinearLogProbsKernel, linear_log_probs
from kitforge.core.kernels.moe_permute.reference import MoEPermuteKernel, moe_permute
from kitforge.core.kernels.moe_unpermute.reference import MoEUnpermuteKernel, moe_unpermute
from kitforge.core.kernels.paged_attention.reference import PagedAttentionKernel, paged_attention
from kitforge.core.kernels.pread_rows.reference import PreadRowsKernel, pread_rows
from kitforge.core.kernels.quantized_linear.reference import QuantizedLinearKernel, quantized_linear
from kitforge.core.kernels.random_sample.reference import RandomSampleKernel, random_sample
from kitforge.core.kernels.rms_norm.reference import RMSNormKernel, rms_norm
from kitforge.core.kernels.rotary.reference import RotaryKernel, rotary
from kitforge.core.kernels.sparse_update.reference import SPARSE_UPDATE, SparseUpdate
from kitforge.core.kernels.swap_rows.reference import SwapRowsKernel, swap_rows
from kitforge.core.kernels.swiglu.reference import SwiGLUKernel, swiglu
from kitforge.core.kernels.tables.without_values import WITHOUT_VALUES
from kitforge.core.kernels.triton import accepts as gpu
from kitforge.core.kernels.unique.reference import UniqueKernel, unique
from kitforge.foundation.errors import (
    ConfigError,
    DependencyError,
    DeviceError,
    KitforgeError,
    ModelError,
    installation,
)
from kitforge.foundation.log import logger, warn_once

CompileLevel = Literal["O0", "O1", "O2"]
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation of a network."""

    linear: LinearKernel
    quantized_linear: QuantizedLinearKernel
    float8_linear: Float8LinearKernel
    attention: AttentionKernel
    decode_attention: DecodeAttentionKernel
    paged_attention: PagedAttentionKernel
    rms_norm: RMSNormKernel
    layer_norm: LayerNormKernel
    rotary: RotaryKernel
    swiglu: SwiGLUKernel
    geglu: GeGLUKernel
    linear_cross_entropy: LinearCrossEntropyKernel
    linear_log_probs: LinearLogProbsKernel
    grouped_linear: GroupedLinearKernel
    moe_permute: MoEPermuteKernel
    moe_unpermute: MoEUnpermuteKernel
    keep_mask: KeepMaskKernel
    greedy_sample: GreedySampleKernel
    random_sample: RandomSampleKernel
    # None: the modules one by one are as fast.
    add_norm: AddNormKernel | None = None
    fused_decode_step: DecodeStepFactory | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKernels:
    """One implementation of each loop over rows of embedding tables, on contiguous tensors.

    The same inputs give the same bits, whatever the number of threads.
    """

    hash_map: HashMapFactory
    unique: UniqueKernel
    copy_rows: CopyRowsKernel
    swap_rows: SwapRowsKernel
    pread_rows: PreadRowsKernel
    embedding_bag: EmbeddingBagKernel
    embedding_bag_backward: EmbeddingBagBackwardKernel
    sparse_update: SparseUpdate


REFERENCE = Kernels(
    linear=linear,
    quantized_linear=quantized_linear,
    float8_linear=float8_linear,
    attention=attention,
    decode_attention=decode_attention,
    paged_attention=paged_attention,
    rms_norm=rms_norm,
    layer_norm=layer_norm,
    rotary=rotary,
    swiglu=swiglu,
    geglu=geglu,
    linear_cross_entropy=linear_cross_entropy,
    linear_log_probs=linear_log_probs,
    grouped_linear=grouped_linear,
    moe_permute=moe_permute,
    moe_unpermute=moe_unpermute,
    keep_mask=keep_mask,
    greedy_sample=greedy_sample,
    random_sample=random_sample,
)
TABLE_REFERENCE = TableKernels(
    hash_map=DictHashMap,
    unique=unique,
    copy_rows=copy_rows,
    swap_rows=swap_rows,
    pread_rows=pread_rows,
    embedding_bag=embedding_bag,
    embedding_bag_backward=embedding_bag_backward,
    sparse_update=SPARSE_UPDATE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Where an implementation is, and where it can run."""

    path: str  # file.name in the operation's folder
    levels: tuple[CompileLevel, ...] = ("O1",)
    devices: tuple[str, ...] = ()  # the device types that it is for; empty: every one
    package: str | None = None  # what must be installed; its module is then imported by the first call
    accepts: Callable[..., bool] | None = None  # whether it takes these positional arguments; None: always


_numba = functools.partial(Implementation, devices=("cpu",), package="numba")
# One source for CUDA and Ascend; "npu" never ran on hardware.
_triton = functools.partial(Implementation, devices=("cuda", "npu"), package="triton")
# By operation and name, in order of preference. The reference takes the calls that none of them accepts.
IMPLEMENTATIONS: dict[str, dict[str, Implementation]] = {
    "linear": {
        "numba": _numba(path="numba.linear", accepts=cpu.accepts_linear),
        "fused": Implementation(path="fused.linear"),
        "traceable": Implementation(path="fused.traceable_linear", levels=("O2",)),
    },
    "quantized_linear": {
        "triton": _triton(path="triton.quantized_linear", levels=("O1", "O2"), accepts=gpu.accepts_triton_quantized)
    },
    "float8_linear": {
        "triton": Implementation(
            path="triton.float8_linear",
            levels=("O1", "O2"),
            devices=("cuda",),
            package="triton",
            accepts=gpu.accepts_triton,
        ),
        "fused": Implementation(path="fused.float8_linear", levels=("O1", "O2")),
    },
    "attention": {
        "fused": Implementation(path="fused.attention"),
        "traceable": Implementation(path="fused.traceable_attention", levels=("O2",)),
    },
    "decode_attention": {
        "numba": _numba(path="numba.decode_attention", levels=("O1", "O2"), accepts=cpu.accepts_decode_attention),
        "fused": Implementation(path="fused.decode_attention", levels=("O1", "O2")),
    },
    "paged_attention": {
        "triton": _triton(path="triton.paged_attention", levels=("O1", "O2"), accepts=gpu.accepts_triton_pages),
        "fused": Implementation(path="fused.paged_attention", levels=("O1", "O2")),
    },
    "rms_norm": {
        "triton": _triton(path="triton.rms_norm", accepts=gpu.accepts_triton_rows),
        "numba": _numba(path="numba.rms_norm", accepts=cpu.accepts_rms_norm),
        "fused": Implementation(path="fused.rms_norm"),
    },
    "layer_norm": {"triton": _triton(path="triton.layer_norm", accepts=gpu.accepts_triton_rows)},
    "add_norm": {"triton": _triton(path="triton.add_norm", accepts=gpu.accepts_triton_rows)},
    "rotary": {
        "triton": _triton(path="triton.rotary", accepts=gpu.accepts_triton),
        "numba": _numba(path="numba.rotary", accepts=cpu.accepts_rotary),
        "fused": Implementation(path="fused.rotary"),
    },
    "swiglu": {
        "triton": _triton(path="triton.swiglu", accepts=gpu.accepts_triton),
        "fused": Implementation(path="fused.swiglu"),
    },
    "geglu": {
        "triton": _triton(path="triton.geglu", accepts=gpu.accepts_triton),
        "fused": Implementation(path="fused.geglu"),
    },
    "linear_cross_entropy": {
        "triton": _triton(path="triton.linear_cross_entropy", levels=("O1", "O2"), accepts=gpu.accepts_triton_logits),
        "chunked": Implementation(path="chunked.linear_cross_entropy", levels=("O1", "O2")),
    },
    "linear_log_probs": {
        "triton": _triton(path="triton.linear_log_probs", levels=("O1", "O2"), accepts=gpu.accepts_triton_logits),
        "chunked": Implementation(path="chunked.linear_log_probs", levels=("O1", "O2")),
    },
    "grouped_linear": {"fused": Implementation(path="fused.grouped_linear", levels=("O1", "O2"))},
    "moe_permute": {
        "triton": _triton(path="triton.moe_permute", levels=("O1", "O2"), accepts=gpu.accepts_triton),
        "fused": Implementation(path="fused.moe_permute", levels=("O1", "O2")),
    },
    "moe_unpermute": {
        "triton": _triton(path="triton.moe_unpermute", levels=("O1", "O2"), accepts=gpu.accepts_triton),
        "fused": Implementation(path="fused.moe_unpermute", levels=("O1", "O2")),
    },
    "greedy_sample": {
        "triton": _triton(path="triton.greedy_sample", levels=("O1", "O2"), accepts=gpu.accepts_triton_sampling),
        "numba": _numba(path="numba.greedy_sample", levels=("O1", "O2"), accepts=cpu.accepts_sampling),
    },
    "random_sample": {
        "triton": _triton(path="triton.random_sample", levels=("O1", "O2"), accepts=gpu.accepts_triton_sampling),
        "numba": _numba(path="numba.random_sample", levels=("O1", "O2"), accepts=cpu.accepts_sampling),
    },
    "keep_mask": {"numba": _numba(path="numba.keep_mask", levels=("O1", "O2"))},
    "fused_decode_step": {
        "triton": Implementation(path="triton.TritonDecodeStep", devices=("cuda",), package="triton"),
        "numba": _numba(path="numba.NumbaDecodeStep"),
    },
    "hash_map": {"triton": _triton(path="triton.DeviceHashMap"), "numba": _numba(path="numba.OpenAddressingHashMap")},
    "unique": {"triton": _triton(path="triton.unique"), "numba": _numba(path="numba.unique")},
    "copy_rows": {"triton": _triton(path="triton.copy_rows"), "numba": _numba(path="numba.copy_rows")},
    "swap_rows": {"numba": _numba(path="numba.swap_rows")},
    "pread_rows": {"numba": _numba(path="numba.pread_rows")},
    "embedding_bag": {"triton": _triton(path="triton.embedding_bag"), "numba": _numba(path="numba.embedding_bag")},
    "embedding_bag_backward": {
        "triton": _triton(path="triton.embedding_bag_backward"),
        "numba": _numba(path="numba.embedding_bag_backward"),
    },
    "sparse_update": {"triton": _triton(path="triton.SPARSE_UPDATE"), "numba": _numba(path="numba.SPARSE_UPDATE")},
}


def _like_rotary(input: Tensor, *_: object) -> Tensor:
    """[batch, heads, length, head_dim] in the memory layout of a linear layer's output."""
    batch, heads, length, head_dim = input.shape
    return input.new_empty(batch, length, heads, head_dim).transpose(1, 2)


# What traced and fake tensors get in the place of an operation's compiled loop.
CUSTOM_OPS: dict[str, Callable[..., Tensor]] = {
    "linear": custom_op_of(
        linear,
        "(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
        lambda input, weight, _bias=None: input.new_empty(*input.shape[:-1], weight.shape[0]),
    ),
    "rms_norm": custom_op_of(
        rms_norm, "(Tensor input, Tensor weight, float eps) -> Tensor", lambda input, *_: input.new_empty(input.shape)
    ),
    "rotary": custom_op_of(rotary, "(Tensor input, Tensor cos, Tensor sin, bool interleaved) -> Tensor", _like_rotary),
    "decode_attention": custom_op_of(
        decode_attention,
        "(Tensor query, Tensor keys, Tensor values, Tensor starts, Tensor lengths, *, int? window, float scale)"
        " -> Tensor",
        lambda query, *_, **__: query.new_empty(query.shape),
    ),
}

_REFERENCES: dict[str, Any] = {
    **{each.name: getattr(REFERENCE, each.name) for each in fields(Kernels)},
    **{each.name: getattr(TABLE_REFERENCE, each.name) for each in fields(TableKernels)},
    "add_norm": add_norm,
    "fused_decode_step": ReferenceDecodeStep,
}
_failed: set[tuple[str, str]] = set()
_watch: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("watch", default=None)
# The extra that brings a package; None: every installation does.
_EXTRA = {"numba": None, "triton": "gpu"}


@contextmanager
def watching_kernels(watch: Callable[[str, Any], Any]) -> Iterator[None]:
    """Within it networks are built with what `watch` makes of the name and the implementation of each operation."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


def kernels_of_network(level: CompileLevel, device: str) -> Kernels:
    """Those of `select`, which a plan may watch."""
    found, watch = select(level, device), _watch.get()
    names = () if watch is None else fields(found)
    return replace(found, **{each.name: watch(each.name, getattr(found, each.name)) for each in names if watch})


@functools.cache
def select(level: CompileLevel, device: str = "cpu") -> Kernels:
    """The kernels of a compile level for tensors of a device type ("cpu", "cuda", ...).

    An implementation of an optional package that fails to load or to run is replaced by the reference, which is logged
    once.
    """
    if level == "O0":
        return REFERENCE
    chosen: dict[str, Any] = {}
    for operation in (each.name for each in fields(Kernels)):
        chosen[operation] = getattr(REFERENCE, operation)
        for name in reversed(preferred(operation, device, level)):
            if IMPLEMENTATIONS[operation][name].package is None:
                chosen[operation] = _load(operation, name)
            elif operation == "fused_decode_step":
                chosen[operation] = DecodeSteps(name, device)
            else:
                load = functools.partial(_load, operation, name)
                slower = chosen[operation] or _REFERENCES[operation]
                chosen[operation] = _WithFallback(operation, name, load, _REFERENCES[operation], slower)
                if name == "triton":
                    chosen[operation].load()
    return Kernels(**chosen)


def select_table(device: str = "cpu") -> TableKernels:
    """The fastest installed loops over rows of tables, for slabs of a device type; within a plan, in which ids have
    values and rows have none, those that write no row.

    The reference replaces one that fails to load, which is logged once; not one that fails later, since it may have
    written half of its rows.
    """
    found = _select_table(device)
    is_planned = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return replace(found, **WITHOUT_VALUES) if is_planned else found


@functools.cache
def _select_table(device: str) -> TableKernels:
    chosen = {each.name: _REFERENCES[each.name] for each in fields(TableKernels)}
    for operation in chosen:
        for name in reversed(preferred(operation, device)):
            try:
                chosen[operation] = _load(operation, name)
            except Exception as error:  # noqa: BLE001 (whatever the import of a package raises)
                _log_failure(operation, name, error)
    return TableKernels(**chosen)


def preferred(operation: str, device: str = "cpu", level: CompileLevel = "O1") -> list[str]:
    """The names of the implementations that `select` prefers to the reference, in order of preference."""
    return [
        name
        for name, each in IMPLEMENTATIONS[operation].items()
        if level in each.levels and (not each.devices or device in each.devices) and _is_installed(each)
    ]


def implementation(operation: str, name: str, device: str = "cpu") -> Any:
    """The implementation of that name, without a fallback; "reference" is one of the names.

    Raises ConfigError for an unknown name, DeviceError on another device, DependencyError without its package. A call
    raises ModelError for arguments that the implementation does not accept.
    """
    known = {"reference": None, **IMPLEMENTATIONS.get(operation, {})}
    found = known.get(name)
    if operation not in IMPLEMENTATIONS or name not in known:
        names = known if operation in IMPLEMENTATIONS else IMPLEMENTATIONS
        raise ConfigError(
            "no such implementation of an operation", got=f"{operation} by {name!r}", expected=", ".join(names)
        )
    if found is None:
        return _REFERENCES[operation]
    if found.devices and device not in found.devices:
        expected = " or ".join(found.devices)
        raise DeviceError(f"{operation} by {name!r} cannot run", got=f"device={device}", expected=expected)
    if found.package is not None and not _is_installed(found):
        raise DependencyError(found.package, needed_for=f"{operation} by {name!r}", extra=_EXTRA[found.package])
    function, accepts = _load(operation, name), found.accepts

    def checked(*inputs: Any, **options: Any) -> Any:
        if accepts is not None and not accepts(*inputs):
            got = "; ".join(
                f"{list(each.shape)} {each.dtype} {each.device}" for each in inputs if torch.is_tensor(each)
            )
            fix = "call the operation of select(level, device), which takes all arguments"
            raise ModelError(f"{operation} by {name!r} does not accept these arguments", got=got, fix=fix)
        return function(*inputs, **options)

    return function if accepts is None else checked


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """A `DecodeStepFactory` of an implementation, for weights on a device. After a failure of a step on a CPU the
    reference runs it again, which writes the same keys and values; elsewhere no step takes any tokens."""

    name: str
    device: str

    def __call__(self, weights: DecoderWeights, slabs: Slabs) -> DecodeStepKernel:
        reference: Any = ReferenceDecodeStep(weights, slabs) if self.device == "cpu" else lambda *_, **_options: None
        load = functools.partial(_load, "fused_decode_step", self.name)
        return _WithFallback("fused_decode_step", self.name, lambda: load()(weights, slabs), reference)


class _WithFallback:
    """Calls the implementation, loaded by the first call, with the arguments that it accepts, and `otherwise` with
    others. After a failure the reference replaces the implementation."""

    def __init__(
        self, operation: str, name: str, load: Callable[[], Any], reference: Callable[..., Any], otherwise: Any = None
    ) -> None:
        self._operation, self._name = operation, name
        self._load, self._reference, self._otherwise = load, reference, otherwise
        self._accepts = None if otherwise is None else IMPLEMENTATIONS[operation][name].accepts
        self._function: Callable[..., Any] | None = None

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self._accepts is not None and not self._accepts(*inputs):
            return self._otherwise(*inputs, **options)
        # Kernels in Triton are operators that see this themselves.
        if torch.compiler.is_compiling() or (self._name != "triton" and is_traced(inputs)):
            # A custom op, or else `otherwise`.
            is_opaque = self._name == "numba" or self._function is None
            traced = CUSTOM_OPS.get(self._operation, self._otherwise) if is_opaque else self._function
            return traced(*inputs, **options)  # type: ignore[misc]
        if self._function is None:
            self.load()
        try:
            return self._function(*inputs, **options)  # type: ignore[misc]
        except (KitforgeError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_traced(inputs):
                raise
            # Wrong arguments fail in the reference as well: then its error is the caller's, and nothing is replaced.
            result = self._reference(*inputs, **options)
            _log_failure(self._operation, self._name, error)
            self._function = self._reference
            return result

    def load(self) -> None:
        """Import the implementation: the first call does so, or `select` where torch.compile must find it imported."""
        try:
            self._function = self._load()
        except Exception as error:  # noqa: BLE001 (whatever the import of a package raises)
            _log_failure(self._operation, self._name, error)
            self._function = self._reference

    def __getstate__(self) -> dict[str, Any]:
        """A pickled or copied model loads its compiled loops again."""
        return {**self.__dict__, "_function": None if self._name == "numba" else self._function}


def _load(operation: str, name: str) -> Any:
    file, _, function = IMPLEMENTATIONS[operation][name].path.partition(".")
    return getattr(importlib.import_module(f"kitforge.core.kernels.{operation}.{file}"), function)


def _is_installed(found: Implementation) -> bool:
    if found.package is None or importlib.util.find_spec(found.package) is not None:
        return True
    slow = f"the package {found.package!r} is not installed, so slower operations of torch run in place of its kernels"
    warn_once(_log, f"{slow}, and bits may depend on the batch: {installation(found.package, _EXTRA[found.package])}")
    return False


def _log_failure(operation: str, name: str, error: Exception) -> None:
    if (operation, name) not in _failed:
        _failed.add((operation, name))
        _log.warning("%s by %r failed, so the slower reference runs from now on: %r", operation, name, error)
