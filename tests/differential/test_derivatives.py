"""First and second gradients of the operations, over drawn shapes in float64, against torch's own functions."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from kitforge.core.kernels.dispatch import CompileLevel, Kernels, select
from kitforge.core.kernels.float8_linear.reference import float8_linear
from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard
from kitforge.core.kernels.moe_permute.reference import Permutation
from kitforge.core.nn.context import Context
from kitforge.foundation.errors import KitforgeError
from kitforge.models.catalog import FAMILIES, config_of
from kitforge.models.loading import build
from tests.differential.drawn import drawn

# A function of an operation's float inputs, by our kernels and by torch.
Case = tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]
Draw = Callable[[st.SearchStrategy[Any]], Any]
KERNELS, TARGETS = select("O1"), torch.arange(16)
SHARD = VocabularyShard(first=0, max_rows=16, gather=lambda values: values.unsqueeze(0))
ALONE = "take compile_level=O0 on one rank"
# What torch has a second derivative of and the default level does not, of an input and a weight in fp32 under autocast,
# with what to do.
REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "saved in FP8": (float8_linear, "train without FP8"),
    "saved in half precision": (KERNELS.linear, ALONE),
    "joined by autocast": (lambda input, weight: KERNELS.linear_cross_entropy(input.half(), weight, TARGETS), ALONE),
    "the loss of a shard of the vocabulary": (
        lambda input, weight: KERNELS.linear_cross_entropy(input, weight, TARGETS, shard=SHARD),
        ALONE,
    ),
    "log-probs of a shard of the vocabulary": (
        lambda input, weight: KERNELS.linear_log_probs(input, weight, TARGETS, shard=SHARD)[0],
        ALONE,
    ),
}
SIZES = st.integers(1, 6)
NETWORK = {
    "vocab_size": 31, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 32, "max_length": 16,
    "experts": {"num_experts": 4, "top_k": 2},
}  # fmt: skip


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def linear(_: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    return kernels.linear, functional.linear, [normal(rows, dim), normal(3, dim), normal(3)]


def rms_norm(_: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    def oracle(input: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(input, (dim,), weight, 1e-5)

    return lambda input, weight: kernels.rms_norm(input, weight, 1e-5), oracle, [normal(rows, dim), normal(dim)]


def layer_norm(_: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    def oracle(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(input, (dim,), weight, bias, 1e-5)

    inputs = [normal(rows, dim), normal(dim), normal(dim)]
    return lambda input, weight, bias: kernels.layer_norm(input, weight, bias, 1e-5), oracle, inputs


def swiglu(_: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    return kernels.swiglu, lambda gate, up: functional.silu(gate) * up, [normal(rows, dim), normal(rows, dim)]


def geglu(_: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    def oracle(gate: Tensor, up: Tensor) -> Tensor:
        return functional.gelu(gate, approximate="tanh") * up

    return kernels.geglu, oracle, [normal(rows, dim), normal(rows, dim)]


def rotary(draw: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    interleaved, angles = draw(st.booleans()), normal(1, rows, dim)

    def oracle(input: Tensor) -> Tensor:
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        pairs = input.view(2, 2, rows, dim, 2).unbind(-1) if interleaved else input.chunk(2, -1)
        turned = pairs[0] * cos - pairs[1] * sin, pairs[1] * cos + pairs[0] * sin
        return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)

    return (
        lambda input: kernels.rotary(input, angles.cos(), angles.sin(), interleaved),
        oracle,
        [normal(2, 2, rows, 2 * dim)],
    )


def linear_cross_entropy(draw: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    targets = torch.tensor(draw(st.lists(st.sampled_from([-100, 0, 1, 2, 3, 4]), min_size=rows, max_size=rows)))

    def oracle(hidden: Tensor, weight: Tensor) -> Tensor:
        return functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")

    inputs = [normal(rows, dim), normal(5, dim)]
    return lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, targets), oracle, inputs


def linear_log_probs(draw: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    targets = torch.tensor(draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows)))
    temperature = draw(st.sampled_from([0.5, 1.0, 2.0]))

    def oracle(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs = (hidden @ weight.t() / temperature).log_softmax(-1)
        chosen = -functional.nll_loss(log_probs, targets, reduction="none")
        return torch.cat([chosen, torch.special.entr(log_probs.exp()).sum(-1)])

    def ours(hidden: Tensor, weight: Tensor) -> Tensor:
        return torch.cat(kernels.linear_log_probs(hidden, weight, targets, temperature))

    return ours, oracle, [normal(rows, dim), normal(5, dim)]


def biased_attention(draw: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    group, causal = draw(st.sampled_from([1, 2])), draw(st.booleans())

    def oracle(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        mask = bias.masked_fill(~torch.ones(rows, rows, dtype=torch.bool).tril(), float("-inf")) if causal else bias
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask[None], scale=0.3, enable_gqa=group > 1
            )

    def ours(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return kernels.attention(query, key, value, mask=None, causal=causal, scale=0.3, bias=bias)

    inputs = [normal(2, 2, rows, dim), *(normal(2, 2 // group, rows, dim) for _ in range(2)), normal(2, rows, rows)]
    return ours, oracle, inputs


def grouped_linear(draw: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    ends = sorted(draw(st.lists(st.integers(0, rows), min_size=3, max_size=3)))

    def oracle(input: Tensor, weight: Tensor) -> Tensor:
        parts = [input[start:end] @ matrix.t() for start, end, matrix in zip([0, *ends], ends, weight, strict=False)]
        return torch.cat([*parts, input.new_zeros(rows - ends[-1], 4)])

    places = torch.tensor(ends, dtype=torch.int32)
    inputs = [normal(rows, dim), normal(3, 4, dim)]
    return lambda input, weight: kernels.grouped_linear(input, weight, places), oracle, inputs


def experts(draw: Draw, kernels: Kernels, rows: int, dim: int) -> Case:
    """Rows to their experts and back."""
    places = torch.tensor(draw(st.permutations(range(2 * rows)))).view(rows, 2)
    tokens = torch.empty(2 * rows, dtype=torch.long)
    tokens[places.flatten()] = torch.arange(2 * rows) // 2
    route = Permutation(positions=places, tokens=tokens, ends=torch.tensor([2 * rows], dtype=torch.int32))

    def oracle(input: Tensor, weights: Tensor) -> Tensor:
        return (input[tokens].square()[places] * weights.unsqueeze(-1)).sum(1)

    def ours(input: Tensor, weights: Tensor) -> Tensor:
        return kernels.moe_unpermute(kernels.moe_permute(input, route).square(), weights, route)

    return ours, oracle, [normal(rows, dim), normal(rows, 2)]


CASES = (
    linear, rms_norm, layer_norm, swiglu, geglu, rotary, linear_cross_entropy, linear_log_probs, biased_attention,
    grouped_linear, experts,
)  # fmt: skip


def derivatives(function: Callable[..., Tensor], inputs: list[Tensor], used: list[bool], weighs: bool) -> list[Tensor]:
    """The value, its gradients along inputs that depend on one another, and those of a function of the gradients."""
    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    # Each input is a curve through a common parameter, so that one is computed from another.
    roots = [each.clone().requires_grad_(is_used) for each, is_used in zip(inputs, used, strict=True)]
    given = [(root + leaf).sin() + root if root.requires_grad else root for root in roots]
    output = function(*given)
    # A plain sum has an incoming gradient of 1, of which torch keeps no graph.
    loss = output.sum() if weighs else output.square().sum()
    sources = [root for root in roots if root.requires_grad] + [leaf]
    first = torch.autograd.grad(loss, sources, create_graph=True)
    penalty = torch.stack([each.square().sum() for each in first]).sum()
    return [output, *first, *torch.autograd.grad(penalty, sources)]


@given(
    data=st.data(),
    build=st.sampled_from(CASES),
    rows=SIZES,
    dim=SIZES,
    seed=st.integers(0, 2**31),
    weighs=st.booleans(),
)
@drawn(100)
def test_gradients_to_second_order_are_those_of_torch(
    data: st.DataObject, build: Callable[..., Case], rows: int, dim: int, seed: int, weighs: bool
) -> None:
    torch.manual_seed(seed)
    ours, oracle, inputs = build(data.draw, select("O1"), rows, dim)
    used = data.draw(st.lists(st.booleans(), min_size=len(inputs), max_size=len(inputs)).filter(any))
    found, wanted = (derivatives(each, inputs, used, weighs) for each in (ours, oracle))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_second_derivative_says_so_where_it_is_asked_for(name: str) -> None:
    root, weight = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    function, words = REFUSED[name]
    with torch.autocast("cpu", torch.float16):
        loss = function(root, weight).sum()
    with pytest.raises(KitforgeError, match=f"(?s)create_graph=True.*{words}"):
        torch.autograd.grad(loss, root, create_graph=True)
    (gradient,) = torch.autograd.grad(loss, root)
    assert not gradient.requires_grad


@pytest.mark.slow  # torch imports its compiler for them
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_leave_first_derivatives_as_they_are(is_reentrant: bool) -> None:
    """A recomputation runs with gradients on, where a graph of the gradients is not asked for."""
    kernels, targets = select("O1"), torch.arange(8)
    root, weight, scale = normal(8, 4).requires_grad_(), normal(8, 4).requires_grad_(), normal(4).requires_grad_()

    def loss(root: Tensor) -> Tensor:
        return kernels.linear_cross_entropy(kernels.rms_norm(root.tanh(), scale, 1e-5), weight, targets)

    wanted = torch.autograd.grad(loss(root), [root, weight, scale])
    checkpoint(loss, root, use_reentrant=is_reentrant).backward()
    for each, gradient in zip((root, weight, scale), wanted, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, gradient)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "llama", "glm", "mixtral", "pangu_alpha"])
def test_the_curvature_of_a_network_is_that_of_the_references(name: str) -> None:
    tokens = torch.arange(24).view(2, 12) % 31
    known = {each.name for each in fields(FAMILIES[name].config)}
    values = {"family": name} | {key: value for key, value in NETWORK.items() if key in known}

    def curvature(level: CompileLevel) -> list[Tensor]:
        model = build(config_of(values), device=torch.device("cpu"), level=level, seed=3, dtype=torch.float64).eval()
        with sdpa_kernel(SDPBackend.MATH):  # The others of torch have no second derivative.
            hidden = model.hidden(tokens, Context()).flatten(0, 1)
            loss = model.kernels.linear_cross_entropy(hidden, model.head_weight, tokens.flatten())
            weights = list(model.parameters())
            first = torch.autograd.grad(loss, weights, create_graph=True, materialize_grads=True)
            total = torch.stack([each.square().sum() for each in first]).sum()
            return list(torch.autograd.grad(total, weights, materialize_grads=True))

    for one, other in zip(curvature("O1"), curvature("O0"), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-7)
