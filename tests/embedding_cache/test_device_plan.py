"""Lookups that are planned where the rows are give the bits, the slots and the counts of those planned on the CPU."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kitforge.core.kernels.dispatch import TABLE_REFERENCE, select_table
from kitforge.core.kernels.hash_map.reference import DictHashMap, FoundIds
from kitforge.embedding_cache import cache
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.collection import EmbeddingCollection
from kitforge.embedding_cache.keys.slot_map import SlotMap
from kitforge.embedding_cache.options import AdmissionOptions, CachedEmbeddingOptions, ExpiryOptions
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers import device as device_file
from kitforge.foundation.errors import DataError
from tests import other_device
from tests.embedding_cache.training import (
    NUM_STEPS,
    OPTIMIZERS,
    Case,
    assert_same_bits,
    batches,
    bits,
    build,
    loss_of,
    outcome,
    rate,
    rows_of,
    run,
    uncached,
)
from tests.other_device import DEVICE, OnDevice
from tests.patience import PATIENCE

MAPS = {"reference": TABLE_REFERENCE, "numba": select_table(), "triton": select_table("cuda")}


@contextmanager
def planned_there(monkeypatch: pytest.MonkeyPatch, name: str = "numba") -> Iterator[None]:
    """Within, tables without a capacity plan lookups with a map of their device tier, here one of these on the CPU."""
    kernels = replace(select_table(), hash_map=MAPS[name].hash_map)
    with monkeypatch.context() as patch:
        patch.setattr(device_file, "select_table", lambda *device: kernels if device else select_table())
        patch.setattr(cache, "plans_on_device", lambda options, _sharding: options.device_rows is None)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("depth", [0, 2])
def test_it_equals_plain_indexing(optimizer: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(optimizer=optimizer, depth=depth, tiers="whole")
    with planned_there(monkeypatch):
        assert_same_bits(run(case, tmp_path), uncached(optimizer))


def steps(table: CachedEmbedding, first: int, last: int) -> list[Tensor]:
    """Steps of two micro-batches that share ids, with an evaluation of ids that are nowhere in each."""
    outputs = []
    for step, ids in enumerate(batches()[first:last], first):
        for part in (ids, ids[:3]):
            answer = table(part)
            loss_of(answer, step).backward()
            outputs.append(answer.detach().clone())
        with torch.no_grad():
            outputs.append(table(torch.arange(900 + step, 904 + step).view(1, 4)))
        table.step(rate(step))
    return outputs


def places(index: SlotMap) -> tuple[Tensor, Tensor]:
    """The slots in use, and their keys."""
    return index.used(), index.keys_at(index.used())


def train(changes: dict[str, Any], folder: Path) -> tuple[Any, ...]:
    """Everything that can be seen of a training that is cut in two and goes on in another table."""
    case = Case(tiers="whole", optimizer=changes.get("optimizer", "adagrad"))
    changes = {name: value for name, value in changes.items() if name != "optimizer"}
    with build(case, folder, **changes) as table, build(case, folder, **changes) as rest:
        outputs = steps(table, 0, NUM_STEPS // 2)
        before = places(table.rows.device.index)
        table.begin_snapshot()
        outputs += steps(table, NUM_STEPS // 2, NUM_STEPS // 2 + 3)
        delta = rows_of(table.begin_snapshot(NUM_STEPS // 2))
        rest(torch.arange(40).view(10, 4))
        rest.load_rows(table.begin_snapshot())
        outputs += steps(rest, NUM_STEPS // 2 + 3, NUM_STEPS)
        counts = table.stats(), rest.stats()
        return outcome(rest, outputs), *before, *places(rest.rows.device.index), *delta, *counts


CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adam": {"optimizer": "adam"},
    "expiry": {"expiry": ExpiryOptions(every=3, max_age=4)},
    "norm": {"expiry": ExpiryOptions(every=2, min_norm=0.9), "optimizer": "adam"},
}


# Triton's interpreter takes seconds for what the others take in a tenth of one, so it has the change with most to it.
CASES = [(kind, name) for name in MAPS for kind in CHANGES if name != "triton" or kind == "norm"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_slots_counts_changes_and_resumed_runs_are_those_of_the_cpu(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = train(CHANGES[kind], tmp_path)
    with planned_there(monkeypatch, name):
        found = train(CHANGES[kind], tmp_path)
    assert_same_bits(found[0], wanted[0])
    for one, other in zip(found[1:], wanted[1:], strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(bits(one), bits(other)) if one.is_floating_point() else torch.equal(one, other)
        else:
            assert one == other


def test_an_id_beyond_the_table_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with planned_there(monkeypatch), CachedEmbedding(10, 2) as table:
        table(torch.tensor([[1, 2]]))
        for bad in (-1, 10):
            with pytest.raises(DataError, match=f"got: +{bad}"):
                table(torch.tensor([[1, bad, 3]]))
        assert len(table.rows.device.index) == 2
        assert table.rows.pins.open_lookups() == []


def test_it_is_chosen_where_all_rows_and_ids_of_a_rank_are_on_an_accelerator() -> None:
    def chosen(device: str = "cuda", **options: Any) -> bool:
        return cache.plans_on_device(CachedEmbeddingOptions(num_embeddings=9, dim=2, device=device, **options), None)

    assert chosen()
    assert not chosen("cpu")
    assert not chosen("mps"), "which has no map of its own"
    assert not chosen(device_rows=4)
    assert not chosen(admission=AdmissionOptions(name="count", count=2))


class Copies:
    """What comes from the other device to the CPU, but for what `find_distinct` reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        self._is_finding = False
        before, find = other_device._run, DictHashMap.find_distinct

        def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            output = before(func, args, kwargs)
            is_there = any(isinstance(each, OnDevice) for each in tree_leaves((args, kwargs)))
            if is_there and not isinstance(output, OnDevice | tuple | list | type(None)) and not self._is_finding:
                self.found.append(str(func))
            return output

        def finding(found: DictHashMap, ids: Tensor, bound: int | None = None) -> FoundIds:
            self._is_finding = True
            try:
                return find(found, ids, bound)
            finally:
                self._is_finding = False

        monkeypatch.setattr(other_device, "_run", watched)
        monkeypatch.setattr(DictHashMap, "find_distinct", finding)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adam", "ftrl"])
def test_known_ids_come_back_from_no_device(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "plans_on_device", lambda options, _sharding: options.device_rows is None)
    ids, known = torch.tensor([[5, 3], [3, 7]]), torch.tensor([[7, 5], [5, 5]])

    def outputs(device: str) -> tuple[Tensor, ...]:
        with CachedEmbedding(10, 2, optimizer=optimizer, device=device) as table:
            results = []
            for each in (ids, known, known):
                copies.found.clear()
                answer = table(each)
                (answer * answer).sum().backward()
                table.step(0.1)
                results.append(answer.detach())
            return tuple(results)

    with other_device.other_device(monkeypatch):
        copies = Copies(monkeypatch)
        there = outputs(DEVICE.type)
        assert not copies.found
    here = outputs("cpu")
    for one, other in zip(there, here, strict=True):
        assert isinstance(one, OnDevice)
        torch.testing.assert_close(one.held, other)


def test_tables_on_a_device_are_planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch, both = RowCache.prefetch, threading.Barrier(2)

    def together(rows: RowCache, ids: Tensor) -> None:
        if rows.device.device == DEVICE:
            both.wait(PATIENCE)
        prefetch(rows, ids)

    monkeypatch.setattr(RowCache, "prefetch", together)

    def outputs(device: str) -> list[Tensor]:
        tables = {name: CachedEmbedding(None, 2, device=device, device_rows=8, name=name) for name in ("a", "b")}
        results = []
        with EmbeddingCollection(tables) as collection:
            drawn = [{name: torch.arange(step, step + 6).view(3, 2) for name in tables} for step in range(7)]
            for inputs in collection.prefetch(drawn, 2):
                answers = collection(inputs)
                sum(answer.tanh().sum() for answer in answers.values()).backward()
                for table in tables.values():
                    table.step(0.1)
                results += [answer.detach() for answer in answers.values()]
        return results

    with other_device.other_device(monkeypatch):
        there = outputs(DEVICE.type)
    for one, other in zip(there, outputs("cpu"), strict=True):
        assert isinstance(one, OnDevice)
        torch.testing.assert_close(one.held, other)


def test_a_plan_of_tables_that_are_planned_at_once_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch, planned = RowCache.prefetch, Counter[str]()

    def slow(rows: RowCache, ids: Tensor) -> None:
        # The trainer looks for a batch meanwhile, and must not have one.
        time.sleep(0.02 if rows.options.name == "b" else 0.0)
        prefetch(rows, ids)
        planned[rows.options.name] += 1

    monkeypatch.setattr(RowCache, "prefetch", slow)
    with other_device.other_device(monkeypatch):
        tables = {name: CachedEmbedding(10, 2, device=DEVICE.type, device_rows=8, name=name) for name in ("a", "b")}
        with EmbeddingCollection(tables) as collection:
            good, bad = ({"a": torch.tensor([[1]]), "b": torch.tensor([[id]])} for id in (2, 10))
            seen = 0
            with pytest.raises(DataError, match="not in the table"):
                for inputs in collection.prefetch([good, good, bad], 2):
                    seen += 1
                    assert min(planned["a"], planned["b"]) >= seen
                    collection(inputs)
            assert seen == 2
