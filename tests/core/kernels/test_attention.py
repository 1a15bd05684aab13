from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.attention import bf16_attention
from kitforge.core.kernels.attention.fused import attention
from kitforge.core.kernels.attention.reference import attention as reference
from tests.core.kernels.comparison import TOLERANCE, Call, autocast, distance, random, relative, results

# batch, heads, kv_heads, queries, keys
SHAPES = [(2, 4, 4, 5, 5), (2, 4, 2, 7, 7), (1, 6, 1, 33, 33), (3, 2, 2, 1, 1), (0, 4, 2, 5, 5), (2, 4, 2, 0, 0)]


def heads(batch: int, num_heads: int, kv_heads: int, queries: int, keys: int, **options: Any) -> list[Tensor]:
    query = random(batch, num_heads, queries, 6, **options)
    return [query, random(batch, kv_heads, keys, 6, seed=1, **options), random(batch, kv_heads, keys, 6, **options)]


def ragged(length: int) -> Tensor:
    """Causal within documents of which the second starts at a third of the length."""
    document = (torch.arange(length) >= length // 3).long()
    return torch.ones(length, length, dtype=torch.bool).tril() & (document[:, None] == document[None, :])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_its_reference(shape: tuple[int, ...], causal: bool, dtype: torch.dtype) -> None:
    options = {"mask": None, "causal": causal, "scale": 0.3}
    assert (
        distance(partial(attention, **options), partial(reference, **options), heads(*shape, dtype=dtype))
        < (TOLERANCE[dtype])
    )


@pytest.mark.parametrize("dims", [2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_its_reference_under_a_mask(shape: tuple[int, ...], dims: int) -> None:
    mask = ragged(shape[3])
    mask = mask if dims == 2 else mask.expand(shape[0], 1, shape[3], shape[3])
    options = {"mask": mask, "causal": True, "scale": 0.3}
    assert distance(partial(attention, **options), partial(reference, **options), heads(*shape)) < 1e-12


@pytest.mark.parametrize("queries", [1, 3])
def test_new_queries_may_look_at_more_keys(queries: int) -> None:
    seen = torch.ones(queries, 9, dtype=torch.bool).tril(9 - queries)
    options = {"mask": seen, "causal": True, "scale": 0.3}
    assert distance(partial(attention, **options), partial(reference, **options), heads(2, 4, 2, queries, 9)) < 1e-12


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_autocast_it_is_near_the_exact_result(shape: tuple[int, ...], masked: bool, native: bool) -> None:
    inputs = heads(*shape, dtype=torch.bfloat16)
    options = {"mask": ragged(shape[3]) if masked else None, "causal": True, "scale": 0.3}
    found = results(autocast(partial(attention, **options)), inputs)
    assert found[0].dtype == torch.bfloat16
    wanted = results(partial(reference, **options), [each.float() for each in inputs])
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.bfloat16]


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


@pytest.mark.parametrize("fault", [{"scale": 0.3 + 1e-9}, {"causal": False}])
def test_a_planted_fault_shows(fault: dict[str, Any]) -> None:
    options = {"mask": None, "causal": True, "scale": 0.3}
    faulty = partial(attention, **(options | fault))
    assert distance(faulty, partial(reference, **options), heads(2, 4, 2, 7, 7)) > 1e-11
