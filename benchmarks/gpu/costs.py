"""FLOPs and bytes of one call of each operation, from the shapes of its arguments.

FLOPs are those of the definition: a multiplication and an addition count as two, and recomputation is not counted, as
in model FLOPs utilization (Chowdhery et al., "PaLM", 2022, appendix B). Bytes are the least that must move: each input
read once and each output written once. Tensors may be on the meta device or fake.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import kitforge.core.kernels.dispatch  # noqa: F401 (defines the operators)
from kitforge.core.kernels.attention.packed_mask import dense_mask
from kitforge.core.kernels.attention.reference import Mask
from kitforge.core.kernels.cpu_engine.custom_ops import is_traced
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard
from kitforge.core.kernels.moe_permute.reference import Permutation
from kitforge.core.kernels.tables.bags import Bags


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one forward call, and of its backward call for the gradients of all float inputs."""

    flops: int
    bytes: int
    backward_flops: int = 0
    backward_bytes: int = 0


def cost(operation: str, *inputs: Any, **options: Any) -> Cost:
    """The cost of a call of an operation of `Kernels` or `TableKernels`, from its arguments without buffers."""
    return COSTS[operation](*inputs, **options)


def _size(*tensors: Tensor | None) -> int:
    """Their bytes."""
    return sum(each.numel() * each.element_size() for each in tensors if each is not None)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    flops = 2 * input.numel() * weight.shape[0]
    output = input.numel() // max(weight.shape[1], 1) * weight.shape[0] * input.element_size()
    moved = _size(input, weight, bias) + output
    return Cost(flops, moved, 2 * flops, moved + _size(input, weight))


def _grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Cost:
    """Of rows that all belong to an expert; the matrix of each is read, also of one without rows."""
    product = _linear(input, weight[0])
    moved = _size(weight[1:], ends)
    return Cost(product.flops, product.bytes + moved, product.backward_flops, product.backward_bytes + 2 * moved)


def _quantized_linear(input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None = None) -> Cost:
    flops = 2 * input.numel() * quantized.shape[0]
    output = input.numel() // max(input.shape[-1], 1) * quantized.shape[0] * input.element_size()
    return Cost(flops, _size(input, quantized, scales, bias) + output)


def _float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """As many operations as `linear`; each operand is also rounded to one byte an element."""
    exact = _linear(input, weight, bias)
    rounded = input.numel() + weight.numel()
    return Cost(exact.flops, exact.bytes + rounded, exact.backward_flops, exact.backward_bytes + rounded)


def _num_choices(permutation: Permutation) -> int:
    """The experts of a token."""
    return permutation.positions.shape[1]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask,
    causal: bool,
    scale: float,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
) -> Cost:
    """A query of a causal call sees the keys up to its position; a mask is dense here. Flash attention computes the
    scores again in its backward pass, which is not counted."""
    del scale, slopes
    mask = dense_mask(mask)
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    seen = queries * keys
    if causal and mask is None:
        seen = queries * (keys - queries) + queries * (queries + 1) // 2
    flops = 4 * batch * heads * seen * head_dim
    moved = 2 * _size(query) + _size(key, value, mask, bias)
    return Cost(flops, moved, 2 * flops, 2 * moved)


def _decode_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    _starts: Tensor,
    lengths: Tensor,
    *,
    window: int | None,
    scale: float,
    slopes: Tensor | None = None,
) -> Cost:
    """Without the lengths, of a tensor without memory, every sequence is as long as all slots over sequences."""
    del scale, slopes
    sequences, heads, head_dim = query.shape
    if lengths.is_meta or is_traced((lengths,)):
        seen = keys.shape[0] if window is None else min(keys.shape[0], sequences * window)
    else:
        seen = int((lengths if window is None else lengths.clamp(max=window)).sum())
    row = prod(keys.shape[1:]) * keys.element_size() + prod(values.shape[1:]) * values.element_size()
    return Cost(4 * heads * head_dim * seen, 2 * _size(query) + row * seen)


def _paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    block_size: int,
    window: int | None,
    scale: float,
    slopes: Tensor | None = None,
) -> Cost:
    """That of `decode_attention`; without lengths, every sequence fills its table."""
    if lengths.is_meta or is_traced((lengths,)):
        lengths = torch.full((len(tables),), tables.shape[1] * block_size)
    return _decode_attention(query, keys, values, tables, lengths, window=window, scale=scale, slopes=slopes)


def _rotary(input: Tensor, cos: Tensor, sin: Tensor, _interleaved: bool) -> Cost:
    flops = 6 * (input.numel() // input.shape[-1]) * cos.shape[-1]
    moved = 2 * _size(input) + _size(cos, sin)
    return Cost(flops, moved, flops, moved)


def _norm(forward: int, backward: int) -> Callable[..., Cost]:
    """Of that many operations for each element."""

    def of(input: Tensor, weight: Tensor, *rest: Any) -> Cost:
        size, parameters = input.numel(), [weight, *(each for each in rest if torch.is_tensor(each))]
        return Cost(forward * size, 2 * _size(input) + _size(*parameters), backward * size, 3 * _size(input))

    return of


def _add_norm(input: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, _: float) -> Cost:
    """The sum is written once, and its gradient joins that of the norm."""
    norm = COSTS["rms_norm"](input, weight) if bias is None else COSTS["layer_norm"](input, weight, bias)
    size, moved = input.numel(), _size(branch, input)
    return Cost(norm.flops + size, norm.bytes + moved, norm.backward_flops + size, norm.backward_bytes + _size(input))


def _gated(forward: int, backward: int) -> Callable[..., Cost]:
    """Of that many operations for each element of gate and up."""
    return lambda gate, up: Cost(
        forward * gate.numel(), _size(gate, gate, up), backward * gate.numel(), _size(gate, gate, gate, up, up)
    )


def _vocabulary(num_elementwise: int) -> Callable[..., Cost]:
    """Of a product with the vocabulary [V, dim] and that many operations for each logit; logits are never held."""

    def of(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        _temperature: float = 1.0,
        *,
        shard: VocabularyShard | None = None,
    ) -> Cost:
        del shard
        logits = hidden.numel() // max(hidden.shape[-1], 1) * weight.shape[0]
        product, moved = 2 * logits * hidden.shape[-1], _size(hidden, weight, targets)
        return Cost(product + num_elementwise * logits, moved, 2 * product + num_elementwise * logits, 2 * moved)

    return of


def _copy_rows(source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None) -> Cost:
    rows = len(source if at is None else at)
    return Cost(0, 2 * rows * source.shape[1] * target.element_size() + _size(at, to))


def _embedding_bag(
    slab: Tensor, slots: Tensor, dim: int, *, inverse: Tensor | None = None, bags: Bags | None = None
) -> Cost:
    ids = len(slots if inverse is None else inverse)
    rows = ids if bags is None else bags.num_bags
    weights = 0 if bags is None or bags.weights is None else ids * dim
    flops = 0 if bags is None else ids * dim + weights + (rows * dim if bags.mode == "mean" else 0)
    return Cost(flops, (ids + rows) * dim * slab.element_size() + _size(slots, inverse))


def _embedding_bag_backward(gradients: Tensor, inverse: Tensor, num_rows: int, *, bags: Bags | None = None) -> Cost:
    dim = gradients.shape[1]
    weights = 0 if bags is None or bags.weights is None else len(inverse) * dim
    moved = _size(gradients, inverse) + num_rows * dim * gradients.element_size()
    return Cost(len(inverse) * dim + weights, moved)


def _sparse_update(slab: Tensor, slots: Tensor, gradients: Tensor, *_: object) -> Cost:
    """Of any rule: each reads and writes whole rows. Its few operations an element hide behind that."""
    return Cost(0, 2 * len(slots) * slab.shape[1] * slab.element_size() + _size(slots, gradients))


# By operation; the arguments are those of the operation. Stateful ones, whose cost is that of their calls of others
# (a decode step) or that of hashing (a hash map), are not here.
COSTS: dict[str, Callable[..., Cost]] = {
    "linear": _linear,
    "quantized_linear": _quantized_linear,
    "float8_linear": _float8_linear,
    "attention": _attention,
    "decode_attention": _decode_attention,
    "paged_attention": _paged_attention,
    "rms_norm": _norm(4, 9),
    "layer_norm": _norm(6, 12),
    "add_norm": _add_norm,
    "rotary": _rotary,
    "swiglu": _gated(5, 10),
    "geglu": _gated(10, 18),
    "linear_cross_entropy": _vocabulary(4),
    "linear_log_probs": _vocabulary(6),
    "grouped_linear": _grouped_linear,
    "moe_permute": lambda input, permutation: Cost(
        0, (1 + _num_choices(permutation)) * _size(input) + _size(permutation.positions), 0, 2 * _size(input)
    ),
    "moe_unpermute": lambda rows, weights, permutation: Cost(
        2 * rows.numel(),
        _size(rows, weights, permutation.positions) + _size(rows) // max(_num_choices(permutation), 1),
        4 * rows.numel(),
        3 * _size(rows),
    ),
    # Ten rounds of Philox for four elements, of integers.
    "keep_mask": lambda _key, rows, _start, count, _rate: Cost(0, _size(rows) + len(rows) * count),
    "greedy_sample": lambda logits: Cost(3 * logits.numel(), _size(logits) + len(logits) * (8 + logits.element_size())),
    "random_sample": lambda logits, points, _temperature: Cost(
        5 * logits.numel(), _size(logits, points) + len(logits) * (8 + logits.element_size())
    ),
    "unique": lambda ids: Cost(0, 3 * _size(ids)),
    "copy_rows": _copy_rows,
    "swap_rows": lambda one, _, at, to: Cost(0, 4 * len(at) * one.shape[1] * one.element_size() + _size(at, to)),
    "pread_rows": lambda _, out, at, to: Cost(0, 2 * len(at) * out.shape[1] * out.element_size() + _size(at, to)),
    "embedding_bag": _embedding_bag,
    "embedding_bag_backward": _embedding_bag_backward,
    "sparse_update": _sparse_update,
}


@register_flop_formula(torch.ops.kitforge.linear_numba)
def _linear_flops(input: torch.Size, weight: torch.Size, *_: object, out_shape: object) -> int:
    """For `torch.utils.flop_counter`, which does not look into a custom op."""
    del out_shape
    return 2 * prod(input) * weight[0]
