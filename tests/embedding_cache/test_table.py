"""The face of a table: what `nn.EmbeddingBag` and `nn.Embedding` give, for any ids, and errors that help."""

import copy
import io
import pickle
import re
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.optim.row_optimizers import SparseModule
from kitforge.embedding_cache import table as tables
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions, PolicyOptions
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation import log
from kitforge.foundation.errors import ConfigError, DataError, ModelError

NUM, DIM = 20, 3
OFFSETS = torch.tensor([0, 2, 2, 5, 9, 9])
IDS = torch.tensor([3, 3, 19, 0, 7, 1, 1, 1, 4])


def twin(table: CachedEmbedding, **options: Any) -> nn.EmbeddingBag:
    """torch's own table with the same rows."""
    with torch.no_grad():
        rows = table(torch.arange(NUM), *([] if table.options.mode is None else [torch.arange(NUM + 1)]))
    return nn.EmbeddingBag.from_pretrained(
        rows.clone(), freeze=False, mode=table.options.mode or "sum", include_last_offset=True, **options
    )


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_and_gradients_are_those_of_torch(mode: str, is_weighted: bool) -> None:
    if mode == "mean" and is_weighted:
        pytest.skip("torch has no weighted mean")
    table = CachedEmbedding(NUM, DIM, mode=mode, optimizer="sgd", device_rows=8)
    other = twin(table)
    weights = torch.linspace(-1, 2, len(IDS)) if is_weighted else None
    own, their = (None if weights is None else weights.clone().requires_grad_() for _ in range(2))
    answer, expected = table(IDS, OFFSETS, own), other(IDS, OFFSETS, their)
    torch.testing.assert_close(answer, expected)
    answer.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(float(table.squared_norm()), float(other.weight.grad.double().square().sum()))
    table.scale_gradients_(0.5)
    table.step(0.1)
    with torch.no_grad():
        torch.testing.assert_close(
            table(torch.arange(NUM).unsqueeze(1)), other.weight - 0.05 * other.weight.grad, rtol=1e-5, atol=1e-7
        )
    if own is not None and their is not None:
        torch.testing.assert_close(own.grad, their.grad)


def test_the_weights_of_a_mean_have_gradients() -> None:
    table = CachedEmbedding(NUM, DIM, mode="mean", optimizer="sgd")
    weights = torch.rand(len(IDS), requires_grad=True)
    table(IDS, OFFSETS, weights).sum().backward()
    with torch.no_grad():
        rows = table(IDS, torch.arange(len(IDS) + 1)).sum(1)
    counts = OFFSETS.diff()
    torch.testing.assert_close(weights.grad, rows / torch.repeat_interleave(counts, counts))


def test_weights_have_no_second_derivative_and_say_so() -> None:
    weights = torch.rand(len(IDS), requires_grad=True)
    pooled = CachedEmbedding(NUM, DIM, optimizer="sgd")(IDS, OFFSETS, weights)
    with pytest.raises(ModelError, match=r"create_graph=True[\s\S]*look the rows up without weights"):
        torch.autograd.grad(pooled.sum(), weights, create_graph=True)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3,), (2, 3, 4)])
def test_without_bags_ids_may_have_any_shape(shape: tuple[int, ...]) -> None:
    table = CachedEmbedding(None, DIM, mode=None, device_rows=4)
    answer = table(torch.ones(shape, dtype=torch.int64))
    assert answer.shape == (*shape, table.embedding_dim)
    answer.sum().backward()
    table.step(0.1)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_an_empty_bag_is_zero(mode: str) -> None:
    table = CachedEmbedding(None, DIM, mode=mode)
    assert table(torch.empty(0, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 3
    assert table(torch.empty(2, 0, dtype=torch.int64)).tolist() == [[0.0] * DIM] * 2


def test_bags_of_one_id_are_its_row() -> None:
    table = CachedEmbedding(None, DIM)
    ids = torch.tensor([[5], [-7]])
    assert torch.equal(table(ids), table(ids.flatten(), torch.tensor([0, 1, 2])))


def test_offsets_may_leave_out_the_last() -> None:
    one, other = CachedEmbedding(None, DIM), CachedEmbedding(None, DIM, include_last_offset=False)
    assert torch.equal(one(IDS, torch.tensor([0, 4, 9])), other(IDS, torch.tensor([0, 4])))


def test_several_lookups_of_a_step_add_up() -> None:
    apart, together = (CachedEmbedding(None, DIM, optimizer="adagrad", device_rows=rows) for rows in (4, None))
    for ids in (IDS[:4], IDS[4:]):
        apart(ids.unsqueeze(1)).sum().backward()
    together(IDS.unsqueeze(1)).sum().backward()
    assert float(apart.squared_norm()) == pytest.approx(float(together.squared_norm()))
    for table in (apart, together):
        table.step(0.1)
    assert torch.equal(apart(IDS.unsqueeze(1)), together(IDS.unsqueeze(1)))


def test_a_step_without_gradients_and_a_skipped_step_move_nothing() -> None:
    table = CachedEmbedding(None, DIM, device_rows=4)
    before = table(IDS, OFFSETS).detach()
    table(IDS, OFFSETS).sum().backward()
    table.clear_gradients()
    table.step(0.1)
    assert float(table.squared_norm()) == 0.0
    assert torch.equal(table(IDS, OFFSETS), before)
    assert table.rows.pins.open_lookups() == []


def test_pins_go_with_answers_that_are_dropped_and_without_gradients_at_once() -> None:
    table = CachedEmbedding(None, DIM, device_rows=4)
    answer = table(IDS, OFFSETS)
    assert table.rows.pins.open_lookups().__len__() == 1
    del answer
    assert table.rows.pins.open_lookups() == []
    with torch.no_grad():
        kept = table(IDS, OFFSETS)
    assert table.rows.pins.open_lookups() == []
    assert not kept.requires_grad


def test_a_backward_pass_after_the_step_is_refused() -> None:
    table = CachedEmbedding(None, DIM)
    loss = table(IDS, OFFSETS).sum()
    loss.backward(retain_graph=True)
    table.step(0.1)
    with pytest.raises(ModelError, match="after the step"):
        loss.backward()


def test_two_backward_passes_add_up() -> None:
    once, twice = CachedEmbedding(None, DIM, optimizer="sgd"), CachedEmbedding(None, DIM, optimizer="sgd")
    (2 * once(IDS, OFFSETS)).sum().backward()
    loss = twice(IDS, OFFSETS).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    once.step(0.5)
    twice.step(0.5)
    assert torch.equal(once(IDS, OFFSETS), twice(IDS, OFFSETS))


def test_the_loop_of_a_run_finds_the_table() -> None:
    assert isinstance(CachedEmbedding(None, DIM), SparseModule)


def test_a_batch_larger_than_the_tier_overflows_and_drains_again() -> None:
    table = CachedEmbedding(None, DIM, device_rows=5)
    table(torch.arange(12).unsqueeze(1)).sum().backward()
    assert table.stats().overflow_rows == 7
    table.step(0.1)
    table(torch.arange(100, 103).unsqueeze(1)).sum().backward()
    table.step(0.1)
    assert table.stats().resident["device"] == 5


def test_strict_says_how_large_the_tier_would_have_to_be() -> None:
    table = CachedEmbedding(None, DIM, device_rows=5, fail_on_overflow=True)
    with pytest.raises(ConfigError, match="cache.device_rows=12"):
        table(torch.arange(12).unsqueeze(1))
    assert table.rows.pins.open_lookups() == []


@pytest.mark.parametrize("bad", [-1, NUM, 2**62])
def test_an_id_beyond_the_table_is_refused(bad: int) -> None:
    table = CachedEmbedding(NUM, DIM, device_rows=5)
    with pytest.raises(DataError, match=rf"(?s){bad}.*0 to {NUM - 1}"):
        table(torch.tensor([[0, bad]]))
    assert table.rows.pins.open_lookups() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([1.0]),), "invalid dtype of ids"),
        ((torch.tensor([1, 2]),), "bags of a lookup are undefined"),
        ((torch.tensor([[1, 2]]), torch.tensor([0, 2])), "bags already"),
        ((IDS, torch.tensor([0, 12])), "another number of ids"),
        ((IDS, torch.tensor([1, 9])), "invalid offsets of bags"),
        ((IDS, OFFSETS, torch.ones(3)), "differ in shape"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments: tuple[Tensor, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        CachedEmbedding(None, DIM)(*arguments)


def test_mode_none_has_no_bags() -> None:
    with pytest.raises(DataError, match="mode None"):
        CachedEmbedding(None, DIM, mode=None)(IDS, OFFSETS)


@pytest.mark.parametrize(
    "options",
    [
        {"dim": 0},
        {"mode": "max"},
        {"init_scale": -1.0},
        {"num_embeddings": 0},
        {"device_rows": 0},
        {"host_rows": 5},
        {"host_rows": -1, "device_rows": 5, "path": "x"},
        {"device_rows": 5, "host_rows": 5},
        {"path": "x"},
        {"device_rows": 5, "path": "x", "file_rows": 7},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    dim, num = options.pop("dim", DIM), options.pop("num_embeddings", None)
    with pytest.raises(ConfigError, match="invalid value for option"):
        CachedEmbedding(num, dim, **options)


@pytest.mark.parametrize(
    "build",
    [
        lambda: PolicyOptions(name="lifo"),  # type: ignore[arg-type]
        lambda: AdmissionOptions(name="counted"),  # type: ignore[arg-type]
        lambda: ExpiryOptions(every=2),
    ],
)
def test_parts_of_options_that_cannot_be_are_refused(build: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape("cache.")):
        build()


def test_a_table_leaves_no_file(tmp_path: Path) -> None:
    with CachedEmbedding(None, DIM, device_rows=2, host_rows=0, path=str(tmp_path)) as table:
        for start in (0, 4, 8):
            table(torch.arange(start, start + 4).unsqueeze(1)).sum().backward()
            table.step(0.1)
        assert table.stats().resident["file"] > 0
        # Not even while it is open: a process that is killed leaves none either.
        assert not list(tmp_path.iterdir())
    table.close()


def test_a_state_dict_does_not_pretend_to_hold_rows() -> None:
    table, dense = CachedEmbedding(None, 4, name="users"), nn.Linear(4, 1)
    network = nn.Sequential(table, dense)
    for save in (network.state_dict, table.state_dict):
        with pytest.raises(ModelError, match=r"holds no rows of the table[\s\S]*CheckpointWriter[\s\S]*parameters"):
            save()
    parameters = dict(network.named_parameters())
    with pytest.raises(RuntimeError, match=r"Missing key[\s\S]*0.rows \(load a checkpoint[\s\S]*load_tables"):
        network.load_state_dict(parameters)
    assert len(network.load_state_dict(parameters, strict=False).missing_keys) == 1
    # What holds no table is not concerned, and the live parameters are no copy that anybody would keep.
    assert dense.state_dict().keys() == {"weight", "bias"}
    assert network.state_dict(keep_vars=True)["1.weight"] is dense.weight


def test_a_table_is_not_copied_or_pickled() -> None:
    network = nn.Sequential(CachedEmbedding(None, 4, name="users"), nn.Linear(4, 1))
    for copying in (copy.deepcopy, copy.copy, lambda module: torch.save(module, io.BytesIO()), pickle.dumps):
        with pytest.raises(ModelError, match=r"'users' cannot be copied or pickled[\s\S]*CheckpointWriter"):
            copying(network if copying is not copy.copy else network[0])


def test_tables_without_a_name_tell_that_their_rows_are_equal(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_warned", set[str]())
    monkeypatch.setattr(tables, "_unnamed", WeakSet[CachedEmbedding]())
    ids = torch.tensor([[3]])
    with (
        CachedEmbedding(9, 2) as user,
        CachedEmbedding(9, 2, seed=1) as item,
        CachedEmbedding(9, 2, name="city") as city,
    ):
        assert len({tuple(each(ids).flatten().tolist()) for each in (user, item, city)}) == 3
        assert not caplog.messages
        with CachedEmbedding(9, 2) as other:
            assert torch.equal(user(ids), other(ids))
    assert caplog.messages == ["tables without a name start with equal rows by id: give each a name of its own"]


def test_gradients_of_a_scaled_loss_are_scaled_back() -> None:
    found = []
    for scale in (1.0, 1024.0):
        with CachedEmbedding(9, 2, optimizer="sgd") as table:
            ids = torch.tensor([[3, 4], [4, 8]])
            (scale * table(ids).square().sum()).backward()
            table.scale_gradients_(1 / scale)
            table.step(0.1)
            found.append(table(ids).detach())
    assert torch.equal(*found)
