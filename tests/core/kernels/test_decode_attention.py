from functools import partial

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.decode_attention import fused
from kitforge.core.kernels.decode_attention.reference import decode_attention as reference
from kitforge.core.kernels.dispatch import select
from tests.core.kernels.comparison import random, relative

SCALE = 0.3


def texts(
    lengths: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 7, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Query, keys, values, starts, lengths; texts lie apart from one another, and what lies between is not a number."""
    starts = [3 + place * (max(lengths, default=0) + 2) for place in range(len(lengths))]
    slots = 3 + (max(lengths, default=0) + 2) * (len(lengths) + 1)
    slabs = [torch.full((slots, kv_heads, head_dim), float("nan"), dtype=dtype) for _ in range(2)]
    for seed, slab in enumerate(slabs):
        for start, length in zip(starts, lengths, strict=True):
            slab[start : start + length] = random(length, kv_heads, head_dim, seed=seed + start).to(dtype)
    query = random(len(lengths), heads, head_dim, seed=9).to(dtype)
    return query, *slabs, torch.tensor(starts, dtype=torch.long), torch.tensor(lengths, dtype=torch.long)


def compiled() -> partial[Tensor]:
    module = pytest.importorskip("kitforge.core.kernels.decode_attention.numba")
    return partial(module.decode_attention, scale=SCALE)


def exact(inputs: tuple[Tensor, ...], window: int | None, slopes: Tensor | None = None) -> Tensor:
    query, keys, values, starts, lengths = inputs
    doubles = query.double(), keys.double(), values.double()
    return reference(*doubles, starts, lengths, window=window, scale=SCALE, slopes=slopes)


@pytest.mark.parametrize("size", [1e-30, 1.0, 40.0, 1e4])
@torch.no_grad()
def test_scores_of_any_size_make_a_softmax(size: float) -> None:
    query, *others = texts([1, 9, 30])
    inputs = query * size, *others
    assert relative(compiled()(*inputs, window=None), exact(inputs, None)) < 2e-6 * max(1.0, size / 10)


@pytest.mark.parametrize("place", range(6))
@pytest.mark.parametrize("slab", [1, 2], ids=["keys", "values"])
@torch.no_grad()
def test_a_key_that_is_not_a_number_shows_in_its_text_only(slab: int, place: int) -> None:
    inputs = texts([6, 6])
    inputs[slab][inputs[3][1] + place] = float("nan")
    found = compiled()(*inputs, window=None)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@torch.no_grad()
def test_models_take_the_compiled_loop_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = texts([5, 3])
    options = {"window": None, "scale": SCALE}
    assert torch.equal(select("O1").decode_attention(*inputs, **options), compiled()(*inputs, window=None))
    with torch.enable_grad():
        assert not torch.equal(select("O1").decode_attention(*inputs, **options), compiled()(*inputs, window=None))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select.__wrapped__("O1").decode_attention is fused.decode_attention
