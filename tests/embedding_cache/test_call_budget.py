"""The bar against splitting: the calls and files of one cached lookup, its backward pass and a step."""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import kitforge
from kitforge.embedding_cache.table import CachedEmbedding

ROOT = str(Path(kitforge.__file__).parent)
CACHE = "embedding_cache/"


def calls_of_one_step(**tiers: Any) -> Counter[str]:
    """Calls by file, of a step after ten others. Compiled loops count as the one call that they are."""
    table, random = CachedEmbedding(5000, 16, **tiers), torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 5000, (64, 4), generator=random) for _ in range(11)]
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(ROOT):
            calls[name[len(ROOT) + 1 :]] += 1

    def step(ids: torch.Tensor) -> None:
        table(ids).sum().backward()
        table.step(0.1)

    for ids in batches[:-1]:
        step(ids)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        step(batches[-1])
    finally:
        sys.setprofile(before)
        table.close()
    return calls


@pytest.mark.parametrize(
    ("tiers", "own", "whole"),
    [({"device_rows": 600}, (103, 13), (286, 34)), ({}, (69, 11), (179, 29))],
    ids=["with_tiers", "without"],
)
def test_a_cached_lookup_its_backward_and_a_step_keep_to_their_budget(
    tiers: dict[str, Any], own: tuple[int, int], whole: tuple[int, int]
) -> None:
    calls = calls_of_one_step(**tiers)
    ours = {name: num for name, num in calls.items() if name.startswith(CACHE)}
    assert sum(ours.values()) <= own[0], ours
    assert len(ours) <= own[1], sorted(ours)
    assert sum(calls.values()) <= whole[0], calls.most_common()
    assert len(calls) <= whole[1], sorted(calls)
