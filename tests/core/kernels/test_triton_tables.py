"""The Triton kernels over rows of tables have the bits of their references; on a CPU, in Triton's interpreter."""

from itertools import product

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE, TableKernels, implementation, select_table
from kitforge.core.kernels.embedding_bag_backward import triton as bag_backward
from kitforge.core.kernels.hash_map.triton import DeviceHashMap
from kitforge.core.kernels.sparse_update.reference import Powers, UpdateRule, integer_view
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.foundation.errors import ModelError
from tests.core.kernels import test_embedding_bag as bag_tests
from tests.core.kernels import test_hash_map as map_tests
from tests.core.kernels import test_sparse_update as update_tests
from tests.core.kernels import test_unique as unique_tests
from tests.core.kernels.records import EXTREME, KERNELS, have_same_bits, normal, poisoned, seeded
from tests.differential.drawn import WHOLE
from tests.pairs import pairs
from tests.row_records import new_records

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TRITON = select_table("cuda")
LENGTHS = [0, 3, 1, 0, 17, 2, 0]
# Ragged bags, empty ones, and none.
BAGS = list(
    (product if WHOLE else pairs)(bag_tests.KINDS, [1, 7, 33, 100] if WHOLE else [1, 33], [LENGTHS, [0, 0], []])
)


def test_an_accelerator_gets_them_and_a_cpu_does_not() -> None:
    names = ("embedding_bag", "embedding_bag_backward", "copy_rows", "unique", "hash_map")
    for name in names:
        assert getattr(TRITON, name) is implementation(name, "triton", "cuda")
        assert getattr(select_table("cpu"), name) is implementation(name, "numba")
    assert TRITON.sparse_update is implementation("sparse_update", "triton", "cuda")
    assert TRITON.swap_rows is TABLE_REFERENCE.swap_rows
    assert DeviceTier(8, 4, "cpu").kernels is select_table("cpu")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("kind", "dim", "lengths"), BAGS)
def test_bags_and_their_gradients(kind: str, dim: int, lengths: list[int]) -> None:
    for dtype in bag_tests.DTYPES:
        found = bag_tests.forward_and_back(TRITON, kind, dim, dtype, lengths)
        wanted = bag_tests.forward_and_back(TABLE_REFERENCE, kind, dim, dtype, lengths)
        assert all(map(have_same_bits, found, wanted))


def test_rows_without_inverse_and_strided_gradients() -> None:
    slab, slots = normal(9, 12)[:, 2:], torch.tensor([8, 0, 0, 3])
    assert torch.equal(TRITON.embedding_bag(slab, slots, 5), slab[slots, :5])
    gradients, inverse = normal(6, 4).t(), torch.tensor([2, 0, 2, 2])
    found = TRITON.embedding_bag_backward(gradients, inverse, 3)
    assert have_same_bits(found, TABLE_REFERENCE.embedding_bag_backward(gradients, inverse, 3))


@pytest.mark.parametrize(
    ("slots", "inverse"), [([2, 9], [0, 1]), ([2, -1], [0, 1]), ([2, 3], [0, 2]), ([2, 3], [0, -1])]
)
def test_an_index_out_of_range_gives_nan_and_no_other_memory(slots: list[int], inverse: list[int]) -> None:
    slab, around = normal(9, 4), torch.arange(6)
    # Slots and rows lie amid others, which would be found beyond their ends.
    around[2:4] = torch.tensor(slots)
    found = TRITON.embedding_bag(slab, around[2:4], 4, inverse=torch.tensor(inverse))
    assert torch.equal(found[0], slab[2])
    assert found[1].isnan().all()


def test_bags_of_more_ids_than_there_are_give_nan() -> None:
    bags = Bags(offsets=torch.tensor([0, 1, 5]))
    found = TRITON.embedding_bag(normal(9, 4), torch.tensor([1, 2]), 4, bags=bags)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


@pytest.fixture(autouse=True)
def few_rows_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes a millisecond for an operation of a program."""
    monkeypatch.setattr(update_tests, "NUM_ROWS", 22)
    monkeypatch.setattr(update_tests, "NUM_STEPS", 7 if WHOLE else 4)


def trained(kernels: TableKernels, name: str, dim: int, dtype: torch.dtype) -> Tensor:
    # Every row of adam comes to a stop in a long rest, of which the interpreter takes every step.
    rest = 300 if (name, dim) == ("adam", 1) and dtype is torch.float32 else 9
    return update_tests.train(kernels, update_tests.CONFIGS[name], dim, dtype, rest=rest)


WIDE = [(name, 5 if "adam" in name else 19) for name in update_tests.CONFIGS]


# The rest of adam takes the interpreter long.
@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("name", "dim"), [("adam", 1), ("rowwise_adagrad", 1), *WIDE])
def test_rows_move_as_the_reference_moves_them(name: str, dim: int) -> None:
    found, wanted = (trained(kernels, name, dim, torch.float32) for kernels in (TRITON, TABLE_REFERENCE))
    if name.startswith("rowwise") and dim > 1:  # its squares are summed in another order
        layout = update_tests.build_row_optimizer(update_tests.CONFIGS[name]).layout(dim)
        counters = slice(layout.width - 3, layout.width)
        assert torch.equal(integer_view(found)[:, counters], integer_view(wanted)[:, counters])
        torch.testing.assert_close(found[:, : dim + 1], wanted[:, : dim + 1], rtol=1e-6, atol=1e-7)
    else:
        assert have_same_bits(integer_view(found), integer_view(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", "ftrl_pulled"])
def test_float64_rows_are_as_exact_as_their_rates(name: str) -> None:
    found, wanted = (trained(kernels, name, 1, torch.float64) for kernels in (TRITON, TABLE_REFERENCE))
    width = 3 if name == "adam" else 2
    torch.testing.assert_close(found[:, :width], wanted[:, :width], rtol=1e-4, atol=1e-6)


def test_a_slot_out_of_range_is_left_out() -> None:
    for name in update_tests.RULES:
        rule = update_tests.build_row_optimizer(update_tests.CONFIGS[name], TRITON)
        around = new_records(rule, normal(6, 3))
        slab, before = around[1:5], around.clone()
        # Past the check of the caller, which reads indices on a CPU alone.
        constants = UpdateRule(name=name, powers=Powers((0.9, 0.999)), eps=1e-6)
        TRITON.sparse_update.update(slab, torch.tensor([-1, 4, 2]), torch.ones(3, 3), 0.1, 1, constants)
        changed = (integer_view(around) != integer_view(before)).any(1)
        assert changed.tolist() == [False, False, False, True, False, False], name


def test_a_first_gradient_of_zero_divides_by_no_sum() -> None:
    config = SparseOptimizerConfig(name="ftrl", initial_sum=0.0, beta=0.0)
    for kernels in (TABLE_REFERENCE, TRITON, select_table()):
        rule = update_tests.build_row_optimizer(config, kernels)
        slab = new_records(rule, torch.zeros(3, 2))
        rule.update(slab, torch.tensor([1]), torch.zeros(1, 2), 0.1, 1)
        assert not slab[1, :2].any()


def test_a_gradient_of_nan_stays_visible() -> None:
    for name in update_tests.RULES:
        rule = update_tests.build_row_optimizer(update_tests.CONFIGS[name], TRITON)
        slab = new_records(rule, normal(4, 3))
        before = slab.clone()
        rule.update(slab, torch.tensor([2]), torch.full((1, 3), torch.nan), 0.1, 1)
        assert slab[2, :3].isnan().all(), name
        others = [0, 1, 3]
        assert have_same_bits(integer_view(slab[others]), integer_view(before[others]))


@pytest.mark.parametrize("count", [0, 1, 23])
@pytest.mark.parametrize("width", [1, 7, 100])
def test_rows_are_copied_whole(width: int, count: int) -> None:
    places = torch.randperm(60, generator=torch.Generator().manual_seed(width))
    for at, to in (
        (None, None),
        (places[:count], None),
        (None, places[-count:] if count else places[:0]),
        (places[:count], places[-count:] if count else places[:0]),
    ):
        source = normal(count if at is None else 60, width)
        source.view(torch.int32)[:, -1] = 0x7F800001  # integers in the bits of floats, as of a signalling NaN
        target = poisoned(count if to is None else 60, width)
        expected = target.clone()
        expected[slice(None) if to is None else to] = source[slice(None) if at is None else at]
        TRITON.copy_rows(source, target, at=at, to=to)
        assert torch.equal(target.view(torch.int32), expected.view(torch.int32))


def test_rows_out_of_range_are_not_copied_and_unequal_numbers_are_refused() -> None:
    source, around = normal(5, 2), torch.zeros(6, 2)
    target = around[1:5]
    TRITON.copy_rows(source[1:4], target, at=torch.tensor([0, 3, 1, -1, 2]), to=torch.tensor([1, 0, 4, 2, -1]))
    assert torch.equal(around[2], source[1])
    assert not around[[0, 1, 3, 4, 5]].any()
    with pytest.raises(ModelError, match="cannot be copied"):
        TRITON.copy_rows(source, target)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_checks_the_operators() -> None:
    slab, slots, inverse = normal(9, 4), torch.tensor([3, 0, 7]), torch.tensor([0, 2, 1, 1])
    offsets, weights, checks = torch.tensor([0, 1, 4]), normal(4), torch.library.opcheck
    ops = torch.ops.kitforge
    checks(ops.embedding_bag.default, (torch.empty(2, 4), slab, slots, inverse, offsets, weights, True))
    checks(ops.embedding_bag_backward.default, (torch.empty(3, 4), normal(2, 4), inverse, offsets, weights, True))
    checks(ops.copy_rows.default, (torch.empty(3, 4), slab, slots, None))


IDS = list(product(["few", "distinct", "equal", "extreme"], [1, 63, 64, 65, 131]))


@pytest.mark.prove
# In the gate every kind at either end, and each size with one of them.
@pytest.mark.parametrize(("kind", "size"), IDS if WHOLE else [each for at, each in enumerate(IDS) if at % 4 in (0, 3)])
def test_unique_numbers_ids_as_a_dict_would(kind: str, size: int) -> None:
    ids = {
        "few": torch.randint(-9, 9, (size,), generator=seeded(size)),
        "distinct": torch.randperm(size, generator=seeded(size)) * 2**40 - 7,
        "equal": torch.full((size,), -1),
        "extreme": torch.tensor(EXTREME)[torch.randint(0, len(EXTREME), (size,), generator=seeded(1))],
    }[kind]
    out = poisoned(size, dtype=torch.int64)
    distinct, inverse = TRITON.unique(ids, out)
    assert inverse is out
    assert (distinct.tolist(), inverse.tolist()) == unique_tests.by_dict(ids.tolist())
    strided = torch.stack([ids, ids + 1], 1)[:, 0]
    assert torch.equal(TRITON.unique(strided)[0], distinct)


def test_no_ids_are_no_trouble() -> None:
    distinct, inverse = TRITON.unique(torch.empty(0, dtype=torch.int64))
    assert len(distinct) == len(inverse) == 0


@pytest.mark.slow
def test_a_map_on_a_device_answers_as_a_dict_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS, "triton", TRITON)
    generator = seeded(5)
    for _ in range(2 if WHOLE else 1):
        calls = [("lookup", [1, 2])]
        for _ in range(8):
            call = ("insert", "insert", "replace", "remove")[int(torch.randint(0, 4, (), generator=generator))]
            keys = torch.randint(-60, 60, (int(torch.randint(0, 40, (), generator=generator)),), generator=generator)
            calls.append((call, [*keys.unique().tolist(), *EXTREME[:2]]))
        map_tests.check("triton", calls)
    map_tests.check("triton", [("insert", []), ("remove", []), ("lookup", []), ("remove", [5]), ("insert", [5])])


def test_a_map_on_a_device_grows() -> None:
    found = TRITON.hash_map(10)
    keys = torch.randint(-(2**63), 2**63 - 1, (500,), generator=seeded(0)).unique()
    for portion in torch.arange(len(keys)).split(77):
        assert (found.insert(keys[portion], portion) == -1).all()
    order = torch.randperm(len(keys), generator=seeded(3))
    asked = torch.cat([keys[order], torch.tensor([7])])
    assert torch.equal(found.lookup(asked), torch.cat([order, torch.tensor([-1])]))


def test_a_map_that_keys_come_and_go_from_does_not_grow_on_a_device() -> None:
    found = TRITON.hash_map(50)
    for first in range(0, 1000, 50):
        found.insert(torch.arange(first, first + 50), torch.arange(50))
        assert (found.remove(torch.arange(first, first + 50)) >= 0).all()
    assert isinstance(found, DeviceHashMap)
    assert len(found._keys) == 128
    assert len(found) == 0


@pytest.mark.parametrize("kind", [None, "sum", "mean", "weighted"])
def test_a_row_that_most_ids_share_is_summed_in_parts(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    monkeypatch.setattr(bag_backward, "SEGMENT", 4)
    # Rows that begin and end at a segment, amid one, over many, and rows without ids.
    counts = torch.tensor([1, 3, 0, 9, 4, 5, 70, 2, 0, 1])
    inverse = torch.repeat_interleave(torch.arange(10), counts)[torch.randperm(95, generator=seeded(1))]
    bags, num = None, 95
    if kind is not None:
        weights = normal(95).double() if kind == "weighted" else None
        offsets = torch.tensor([0, 0, 7, 8, 50, 95])
        bags, num = Bags(offsets=offsets, mode="mean" if kind == "mean" else "sum", weights=weights), 5
    gradients = normal(num, 3)
    found = TRITON.embedding_bag_backward(gradients, inverse, 10, bags=bags)
    wanted = TABLE_REFERENCE.embedding_bag_backward(gradients.double(), inverse, 10, bags=bags)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert not found[[2, 8]].any()
    outside = torch.cat([inverse, torch.tensor([-1, 10, 10, 10, 10, 10, 10])])
    if kind is None:
        more = torch.cat([gradients, torch.full((7, 3), torch.nan)])
        assert have_same_bits(TRITON.embedding_bag_backward(more, outside, 10)[[0, 2]], found[[0, 2]])
        assert TRITON.embedding_bag_backward(more, outside, 10).isfinite().all()
