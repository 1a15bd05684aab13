"""Which implementation of each operation a model runs. The only place that chooses; callers never branch.

Level O0 is the references, O1 the fused operations (torch's own where it has them). A model is handed one `Kernels`
when it is built, so two levels live side by side in one process and in one test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from kitforge.core.kernels.attention import reference as attention_reference
from kitforge.core.kernels.linear import reference as linear_reference
from kitforge.core.kernels.linear_cross_entropy import reference as linear_cross_entropy_reference
from kitforge.core.kernels.rms_norm import reference as rms_norm_reference
from kitforge.core.kernels.rotary import reference as rotary_reference
from kitforge.core.kernels.swiglu import reference as swiglu_reference

CompileLevel = Literal["O0", "O1", "O2"]


class Linear(Protocol):
    """`input [..., in] @ weight [out, in].T + bias [out]`, in the autocast dtype where autocast is on."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See the class."""
        ...


class Attention(Protocol):
    """Softmax attention: query [batch, heads, length, head_dim], key and value [batch, kv_heads, keys, head_dim].

    `mask` is boolean, True where a query may look, broadcastable to [batch, heads, length, keys]; without a mask the
    attention is causal (query and key counts equal) or, when `causal` is False, unrestricted.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, causal: bool, scale: float
    ) -> Tensor:
        """See the class."""
        ...


class RMSNorm(Protocol):
    """`input / sqrt(mean(input²) + eps) * weight` over the last dim, reduced in fp32 (Zhang and Sennrich, 2019)."""

    def __call__(self, input: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See the class."""
        ...


class Rotary(Protocol):
    """Rotates the first `2 * cos.shape[-1]` features of input [batch, heads, length, head_dim] by the angles given as
    cos and sin [batch or 1, length, pairs]; pairs are (i, i + pairs), or (2i, 2i + 1) when interleaved (Su et al.)."""

    def __call__(self, input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """See the class."""
        ...


class SwiGLU(Protocol):
    """`silu(gate) * up`, elementwise (Shazeer, 2020)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """See the class."""
        ...


class LinearCrossEntropy(Protocol):
    """Sum over the rows whose target is not -100 of the cross entropy of `hidden [rows, dim] @ weight [vocab, dim].T`
    against targets [rows], in fp32. Returns a 0-dim sum."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """See the class."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation."""

    linear: Linear
    attention: Attention
    rms_norm: RMSNorm
    rotary: Rotary
    swiglu: SwiGLU
    linear_cross_entropy: LinearCrossEntropy


REFERENCE = Kernels(
    linear=linear_reference.linear,
    attention=attention_reference.attention,
    rms_norm=rms_norm_reference.rms_norm,
    rotary=rotary_reference.rotary,
    swiglu=swiglu_reference.swiglu,
    linear_cross_entropy=linear_cross_entropy_reference.linear_cross_entropy,
)


def select(level: CompileLevel) -> Kernels:
    """The kernels of a compile level. O2 compiles the model's blocks over kernels that the compiler can see through."""
    if level == "O0":
        return REFERENCE
    from kitforge.core.kernels.attention.fused import attention, traceable_attention
    from kitforge.core.kernels.linear.fused import linear, traceable_linear
    from kitforge.core.kernels.linear_cross_entropy.chunked import linear_cross_entropy
    from kitforge.core.kernels.rms_norm.fused import rms_norm
    from kitforge.core.kernels.rotary.fused import rotary
    from kitforge.core.kernels.swiglu.fused import swiglu

    if level == "O2":
        return Kernels(
            linear=traceable_linear,
            attention=traceable_attention,
            rms_norm=rms_norm_reference.rms_norm,
            rotary=rotary_reference.rotary,
            swiglu=swiglu_reference.swiglu,
            linear_cross_entropy=linear_cross_entropy,
        )
    return Kernels(
        linear=linear,
        attention=attention,
        rms_norm=rms_norm,
        rotary=rotary,
        swiglu=swiglu,
        linear_cross_entropy=linear_cross_entropy,
    )
