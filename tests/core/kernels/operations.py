"""Operations of networks as rows of one table: inputs that are drawn, what calls an operation with them, by which
implementations, and what rounding alone may do."""

import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.kernels.dispatch import implementation
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.kernels.quantized_linear.reference import quantize
from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import Call, autocast, random, relative, results

KERNELS = "kitforge.core.kernels"
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# What rounding alone may do, relative to the largest element: of any operation and implementation, then of some.
TOLERANCE = {F64: 1e-12, F32: 1e-5, BF16: 3e-2, F16: 3e-3}
# A probability by the Triton kernels is exp of a difference of two logits, each off by half a unit: for those up to 300
# that states of 30 have, by 2 * 300 * 2**-24.
TOLERANCES = {
    ("autocast", F32): 3e-2,
    ("linear_cross_entropy", F32): 1e-5,
    ("linear_log_probs", F32): 1e-5,
    ("linear_cross_entropy by triton", F32): 4e-5,
    ("linear_log_probs by triton", F32): 4e-5,
    ("numba", F32): 3e-6,
    ("numba", BF16): 2.0**-7,
    ("triton", F32): 3e-6,
}
CPU_IMPLEMENTATIONS = ("numba", "fused", "traceable", "chunked")
HALF = {"native": True, "stored": False}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What every operation's inputs have: dimensions, numbers, layout, and how gradients come."""

    lead: tuple[int, ...] = (5,)
    width: int = 7
    dtype: torch.dtype = F64
    layout: str = "rows"
    upstream: str = "random"
    choice: int = 0  # of what else an operation may be given
    autocast: str | None = None  # on processors with half-precision arithmetic, or which only store it

    @property
    def rows(self) -> int:
        return math.prod(self.lead)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Differentiable inputs in float64, and what makes a call of them of an implementation."""

    inputs: list[Tensor]
    call: Callable[[Any], Call] = lambda operation: operation
    patches: dict[str, Any] = field(default_factory=dict)


def some(draw: Draw, chance: Random, *scales: float) -> Tensor:
    """The input [*lead, width], now and then tiny or huge."""
    is_narrow = draw.dtype is F16 or draw.width < 3
    return random(*draw.lead, draw.width) * (1.0 if is_narrow else chance.choice([1.0, *scales]))


def linear(draw: Draw, chance: Random) -> Case:
    outputs = chance.choice([1, 3, 33, 70])
    inputs = [random(*draw.lead, draw.width), random(outputs, draw.width, seed=1), random(outputs, seed=2)]
    threads = chance.choice([1, 2])
    patches = {"torch.get_num_threads": lambda: threads, f"{KERNELS}.linear.numba.GRAIN": 1}
    patches |= {f"{KERNELS}.linear.fused.ROWS": chance.choice([1, 2, 5, 100])}
    return Case(inputs=inputs[: chance.choice([2, 3])], patches=patches)


def rms_norm(draw: Draw, chance: Random) -> Case:
    tiny_and_huge = some(draw, chance, 1e-15, 1e-4, 1e10)
    return Case(inputs=[tiny_and_huge, random(draw.width)], call=lambda operation: partial(operation, eps=1e-6))


def without_pairs(draw: Draw) -> Draw:
    """A few numbers of a row may be so near to one another that their deviation is rounding."""
    return replace(draw, width=7) if draw.width == 2 else draw


def layer_norm(draw: Draw, _: Random) -> Case:
    draw = without_pairs(draw)
    inputs = [random(*draw.lead, draw.width), random(draw.width), random(draw.width, seed=1)]
    return Case(inputs=inputs, call=lambda operation: partial(operation, eps=1e-6))


def add_norm(draw: Draw, chance: Random) -> Case:
    draw = without_pairs(draw)
    inputs = [random(*draw.lead, draw.width, seed=seed) for seed in range(2)]
    inputs += [random(draw.width, seed=seed) for seed in range(chance.choice([1, 2]))]
    nothing = [None] * (4 - len(inputs))
    return Case(inputs=inputs, call=lambda operation: lambda *given: torch.stack(operation(*given, *nothing, 1e-6)))


def gated(draw: Draw, chance: Random) -> Case:
    """Gates saturate where they are large."""
    return Case(inputs=[some(draw, chance, 3, 500), random(*draw.lead, draw.width, seed=1)])


def rotary(draw: Draw, chance: Random) -> Case:
    """Heads of a number of pairs that are turned, and of what is left."""
    batch, heads, length = (min(size, 5) for size in (*draw.lead, 3, 5, 2)[:3])
    dim = max(draw.width, 2)
    turned = 3 * random(chance.choice([1, batch]), length, chance.randint(1, dim // 2))
    is_interleaved = chance.random() < 0.5

    angles = turned.cos().float(), turned.sin().float()

    def call(operation: Any) -> Call:
        return lambda input: operation(input, *angles, is_interleaved)

    return Case(inputs=[random(batch, heads, length, dim)], call=call)


def logits(draw: Draw, chance: Random, *, ignored: bool) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Hidden states, a weight, targets, and chunks that need not divide the rows."""
    targets = torch.randint(0, draw.width, (draw.rows,), generator=torch.Generator().manual_seed(draw.rows))
    if ignored:
        targets[:: chance.choice([1, 2, 3, 9])] = -100
    sizes = [1.0] if draw.autocast else {F64: [1.0, 1e4], F32: [1.0, 1.0, 30.0]}.get(draw.dtype, [1.0])
    inputs = [random(draw.rows, 6) * chance.choice(sizes), random(draw.width, 6, seed=1)]
    patches = {
        f"{KERNELS}.linear_cross_entropy.vocabulary.CHUNK_BYTES": chance.choice([0, 1, 2, 3, 100]) * draw.width * 8
    }
    return inputs, targets, patches


def linear_cross_entropy(draw: Draw, chance: Random) -> Case:
    inputs, targets, patches = logits(draw, chance, ignored=chance.random() < 0.8)
    return Case(inputs=inputs, call=lambda operation: partial(operation, targets=targets), patches=patches)


def linear_log_probs(draw: Draw, chance: Random) -> Case:
    """Both results in one tensor, so that each has a gradient of its own."""
    inputs, targets, patches = logits(draw, chance, ignored=False)
    temperature = chance.choice([0.7, 1.0, 2.0])
    return Case(
        inputs=inputs,
        call=lambda operation: lambda *given: torch.stack(operation(*given, targets, temperature)),
        patches=patches | {f"{KERNELS}.linear_log_probs.chunked.KEPT_BYTES": chance.choice([0, 2**30])},
    )


def ragged(length: int) -> Tensor:
    """Causal within documents of which the second starts at a third of the length."""
    document = (torch.arange(length) >= length // 3).long()
    return torch.ones(length, length, dtype=torch.bool).tril() & (document[:, None] == document[None, :])


def attention(draw: Draw, chance: Random) -> Case:
    """Rows are batch and queries, of which there may be fewer than keys."""
    batch, queries = (*draw.lead, 5, 7)[:2]
    heads, kv_heads = chance.choice([(4, 4), (4, 2), (6, 1)])
    kind = chance.choice(["causal", "causal", "full", "mask", "masks of rows", "more keys"])
    keys = queries + 4 * (kind == "more keys")
    mask = ragged(queries)
    masks = {
        "mask": mask,
        "masks of rows": mask.expand(batch, 1, queries, queries),
        "more keys": torch.ones(queries, keys, dtype=torch.bool).tril(4),
    }
    options: dict[str, Any] = {"mask": masks.get(kind), "causal": kind != "full", "scale": 0.3}
    if kind != "full" and chance.random() < 0.4:
        options["slopes"] = random(heads).abs()
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
    inputs = [random(batch, *shape, 6, seed=seed) for seed, shape in enumerate(shapes)]
    return Case(inputs=inputs, call=lambda operation: partial(operation, **options))


def grouped_linear(draw: Draw, chance: Random) -> Case:
    """Experts may be without a row, and rows without an expert."""
    ends = torch.tensor(sorted(chance.randint(0, draw.rows) for _ in range(chance.randint(1, 4))), dtype=torch.int32)
    inputs = [random(draw.rows, draw.width), random(len(ends), chance.choice([0, 1, 6]), draw.width, seed=1)]
    return Case(inputs=inputs, call=lambda operation: lambda input, weight: operation(input, weight, ends))


def routed(num_tokens: int, k: int, num_experts: int) -> Tensor:
    """Distinct experts of each token, not all of them chosen."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, 1] = -1 if num_experts > k else scores[:, 1]
    return scores.topk(k, dim=1).indices


def moe_permute(draw: Draw, chance: Random) -> Case:
    experts = chance.choice([3, 8])
    permutation = permutation_of(routed(draw.rows, chance.randint(1, 3), experts), experts)
    return Case(
        inputs=[random(draw.rows, draw.width)], call=lambda operation: lambda input: operation(input, permutation)
    )


def moe_unpermute(draw: Draw, chance: Random) -> Case:
    k, experts = chance.choice([1, 2, 2, 3]), chance.choice([3, 8])
    permutation = permutation_of(routed(draw.rows, k, experts), experts)
    inputs = [random(draw.rows * k, draw.width), random(draw.rows, k)]
    return Case(inputs=inputs, call=lambda operation: lambda *given: operation(*given, permutation))


def decode_attention(draw: Draw, chance: Random) -> Case:
    """Texts lie apart from one another, and what lies between is not a number."""
    lengths = [chance.choice([1, 2, 4, 5, 17, 40, 64]) for _ in range(draw.rows % 8)]
    heads, kv_heads = chance.choice([(4, 2), (3, 3), (8, 1), (1, 1)])
    starts = [3 + place for place in itertools.accumulate(lengths, lambda sum, each: sum + each + 2, initial=0)][:-1]
    inputs = [random(len(lengths), heads, draw.width, seed=9)]
    for seed in range(2):
        slab = torch.full((sum(lengths) + 2 * len(lengths) + 9, kv_heads, draw.width), math.nan, dtype=F64)
        for start, length in zip(starts, lengths, strict=True):
            slab[start : start + length] = random(length, kv_heads, draw.width, seed=seed + start)
        inputs.append(slab)
    places = torch.tensor(starts, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)
    options: dict[str, Any] = {"window": chance.choice([None, 1, 3, 4, 100]), "scale": 0.3}
    if chance.random() < 0.5:
        options["slopes"] = random(heads, seed=4).abs()
    return Case(inputs=inputs, call=lambda operation: lambda *given: operation(*given, *places, **options))


def quantized_linear(draw: Draw, chance: Random) -> Case:
    """Features in groups with a scale, or in none."""
    bits, group = chance.choice([4, 8]), chance.choice([None, 32, 64])
    features = 2 * draw.width if group is None else group * (1 + draw.width % 4)
    outputs = chance.choice([1, 5, 33, 40])
    whole, scales = quantize(random(outputs, features, seed=1).float(), bits, group)  # type: ignore[arg-type]
    patches = {f"{KERNELS}.quantized_linear.triton._FRACTION": chance.choice([2, 32])}
    inputs = [random(*draw.lead, features), random(outputs, seed=2)][: chance.choice([1, 2, 2])]

    def call(operation: Any) -> Call:
        def multiply(input: Tensor, bias: Tensor | None = None) -> Tensor:
            result: Tensor = operation(input, whole, scales.to(input.dtype) if input.dtype is F64 else scales, bias)
            return result

        return multiply

    return Case(inputs=inputs, call=call, patches=patches)


OPERATIONS: dict[str, Callable[[Draw, Random], Case]] = {
    "linear": linear,
    "quantized_linear": quantized_linear,
    "attention": attention,
    "decode_attention": decode_attention,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "add_norm": add_norm,
    "rotary": rotary,
    "swiglu": gated,
    "geglu": gated,
    "linear_cross_entropy": linear_cross_entropy,
    "linear_log_probs": linear_log_probs,
    "grouped_linear": grouped_linear,
    "moe_permute": moe_permute,
    "moe_unpermute": moe_unpermute,
}
WITHOUT_GRADIENT = {"quantized_linear", "decode_attention"}
# Whose outputs under autocast are in half precision, and those whose are not.
AUTOCAST = {"linear": BF16, "attention": BF16, "grouped_linear": BF16, "linear_cross_entropy": F32}
LEADS = [(), (0,), (1,), (5,), (9,), (32,), (2, 3), (2, 0), (2, 3, 4)]
WIDTHS = [1, 2, 7, 33, 64, 65, 200]
LAYOUTS = ["rows", "part", "turned", "every other"]


def laid_out(tensor: Tensor, layout: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Memory that holds the tensor amid what is not a number, and what finds it there."""
    if layout == "part" and tensor.dim():
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), math.nan, dtype=tensor.dtype)
        wide[..., 2:-3] = tensor
        return wide, lambda memory: memory[..., 2:-3]
    if layout == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous(), lambda memory: memory.transpose(0, -1)
    if layout == "every other":
        return torch.stack((tensor, torch.full_like(tensor, math.nan)), -1), lambda memory: memory[..., 0]
    return tensor, lambda memory: memory


def expanded(*shape: int, **options: Any) -> Tensor:
    """The gradient of a sum over the last dimension."""
    return random(*shape[:-1], *[1] * bool(shape), **options).expand(shape)


def turned(*shape: int, **options: Any) -> Tensor:
    """The gradient of a view."""
    return random(*reversed(shape), **options).permute([*reversed(range(len(shape)))])


UPSTREAM: dict[str, Callable[..., Tensor]] = {"random": random, "expanded": expanded, "turned": turned}


DRAWS = st.builds(
    Draw,
    lead=st.sampled_from(LEADS),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from([F64, F32, BF16, F16]),
    layout=st.sampled_from(LAYOUTS),
    upstream=st.sampled_from([*UPSTREAM]),
    choice=st.integers(0, 999),
    autocast=st.sampled_from([None, None, None, *HALF]),
)
# Ragged rows, no row, one row and one number, a tile and its neighbour, and memory around them that is not a number.
EDGES = [
    Draw(lead=lead, width=width, layout=layout, choice=choice, dtype=dtype)
    for choice, (lead, width, layout, dtype) in enumerate(
        [
            ((5,), 7, "part", F32),
            ((0,), 5, "rows", BF16),
            ((1,), 1, "every other", F32),
            ((4,), 64, "turned", F64),
            ((9,), 200, "part", BF16),
            ((9,), 33, "every other", F32),  # by this choice linear layers have a bias
            ((3,), 65, "rows", F64),
        ]
    )
]
EDGES += [Draw(lead=(1,), width=65, dtype=F32, choice=2)]  # by this choice one query has ALiBi's bias over 64 keys


def error(operation: str, name: str, draw: Draw, found: Any = None) -> float | None:
    """The largest difference of any result of an implementation, or of `found` instead, from the reference in
    float64; None where the implementation does not accept the call."""
    case = OPERATIONS[operation](draw, Random(draw.choice))
    # Compiled loops read weights and keys as they lie.
    are_plain = name == "numba" and operation in ("linear", "decode_attention")
    layouts = [draw.layout, *["rows" if are_plain else draw.layout] * (len(case.inputs) - 1)]
    # Autocast rounds what it is given, and of a sum that nearly cancels the rounding is all that is left.
    exact = BF16 if draw.autocast else draw.dtype
    leaves, views = zip(
        *(laid_out(each.to(exact).to(draw.dtype), layout) for each, layout in zip(case.inputs, layouts, strict=True)),
        strict=True,
    )

    def viewed(function: Any) -> Call:
        own = case.call(function)
        return lambda *memory: own(*(view(each) for view, each in zip(views, memory, strict=True)))

    has_gradient = name != "numba" and operation not in WITHOUT_GRADIENT

    def upstream(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
        return UPSTREAM[draw.upstream](*shape, dtype=BF16 if draw.autocast else dtype, seed=seed).to(dtype)

    find = partial(results, has_gradient=has_gradient, upstream=upstream)
    kernel = viewed(found or implementation(operation, name, "cuda" if name == "triton" else "cpu"))
    with ExitStack() as stack:
        stack.enter_context(nullcontext() if has_gradient else torch.no_grad())
        is_native = HALF[draw.autocast] if draw.autocast else draw.choice % 2 == 0
        stack.enter_context(mock.patch.dict(NATIVE_DTYPES, {BF16: is_native}))
        for target, value in case.patches.items():
            stack.enter_context(mock.patch(target, value))
        if draw.autocast:
            kernel = autocast(kernel)
        try:
            got = find(kernel, leaves)
        except ModelError as refused:
            if "does not accept" not in str(refused):
                raise
            return None
        wanted = find(viewed(implementation(operation, "reference")), [each.double() for each in leaves])
    assert [each.shape for each in got] == [each.shape for each in wanted]
    if draw.autocast or not operation.startswith("linear_"):
        assert got[0].dtype is (AUTOCAST[operation] if draw.autocast else draw.dtype)
    # A gradient that is zero but for rounding has no scale of its own.
    largest = max((float(each.abs().nan_to_num().max()) for each in case.inputs if each.numel()), default=1.0)
    return max(relative(one, other, floor=min(1.0, largest)) for one, other in zip(got, wanted, strict=True))


def check(operation: str, name: str, draw: Draw) -> bool:
    """Assert that the implementation is the reference, for the draw or its nearest that it is made for; False where
    it does not accept the call."""
    if operation not in AUTOCAST or name in ("triton", "numba"):
        draw = replace(draw, autocast=None)
    if name == "numba":
        draw = replace(draw, dtype=F32 if draw.dtype in (F64, F32) else BF16)
    elif name != "triton" and (draw.dtype is F16 or (draw.autocast and draw.dtype is F64)):
        draw = replace(draw, dtype=F32)
    names = ["autocast" if draw.autocast else f"{operation} by {name}", operation, name]
    keys = [(each, draw.dtype) for each in names]
    most = next((TOLERANCES[key] for key in keys if key in TOLERANCES), TOLERANCE[draw.dtype])
    found = error(operation, name, draw)
    assert found is None or found < most, (found, most)
    return found is not None
