"""Who gets a row, and who loses it again, against a table of plain dicts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE
from kitforge.embedding_cache.admission import Admission
from kitforge.embedding_cache.options import AdmissionOptions, ForgettingOptions
from kitforge.embedding_cache.table import CachedEmbedding
from tests.embedding_cache.training import Case, batches, bits, build, loss_of, rate, rows_of

DIM, RATE = 2, 0.5
ids_of = st.lists(st.integers(-4, 4), min_size=0, max_size=6)
call = st.tuples(ids_of, st.sampled_from(["train", "skip", "look"]))


class Oracle:
    """SGD on rows in a dict, with counts, ages and norms in dicts."""

    def __init__(self, initial: dict[int, Tensor], count: int, forgetting: ForgettingOptions) -> None:
        self.initial, self.count, self.forgetting = initial, count, forgetting
        self.rows: dict[int, Tensor] = {}
        self.seen: dict[int, int] = {}
        self.updates: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.steps = 0

    def row(self, key: int) -> Tensor:
        return self.rows.get(key, self.initial[key])

    def train(self, keys: list[int], is_skipped: bool) -> None:
        for key in set(keys):
            self.seen[key] = self.seen.get(key, 0) + 1
        if is_skipped:
            return
        self.steps += 1
        for key in {key for key in keys if self.seen[key] >= self.count}:
            self.rows[key] = self.row(key) - RATE * keys.count(key) * torch.ones(DIM)
            self.updates[key] = self.updates.get(key, 0) + 1
            self.last[key] = self.steps
        if self.forgetting.every and self.steps % self.forgetting.every == 0:
            for key in [key for key in self.rows if self.goes(key)]:
                del self.rows[key], self.updates[key], self.last[key]

    def goes(self, key: int) -> bool:
        bounds = self.forgetting
        return (
            (bounds.age is not None and self.steps - self.last[key] > bounds.age)
            or (bounds.updates is not None and self.updates[key] < bounds.updates)
            or (bounds.norm is not None and float(self.rows[key].double().norm()) < bounds.norm)
        )


FORGETTING = {
    "nothing": ForgettingOptions(),
    "age": ForgettingOptions(every=2, age=2),
    "updates": ForgettingOptions(every=3, updates=2),
    "norm": ForgettingOptions(every=1, norm=2.0),
}


@pytest.mark.parametrize("device_rows", [None, 3])
@pytest.mark.parametrize("forgetting", FORGETTING)
@settings(max_examples=12)
@given(calls=st.lists(call, max_size=12), count=st.integers(1, 3))
def test_a_table_is_its_oracle(
    forgetting: str, device_rows: int | None, calls: list[tuple[list[int], str]], count: int
) -> None:
    everything = torch.arange(-4, 5)
    table = CachedEmbedding(
        None,
        DIM,
        mode=None,
        optimizer="sgd",
        spread=0.5,
        device_rows=device_rows,
        admission=AdmissionOptions(name="count", count=count),
        forgetting=FORGETTING[forgetting],
    )
    with torch.no_grad():
        initial = dict(zip(everything.tolist(), table(everything), strict=True))
    oracle = Oracle(initial, count, FORGETTING[forgetting])
    for keys, kind in calls:
        ids = torch.tensor(keys, dtype=torch.int64)
        if kind == "look":
            with torch.no_grad():
                table(ids)
            continue
        table(ids).sum().backward()
        oracle.train(keys, kind == "skip")
        table.clear_gradients() if kind == "skip" else table.step(RATE)
    with torch.no_grad():
        got = table(everything)
    torch.testing.assert_close(got, torch.stack([oracle.row(key) for key in everything.tolist()]), rtol=0, atol=0)
    assert rows_of(table.begin_snapshot())[0].tolist() == sorted(oracle.rows)


@pytest.mark.parametrize("name", ["count", "probability"])
@pytest.mark.parametrize("tiers", ["host", "file"])
def test_admission_does_not_see_look_ahead_or_tiers(name: str, tiers: str, tmp_path: Path) -> None:
    admission = AdmissionOptions(name=name, count=3, probability=0.4)
    tables = [
        build(case, tmp_path / str(number), admission=admission, forgetting=ForgettingOptions(every=5, age=6))
        for number, case in enumerate((Case(tiers="whole", depth=0), Case(tiers=tiers, depth=3, spare=0.0)))
    ]
    results = []
    for table, depth in zip(tables, (0, 3), strict=True):
        given_batches = batches()
        answers = []
        for step, ids in enumerate(table.prefetch(given_batches, depth)):
            answer = table(ids)
            loss_of(answer, step).backward()
            table.step(rate(step))
            answers.append(bits(answer.detach().clone()))
        results.append((answers, rows_of(table.begin_snapshot())))
        assert table.stats().guests > 0
        table.close()
    (answers, rows), (others, other_rows) = results
    assert all(map(torch.equal, answers, others))
    assert torch.equal(rows[0], other_rows[0])
    assert torch.equal(bits(rows[1]), bits(other_rows[1]))


def test_ids_without_admission_take_no_lasting_room() -> None:
    table = CachedEmbedding(None, DIM, admission=AdmissionOptions(name="count", count=2))
    for start in range(0, 5000, 50):
        table(torch.arange(start, start + 50).view(-1, 1)).sum().backward()
        table.step(RATE)
    assert table.stats().resident["device"] <= 100
    assert len(rows_of(table.begin_snapshot())[0]) == 0


def test_a_probability_admits_that_share_of_lookups() -> None:
    keys = torch.arange(20_000) * 977 - 5
    admission = Admission(
        AdmissionOptions(name="probability", probability=0.25), TABLE_REFERENCE.hash_map, seed=1, table="a"
    )
    outside = torch.ones(len(keys), dtype=torch.bool)
    for _ in range(3):
        admitted = admission.observe(keys)
        share = float(admitted[outside].double().mean())
        assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / int(outside.sum())))
        assert bool(admitted[~outside].all())
        outside = ~admitted


def test_a_lookup_that_is_taken_back_was_never_counted() -> None:
    admission = Admission(AdmissionOptions(name="count", count=2), TABLE_REFERENCE.hash_map, seed=0, table="a")
    admission.observe(torch.tensor([1, 2]))
    admission.observe(torch.tensor([2, 3]))
    admission.retract(torch.tensor([2, 3]))
    keys, counts = admission.counts()
    assert keys.tolist() == [1, 2]
    assert counts.tolist() == [1, 1]
