"""Who gets a row, and who loses it again, against a table of plain dicts."""

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE
from kitforge.embedding_cache import expiry
from kitforge.embedding_cache.keys.admission import Admission
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions
from kitforge.embedding_cache.table import CachedEmbedding
from tests.embedding_cache.training import Case, batches, bits, build, loss_of, rate, rows_of

DIM, RATE = 2, 0.5
ids_of = st.lists(st.integers(-4, 4), min_size=0, max_size=6)
# step: a lookup whose step is made; part: a micro-batch of the step that the next `step` or `skip` ends.
call = st.tuples(ids_of, st.sampled_from(["step", "part", "skip", "look", "evaluate"]))


class Oracle:
    """SGD on rows in a dict, with counts, ages and norms in dicts."""

    def __init__(self, initial: dict[int, Tensor], admission: AdmissionOptions, expiry: ExpiryOptions) -> None:
        self.initial, self.admission, self.expiry = initial, admission, expiry
        self.rows: dict[int, Tensor] = {}
        self.seen: dict[int, int] = {}
        self.seen_last: dict[int, int] = {}
        self.updates: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.pending: list[int] | None = None
        self.steps = self.counted_steps = 0

    def row(self, key: int) -> Tensor:
        return self.rows.get(key, self.initial[key])

    def look(self, keys: list[int]) -> None:
        """A lookup of the training."""
        now = self.counted_steps + 1
        for key in set(keys):
            is_admitted = self.seen.get(key, 0) >= self.admission.count
            if not is_admitted and now - self.seen_last.get(key, now) > self.admission.age:
                self.seen[key] = 0
            if self.seen_last.get(key) != now:
                self.seen[key] = self.seen.get(key, 0) + 1
            self.seen_last[key] = now
        self.pending = [*(self.pending or []), *keys]

    def end(self, is_skipped: bool) -> None:
        keys, self.pending = self.pending, None
        self.counted_steps += keys is not None
        if is_skipped:
            return
        self.steps += 1
        for key in {key for key in keys or [] if self.seen[key] >= self.admission.count}:
            self.rows[key] = self.row(key) - RATE * keys.count(key) * torch.ones(DIM)
            self.updates[key] = self.updates.get(key, 0) + 1
            self.last[key] = self.steps
        if self.expiry.every and self.steps % self.expiry.every == 0:
            for key in [key for key in self.rows if self.goes(key)]:
                del self.rows[key], self.updates[key], self.last[key], self.seen[key], self.seen_last[key]

    def goes(self, key: int) -> bool:
        bounds = self.expiry
        return (
            (bounds.max_age is not None and self.steps - self.last[key] > bounds.max_age)
            or (bounds.min_updates is not None and self.updates[key] < bounds.min_updates)
            or (bounds.min_norm is not None and float(self.rows[key].double().norm()) < bounds.min_norm)
        )


FORGETTING = {
    "nothing": ExpiryOptions(),
    "age": ExpiryOptions(every=2, max_age=2),
    "updates": ExpiryOptions(every=3, min_updates=2),
    "both": ExpiryOptions(every=2, max_age=3, min_updates=2),
    "norm": ExpiryOptions(every=1, min_norm=2.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("device_rows", [None, 3])
@pytest.mark.parametrize("expiry", FORGETTING)
@settings(max_examples=12)
@given(calls=st.lists(call, max_size=14), count=st.integers(1, 3), age=st.integers(1, 3))
def test_a_table_is_its_oracle(
    expiry: str, device_rows: int | None, calls: list[tuple[list[int], str]], count: int, age: int
) -> None:
    everything = torch.arange(-4, 5)
    admission = AdmissionOptions(name="count", count=count, age=age)
    table = CachedEmbedding(
        None,
        DIM,
        mode=None,
        optimizer="sgd",
        init_scale=0.5,
        device_rows=device_rows,
        admission=admission,
        expiry=FORGETTING[expiry],
    )
    with torch.no_grad():
        initial = dict(zip(everything.tolist(), table(everything), strict=True))
    oracle = Oracle(initial, admission, FORGETTING[expiry])
    for keys, kind in calls:
        ids = torch.tensor(keys, dtype=torch.int64)
        if kind in ("look", "evaluate"):
            with torch.set_grad_enabled(kind == "evaluate"):
                table.train(kind == "look")(ids)
            table.train()
            continue
        table(ids).sum().backward()
        oracle.look(keys)
        if kind != "part":
            oracle.end(kind == "skip")
            table.clear_gradients() if kind == "skip" else table.step(RATE)
    table.clear_gradients()
    with torch.no_grad():
        got = table(everything)
    torch.testing.assert_close(got, torch.stack([oracle.row(key) for key in everything.tolist()]), rtol=0, atol=0)
    assert rows_of(table.begin_snapshot())[0].tolist() == sorted(oracle.rows)


@pytest.mark.parametrize("name", ["count", "probability"])
@pytest.mark.parametrize("tiers", ["host", "file"])
def test_admission_does_not_see_look_ahead_or_tiers(name: str, tiers: str, tmp_path: Path) -> None:
    admission = AdmissionOptions(name=name, count=3, probability=0.4)
    tables = [
        build(case, tmp_path / str(number), admission=admission, expiry=ExpiryOptions(every=5, max_age=6))
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
        assert table.stats().unadmitted > 0
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
        admitted = admission.admit(keys, is_counted=True)
        admission.end_step()
        share = float(admitted[outside].double().mean())
        assert share == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / int(outside.sum())))
        assert bool(admitted[~outside].all())
        outside = ~admitted


def admission_of(**options: Any) -> Admission:
    return Admission(AdmissionOptions(**options), TABLE_REFERENCE.hash_map, seed=0, table="a")


def test_counts_that_expire_take_no_memory() -> None:
    admission = admission_of(name="count", count=2, age=50)
    for step in range(2000):
        # One id that comes back in time, one that is admitted and does not come again, and many that are new.
        new = torch.arange(20 * step, 20 * step + 20) + 100
        admission.admit(torch.cat([new, torch.tensor([1])] + [torch.tensor([2])] * (step < 2)), is_counted=True)
        admission.end_step()
    assert len(admission._entries) < 3 * 20 * 50 + 5000
    keys, counts = admission.counts()
    assert keys[:2].tolist() == [1, 2]
    assert counts[:2].tolist() == [[2000, 2000], [2, 2]]
    assert len(keys) == 2 + 20 * 50
    assert admission.admit(torch.tensor([1, 2, 3, 100]), is_counted=False).tolist() == [True, True, False, False]


@pytest.mark.parametrize("name", ["count", "probability"])
def test_a_step_counts_an_id_once_in_however_many_lookups(name: str) -> None:
    whole, parts = (admission_of(name=name, count=3, probability=0.3) for _ in range(2))
    for step in range(12):
        keys = torch.randperm(40, generator=torch.Generator().manual_seed(step))[:25]
        wanted = dict(zip(keys.tolist(), whole.admit(keys, is_counted=True).tolist(), strict=True))
        for part in (keys[:10], keys[5:20], keys[20:], keys[:1]):
            assert parts.admit(part, is_counted=True).tolist() == [wanted[key] for key in part.tolist()]
        for each in (whole, parts):
            each.end_step()
            each.end_step()
    assert all(map(torch.equal, whole.counts(), parts.counts()))


def test_an_evaluation_beside_a_prefetcher_counts_nothing() -> None:
    """The mode is that in which a lookup is computed, whichever the thread that plans it may see."""
    counted = []
    for depth in (0, 2):
        table = CachedEmbedding(
            None, 4, optimizer="sgd", device_rows=50, admission=AdmissionOptions(name="count", count=2)
        )
        given = [torch.arange(10).unsqueeze(1).clone() for _ in range(6)]
        outputs = []
        for number, ids in enumerate(table.prefetch(given, depth)):
            outputs.append(table(ids))
            outputs[-1].sum().backward()
            table.step(0.1)
            with torch.no_grad():
                if number % 2:
                    # A pass without gradients in training mode is no training either.
                    table(ids)
                    continue
                table.eval()(torch.arange(100, 105).unsqueeze(1))
                # Long enough for what comes next to be planned.
                time.sleep(0.02)
                table.train()
        keys, counts = table.rows.admission.counts()
        counted.append((torch.cat(outputs).detach(), keys, counts))
        table.close()
    assert all(map(torch.equal, *counted))
    assert counted[0][1].tolist() == list(range(10))
    assert counted[0][2][:, 0].tolist() == [6] * 10


def test_a_pass_that_is_only_looked_at_counts_nothing_at_any_depth() -> None:
    for depth in (0, 2):
        table = CachedEmbedding(None, 4, device_rows=50, admission=AdmissionOptions(name="count", count=2))
        with torch.no_grad():
            for ids in table.prefetch([torch.arange(5).unsqueeze(1).clone() for _ in range(4)], depth):
                table(ids)
        assert len(table.rows.admission.counts()[0]) == 0
        table.close()


@pytest.mark.slow
def test_unseen_ids_of_an_evaluation_take_no_lasting_room() -> None:
    for tiers in ({}, {"device_rows": 40}):
        table = CachedEmbedding(None, 4, optimizer="lazy_adam", **tiers)
        for ids in table.prefetch([torch.arange(20).view(-1, 1).clone() for _ in range(4)], 2):
            # Batches planned ahead do not keep what an evaluation leaves behind.
            with torch.no_grad():
                for start in range(1000, 5000, 50):
                    table.eval()(torch.arange(start, start + 50).view(-1, 1))
            table.train()(ids).sum().backward()
            table.step(RATE)
        assert len(table.rows.device.slab) <= 1024
        assert sum(table.stats().resident.values()) <= 120
        assert rows_of(table.begin_snapshot())[0].tolist() == list(range(20))
        table.close()


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [{}, {"device_rows": 60}, {"device_rows": 60, "host_rows": 20, "path": "rows"}])
def test_forgetting_gives_back_slots_and_counts(
    tiers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"admission": AdmissionOptions(name="count", count=1), "expiry": ExpiryOptions(every=5, max_age=3)}
    with CachedEmbedding(None, DIM, optimizer="lazy_adam", **tiers, **options) as table:
        given = [torch.arange(20 * step, 20 * step + 20).view(-1, 1) for step in range(300)]
        for ids in table.prefetch(given, 2):
            table(ids).sum().backward()
            table.step(RATE)
        stats = table.stats()
        assert stats.expired > 5000
        assert sum(stats.resident.values()) <= 20 * (5 + 3 + 2 + 2)
        assert len(table.rows.device.slab) <= 1024
        assert len(table.rows.admission.counts()[0]) <= 20 * (5 + 3 + 1)


@pytest.mark.parametrize("tiers", [{}, {"device_rows": 60, "host_rows": 20, "path": "rows"}])
@pytest.mark.parametrize("is_restored", [False, True])
def test_expiry_reads_the_rows_that_are_due_and_no_others(
    is_restored: bool, tiers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    read: list[int] = []
    goes = expiry.is_expired
    monkeypatch.setattr(expiry, "is_expired", lambda *given: read.append(len(given[2])) or goes(*given))
    options: dict[str, Any] = {"optimizer": "lazy_adam", "expiry": ExpiryOptions(every=4, max_age=40)}
    table = CachedEmbedding(None, DIM, **options, **tiers)
    for step in range(120):
        if is_restored and step == 35:
            with table as before:
                table = CachedEmbedding(None, DIM, **options)
                table.load_rows(before.begin_snapshot())
        # One key changes at each step, one twice.
        ids = [*range(20 * step, 20 * step + 20), -1, *([-2] if step in (12, 32) else [])]
        table(torch.tensor(ids).view(-1, 1)).sum().backward()
        table.step(RATE)
        if step in (71, 75):
            assert (-2 in rows_of(table.begin_snapshot())[0].tolist()) == (step == 71)
    # All but these two are read once, when they go.
    assert table.stats().expired == 20 * 79 + 1
    assert sum(read) <= 20 * 79 + 3 + 2
    assert rows_of(table.begin_snapshot())[0].tolist() == [-1, *range(20 * 79, 20 * 120)]
    table.close()
