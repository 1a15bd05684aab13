"""Which implementation of each operation a model runs. The only place that chooses; callers never branch.

Level O0 is the references, O1 the fused operations (torch's own where it has them). A model is handed one `Kernels`
when it is built, so two levels live side by side in one process and in one test. The loops over rows of embedding
tables are a set of their own, `TableKernels`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kitforge.core.kernels.attention import reference as attention_reference
from kitforge.core.kernels.copy_rows import reference as copy_rows_reference
from kitforge.core.kernels.decode_attention import reference as decode_attention_reference
from kitforge.core.kernels.embedding_bag import reference as embedding_bag_reference
from kitforge.core.kernels.embedding_bag_backward import reference as embedding_bag_backward_reference
from kitforge.core.kernels.fused_decode_step.weights import DecoderWeights
from kitforge.core.kernels.hash_map import reference as hash_map_reference
from kitforge.core.kernels.jagged_bags import Bags
from kitforge.core.kernels.keep_mask import reference as keep_mask_reference
from kitforge.core.kernels.linear import reference as linear_reference
from kitforge.core.kernels.linear_cross_entropy import reference as linear_cross_entropy_reference
from kitforge.core.kernels.linear_log_probs import reference as linear_log_probs_reference
from kitforge.core.kernels.pread_rows import reference as pread_rows_reference
from kitforge.core.kernels.rms_norm import reference as rms_norm_reference
from kitforge.core.kernels.rotary import reference as rotary_reference
from kitforge.core.kernels.sparse_update import reference as sparse_update_reference
from kitforge.core.kernels.swap_rows import reference as swap_rows_reference
from kitforge.core.kernels.swiglu import reference as swiglu_reference
from kitforge.core.kernels.unique import reference as unique_reference
from kitforge.core.kernels.workspace import Workspace

CompileLevel = Literal["O0", "O1", "O2"]


class LinearKernel(Protocol):
    """`input [..., in] @ weight [out, in].T + bias [out]`, in the autocast dtype where autocast is on."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See the class."""
        ...


class AttentionKernel(Protocol):
    """Softmax attention: query [batch, heads, length, head_dim], key and value [batch, kv_heads, keys, head_dim].

    `mask` is boolean, True where a query may look, broadcastable to [batch, heads, length, keys]; without a mask the
    attention is causal (query and key counts equal) or, when `causal` is False, unrestricted.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        """See the class."""
        ...


class DecodeAttentionKernel(Protocol):
    """Softmax attention of single tokens, query [texts, heads, head_dim], each over a text of its own: `lengths` int64
    [texts] positions, or the last `window` of them, that follow one another in keys and values [slots, kv_heads,
    head_dim] from slot `starts` int64 [texts] on. Returns [texts, heads, head_dim]."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        lengths: Tensor,
        *,
        window: int | None,
        scale: float,
    ) -> Tensor:
        """See the class."""
        ...


class RMSNormKernel(Protocol):
    """`input / sqrt(mean(input²) + eps) * weight` over the last dim, reduced in fp32 (Zhang and Sennrich, 2019)."""

    def __call__(self, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the class."""
        ...


class RotaryKernel(Protocol):
    """Rotates the first `2 * cos.shape[-1]` features of input [batch, heads, length, head_dim] by the angles given as
    cos and sin [batch or 1, length, pairs]; pairs are (i, i + pairs), or (2i, 2i + 1) when interleaved (Su et al.)."""

    def __call__(self, input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """See the class."""
        ...


class SwiGLUKernel(Protocol):
    """`silu(gate) * up`, elementwise (Shazeer, 2020)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """See the class."""
        ...


class LinearCrossEntropyKernel(Protocol):
    """Sum over the rows whose target is not -100 of the cross entropy of `hidden [rows, dim] @ weight [vocab, dim].T`
    against targets [rows], in fp32. Returns a 0-dim sum."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """See the class."""
        ...


class LinearLogProbsKernel(Protocol):
    """Log-probabilities of targets [rows] under the softmax of `hidden [rows, dim] @ weight [vocab, dim].T` over the
    temperature, and the entropies of those distributions, both [rows] in fp32 and both differentiable."""

    def __call__(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        ...


class DecodeStepKernel(Protocol):
    """All blocks of a decoder, its norm and its head over single tokens, each the last of a text of its own: stream
    [texts, dim], cos and sin [texts, pairs] or None, `lengths` int64 [texts] positions that follow one another from
    slot `starts` int64 [texts] on. Their keys and values are written. Returns the normalised output [texts, dim] and
    logits [texts, vocab] in fp32 at least."""

    def __call__(
        self, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        ...


class DecodeStepFactory(Protocol):
    """Such a call over these weights, and for each layer the slabs of keys and values [slots, kv_heads, head_dim];
    all in one dtype, fp32 or bfloat16, contiguous and on CPU. They are read where they lie now."""

    def __call__(self, weights: DecoderWeights, slabs: list[tuple[Tensor, Tensor]]) -> DecodeStepKernel:
        """See the class."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation."""

    linear: LinearKernel
    attention: AttentionKernel
    decode_attention: DecodeAttentionKernel
    rms_norm: RMSNormKernel
    rotary: RotaryKernel
    swiglu: SwiGLUKernel
    linear_cross_entropy: LinearCrossEntropyKernel
    linear_log_probs: LinearLogProbsKernel
    fused_decode_step: Callable[[], DecodeStepFactory] | None = None  # None: where module by module is as fast


REFERENCE = Kernels(
    linear=linear_reference.linear,
    attention=attention_reference.attention,
    decode_attention=decode_attention_reference.decode_attention,
    rms_norm=rms_norm_reference.rms_norm,
    rotary=rotary_reference.rotary,
    swiglu=swiglu_reference.swiglu,
    linear_cross_entropy=linear_cross_entropy_reference.linear_cross_entropy,
    linear_log_probs=linear_log_probs_reference.linear_log_probs,
)


@functools.cache
def select(level: CompileLevel) -> Kernels:
    """The kernels of a compile level. O2 compiles the model's blocks over kernels that the compiler can see through."""
    if level == "O0":
        return REFERENCE
    from kitforge.core.kernels.attention.fused import attention, traceable_attention
    from kitforge.core.kernels.decode_attention.fused import decode_attention
    from kitforge.core.kernels.linear.fused import linear, traceable_linear
    from kitforge.core.kernels.linear_cross_entropy.chunked import linear_cross_entropy
    from kitforge.core.kernels.linear_log_probs.chunked import linear_log_probs
    from kitforge.core.kernels.rms_norm.fused import rms_norm
    from kitforge.core.kernels.rotary.fused import rotary
    from kitforge.core.kernels.swiglu.fused import swiglu

    decode = (
        functools.partial(decode_attention, compiled=_numba_decode_attention)
        if _is_numba_installed()
        else decode_attention
    )
    if level == "O2":
        return Kernels(
            linear=traceable_linear,
            attention=traceable_attention,
            decode_attention=decode,
            rms_norm=rms_norm_reference.rms_norm,
            rotary=rotary_reference.rotary,
            swiglu=swiglu_reference.swiglu,
            linear_cross_entropy=linear_cross_entropy,
            linear_log_probs=linear_log_probs,
        )
    if _is_numba_installed():
        linear = functools.partial(linear, few_rows=_small_linear)
        rms_norm = functools.partial(rms_norm, few_rows=_small_rms_norm)
        rotary = functools.partial(rotary, few_rows=_small_rotary)
    return Kernels(
        linear=linear,
        attention=attention,
        decode_attention=decode,
        rms_norm=rms_norm,
        rotary=rotary,
        swiglu=swiglu,
        linear_cross_entropy=linear_cross_entropy,
        linear_log_probs=linear_log_probs,
        fused_decode_step=_fused_decode_step if _is_numba_installed() else None,
    )


# Compiled loops are loaded with their first call, since most who choose kernels never make one.
@functools.cache
def _small_linear() -> LinearKernel:
    from kitforge.core.kernels.linear.numba import linear

    return linear


@functools.cache
def _small_rms_norm() -> RMSNormKernel:
    from kitforge.core.kernels.rms_norm.numba import rms_norm

    return rms_norm


@functools.cache
def _small_rotary() -> RotaryKernel:
    from kitforge.core.kernels.rotary.numba import rotary

    return rotary


@functools.cache
def _numba_decode_attention() -> DecodeAttentionKernel:
    from kitforge.core.kernels.decode_attention.numba import decode_attention

    return decode_attention


@functools.cache
def _fused_decode_step() -> DecodeStepFactory:
    from kitforge.core.kernels.fused_decode_step.numba import NumbaDecodeStep

    return NumbaDecodeStep


def _is_numba_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


class KeepMaskKernel(Protocol):
    """Boolean [rows, count]: which of the elements `start` to `start + count` of these rows dropout keeps.

    Rows are int64 of any value, the key has 64 bits. Each element is lost with probability `rate`;
    `keep_mask/reference.py` says how, to the bit.
    """

    def __call__(self, key: int, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
        """See the class."""
        ...


@functools.cache
def select_keep_mask(device: str) -> KeepMaskKernel:
    """The fastest one that is installed for that kind of device. All give the same bits."""
    if device != "cpu" or not _is_numba_installed():
        return keep_mask_reference.keep_mask
    from kitforge.core.kernels.keep_mask.numba import keep_mask

    return keep_mask


class HashMapKernel(Protocol):
    """Slots, int64 from 0, by key, any int64. Keys of one call are distinct. Not for two threads at once."""

    def __len__(self) -> int:
        """How many keys there are."""
        ...

    def lookup(self, keys: Tensor, out: Tensor | None = None, through: Tensor | None = None) -> Tensor:
        """The slots [n] of keys [n], -1 where one is not there; here keys may repeat. `out` int64 [n] is reused.

        `through` int64 [slots]: what it holds at a slot is given in the slot's stead.
        """
        ...

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Give keys [n] these slots [n]; those [n] that they had before, -1 for a key that was not there."""
        ...

    def remove(self, keys: Tensor) -> Tensor:
        """Forget keys [n]: the slots [n] they had, -1 for a key that was not there."""
        ...

    def items(self) -> tuple[Tensor, Tensor]:
        """All keys [n] in ascending order and their slots [n]."""
        ...


class HashMapFactory(Protocol):
    """An empty map, with room for so many keys before it grows."""

    def __call__(self, room: int = 0) -> HashMapKernel:
        """See the class."""
        ...


class UniqueKernel(Protocol):
    """Distinct ids [u] of ids [N] int64 in the order in which they first occur, and the place [N] of each id there.

    Places are written to `out` int64 [N] where it is given. `scratch` keeps working memory from call to call.
    """

    def __call__(
        self, ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the class."""
        ...


class EmbeddingBagKernel(Protocol):
    """The first `dim` columns of rows of `slab` [rows, width]: id i has row `slots[i]`, or `slots[inverse[i]]`.

    Without bags they come as they are, [num_ids, dim]; with bags each bag's rows are weighted, added up in order and
    for a mean divided by their number, [num_bags, dim]. `out` of that shape is overwritten where it is given,
    and `scratch` keeps working memory from call to call.
    Raises ModelError for a slot or a place that is none.
    """

    def __call__(
        self,
        slab: Tensor,
        slots: Tensor,
        dim: int,
        *,
        inverse: Tensor | None = None,
        bags: Bags | None = None,
        out: Tensor | None = None,
        scratch: Workspace | None = None,
    ) -> Tensor:
        """See the class."""
        ...


class EmbeddingBagBackwardKernel(Protocol):
    """The backward pass of `embedding_bag`: what `gradients` of its output give for each of `num_rows` distinct rows.

    Id i is row `inverse[i]`. The parts of a row are added to zero in the order of the ids. `out` [num_rows, dim] is
    overwritten where it is given. Raises ModelError for a place that is none.
    """

    def __call__(
        self,
        gradients: Tensor,
        inverse: Tensor,
        num_rows: int,
        *,
        bags: Bags | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """See the class."""
        ...


class CopyRowsKernel(Protocol):
    """Row i of `source` [rows, width], or row `at[i]`, becomes row i of `target`, or row `to[i]`; `to` are distinct.

    Raises ModelError for a place that is none.
    """

    def __call__(self, source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None) -> None:
        """See the class."""
        ...


class PreadRowsKernel(Protocol):
    """Row `at[i]` of an open file, of rows as wide as those of `out` [rows, width], becomes row `to[i]` of `out`.

    Returns how many could be read; of the others nothing is known. Raises ModelError for a place in `out` that is none.
    """

    def __call__(self, file: int, out: Tensor, at: Tensor, to: Tensor) -> int:
        """See the class."""
        ...


class SwapRowsKernel(Protocol):
    """Row `at[i]` of `one` [rows, width] and row `to[i]` of `other` [rows, width] change places; `at` are distinct, and
    so are `to`. Raises ModelError for a place that is none.
    """

    def __call__(self, one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
        """See the class."""
        ...


# What every rule begins with: slab, slots, gradients, rate, step. `sparse_update/reference.py` has the rest.
UpdateRule = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseUpdate:
    """The rules by which rows of a slab move in place; `sparse_update/reference.py` defines them."""

    sgd: UpdateRule
    adagrad: UpdateRule
    rowwise_adagrad: UpdateRule
    adam: UpdateRule
    lazy_adam: UpdateRule
    ftrl: UpdateRule
    catch_up: Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKernels:
    """One implementation of each loop over rows of embedding tables, on contiguous tensors of the CPU.

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


TABLE_REFERENCE = TableKernels(
    hash_map=hash_map_reference.DictHashMap,
    unique=unique_reference.unique,
    copy_rows=copy_rows_reference.copy_rows,
    swap_rows=swap_rows_reference.swap_rows,
    pread_rows=pread_rows_reference.pread_rows,
    embedding_bag=embedding_bag_reference.embedding_bag,
    embedding_bag_backward=embedding_bag_backward_reference.embedding_bag_backward,
    sparse_update=SparseUpdate(
        sgd=sparse_update_reference.sgd,
        adagrad=sparse_update_reference.adagrad,
        rowwise_adagrad=sparse_update_reference.rowwise_adagrad,
        adam=sparse_update_reference.adam,
        lazy_adam=sparse_update_reference.lazy_adam,
        ftrl=sparse_update_reference.ftrl,
        catch_up=sparse_update_reference.catch_up,
    ),
)


@functools.cache
def select_table(device: str = "cpu") -> TableKernels:
    """The fastest loops over rows of tables that are installed, for slabs on that kind of device."""
    if device != "cpu" or not _is_numba_installed():
        return TABLE_REFERENCE
    from kitforge.core.kernels.copy_rows import numba as copy_rows
    from kitforge.core.kernels.embedding_bag import numba as embedding_bag
    from kitforge.core.kernels.embedding_bag_backward import numba as embedding_bag_backward
    from kitforge.core.kernels.hash_map import numba as hash_map
    from kitforge.core.kernels.pread_rows import numba as pread_rows
    from kitforge.core.kernels.sparse_update import numba as sparse_update
    from kitforge.core.kernels.swap_rows import numba as swap_rows
    from kitforge.core.kernels.unique import numba as unique

    return TableKernels(
        hash_map=hash_map.OpenAddressingHashMap,
        unique=unique.unique,
        copy_rows=copy_rows.copy_rows,
        swap_rows=swap_rows.swap_rows,
        pread_rows=pread_rows.pread_rows,
        embedding_bag=embedding_bag.embedding_bag,
        embedding_bag_backward=embedding_bag_backward.embedding_bag_backward,
        sparse_update=SparseUpdate(
            sgd=sparse_update.sgd,
            adagrad=sparse_update.adagrad,
            rowwise_adagrad=sparse_update.rowwise_adagrad,
            adam=sparse_update.adam,
            lazy_adam=sparse_update.lazy_adam,
            ftrl=sparse_update.ftrl,
            catch_up=sparse_update.catch_up,
        ),
    )
