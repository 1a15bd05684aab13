from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.attention import bf16_attention
from kitforge.core.kernels.attention.fused import attention, traceable_attention
from kitforge.core.kernels.attention.reference import attention as reference
from kitforge.core.nn.positions import alibi_slopes
from tests.core.kernels.comparison import TOLERANCE, Call, distance, random, relative, results
from tests.core.kernels.operations import ragged

# batch, heads, kv_heads, queries, keys
SHAPES = [(2, 4, 4, 5, 5), (2, 4, 2, 7, 7), (1, 6, 1, 33, 33), (3, 2, 2, 1, 1), (0, 4, 2, 5, 5), (2, 4, 2, 0, 0)]


def heads(batch: int, num_heads: int, kv_heads: int, queries: int, keys: int, **options: Any) -> list[Tensor]:
    query = random(batch, num_heads, queries, 6, **options)
    return [query, random(batch, kv_heads, keys, 6, seed=1, **options), random(batch, kv_heads, keys, 6, **options)]


@pytest.mark.parametrize("kernel", [attention, reference])
@pytest.mark.parametrize("masked", [False, True])
def test_what_a_query_may_not_see_does_not_move_it(kernel: Call, masked: bool) -> None:
    query, key, value = heads(2, 4, 2, 6, 6)
    options = {"mask": ragged(6) if masked else None, "causal": True, "scale": 0.3}
    before = kernel(query, key, value, **options)
    key[:, :, 5], value[:, :, 5] = 1e6, -1e6
    assert torch.equal(kernel(query, key, value, **options)[:, :, :5], before[:, :, :5])
    if masked:
        key[:, :, :2], value[:, :, :2] = 1e6, -1e6
        assert torch.equal(kernel(query, key, value, **options)[:, :, 2:5], before[:, :, 2:5])


@pytest.mark.parametrize("native", [False], indirect=True)
def test_where_half_is_for_storage_only_nothing_of_a_head_s_width_is_kept_in_fp32(native: bool) -> None:
    inputs = [each.requires_grad_() for each in heads(2, 4, 4, 5, 5, dtype=torch.bfloat16)]
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(*inputs, mask=None, causal=True, scale=0.3)
    node = output.grad_fn.next_functions[0][0]
    names = ("query", "key", "value")
    kept = {name: getattr(node, f"_raw_saved_{name}").data for name in names}
    assert all(torch.equal(kept[name], each) for name, each in zip(names, inputs, strict=True))
    assert all(each.dtype == torch.bfloat16 for each in kept.values())


# With more than one block, a last one that is not full, and one that is.
LONG = [*SHAPES[:4], (2, 2, 2, 130, 130), (1, 4, 2, 128, 128)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", LONG)
def test_plain_products_are_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wanted = partial(reference, mask=None, causal=True, scale=0.3)
    assert distance(partial(bf16_attention.attention, scale=0.3), wanted, heads(*shape, dtype=dtype)) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.parametrize("native", [True], indirect=True)
def test_short_texts_in_half_precision_go_by_plain_products_and_long_ones_do_not(native: bool) -> None:
    for length, is_short in ((130, True), (6000, False)):
        inputs = [each.bfloat16().requires_grad_() for each in heads(1, 1, 1, length, length)]
        node = attention(*inputs, mask=None, causal=True, scale=0.3).grad_fn
        assert ("Products" in type(node).__name__) == is_short
    assert "Products" not in type(attention(*inputs, mask=ragged(6000), causal=True, scale=0.3).grad_fn).__name__


@pytest.mark.parametrize("native", [True], indirect=True)
def test_plain_products_are_as_near_as_the_fused_kernel(native: bool) -> None:
    query, key, value = heads(2, 2, 2, 130, 130, dtype=torch.bfloat16)
    inputs = [query * 6, key, value]
    wanted = results(partial(reference, mask=None, causal=True, scale=0.3), [each.double() for each in inputs])
    found = results(partial(bf16_attention.attention, scale=0.3), inputs)
    fused = results(partial(functional.scaled_dot_product_attention, is_causal=True, scale=0.3), inputs)
    for ours, theirs, exact in zip(found, fused, wanted, strict=True):
        assert (ours - exact).norm() < 1.5 * (theirs - exact).norm()


def by_definition(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, mask: Tensor) -> Tensor:
    """Head by head, with the distance of every pair."""
    output = torch.empty_like(query)
    queries, keys = query.shape[2], key.shape[2]
    for head in range(query.shape[1]):
        own = head * key.shape[1] // query.shape[1]
        scores = query[:, head] @ key[:, own].transpose(1, 2) * 0.3
        for row in range(queries):
            for column in range(keys):
                scores[:, row, column] += slopes[head] * (column - (keys - queries + row))
        output[:, head] = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ value[:, own]
    return output


@pytest.mark.parametrize("kernel", [reference, attention, traceable_attention])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 9), (1, 5), (7, 300)])
def test_the_bias_is_slope_times_distance(kernel: Call, queries: int, keys: int) -> None:
    inputs, slopes = heads(2, 4, 2, queries, keys), random(4, seed=5).abs()
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    found = kernel(*inputs, mask=seen, causal=True, scale=0.3, slopes=slopes)
    assert relative(found, by_definition(*inputs, slopes, seen)) < 1e-12


CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_row_is_as_exact_as_without_a_bias(dtype: torch.dtype) -> None:
    # Biases reach 1,400. Rounded at that size, as where a row's positions are counted from 0, the error is 50 times as
    # large in fp32. Of twelve heads the steepest and, as of eight, the shallowest.
    inputs = [random(1, 3, 2000, 16, seed=seed).to(dtype) for seed in range(3)]
    slopes, errors = alibi_slopes(12, CPU)[[8, 0, 7]], []
    options: dict[str, Any] = {"mask": None, "causal": True, "scale": 0.25}
    for more in ({"slopes": slopes}, {}):
        exact = reference(*(each.double() for each in inputs), **options, **more)
        errors.append(float((attention(*inputs, **options, **more).double() - exact).abs().max()))
    assert errors[0] < 3 * errors[1]


def test_slopes_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.models.bloom.modeling_bloom").build_alibi_tensor
    for num_heads in range(1, 130):
        wanted = theirs(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
        torch.testing.assert_close(alibi_slopes(num_heads, CPU), wanted, rtol=2e-6, atol=0)
