"""Random programs over one table: training in micro-batches, skipped steps, evaluations, passes without gradients,
lookups that nobody trains on and checkpoints of changes. What comes out does not depend on where rows live."""

import itertools
import os
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions, PolicyOptions
from kitforge.embedding_cache.table import CachedEmbedding
from tests.embedding_cache.training import DEPTHS, OPTIMIZERS, bits, sampled

NUM_STEPS, NUM_IDS = 30, 400
ADMISSIONS = (
    AdmissionOptions(),
    AdmissionOptions(name="count", count=2, age=6),
    AdmissionOptions(name="probability", probability=0.4),
)
FORGETTINGS = (
    ExpiryOptions(),
    ExpiryOptions(every=5, max_age=4),
    ExpiryOptions(every=3, min_updates=2),
    ExpiryOptions(every=4, min_norm=0.03),
)
POLICIES = (PolicyOptions(), PolicyOptions(name="lfu", half_life=3.0), PolicyOptions(name="lookahead", window=3))
TIERS: tuple[dict[str, Any], ...] = (
    {"device_rows": 60},
    {"device_rows": 40, "path": "rows", "host_rows": 0},
    {"device_rows": 30, "host_rows": 20, "path": "rows"},
    {"device_rows": 200, "host_rows": 100, "path": "rows"},
)
PRODUCT = list(itertools.product(OPTIMIZERS, ADMISSIONS, FORGETTINGS, POLICIES, TIERS, DEPTHS))
NUM_PROGRAMS = 150 if os.environ.get("KITFORGE_PROVE") else 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    lookups: list[Tensor]  # bags of two ids
    looks: list[Tensor]  # without gradients
    evaluations: list[Tensor]
    rate: float
    is_skipped: bool
    is_trained_on: bool
    is_saved: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Everything that must not depend on where rows live."""

    outputs: list[Tensor] = field(default_factory=list)
    stored: dict[str, Tensor] = field(default_factory=dict)  # ids and rows of each part of the last checkpoint


def program(seed: int) -> list[Step]:
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def ids(probability: float) -> Iterator[Tensor]:
        while numbers.random() < probability:
            # Few frequent and many rare ones, from all over int64.
            drawn = (torch.rand(numbers.choice([0, 1, 8, 30]), 2, generator=generator) ** 3 * NUM_IDS).long()
            yield drawn * numbers.choice([1, 1, 1, -(2**55), 2**54])
            probability /= 2

    return [
        Step(
            lookups=list(ids(1.0)),
            looks=list(ids(0.3)),
            evaluations=[each + NUM_IDS // 2 for each in ids(0.3)],
            rate=numbers.choice([0.1, 0.01]),
            is_skipped=numbers.random() < 0.15,
            is_trained_on=numbers.random() < 0.9,
            is_saved=numbers.random() < 0.2,
        )
        for _ in range(NUM_STEPS)
    ]


def run(table: CachedEmbedding, steps: list[Step], depth: int, folder: Path) -> Result:
    result = Result()
    with closing(CheckpointWriter(folder)) as writer:
        writer.attach({"table": table}, num_deltas=4)
        num_saved = 0
        for step in table.prefetch(steps, depth, ids=lambda step: step.lookups):
            for ids in step.lookups:
                answer = table(ids)
                result.outputs.append(answer.detach())
                if step.is_trained_on:
                    (answer * torch.arange(1.0, 1.0 + answer.numel()).view_as(answer)).sum().mul(0.01).backward()
                # Its graph may still bring gradients.
                del answer
            with torch.no_grad():
                result.outputs.extend(table(ids) for ids in step.looks)
                result.outputs.extend(table.eval()(ids) for ids in step.evaluations)
            table.train()
            table.clear_gradients() if step.is_skipped else table.step(step.rate)
            if step.is_saved:
                num_saved += 1
                writer.save(num_saved, model=[], optimizer=[], state={})
        writer.save(num_saved + 1, model=[], optimizer=[], state={})
    assert table.rows.pins.open_lookups() == []
    stored = open_checkpoint(folder / f"step_{num_saved + 1}").table("table")
    for part in stored.parts:
        chunks = [(ids.clone(), rows.clone()) for ids, rows in stored.chunks(part)]
        if chunks:
            ids, rows = (torch.cat(each) for each in zip(*chunks, strict=True))
            order = ids.argsort()
            result.stored.update({f"{part} ids": ids[order], part: rows[order]})
    again = CachedEmbedding(None, 4, **made_of(table))
    again.load_rows(stored)
    with torch.no_grad():
        probe = torch.arange(NUM_IDS).view(-1, 2)
        result.outputs.append(table.eval()(probe))
        assert torch.equal(bits(again.eval()(probe)), bits(result.outputs[-1]))
    return result


def made_of(table: CachedEmbedding) -> dict[str, Any]:
    options = table.options
    return {"optimizer": table.optimizer, "admission": options.admission, "expiry": options.expiry}


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_a_program_ends_the_same_wherever_rows_live(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    [(optimizer, admission, expiry, policy, tiers, depth)] = sampled(PRODUCT, 1, seed=seed)
    rules = {"optimizer": optimizer, "admission": admission, "expiry": expiry}
    steps, results = program(seed), []
    for name, where, depth_of in (("plain", {}, 0), ("cached", tiers | {"policy": policy}, depth)):
        with CachedEmbedding(None, 4, **rules, **where) as table:
            results.append(run(table, steps, depth_of, tmp_path / name))
    plain, cached = results
    for number, (one, other) in enumerate(zip(plain.outputs, cached.outputs, strict=True)):
        assert torch.equal(bits(one), bits(other)), f"output {number}"
    assert plain.stored.keys() == cached.stored.keys()
    for name, values in plain.stored.items():
        assert torch.equal(values.view(torch.int32), cached.stored[name].view(torch.int32)), name
