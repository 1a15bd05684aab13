"""Tables whose rows live on several ranks, against one dense table in one process."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.optim.row_optimizers import RowOptimizer, SparseOptimizerConfig, build_row_optimizer
from kitforge.core.parallel import collectives, table
from kitforge.core.parallel.table import EmbeddingExchange, ExchangePlan
from kitforge.embedding_cache.keys.row_init import RowInitConfig, initial_rows
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.row_records import new_records
from tests.sharded_table import FIRST_ROWS, GradientAccumulator, ShardedTable

pytestmark = pytest.mark.slow

DIMS = (3, 6)
NUM_STEPS = 5
RATE = 0.1
MAX_NORM = 4.0
RULES = ("sgd", "adagrad", "adam", "lazy_adam")
HUGE = 2**63 - 1
# By name: outputs of every step, then ids, rows and states of every table.
Result = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The ids of every step and how the ranks divide them."""

    draw: Callable[[torch.Generator], Tensor]
    num_lookups: int = 1
    is_clipped: bool = True
    has_empty_rank: bool = False

    def ids(self, step: int, lookup: int, place: int) -> Tensor:
        """The whole batch of a lookup, for one of the tables."""
        return self.draw(torch.Generator().manual_seed(1000 * step + 10 * lookup + place))

    def share(self, batch: Tensor, step: int, rank: int, num_ranks: int) -> Tensor:
        """A rank's part of a batch: the later the larger, and none at all for one rank after the other."""
        weights = [number + 1 for number in range(num_ranks)]
        if self.has_empty_rank and num_ranks > 1:
            weights[step % num_ranks] = 0
        bounds = [len(batch) * sum(weights[:number]) // sum(weights) for number in range(num_ranks + 1)]
        return batch[bounds[rank] : bounds[rank + 1]]


def few(generator: torch.Generator) -> Tensor:
    return torch.randint(-4, 5, (23,), generator=generator)


def extreme(generator: torch.Generator) -> Tensor:
    ids = torch.tensor([-HUGE - 1, -HUGE, -(2**32), -2, -1, 0, 1, 2**31, 2**53 + 1, HUGE - 1, HUGE])
    return ids[torch.randint(0, len(ids), (9, 2), generator=generator)]


CASES = {
    "uneven": Case(draw=few),
    "empty_rank": Case(draw=few, has_empty_rank=True),
    "all_equal": Case(draw=lambda _: torch.full((11,), 7)),
    "all_distinct": Case(draw=lambda generator: torch.randperm(40, generator=generator)[:17], is_clipped=False),
    "extreme": Case(draw=extreme),
    "several_lookups": Case(draw=few, num_lookups=3, has_empty_rank=True),
}


def rule_of(name: str) -> RowOptimizer:
    return build_row_optimizer(SparseOptimizerConfig(name=name, eps=1e-6))


def config_of(place: int) -> RowInitConfig:
    return RowInitConfig(name=f"table_{place}", dim=DIMS[place], seed=5, init_scale=0.5, dtype=torch.float64)


def weights_of(ids: Tensor, dim: int, step: int, is_dyadic: bool) -> Tensor:
    """What each output of the whole batch is multiplied by in the loss."""
    generator = torch.Generator().manual_seed(step)
    if is_dyadic:
        return torch.randint(-8, 9, (*ids.shape, dim), generator=generator).double() / 4
    return torch.randn(*ids.shape, dim, generator=generator, dtype=torch.float64)


def loss_of(vectors: Tensor, weights: Tensor, is_dyadic: bool) -> Tensor:
    """A sum over samples. Dyadic gradients have few bits, so that their sums are exact in every order."""
    loss = (vectors * weights).sum()
    return loss if is_dyadic else loss + (vectors**2).sum() / 2


def train(name: str, rule: str, is_dyadic: bool, fault: str = "", group: collectives.Group = None) -> Result:
    """What a rank, or the only process, has seen and holds after training in a case."""
    case, rank, num_ranks = CASES[name], collectives.group_rank(group), collectives.group_size(group)
    tables = [ShardedTable(config_of(place), rule_of(rule), group) for place in range(len(DIMS))]
    for each in tables if fault == "applied_in_backward" else ():
        make_eager(each)
    result: Result = {}
    for step in range(NUM_STEPS):
        for lookup in range(case.num_lookups):
            loss = torch.zeros((), dtype=torch.float64)
            for place, each in enumerate(tables):
                ids = case.ids(step, lookup, place)
                weights = weights_of(ids, DIMS[place], step, is_dyadic)
                vectors = each(case.share(ids, step, rank, num_ranks))
                result[f"output_{step}_{lookup}_{place}"] = vectors.detach()
                loss = loss + loss_of(vectors, case.share(weights, step, rank, num_ranks), is_dyadic)
            loss.backward()
        factor = 0.5
        if case.is_clipped and not is_dyadic:
            squares = collectives.all_reduce_(sum(each.sink.squared_norm() for each in tables), group)
            factor = MAX_NORM / max(math.sqrt(squares), MAX_NORM)
        for each in tables:
            each.sink.scale_(factor)
            each.step(RATE)
    for place, each in enumerate(tables):
        ids, rows, states = each.rows()
        result |= {f"ids_{place}": ids, f"rows_{place}": rows}
        result |= {f"{key}_{place}": state for key, state in states.items()}
    return result


def train_densely(name: str, rule: str, is_dyadic: bool) -> Result:
    """The same by plain indexing into one matrix of all rows that the case has."""
    case, result = CASES[name], Result()
    lookups = [(step, lookup) for step in range(NUM_STEPS) for lookup in range(case.num_lookups)]
    known = [torch.cat([case.ids(*which, place).flatten() for which in lookups]).unique() for place in (0, 1)]
    slabs = [new_records(rule_of(rule), initial_rows(config_of(place), ids)) for place, ids in enumerate(known)]
    rates = torch.full((NUM_STEPS,), RATE, dtype=torch.float64)
    for step in range(NUM_STEPS):
        touched: list[list[Tensor]] = [[], []]
        for slab in slabs:
            rule_of(rule).catch_up(slab, torch.arange(len(slab)), step, rates)
        tables = [slab[:, :dim].clone().requires_grad_() for slab, dim in zip(slabs, DIMS, strict=True)]
        for lookup in range(case.num_lookups):
            for place, rows in enumerate(tables):
                ids = case.ids(step, lookup, place)
                places = torch.searchsorted(known[place], ids)
                vectors = rows[places]
                loss_of(vectors, weights_of(ids, DIMS[place], step, is_dyadic), is_dyadic).backward()
                result[f"output_{step}_{lookup}_{place}"] = vectors.detach()
                touched[place].append(places.flatten())
        gradients = [rows.grad for rows in tables]
        norm = math.sqrt(sum(float((each**2).sum()) for each in gradients))
        factor = MAX_NORM / max(norm, MAX_NORM) if case.is_clipped and not is_dyadic else 0.5
        for slab, gradient, places in zip(slabs, gradients, touched, strict=True):
            moving = torch.cat(places).unique()
            rule_of(rule).update(slab, moving, gradient[moving] * factor, RATE, step + 1)
    for place, slab in enumerate(slabs):
        layout = rule_of(rule).layout(DIMS[place])
        rule_of(rule).catch_up(slab, torch.arange(len(slab)), NUM_STEPS, rates)
        result |= {f"ids_{place}": known[place], f"rows_{place}": slab[:, : DIMS[place]]}
        result |= {f"{key}_{place}": slab[:, columns] for key, columns in layout.states.items()}
    return result


def train_on_rank(rank: int, jobs: list[tuple[str, str, bool]], fault: str) -> list[Result]:
    """All jobs within one start of the ranks. A fault is planted in this rank's own process, which ends with it."""
    if fault == "single_dedup":
        EmbeddingExchange.plan = planned_without_second_dedup(EmbeddingExchange.plan)
    return [train(*job, fault, dist.group.WORLD) for job in jobs]


def joined(results: list[Result]) -> Result:
    """Outputs of the ranks as one batch, rows of the ranks as one table."""
    whole = {key: torch.cat([result[key] for result in results]) for key in results[0]}
    for key in [key for key in whole if not key.startswith("output")]:
        ids = torch.cat([result[f"ids_{key[-1]}"] for result in results])
        whole[key] = whole[key][ids.argsort()]
    return whole


def assert_equal(got: Result, expected: Result, *, to_the_bit: bool) -> None:
    assert got.keys() == expected.keys()
    tolerance = 0.0 if to_the_bit else 1e-12
    for key in expected:
        torch.testing.assert_close(
            got[key], expected[key], rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


DYADIC = ("uneven", "several_lookups")
# Ranks differ by their cases, rows by the rules of their optimizers: in the gate each case meets two rules.
JOBS = [
    (name, rule, is_dyadic)
    for is_dyadic, names in ((False, CASES), (True, DYADIC))
    for number, name in enumerate(names)
    for rule in (RULES if WHOLE else (RULES[2 * number % 4], RULES[(2 * number + 1 + number // 2) % 4]))
]
RANKS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]


@functools.cache
def trained(num_ranks: int) -> dict[tuple[str, str, bool], Result]:
    """What every job gives on that many ranks."""
    if num_ranks == 1:
        return {job: train(*job) for job in JOBS}
    answers = run_ranks(num_ranks, train_on_rank, JOBS, "")
    return {job: joined([answer[number] for answer in answers]) for number, job in enumerate(JOBS)}


@pytest.mark.prove
@pytest.mark.parametrize(("name", "rule", "is_dyadic"), JOBS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_ranks_equal_one_dense_table(num_ranks: int, name: str, rule: str, is_dyadic: bool) -> None:
    # Where sums are exact, or no row has two gradients in a step to be summed, not even a bit may differ.
    to_the_bit = is_dyadic or name == "all_distinct"
    assert_equal(trained(num_ranks)[name, rule, is_dyadic], train_densely(name, rule, is_dyadic), to_the_bit=to_the_bit)


def planned_without_second_dedup(
    plan: Callable[[EmbeddingExchange, Tensor], ExchangePlan],
) -> Callable[[EmbeddingExchange, Tensor], ExchangePlan]:
    def planned(axis: EmbeddingExchange, ids: Tensor) -> ExchangePlan:
        route = plan(axis, ids)
        return dataclasses.replace(route, ids=route.ids[route.positions], positions=None)

    return planned


def make_eager(each: ShardedTable) -> None:
    """Let the table move its rows as soon as their gradients arrive."""
    add = each.sink.add

    def add_and_step(ids: Tensor, gradients: Tensor) -> None:
        add(ids, gradients)
        each.step(RATE)

    each.sink.add = add_and_step


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["sgd", "lazy_adam"])
@pytest.mark.parametrize("fault", ["single_dedup", "applied_in_backward"])
def test_a_planted_fault_is_seen(fault: str, rule: str) -> None:
    job = ("uneven", rule, False)
    # A row that moves twice in a step may be refused, which is to be seen as well.
    with pytest.raises((AssertionError, ModelError)):
        results = [answer[0] for answer in run_ranks(2, train_on_rank, [job], fault)]
        assert_equal(joined(results), train_densely(*job), to_the_bit=False)


def sum_on_owner(rank: int, by_arrival: bool) -> float:
    """One row, and from each rank a gradient that is lost or kept according to what it is added to."""
    if by_arrival:
        summed = table._segment_sum
        table._segment_sum = lambda parts, places, num_rows: summed(parts.flip(0), places.flip(0), num_rows)
    sink = GradientAccumulator()
    axis = EmbeddingExchange(dist.group.WORLD)
    route = axis.plan(torch.tensor([3]))
    vectors = axis.fetch(route, lambda ids: torch.ones(len(ids), 1, dtype=torch.float64), sink)
    (vectors * [2.0**60, 1.0, -(2.0**60), 1.0][rank]).sum().backward()
    return float(sink.gradients()[1].sum())


@pytest.mark.parametrize("by_arrival", [False, True])
def test_the_owner_adds_in_the_order_of_the_ranks(by_arrival: bool) -> None:
    # ((2^60 + 1) - 2^60) + 1 in float64; the last rank first gives 0.
    in_order = sum(run_ranks(4, sum_on_owner, by_arrival)) == 1.0
    assert in_order != by_arrival


def fetch_ahead(rank: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Outputs when ids are exchanged for all steps at once, on a group of their own, and when they are not."""
    ahead, now = (ShardedTable(config_of(0), rule_of("adam"), dist.group.WORLD) for _ in range(2))
    side = EmbeddingExchange(dist.new_group())
    batches = [few(torch.Generator().manual_seed(10 * step + rank)) for step in range(NUM_STEPS)]
    routes = [side.plan(ids) for ids in batches]
    outputs: tuple[list[Tensor], list[Tensor]] = ([], [])
    for ids, route in zip(batches, routes, strict=True):
        early, late = ahead.axis.fetch(route, ahead.rows_of, ahead.sink), now(ids)
        for vectors, each, seen in ((early, ahead, outputs[0]), (late, now, outputs[1])):
            seen.append(vectors.detach())
            (vectors**2).sum().backward()
            each.step(RATE)
    again = ahead.axis.fetch(routes[0], ahead.rows_of, ahead.sink).detach()
    return (*outputs, again - now(batches[0]).detach())


def test_ids_may_be_exchanged_steps_ahead() -> None:
    for ahead, now, difference in run_ranks(2, fetch_ahead):
        assert all(map(torch.equal, ahead, now))
        assert not difference.any()


def test_alone_nothing_is_communicated(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a collective alone")

    for name in ("all_to_all_single", "all_reduce", "all_gather_object"):
        monkeypatch.setattr(dist, name, refuse)
    train("several_lookups", "adam", False)


def test_the_hash_is_splitmix64() -> None:
    # What the generator gives first when it is seeded by 0, 1 and -1.
    outputs = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20]
    assert [value % 2**64 for value in table.splitmix64(torch.tensor([0, 1, -1])).tolist()] == outputs


@pytest.mark.parametrize("stride", [1, -1, 4, 2**20, 2**40])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rows_spread_over_the_ranks(num_ranks: int, stride: int) -> None:
    num_ids, share = 100_000, 1.0 / num_ranks
    counts = table.owner(stride * torch.arange(num_ids), num_ranks).bincount(minlength=num_ranks)
    deviation = math.sqrt(num_ids * share * (1.0 - share))
    assert float((counts - num_ids * share).abs().max()) < 5.0 * deviation


@pytest.mark.parametrize("initial", ["normal", "uniform"])
def test_an_initial_row_depends_on_its_id_alone(initial: str) -> None:
    config = dataclasses.replace(config_of(1), initial=initial)
    ids = torch.tensor([5, -1, HUGE, 0, -HUGE - 1, 6])
    together = initial_rows(config, ids)
    assert torch.equal(together, torch.cat([initial_rows(config, ids[place : place + 1]) for place in range(len(ids))]))
    for change in ({"seed": 6}, {"name": "other"}):
        assert not (initial_rows(dataclasses.replace(config, **change), ids) == together).any()


def test_initial_rows_have_the_shape_that_was_asked_for() -> None:
    normal, uniform = (
        initial_rows(RowInitConfig(name="a", dim=50, initial=initial, init_scale=2.0), torch.arange(4000)).double()
        for initial in ("normal", "uniform")
    )
    assert abs(float(normal.mean())) < 0.02
    assert float(normal.std()) == pytest.approx(2.0, rel=0.01)
    assert float((normal.abs() > 4.0).double().mean()) == pytest.approx(0.0455, abs=0.003)
    assert float(uniform.std()) == pytest.approx(2.0 / math.sqrt(3.0), rel=0.01)
    assert -2.0 <= float(uniform.min()) < -1.99 < 1.99 < float(uniform.max()) < 2.0
    # Neither neighbouring ids nor neighbouring columns know of one another.
    for one, other in ((normal[1:], normal[:-1]), (normal[:, 1:], normal[:, :-1])):
        assert abs(float((one * other).mean())) / 4.0 < 0.01


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (2, 3, 4)])
def test_ids_may_have_any_shape(shape: tuple[int, ...]) -> None:
    each = ShardedTable(config_of(0), rule_of("sgd"))
    vectors = each(torch.ones(shape, dtype=torch.int64))
    assert vectors.shape == (*shape, each.embedding_dim)
    vectors.sum().backward()
    each.step(RATE)


def test_what_is_only_looked_up_or_skipped_leaves_no_row_behind() -> None:
    each = ShardedTable(config_of(0), rule_of("adam"))
    each(torch.arange(5)).sum().backward()
    each.sink.clear()
    each.step(RATE)
    with torch.no_grad():
        assert not each(torch.arange(5)).requires_grad
    assert [len(part) for part in each.rows()[:2]] == [0, 0]


def test_the_table_grows_and_keeps_its_rows() -> None:
    each = ShardedTable(config_of(0), rule_of("adagrad"))
    for first in (0, FIRST_ROWS - 1, 3 * FIRST_ROWS):
        each(torch.arange(first, first + FIRST_ROWS)).sum().backward()
        each.step(RATE)
    ids, rows, states = each.rows()
    assert ids.tolist() == [*range(2 * FIRST_ROWS - 1), *range(3 * FIRST_ROWS, 4 * FIRST_ROWS)]
    assert states["sum"][:, 0].tolist() == [2.0 if id == FIRST_ROWS - 1 else 1.0 for id in ids.tolist()]
    assert torch.equal(rows, each(ids).detach())


@pytest.mark.parametrize("ids", [torch.ones(2, dtype=torch.int32), torch.ones(2), torch.ones(2, 2, dtype=torch.int64)])
def test_what_are_no_ids_is_refused(ids: Tensor) -> None:
    with pytest.raises(DataError, match="expected: int64"):
        EmbeddingExchange(None).plan(ids)


def test_an_owner_that_gives_too_few_rows_is_refused() -> None:
    axis = EmbeddingExchange(None)
    with pytest.raises(ModelError, match="one row for each id"):
        axis.fetch(axis.plan(torch.tensor([1, 2])), lambda ids: torch.ones(1, 3), GradientAccumulator())


@pytest.mark.parametrize("change", [{"dim": 0}, {"init_scale": -1.0}, {"dtype": torch.bfloat16}])
def test_a_table_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(config_of(0), **change)
