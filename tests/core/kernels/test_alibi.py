"""ALiBi's bias in every kernel of attention: by features in the fused ones, as a bias in the definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.attention.fused import attention, traceable_attention
from kitforge.core.kernels.attention.reference import attention as reference
from kitforge.core.nn.positions import alibi_slopes
from tests.core.kernels.comparison import TOLERANCE, Call, autocast, distance, random, relative, results
from tests.core.kernels.test_attention import SHAPES, heads, ragged


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


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_the_definition(shape: tuple[int, ...], dtype: torch.dtype, masked: bool) -> None:
    mask = ragged(shape[3]) if masked else None
    options: dict[str, Any] = {"mask": mask, "causal": True, "scale": 0.3, "slopes": random(shape[1]).abs()}
    wanted = partial(reference, **options)
    for kernel in (attention, traceable_attention):
        assert distance(partial(kernel, **options), wanted, heads(*shape, dtype=dtype)) < TOLERANCE[dtype]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_autocast_it_is_near_the_exact_result(shape: tuple[int, ...], masked: bool, native: bool) -> None:
    inputs = heads(*shape, dtype=torch.bfloat16)
    mask = ragged(shape[3]) if masked else None
    options: dict[str, Any] = {"mask": mask, "causal": True, "scale": 0.3, "slopes": alibi_slopes(shape[1], CPU)}
    found = results(autocast(partial(attention, **options)), inputs)
    assert found[0].dtype == torch.bfloat16
    wanted = results(partial(reference, **options), [each.float() for each in inputs])
    assert max(map(relative, found, wanted)) < TOLERANCE[torch.bfloat16]


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
