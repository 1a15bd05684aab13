"""Attention over a paged cache: every implementation against the float64 definition, page by page."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import REFERENCE, implementation
from kitforge.core.kernels.paged_attention import triton as module
from kitforge.core.kernels.triton.accepts import accepts_triton_pages
from tests.core.kernels.comparison import poison, random
from tests.differential.drawn import WHOLE
from tests.pairs import pairs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BLOCK, NUM_BLOCKS = 4, 48
# Sequences of one position, of whole blocks, one beyond and one below, and of several tiles and splits.
LENGTHS = [1, 4, 5, 39, 16, 17, 80]


def cache(dim: int, kv_heads: int, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values, NaN in every slot that no sequence attends to (block 0 is nobody's), and shuffled block tables
    padded with the last block."""
    blocks = (1 + torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(3))).tolist()
    keys = torch.full((NUM_BLOCKS * BLOCK, kv_heads, dim), math.nan, dtype=torch.float64)
    values = keys.clone()
    width, tables = max(-(-length // BLOCK) for length in lengths), []
    for seed, length in enumerate(lengths):
        own = [blocks.pop() for _ in range(-(-length // BLOCK))]
        tables.append((own + own[-1:] * width)[:width])
        slots = torch.tensor([own[place // BLOCK] * BLOCK + place % BLOCK for place in range(length)])
        keys[slots] = random(length, kv_heads, dim, seed=seed)
        values[slots] = random(length, kv_heads, dim, seed=seed + 50)
    return keys, values, torch.tensor(tables)


def expected(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, **options: Any) -> Tensor:
    """Sequence by sequence and head by head, without the pages that are not attended to."""
    window, scale, slopes = options["window"], options["scale"], options.get("slopes")
    output = torch.empty_like(query)
    for text, length in enumerate(lengths.tolist()):
        first = max(0, length - window) if window else 0
        places = torch.arange(first, length)
        slots = tables[text][places // BLOCK] * BLOCK + places % BLOCK
        for head in range(query.shape[1]):
            own = head * keys.shape[1] // query.shape[1]
            scores = keys[slots, own] @ query[text, head] * scale
            if slopes is not None:
                scores += slopes[head] * (places - (length - 1))
            output[text, head] = torch.softmax(scores, 0) @ values[slots, own]
    return output


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(
    ("shape", "window", "dtype"), pairs([(2, 2, 8), (6, 2, 20), (3, 1, 64)], [None, 1, 6], TOLERANCE)
)
def test_triton_attends_to_the_pages_of_each_sequence(
    shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    keys, values, tables = cache(dim, kv_heads, LENGTHS)
    query, lengths, slopes = random(len(LENGTHS), heads, dim), torch.tensor(LENGTHS), random(heads).abs() / 4
    # The interpreter takes long; in the gate each shape and window is met with and without slopes, in some dtype.
    both: list[dict[str, Any]] = [{}, {"slopes": slopes}]
    for more in both if WHOLE else [both[list(TOLERANCE).index(dtype) % 2]]:
        options = {"block_size": BLOCK, "window": window, "scale": dim**-0.5, **more}
        rounded = [each.to(dtype) for each in (query, keys, values)]
        poison()
        found = implementation("paged_attention", "triton", "cuda")(*rounded, tables, lengths, **options)
        wanted = expected(*(each.double() for each in rounded), tables, lengths, **options)
        assert found.dtype == dtype
        error = (found.double() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE[dtype], (error, more)


@pytest.mark.parametrize("name", ["reference", "fused"])
def test_plain_torch_agrees_where_every_slot_is_finite(name: str) -> None:
    keys, values, tables = (each.nan_to_num() for each in cache(20, 2, LENGTHS))
    query, lengths = random(len(LENGTHS), 6, 20), torch.tensor(LENGTHS)
    for options in ({}, {"slopes": random(6).abs()}):
        for window in (None, 6):
            own = {"block_size": BLOCK, "window": window, "scale": 0.2, **options}
            found = implementation("paged_attention", name)(query, keys, values, tables, lengths, **own)
            torch.testing.assert_close(
                found, expected(query, keys, values, tables, lengths, **own), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("window", [None, 6, 40])
@pytest.mark.parametrize("length", [1, 17, 79, 160])
def test_one_sequence_is_split_over_programs(length: int, window: int | None) -> None:
    """Splits before the window and beyond the length are empty."""
    keys, values, tables = cache(8, 1, [160])
    keys[tables[0][-(-length // BLOCK) :].view(-1, 1) * BLOCK + torch.arange(BLOCK)] = math.nan
    options = {"block_size": BLOCK, "window": window, "scale": 0.4}
    query, lengths = random(1, 2, 8), torch.tensor([length])
    found = implementation("paged_attention", "triton", "cuda")(query, keys, values, tables, lengths, **options)
    wanted = expected(query, keys, values, tables, lengths, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_sequence_is_the_same_whoever_its_neighbors_are() -> None:
    triton = implementation("paged_attention", "triton", "cuda")
    keys, values, tables = cache(8, 1, LENGTHS)
    query, lengths = random(len(LENGTHS), 2, 8), torch.tensor(LENGTHS)
    for window in (None, 6, 40):
        options = {"block_size": BLOCK, "window": window, "scale": 0.4}
        together = triton(query, keys, values, tables, lengths, **options)
        for text, length in enumerate(LENGTHS):
            own = tables[text : text + 1, : -(-length // BLOCK)]
            alone = triton(query[text : text + 1], keys, values, own, lengths[text : text + 1], **options)
            assert torch.equal(alone[0], together[text])


def test_a_long_sequence_has_longer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_SPLITS", 3)
    keys, values, tables = cache(8, 1, [160])
    options = {"block_size": BLOCK, "window": None, "scale": 0.4}
    query, lengths = random(1, 2, 8), torch.tensor([150])
    found = implementation("paged_attention", "triton", "cuda")(query, keys, values, tables, lengths, **options)
    wanted = expected(query, keys, values, tables, lengths, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_views_no_sequence_and_large_scores() -> None:
    triton = implementation("paged_attention", "triton", "cuda")
    keys, values, tables = (each.nan_to_num() for each in cache(8, 2, LENGTHS))
    query, lengths = 100 * random(len(LENGTHS), 4, 8), torch.tensor(LENGTHS)
    options = {"block_size": BLOCK, "window": None, "scale": 1.0}
    wanted = REFERENCE.paged_attention(query, keys, values, tables, lengths, **options)
    strided = query.transpose(0, 1).contiguous().transpose(0, 1)
    both = torch.stack((keys, values), dim=1)
    found = triton(strided, both[:, 0], both[:, 1], tables.t().contiguous().t(), lengths, **options)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    nothing = triton(query[:0], keys, values, tables[:0], lengths[:0], **options)
    assert nothing.shape == (0, 4, 8)


@pytest.mark.slow
def test_torch_checks_the_operator() -> None:
    implementation("paged_attention", "triton", "cuda")
    keys, values, tables = cache(8, 2, LENGTHS[:3])
    inputs = (random(3, 4, 8), keys, values, tables, torch.tensor(LENGTHS[:3]), None, BLOCK, 0, 0.5)
    torch.library.opcheck(torch.ops.kitforge.paged_attention.default, inputs)


def test_a_cache_in_another_dtype_is_left_to_torch() -> None:
    keys = random(8, 2, 8)
    assert accepts_triton_pages(random(1, 4, 8), keys, keys)
    assert not accepts_triton_pages(random(1, 4, 8).float(), keys, keys)
    assert not accepts_triton_pages(random(1, 4, 300), random(8, 2, 300), random(8, 2, 300))
