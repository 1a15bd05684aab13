"""Tables on several ranks, in every placement: cached equals uncached bit for bit, and ranks equal one process."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.optim.table_protocols import RowSource
from kitforge.core.parallel import collectives
from kitforge.core.parallel.table import EmbeddingExchange
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions
from kitforge.embedding_cache.sharding.planner import ShardingType, TableLoad, TablePlacement, build_sharding
from kitforge.embedding_cache.sharding.replicated import Replicated
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import ConfigError
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.distributed.test_table import planned_without_second_dedup
from tests.embedding_cache.training import (
    DIM,
    OPTIMIZERS,
    Case,
    batches,
    bits,
    build,
    loss_of,
    rate,
    rows_of,
    sleeping,
)

pytestmark = pytest.mark.slow

NUM_STEPS = 9
WAYS: tuple[ShardingType, ...] = ("row", "column", "table", "replicate")
JOBS: list[tuple[ShardingType, str]] = [("row", optimizer) for optimizer in OPTIMIZERS]
JOBS += [(way, optimizer) for way in WAYS[1:] for optimizer in ("adagrad", "adam")]
# Rows know no ranks, so a rule for each kind of state is enough beside each placement; `test_cache_product.py` has all.
JOBS_OF = {
    2: [("row", "sgd"), ("row", "ftrl"), ("column", "adam"), *((way, "adagrad") for way in WAYS)],
    4: [("row", "adam"), *((way, "adagrad") for way in WAYS)],
}
# Uncached, then caches that differ in look-ahead, tiers and capacity.
CASES = (
    Case(tiers="whole", depth=0),
    Case(tiers="file", depth=2, spare=0.0),
    Case(tiers="host_file", depth=4, spare=-0.4, policy="lookahead"),
)
Result = dict[str, Tensor]


def share(ids: Tensor, step: int, rank: int, num_ranks: int) -> Tensor:
    """A rank's part of a batch: the later the larger, and every other step none at all for one of them."""
    weights = [number + 1 for number in range(num_ranks)]
    if num_ranks > 1 and step % 2:
        weights[step // 2 % num_ranks] = 0
    bounds = [len(ids) * sum(weights[:number]) // sum(weights) for number in range(num_ranks + 1)]
    return ids[bounds[rank] : bounds[rank + 1]]


def new_table(way: ShardingType, case: Case, folder: Path, groups: tuple[Any, Any] | None) -> CachedEmbedding:
    load = TableLoad(num_rows=1, dim=DIM, width=DIM, distinct=1.0, optimizer=case.optimizer)
    ranks = (
        build_sharding(TablePlacement(sharding_type=way, owner=1 if way == "table" else None), load, *groups)
        if groups
        else None
    )
    return build(case, folder, sharding=ranks)


def train(table: CachedEmbedding, depth: int, *, looks: bool = False) -> list[Tensor]:
    """The outputs of all steps. `looks`: other rows are looked up in between, as an evaluation does."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    given = [share(ids, step, rank, num_ranks) for step, ids in enumerate(batches(NUM_STEPS))]
    outputs = []
    for step, ids in enumerate(table.prefetch(given, depth)):
        answer = table(ids)
        loss_of(answer, step).backward()
        square = collectives.all_reduce_(table.squared_norm(), dist.group.WORLD if num_ranks > 1 else None)
        table.scale_gradients_(2.0 / max(float(square) ** 0.5, 2.0))
        table.step(rate(step))
        outputs.append(answer.detach().clone())
        if looks:
            with torch.no_grad():
                table.eval()(given[5 * step % NUM_STEPS].clone())
            table.train()
    assert table.rows.pins.open_lookups() == []
    return outputs


def result_of(table: CachedEmbedding, outputs: list[Tensor]) -> Result:
    source = table.begin_snapshot()
    ids, records = rows_of(source, source.parts[0])
    return {f"output {step}": output for step, output in enumerate(outputs)} | {"ids": ids, "records": records}


def on_ranks(rank: int, jobs: list[tuple[ShardingType, str]], folder: str) -> list[list[Result]]:
    groups = (dist.group.WORLD, dist.new_group())
    answers = []
    for way, optimizer in jobs:
        results = []
        for number, case in enumerate(CASES):
            case = Case(optimizer=optimizer, tiers=case.tiers, depth=case.depth, spare=case.spare, policy=case.policy)
            with sleeping(number), new_table(way, case, Path(folder), groups) as table:
                results.append(result_of(table, train(table, case.depth)))
        answers.append(results)
    return answers


@functools.cache
def trained(num_ranks: int) -> dict[tuple[ShardingType, str], list[list[Result]]]:
    """By job, for each rank the results of all cases."""
    # What one process has compiled its ranks need not compile each for itself.
    for _, optimizer in JOBS_OF[num_ranks]:
        alone(optimizer)
    with tempfile.TemporaryDirectory() as folder:
        answers = run_ranks(num_ranks, on_ranks, JOBS_OF[num_ranks], folder)
    return {job: [answer[place] for answer in answers] for place, job in enumerate(JOBS_OF[num_ranks])}


@functools.cache
def alone(optimizer: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        table = build(Case(optimizer=optimizer, tiers="whole"), Path(folder))
        return result_of(table, train(table, 0))


RANKS = list(JOBS_OF)
RUNS = [(num_ranks, *job) for num_ranks, jobs in JOBS_OF.items() for job in jobs]


@pytest.mark.parametrize(("num_ranks", "way", "optimizer"), RUNS)
def test_cached_equals_uncached_on_every_rank(num_ranks: int, way: ShardingType, optimizer: str) -> None:
    for whole, *cached in trained(num_ranks)[way, optimizer]:
        for other in cached:
            for key in whole:
                assert torch.equal(whole[key].view(torch.int32), other[key].view(torch.int32)), key


@pytest.mark.parametrize(("num_ranks", "way", "optimizer"), RUNS)
def test_ranks_equal_one_process(num_ranks: int, way: ShardingType, optimizer: str) -> None:
    ranks, expected = [results[0] for results in trained(num_ranks)[way, optimizer]], alone(optimizer)
    for step in range(NUM_STEPS):
        together = torch.cat([result[f"output {step}"] for result in ranks])
        torch.testing.assert_close(together, expected[f"output {step}"], rtol=2e-5, atol=2e-6)
    if way == "column":
        ids, rows = ranks[0]["ids"], torch.cat([result["records"][:, : DIM // num_ranks] for result in ranks], 1)
    else:
        ids = torch.cat([result["ids"] for result in ranks])
        order = ids.argsort()
        ids = ids[order]
        rows = torch.cat([result["records"] for result in ranks if len(result["ids"])])[order][:, :DIM]
    assert torch.equal(ids, expected["ids"])
    torch.testing.assert_close(rows, expected["records"][:, :DIM], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rows_lie_where_their_placement_says(num_ranks: int) -> None:
    counts = {way: [len(result[0]["ids"]) for result in trained(num_ranks)[way, "adagrad"]] for way in WAYS}
    total = len(alone("adagrad")["ids"])
    assert sum(counts["row"]) == total
    assert min(counts["row"]) > 0
    assert counts["column"] == [total] * num_ranks
    assert counts["table"] == [0, total, 0, 0][:num_ranks]
    assert counts["replicate"] == [total] + [0] * (num_ranks - 1)


# Which rows there are, where all ranks hold all of them and must agree.
RULES: dict[str, tuple[str, AdmissionOptions, ExpiryOptions]] = {
    "count": ("adagrad", AdmissionOptions(name="count", count=2), ExpiryOptions(every=4, max_age=2)),
    "probability": ("ftrl", AdmissionOptions(name="probability", probability=0.5), ExpiryOptions()),
    "age": ("adam", AdmissionOptions(), ExpiryOptions(every=3, max_age=2)),
    "norm": ("adam", AdmissionOptions(name="count", count=2), ExpiryOptions(every=3, min_norm=0.9)),
}
# Of four ranks the one that counts and expires.
RULES_OF = {2: [*RULES], 4: [*RULES] if WHOLE else ["norm"]}


def ruled(name: str, case: Case, folder: Path, ranks: TableSharding | None) -> Result:
    optimizer, admission, expiry = RULES[name]
    case = Case(optimizer=optimizer, tiers=case.tiers, depth=case.depth, spare=case.spare, policy=case.policy)
    with build(case, folder, sharding=ranks, admission=admission, expiry=expiry) as table:
        outputs = train(table, case.depth, looks=True)
        assert expiry.every == 0 or table.stats().expired > 0
        keys, counts = table.rows.admission.counts()
        return result_of(table, outputs) | {"counted keys": keys, "counts": counts}


def ruled_on_ranks(rank: int, folder: str) -> dict[str, list[Result]]:
    groups = (dist.group.WORLD, dist.new_group())
    results: dict[str, list[Result]] = {name: [] for name in RULES_OF[dist.get_world_size()]}
    for name in results:
        for number, case in enumerate(CASES):
            spread = Replicated(*groups)
            # Each rank shows the rows that it has, not only the one that saves them.
            spread.saves_rows = True
            with sleeping(number):
                results[name].append(ruled(name, case, Path(folder), spread))
    return results


@functools.cache
def all_ruled(num_ranks: int) -> list[dict[str, list[Result]]]:
    for name in RULES_OF[num_ranks]:
        ruled_alone(name)
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(num_ranks, ruled_on_ranks, folder)


@functools.cache
def ruled_alone(name: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        return ruled(name, CASES[0], Path(folder), None)


@pytest.mark.parametrize(
    ("num_ranks", "name"), [(num_ranks, name) for num_ranks, names in RULES_OF.items() for name in names]
)
def test_tables_on_all_ranks_agree_on_which_rows_there_are(num_ranks: int, name: str) -> None:
    ranks, expected = [results[name] for results in all_ruled(num_ranks)], ruled_alone(name)
    for whole, *cached in ranks:
        for other in cached:
            for key in whole:
                assert torch.equal(bits(whole[key]), bits(other[key])), key
        for key in ("ids", "records", "counted keys", "counts"):
            assert torch.equal(bits(whole[key]), bits(ranks[0][0][key])), key
        for key in ("ids", "counted keys", "counts"):
            assert torch.equal(whole[key], expected[key]), key
        torch.testing.assert_close(whole["records"][:, :DIM], expected["records"][:, :DIM], rtol=2e-5, atol=2e-6)
    for step in range(NUM_STEPS):
        together = torch.cat([results[0][f"output {step}"] for results in ranks])
        torch.testing.assert_close(together, expected[f"output {step}"], rtol=2e-5, atol=2e-6)


def single_dedup(rank: int) -> Tensor:
    EmbeddingExchange.plan = planned_without_second_dedup(EmbeddingExchange.plan)
    groups = (dist.group.WORLD, dist.new_group())
    with tempfile.TemporaryDirectory() as folder:
        table = new_table("row", Case(tiers="whole", depth=0), Path(folder), groups)
        train(table, 0)
        with torch.no_grad():
            return table(torch.cat([ids.flatten() for ids in batches(NUM_STEPS)]).view(-1, 1))


def test_ids_that_several_ranks_ask_for_must_be_made_distinct_again() -> None:
    expected = build(Case(tiers="whole"), Path())
    train(expected, 0)
    with torch.no_grad():
        right = expected(torch.cat([ids.flatten() for ids in batches(NUM_STEPS)]).view(-1, 1))
    try:
        wrong = run_ranks(2, single_dedup)[0]
    except Exception:  # noqa: BLE001 (to be refused is to be seen as well)
        return
    assert not torch.allclose(wrong, right, rtol=2e-5, atol=2e-6)


class Joined:
    """The snapshots of several ranks as one source, as a checkpoint is."""

    def __init__(self, sources: list[dict[str, Any]]) -> None:
        self._sources = sources
        self.state = sources[0]["state"]
        self.parts = tuple(dict.fromkeys(part for source in sources for part in source["parts"]))

    def chunks(self, part: str = "rows") -> list[tuple[Tensor, Tensor]]:
        return [chunk for source in self._sources for chunk in source["chunks"].get(part, [])]


def held(source: RowSource) -> dict[str, Any]:
    chunks = {part: [(ids.clone(), rows.clone()) for ids, rows in source.chunks(part)] for part in source.parts}
    return {"state": dict(source.state), "parts": source.parts, "chunks": chunks}


def saved(rank: int, ways: list[ShardingType]) -> list[dict[str, Any]]:
    groups = (dist.group.WORLD, dist.new_group())
    answers = []
    for way in ways:
        table = new_table(way, Case(optimizer="adam", tiers="whole", depth=0), Path(), groups)
        train(table, 0)
        answers.append(held(table.begin_snapshot()))
    return answers


def loaded(
    rank: int, ways: list[ShardingType], sources: dict[ShardingType, list[dict[str, Any]]]
) -> list[list[dict[str, Any]]]:
    groups = (dist.group.WORLD, dist.new_group())
    answers = []
    for source in sources.values():
        row = []
        for way in ways:
            with tempfile.TemporaryDirectory() as folder:
                case = Case(optimizer="adam", tiers="file" if way == "row" else "whole", depth=0)
                with new_table(way, case, Path(folder), groups) as table:
                    table.load_rows(Joined(source))
                    row.append(held(table.begin_snapshot()))
        answers.append(row)
    return answers


@pytest.mark.slow
def test_rows_survive_a_change_of_placement_and_of_the_number_of_ranks_to_the_bit() -> None:
    ways = list(WAYS)
    first = run_ranks(2, saved, ways)
    sources = {way: [answer[place] for answer in first] for place, way in enumerate(ways)}
    second = run_ranks(4, loaded, ways, sources)
    for place, way in enumerate(ways):
        for other_place in range(len(ways)):
            middle = [answer[place][other_place] for answer in second]
            back = build(Case(optimizer="adam", tiers="host"), Path())
            back.load_rows(Joined(middle))
            straight = build(Case(optimizer="adam", tiers="whole"), Path())
            straight.load_rows(Joined(sources[way]))
            for got, expected in zip(rows_of(back.begin_snapshot()), rows_of(straight.begin_snapshot()), strict=True):
                assert torch.equal(got.view(torch.int32), expected.view(torch.int32))
            assert len(got) > 0


def refused(rank: int) -> list[str]:
    groups = (dist.group.WORLD, dist.new_group())
    words = []
    for way, owner in (("column", None), ("table", 2), ("table", None), ("table", 0), ("table", 1)):
        optimizer = "sgd" if way == "table" else "rowwise_adagrad"
        load = TableLoad(num_rows=1, dim=DIM, width=DIM, distinct=1.0, optimizer=optimizer)
        try:
            build_sharding(TablePlacement(sharding_type=way, owner=owner), load, *groups)
        except ConfigError as error:
            words.append(str(error))
    return words


def test_placements_that_cannot_be_are_refused() -> None:
    for words in run_ranks(2, refused):
        assert len(words) == 3
        assert "updates each number by itself" in words[0]
        assert "a rank from 0 to 1" in words[1]
