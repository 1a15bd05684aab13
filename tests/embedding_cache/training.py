"""One small training for all exactness tests: whose rows live where is said by a `Case`, what comes out must not depend
on it."""

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.embedding_cache.cache_manager import CacheManager
from kitforge.embedding_cache.keys.row_init import RowInitConfig, initial_rows
from kitforge.embedding_cache.options import AdmissionOptions, PolicyOptions
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.embedding_cache.tiers.host import HostStore
from kitforge.embedding_cache.tiers.two_level import TwoLevelStore
from tests.row_records import new_records

DIM, NUM_IDS, NUM_STEPS, BAG = 4, 300, 24, 4
COUNT = 2  # of admission, in mixed cases
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl")
POLICIES = ("lru", "lfu", "lookahead")
DEPTHS = (0, 1, 2, 4)
TIERS = ("host", "host_file", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Where rows may live."""

    optimizer: str = "adagrad"
    policy: str = "lru"
    depth: int = 2
    tiers: str = "host_file"
    spare: float = 0.05  # rows of the device tier above the largest batch, as a share of that
    sleeps: int = 0  # a seed for random sleeps in all threads; 0: none
    # Admission by count, steps of two micro-batches, and in between evaluations and passes without gradients.
    is_mixed: bool = False

    def __str__(self) -> str:
        words = f"{self.optimizer}-{self.policy}-{self.depth}-{self.tiers}-{self.spare}-{self.sleeps}"
        return f"{words}-mixed" if self.is_mixed else words

    def parts(self, ids: Tensor) -> list[Tensor]:
        """The micro-batches of a step. Where there are two, the second has ids of the first."""
        return [ids[: len(ids) // 2], ids[len(ids) // 2 :]] if self.is_mixed else [ids]


def optimizer_config(name: str) -> SparseOptimizerConfig:
    """FTRL with an l1 that keeps many rows at zero, which must still be known as rows."""
    return SparseOptimizerConfig(name=name, eps=1e-6, l1=0.3 if name == "ftrl" else 0.0, initial_sum=0.1)


def batches(num_steps: int = NUM_STEPS) -> list[Tensor]:
    """Ids [samples, BAG] with few frequent and many rare ones, from all over int64; some batches are smaller."""
    random = np.random.default_rng(7)
    known = torch.from_numpy(random.integers(-(2**63), 2**63 - 1, NUM_IDS, endpoint=True, dtype=np.int64))
    known[:3] = torch.tensor([-(2**63), 2**63 - 1, 0])
    drawn = []
    for step in range(num_steps):
        size = (12, 12, 5, 0, 12)[step % 5]
        ranks = (NUM_IDS ** random.random((size, BAG)) - 1).astype(np.int64)
        drawn.append(known[torch.from_numpy(ranks)])
    return drawn


def largest_batch() -> int:
    """Distinct rows of the batch that has most."""
    return max(len(torch.unique(ids)) for ids in batches())


def rate(step: int) -> float:
    return 0.1 / (1 + step % 3)


def loss_of(answer: Tensor, step: int) -> Tensor:
    """Depends on the values, so that one stale row shows in all that follows."""
    return (torch.tanh(3.0 * answer + 0.1 * step) ** 2).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that must not depend on where rows live."""

    outputs: list[Tensor]
    ids: Tensor  # ascending, of the rows that ever moved
    records: Tensor  # their embeddings, states and counters


def assert_same_bits(got: Outcome, expected: Outcome) -> None:
    for step, (one, other) in enumerate(zip(got.outputs, expected.outputs, strict=True)):
        assert torch.equal(bits(one), bits(other)), f"outputs of step {step}"
    assert torch.equal(got.ids, expected.ids), "which rows there are"
    differing = (bits(got.records) != bits(expected.records)).any(1).nonzero().flatten().tolist()
    assert not differing, f"records {differing}"


def bits(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32)


@functools.cache
def uncached(optimizer: str, is_mixed: bool = False) -> Outcome:
    """One matrix of all rows and plain indexing: no cache, no plan, no thread, the reference kernels."""
    case = Case(is_mixed=is_mixed)
    known = torch.unique(torch.cat([ids.flatten() for ids in batches()]))
    rule = build_row_optimizer(optimizer_config(optimizer), TABLE_REFERENCE)
    records = new_records(rule, initial_rows(RowInitConfig(name="table", dim=DIM, seed=3, init_scale=0.5), known))
    rates = torch.tensor([rate(step) for step in range(NUM_STEPS)], dtype=torch.float64)
    outputs, seen = [], torch.zeros(len(known), dtype=torch.int64)
    for step, batch in enumerate(batches()):
        slots = torch.searchsorted(known, torch.unique(batch))
        seen[slots] += 1
        rule.catch_up(records, slots, step, rates)
        total, answers = torch.zeros(len(known), DIM), []
        for ids in case.parts(batch):
            places = torch.searchsorted(known, ids)
            vectors = records[places, :DIM].requires_grad_()
            answer = torch.zeros(len(ids), DIM)
            for place in range(BAG):
                answer = answer + vectors[:, place]
            loss_of(answer, step).backward()
            total += torch.zeros(len(known), DIM).index_add_(0, places.flatten(), vectors.grad.reshape(-1, DIM))
            answers.append(answer.detach())
        slots = slots[seen[slots] >= COUNT] if is_mixed else slots
        if len(slots):
            rule.update(records, slots, total[slots], rate(step), step + 1)
        outputs.append(torch.cat(answers))
    if is_mixed:
        rule.catch_up(records, torch.arange(len(known)), NUM_STEPS, rates)
    moved = rule.layout(DIM).as_integers(records)[:, rule.layout(DIM).updates] > 0
    return Outcome(outputs=outputs, ids=known[moved], records=records[moved])


def build(case: Case, folder: Path, **changes: Any) -> CachedEmbedding:
    capacity = int(largest_batch() * (1 + case.spare)) + 1
    tiers = {
        "whole": {},
        "host": {"device_rows": capacity},
        "host_file": {"device_rows": capacity, "host_rows": capacity // 2, "path": str(folder)},
        "file": {"device_rows": capacity, "host_rows": 0, "path": str(folder)},
    }[case.tiers]
    options: dict[str, Any] = {"seed": 3, "init_scale": 0.5, "policy": PolicyOptions(name=case.policy, window=3)}
    if case.is_mixed:
        options["admission"] = AdmissionOptions(name="count", count=COUNT)
    return CachedEmbedding(None, DIM, optimizer=optimizer_config(case.optimizer), **(options | tiers | changes))


def train(table: CachedEmbedding, case: Case, num_steps: int = NUM_STEPS) -> list[Tensor]:
    """The outputs of all steps."""
    outputs = []
    given = [case.parts(ids) for ids in batches(num_steps)]
    for step, parts in enumerate(table.prefetch(given, case.depth, ids=lambda parts: parts)):
        answers = []
        for ids in parts:
            answers.append(table(ids))
            loss_of(answers[-1], step).backward()
            if case.is_mixed:
                look(table, step)
        table.step(rate(step))
        outputs.append(torch.cat(answers).detach())
    if case.is_mixed:
        # Rows that move while they rest are told of it when they are looked at, and not all have been.
        with torch.no_grad():
            table(torch.unique(torch.cat(batches())).view(-1, 1))
    return outputs


def look(table: CachedEmbedding, step: int) -> None:
    """What is not a training in the middle of it: an evaluation, also of ids that are nowhere, and a pass without
    gradients."""
    with torch.no_grad():
        table(batches()[7 * step % NUM_STEPS])
        table.eval()(torch.cat([batches()[5 * step % NUM_STEPS], torch.arange(900, 900 + BAG).unsqueeze(0)]))
    table.train()


def outcome(table: CachedEmbedding, outputs: list[Tensor]) -> Outcome:
    ids, records = rows_of(table.begin_snapshot())
    return Outcome(outputs=outputs, ids=ids, records=records)


def rows_of(source: Any, part: str = "rows") -> tuple[Tensor, Tensor]:
    """All rows of a source in the order of their ids; each may come once."""
    chunks = [(ids.clone(), rows.clone()) for ids, rows in source.chunks(part)]
    if not chunks:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0)
    ids, rows = torch.cat([ids for ids, _ in chunks]), torch.cat([rows for _, rows in chunks])
    assert len(torch.unique(ids)) == len(ids)
    order = ids.argsort()
    return ids[order], rows[order]


def run(case: Case, folder: Path) -> Outcome:
    """Train in a case, with every invariant looked after that can be seen from outside."""
    with sleeping(case.sleeps), nobody_leaves_too_early(), build(case, folder) as table:
        outputs = train(table, case)
        assert table.rows.pins.open_lookups() == [], "pins are left"
        if not case.is_mixed:
            assert_counts(table)
        assert_one_place(table)
        return outcome(table, outputs)


def assert_counts(table: CachedEmbedding) -> None:
    stats = table.stats()
    assert stats.rows == sum(len(torch.unique(ids)) for ids in batches())
    assert stats.moved_bytes == {tier: 4 * table.rows.layout.width * num for tier, num in stats.moved.items()}


def assert_one_place(table: CachedEmbedding) -> None:
    """A row is in the device tier or in the host tier, never in both."""
    device = table.rows.device.index
    host = table.rows.tiers.upper
    for keys in () if host is None else host.keys(2**20):
        assert not bool((device.lookup(keys) >= 0).any())
    assert torch.equal(device.lookup(device.keys_at(device.used())), device.used())


@contextmanager
def nobody_leaves_too_early() -> Iterator[None]:
    """No row leaves the device tier while a lookup that needs it is not done."""
    with pytest.MonkeyPatch.context() as patch:
        registers: dict[int, Any] = {}
        init, leave, exchange = CacheManager.__init__, DeviceTier.evict, HostStore.exchange

        def noted(planner: CacheManager, *arguments: Any) -> None:
            init(planner, *arguments)
            registers[id(planner.device)] = planner.pins

        def check(device: DeviceTier, slots: Tensor) -> None:
            assert not len(slots) or int(device.index.last_use[slots].max()) <= registers[id(device)].done

        def watched(device: DeviceTier, slots: Tensor) -> Any:
            check(device, slots)
            return leave(device, slots)

        def watched_pairs(host: HostStore, places: Tensor, device: DeviceTier, slots: Tensor) -> None:
            check(device, slots)
            exchange(host, places, device, slots)

        patch.setattr(CacheManager, "__init__", noted)
        patch.setattr(DeviceTier, "evict", watched)
        patch.setattr(HostStore, "exchange", watched_pairs)
        yield


@contextmanager
def sleeping(seed: int) -> Iterator[None]:
    """Random short sleeps wherever one thread might overtake another."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in SLEEPERS if seed else ():
            patch.setattr(owner, name, delayed(getattr(owner, name), seed))
        yield


def delayed(function: Callable[..., Any], seed: int) -> Callable[..., Any]:
    random = np.random.default_rng((seed, len(function.__qualname__)))

    def late(*arguments: Any, **named: Any) -> Any:
        time.sleep(float(random.exponential(0.0007)))
        result = function(*arguments, **named)
        time.sleep(float(random.exponential(0.0003)))
        return result

    return late


SLEEPERS = (
    (CacheManager, "ensure_resident"),
    (TwoLevelStore, "fetch"),
    (TwoLevelStore, "put"),
    (FileStore, "write"),
    (FileStore, "read"),
    (DeviceTier, "insert"),
    (HostStore, "exchange"),
    (CachedEmbedding, "forward"),
    (CachedEmbedding, "step"),
)


def sampled(cases: list[Case], num: int, seed: int) -> list[Case]:
    order = np.random.default_rng(seed).permutation(len(cases))[:num]
    return [cases[place] for place in sorted(order)]
