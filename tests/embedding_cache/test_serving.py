"""Tables that are only read: equal to the training's, or within the bounds of fewer bits."""

import resource
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.optim.table_protocols import RowSource
from kitforge.embedding_cache.options import ExpiryOptions
from kitforge.embedding_cache.serving import table as served_table
from kitforge.embedding_cache.serving.mmap_rows import HashedRowIndex, RowShards, SortedRowIndex
from kitforge.embedding_cache.serving.quantize import quantize_tables
from kitforge.embedding_cache.serving.table import ServedTable
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import CheckpointError, ConfigError, DataError
from tests.sharded_table import HeldRows

DIM = 5
EXTREME = (-(2**63), -1, 0, 2**63 - 1)
ASKED = torch.tensor([*EXTREME, *range(-3, 40), 7, 7, 10**15])
OPTIMIZERS = ("sgd", "adagrad", "adam", "ftrl")


def train(table: CachedEmbedding, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    ids = torch.cat([torch.randint(0, 30, (12,), generator=generator), torch.tensor(EXTREME)])
    vectors = table(ids.unsqueeze(1))
    (vectors * torch.randn(vectors.shape, generator=generator)).sum().backward()
    table.step(0.1)


def trained(root: Path, *, num_deltas: int = 0, **options: Any) -> tuple[CachedEmbedding, Checkpoint]:
    """A table after six steps, of which the last is saved after the others."""
    table = CachedEmbedding(None, DIM, init_scale=0.5, **options)
    with closing(CheckpointWriter(root)) as writer:
        writer.attach({"table": table}, num_deltas=num_deltas)
        for step in range(1, 7):
            train(table, step)
            writer.save(step, model=[], optimizer=[], state={})
    return table.eval(), open_checkpoint(root / "step_6")


def same_bits(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and first.view(torch.int32).equal(second.view(torch.int32))


def assert_served_as_trained(served: ServedTable, table: CachedEmbedding) -> None:
    with torch.no_grad():
        assert same_bits(served(ASKED.unsqueeze(1)), table(ASKED.unsqueeze(1)))
        offsets = torch.tensor([0, 0, 3, 20, 20, len(ASKED)])
        weights = torch.linspace(-1, 2, len(ASKED))
        assert same_bits(served(ASKED, offsets), table(ASKED, offsets))
        assert same_bits(served(ASKED, offsets, weights), table(ASKED, offsets, weights))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_served_is_what_the_training_looks_up(tmp_path: Path, optimizer: str) -> None:
    table, checkpoint = trained(tmp_path, optimizer=optimizer)
    assert_served_as_trained(ServedTable(checkpoint.table("table")), table)


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_a_chain_of_changes_with_rows_that_went_away_is_served_too(tmp_path: Path, optimizer: str) -> None:
    expiry = ExpiryOptions(every=2, max_age=1)
    table, checkpoint = trained(tmp_path, num_deltas=9, optimizer=optimizer, expiry=expiry)
    assert len(checkpoint.increments) == 6
    assert any(len(ids) for _, removed in checkpoint.table("table").layers() for ids in removed)
    assert_served_as_trained(ServedTable(checkpoint.table("table")), table)


def test_dense_adam_served_without_catching_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_table, "_catch_up", lambda *_: None)
    with pytest.raises(AssertionError):
        test_what_is_served_is_what_the_training_looks_up(tmp_path, "adam")


def test_an_older_row_that_hides_a_newer_one_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = HashedRowIndex._add

    def over(self: HashedRowIndex, ids: Tensor, places: Tensor) -> None:
        self._positions.insert(ids.contiguous(), places)

    assert add is not over
    monkeypatch.setattr(HashedRowIndex, "_add", over)
    with pytest.raises(AssertionError):
        test_a_chain_of_changes_with_rows_that_went_away_is_served_too(tmp_path, "adagrad")


@pytest.mark.parametrize("mode", ["mean", None])
def test_it_has_the_face_of_the_table_that_was_trained(tmp_path: Path, mode: Any) -> None:
    table, checkpoint = trained(tmp_path, mode="sum", optimizer="sgd")
    served = ServedTable(checkpoint.table("table"), mode=mode)
    ids = ASKED[:40].reshape(8, 5)
    wanted = torch.stack([table(ids.reshape(-1, 1))]).reshape(8, 5, DIM)
    assert served.embedding_dim == DIM
    answer = served(ids)
    assert not answer.requires_grad
    assert torch.allclose(answer, wanted if mode is None else wanted.mean(1))


def test_a_table_with_a_range_refuses_ids_outside(tmp_path: Path) -> None:
    table = CachedEmbedding(50, DIM, optimizer="sgd")
    table(torch.tensor([[3]])).sum().backward()
    table.step(0.1)
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"table": table})
        writer.save(1, model=[], optimizer=[], state={})
    served = ServedTable(open_checkpoint(tmp_path / "step_1").table("table"))
    with pytest.raises(DataError, match="an id is not in the table"):
        served(torch.tensor([[50]]))


def test_a_table_without_rows_is_served_as_it_begins(tmp_path: Path) -> None:
    table = CachedEmbedding(None, DIM, optimizer="adam")
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"table": table})
        writer.save(1, model=[], optimizer=[], state={})
    checkpoint = open_checkpoint(tmp_path / "step_1")
    assert_served_as_trained(ServedTable(checkpoint.table("table")), table)
    quantize_tables(checkpoint, tmp_path / "served", "int8")
    assert_served_as_trained(ServedTable(open_checkpoint(tmp_path / "served").table("table")), table)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at the maps of the process")
def test_rows_stay_in_the_files(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path, optimizer="adagrad")
    served = ServedTable(checkpoint.table("table"))
    address = served._column_shards[0].rows.parts[0].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < end:
            assert line.endswith(".safetensors")
            return
    raise AssertionError("the rows are nowhere")


@contextmanager
def small_portions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several files of several portions each."""
    from kitforge.core.checkpoint.table_writer import TableWriter
    from kitforge.embedding_cache.serving import quantize as module

    with monkeypatch.context() as patched:
        patched.setattr(module, "CHUNK_ROWS", 3)
        patched.setattr(TableWriter.__init__, "__defaults__", (None, 150))
        yield


def converted(root: Path, checkpoint: Checkpoint, dtype: Any) -> tuple[ServedTable, float]:
    made = quantize_tables(checkpoint, root / dtype, dtype)
    checkpoint = open_checkpoint(root / dtype)
    stored = checkpoint.table("table")
    assert stored.schema["serving"] == {"dtype": dtype, "largest_error": made["table"].largest_error}
    return ServedTable(stored), made["table"].largest_error


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_conversion_without_loss_is_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    table, checkpoint = trained(tmp_path, num_deltas=9, optimizer=optimizer)
    with small_portions(monkeypatch):
        served, error = converted(tmp_path, checkpoint, "fp32")
    assert len(list((tmp_path / "fp32").glob("table-table-rows-*"))) > 2
    assert error == 0
    assert_served_as_trained(served, table)


def bound_of(dtype: str, wanted: Tensor) -> Tensor:
    if dtype == "fp16":
        return (wanted.abs() * 2**-11).clamp(min=2**-25)
    return wanted.abs().amax(1, keepdim=True) / 127 / 2 * (1 + 1e-5)


@pytest.mark.parametrize("dtype", ["fp16", "int8"])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_fewer_bits_stay_within_their_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, scale: float
) -> None:
    table, checkpoint = trained(tmp_path, optimizer="adagrad")
    vectors = ServedTable.vectors
    # Rows of every size, zeros among them.
    factors = scale * torch.tensor([1.0, 0.0, -3.0, 0.1, 2e-3])
    monkeypatch.setattr(ServedTable, "vectors", lambda self, ids: vectors(self, ids) * factors)
    with small_portions(monkeypatch):
        served, error = converted(tmp_path, checkpoint, dtype)
    wanted = ServedTable(checkpoint.table("table")).vectors(served.ids())
    monkeypatch.undo()
    errors = (served.vectors(served.ids()) - wanted).abs()
    assert bool((errors <= bound_of(dtype, wanted)).all())
    assert float(errors.max()) == error
    assert error > 0
    assert len(served.ids()) == len(checkpoint.table("table").layers().__next__()[0][0][0])


def test_int8_takes_a_fraction_of_the_room(tmp_path: Path) -> None:
    held = HeldRows(
        schema=CachedEmbedding(None, 64, optimizer="sgd").schema,
        version=1,
        state={"steps": torch.tensor(1)},
        chunks_by_part={"rows": (torch.arange(2000), torch.ones(2000, 67))},
    )
    checkpoint = saved(tmp_path, held)
    sizes = {
        dtype: quantize_tables(checkpoint, tmp_path / dtype, dtype)["table"].num_bytes for dtype in ("fp32", "int8")
    }
    assert sizes["int8"] < 0.32 * sizes["fp32"]


class Given:
    """A table whose snapshot is what a test gives."""

    def __init__(self, source: HeldRows) -> None:
        self.schema, self.share, self._source = source.schema, source.shard, source

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> RowSource:
        return self._source

    def load_rows(self, source: RowSource) -> None:
        raise NotImplementedError


def saved(root: Path, source: HeldRows) -> Checkpoint:
    with closing(CheckpointWriter(root)) as writer:
        writer.attach({"table": Given(source)})
        writer.save(1, model=[], optimizer=[], state={})
    return open_checkpoint(root / "step_1")


def test_rows_in_pieces_of_columns_are_put_together(tmp_path: Path) -> None:
    table, checkpoint = trained(tmp_path / "run", optimizer="adagrad")
    [(ids, records)] = checkpoint.table("table").chunks()
    layout = table.rows.optimizer.layout(DIM)

    def piece(columns: slice) -> Tensor:
        sums = records[:, layout.states["sum"]]
        return torch.cat([records[:, columns], sums[:, columns], records[:, -3:]], 1)

    held = HeldRows(
        schema=checkpoint.table("table").schema,
        version=6,
        state={"steps": torch.tensor(6)},
        chunks_by_part={"rows-0-2": (ids, piece(slice(0, 2))), "rows-2-5": (ids, piece(slice(2, 5)))},
    )
    checkpoint = saved(tmp_path / "pieces", held)
    assert_served_as_trained(ServedTable(checkpoint.table("table")), table)
    served, _ = converted(tmp_path, checkpoint, "fp32")
    assert_served_as_trained(served, table)


@pytest.mark.parametrize(
    ("value", "dtype", "words"),
    [
        (float("nan"), "fp32", r"id 12 with nan[\s\S]*finite"),
        (float("inf"), "int8", r"id 12 with inf[\s\S]*finite"),
        (7e4, "fp16", r"id 12 with 70000.0[\s\S]*65504"),
    ],
)
def test_a_row_that_does_not_fit_is_named_and_the_last_conversion_stays(
    tmp_path: Path, value: float, dtype: Any, words: str
) -> None:
    table = CachedEmbedding(None, 2, optimizer="sgd")
    records = torch.ones(3, 5)
    held = HeldRows(
        schema=table.schema,
        version=1,
        state={"steps": torch.tensor(1)},
        chunks_by_part={"rows": (torch.tensor([5, 12, -4]), records)},
    )
    quantize_tables(saved(tmp_path, held), tmp_path / "served", dtype)
    before = (tmp_path / "served" / "manifest.json").read_bytes()
    records[1, 1] = value
    with pytest.raises(DataError, match=rf"table 'table' cannot be served as {dtype}[\s\S]*{words}"):
        quantize_tables(saved(tmp_path, replace(held)), tmp_path / "served", dtype)
    assert (tmp_path / "served" / "manifest.json").read_bytes() == before
    assert len(ServedTable(open_checkpoint(tmp_path / "served").table("table")).ids()) == 3
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_leaves_the_last_conversion(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path, optimizer="adagrad")
    quantize_tables(checkpoint, tmp_path / "served")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            quantize_tables(checkpoint, tmp_path / "served", "fp32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ServedTable(open_checkpoint(tmp_path / "served").table("table")).dtype == "int8"


def test_a_damaged_file_of_served_rows_is_named(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path, optimizer="adagrad")
    quantize_tables(checkpoint, tmp_path / "served")
    path = tmp_path / "served" / "table-table-scales-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path} is damaged"):
        open_checkpoint(tmp_path / "served")


def test_a_checkpoint_is_not_converted_over_itself(tmp_path: Path) -> None:
    _, checkpoint = trained(tmp_path, optimizer="sgd")
    with pytest.raises(ConfigError, match="quantized in place"):
        quantize_tables(checkpoint, tmp_path / "step_6")


def test_parts_of_an_unknown_kind_are_refused(tmp_path: Path) -> None:
    held = HeldRows(
        schema=CachedEmbedding(None, 2, optimizer="sgd").schema,
        version=1,
        chunks_by_part={"rows-of-another-kind": (torch.tensor([1]), torch.ones(1, 5))},
    )
    with pytest.raises(CheckpointError, match="rows of an unknown part"):
        ServedTable(saved(tmp_path, held).table("table"))


def test_places_in_files_are_found_whatever_is_asked() -> None:
    parts = [torch.tensor([-(2**63), -5, 3]), torch.tensor([4]), torch.tensor([9, 2**63 - 1])]
    index, stack = SortedRowIndex(parts), RowShards([part.unsqueeze(1) for part in parts])
    asked = torch.tensor([9, -(2**63), -6, 3, 4, 5, 2**63 - 1, 9, 10])
    places = index.find(asked)
    assert (places >= 0).tolist() == [True, True, False, True, True, False, True, True, False]
    assert stack.gather(places[places >= 0]).squeeze(1).tolist() == asked[places >= 0].tolist()
    assert index.find(asked[:0]).tolist() == []
    assert SortedRowIndex([]).find(asked).tolist() == [-1] * 9
