"""Rows of tables in checkpoints: whole or as changes, at one instant, under any world, and refused when damaged."""

import copy
import json
import random
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.checkpoint import incremental_tables, table_reader, table_writer
from kitforge.core.checkpoint.load import newest, open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.checkpoint.table_reader import StoredTable, tables_of
from kitforge.core.optim.table_protocols import Chunk
from kitforge.foundation.errors import CheckpointError, ConfigError
from tests.core.checkpoint import rows
from tests.core.checkpoint.rows import EXTREME, DictTable
from tests.patience import PATIENCE


def trained(num_steps: int = 3, **options: object) -> DictTable:
    table = DictTable(**options)  # type: ignore[arg-type]
    for step in range(num_steps):
        table.change([*range(10 * step, 10 * step + 12), *EXTREME])
    return table


def run_of_deltas(
    root: Path, table: DictTable, *, num_deltas: int = 3, num_steps: int = 6, keep_last: int = 100
) -> dict[int, DictTable]:
    """Random changes and removals, each step saved; returns the table as it was at every step."""
    numbers = random.Random(5)
    past: dict[int, DictTable] = {}
    with closing(CheckpointWriter(root, keep_last=keep_last)) as writer:
        writer.attach({table.name: table}, num_deltas=num_deltas)
        for step in range(1, num_steps + 1):
            table.change(numbers.sample(range(-40, 40), 25))
            table.remove(numbers.sample(range(-40, 40), 12))
            # Some come back within the same step.
            table.change(numbers.sample(range(-40, 40), 6))
            rows.save(writer, step)
            past[step] = copy.deepcopy(table)
    return past


def assert_same(got: DictTable, wanted: DictTable) -> None:
    assert (got.rows, got.counts, got.version) == (wanted.rows, wanted.counts, wanted.version)


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """The system refuses to let any file grow beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def table_file(root: Path, step: int) -> Path:
    return next(step_folder(root, step).glob("table-users-rows-*"))


def test_a_table_comes_back_bit_for_bit(tmp_path: Path) -> None:
    table, other = trained(), trained(2, name="items", dim=1)
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": table, "items": other})
        rows.save(writer, 1)
    users, items = DictTable(), DictTable(name="items", dim=1)
    rows.loaded(tmp_path, 1, users, items)
    assert_same(users, table)
    assert_same(items, other)
    assert set(EXTREME) < set(users.rows)


def test_values_that_are_not_finite_come_back_too(tmp_path: Path) -> None:
    table = DictTable(dim=2)
    table.change([7])
    table.rows[7] = (float("inf"), -0.0)
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": table})
        rows.save(writer, 1)
    [(ids, values)] = open_checkpoint(tmp_path / "step_1").table("users").chunks()
    assert values.view(torch.int32).equal(torch.tensor([[float("inf"), -0.0]]).view(torch.int32))
    assert ids.tolist() == [7]


def test_the_file_names_say_what_is_inside(tmp_path: Path) -> None:
    run_of_deltas(tmp_path, DictTable(name="a/b c-d"), num_steps=2)
    names = sorted(path.name for path in (tmp_path / "step_2").glob("table-*"))
    assert names == [
        f"table-a%2Fb%20c%2Dd-{part}.safetensors" for part in ("counts-00001", "removed-00001", "rows-00001", "state")
    ]


def test_an_empty_table_is_no_missing_table(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": DictTable()})
        rows.save(writer, 1)
    table = trained(0)
    rows.loaded(tmp_path, 1, table)
    assert table.rows == {}


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_table_larger_than_a_file_takes_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    # A row of three floats and its id take 20 bytes.
    monkeypatch.setattr(table_writer.TableWriter.__init__, "__defaults__", (None, 20 * num_rows + 7))
    table = trained()
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": table})
        rows.save(writer, 1)
    assert len(list((tmp_path / "step_1").glob("table-users-rows-*"))) == -(-len(table.rows) // num_rows)
    loaded = DictTable()
    rows.loaded(tmp_path, 1, loaded)
    assert_same(loaded, table)


def test_training_goes_on_while_the_files_get_the_old_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, gate = trained(), threading.Event()
    before = copy.deepcopy(table.rows)
    write = table_writer.TableWriter.write
    monkeypatch.setattr(table_writer.TableWriter, "write", lambda *given: (gate.wait(PATIENCE), write(*given)))
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": table})
        rows.save(writer, 1)
        table.change(range(100))
        gate.set()
    loaded = DictTable()
    rows.loaded(tmp_path, 1, loaded)
    assert loaded.rows == before
    assert table.snapshots[0].is_closed


def test_a_base_and_its_deltas_are_the_whole(tmp_path: Path) -> None:
    past = run_of_deltas(tmp_path, DictTable(), num_deltas=3, num_steps=7)
    for step, table in past.items():
        loaded = DictTable()
        rows.loaded(tmp_path, step, loaded)
        assert_same(loaded, table)


def test_a_delta_holds_changes_only_and_every_fourth_step_is_whole(tmp_path: Path) -> None:
    past = run_of_deltas(tmp_path, DictTable(), num_deltas=3, num_steps=7)
    manifests = {step: open_checkpoint(step_folder(tmp_path, step)).manifest for step in past}
    assert [step for step, manifest in manifests.items() if manifest.parent is None] == [1, 5]
    for step, manifest in manifests.items():
        [table] = manifest.tables
        num_rows = sum(entry.num_rows for entry in table.rows if entry.part == "rows")
        changed = [id for id, at in past[step].changed.items() if id in past[step].rows and at > (table.since or 0)]
        assert num_rows == len(past[step].rows if table.since is None else changed)


def forget_the_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.Held, "removed", lambda self: iter(()))


def take_the_older_row(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = StoredTable.chunks

    def oldest_first(self: StoredTable, part: str = "rows") -> Iterator[Chunk]:
        self._increments.reverse()
        return chunks(self, part)

    monkeypatch.setattr(StoredTable, "chunks", oldest_first)


def keep_the_removed_ones_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that came back after it went away would be lost if removals counted within their own step."""
    without = table_reader._without

    def shorter(known: Tensor, ids: Tensor, values: Tensor) -> Chunk:
        return without(known[:-1], ids, values)

    monkeypatch.setattr(table_reader, "_without", shorter)


@pytest.mark.parametrize("fault", [forget_the_removed, take_the_older_row, keep_the_removed_ones_out])
def test_a_chain_put_together_wrongly_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_base_and_its_deltas_are_the_whole(tmp_path)


def test_what_a_kept_step_builds_on_stays(tmp_path: Path) -> None:
    past = run_of_deltas(tmp_path, DictTable(), num_deltas=3, num_steps=7, keep_last=1)
    # Step 7 builds on 6, and that on 5, which is whole.
    assert steps(tmp_path) == [5, 6, 7]
    loaded = DictTable()
    rows.loaded(tmp_path, 7, loaded)
    assert_same(loaded, past[7])


def test_a_later_process_that_saves_no_changes_leaves_what_it_found_whole(tmp_path: Path) -> None:
    past = run_of_deltas(tmp_path, DictTable(), num_deltas=9, num_steps=4)
    with closing(CheckpointWriter(tmp_path, keep_last=2)) as writer:
        rows.save(writer, 5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    loaded = DictTable()
    rows.loaded(tmp_path, 4, loaded)
    assert_same(loaded, past[4])
    with closing(CheckpointWriter(tmp_path, keep_last=2)) as writer:
        rows.save(writer, 6)
    assert steps(tmp_path) == [5, 6]


def test_a_protected_delta_keeps_its_base(tmp_path: Path) -> None:
    table = DictTable()
    with closing(CheckpointWriter(tmp_path, keep_last=1)) as writer:
        writer.attach({"users": table}, num_deltas=1)
        for step in range(1, 6):
            table.change([step])
            rows.save(writer, step)
            if step == 2:
                writer.pin(2)
    assert steps(tmp_path) == [1, 2, 5]


def fail_in_the_middle(root: Path, table: DictTable) -> None:
    """Three steps, of which the disk has no room for the second."""
    with closing(CheckpointWriter(root)) as writer:
        writer.attach({"users": table}, num_deltas=5)
        table.change(range(1000))
        rows.save(writer, 1)
        writer.wait()
        table.change(range(500))
        table.remove(range(100))
        with full_disk(4000):
            rows.save(writer, 2)
            with pytest.raises(CheckpointError, match=r"step_2 could not be written[\s\S]*rows of users[\s\S]*step_1"):
                writer.wait()
        table.change([7])
        rows.save(writer, 3)
    assert steps(root) == [1, 3]
    loaded = DictTable()
    rows.loaded(root, 3, loaded)
    assert_same(loaded, table)


def test_a_full_disk_leaves_the_last_step_and_loses_no_change(tmp_path: Path) -> None:
    fail_in_the_middle(tmp_path, DictTable())


def test_a_delta_that_builds_on_a_step_that_never_came_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = incremental_tables.IncrementalTables.begin

    def hopeful(self: incremental_tables.IncrementalTables, step: int) -> None:
        last = self._last
        begin(self, step)
        self._last = last

    monkeypatch.setattr(incremental_tables.IncrementalTables, "begin", hopeful)
    with pytest.raises(CheckpointError, match=r"step_3 does not go on from that in .*step_1"):
        fail_in_the_middle(tmp_path, DictTable())


def test_a_new_process_begins_with_all_rows(tmp_path: Path) -> None:
    table = DictTable()
    run_of_deltas(tmp_path, table, num_steps=2)
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": table}, num_deltas=5)
        rows.save(writer, 3)
    assert open_checkpoint(tmp_path / "step_3").manifest.parent is None


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "word"), [(cut, "truncated"), (flip, "damaged"), (Path.unlink, "missing")])
@pytest.mark.parametrize("step", [2, 3])
def test_a_damaged_file_of_rows_is_named_and_an_earlier_step_is_used(
    tmp_path: Path, damage: Callable[[Path], None], word: str, step: int
) -> None:
    past = run_of_deltas(tmp_path, DictTable(), num_deltas=1, num_steps=4)
    path = table_file(tmp_path, step)
    damage(path)
    told: list[str] = []
    found = newest(tmp_path, on_damaged=lambda error: told.append(str(error)))
    # Steps 1 and 3 are whole; 2 builds on 1, and 4 on 3.
    assert found is not None
    assert found.step == {2: 4, 3: 2}[step]
    assert len(told) == {2: 0, 3: 2}[step]
    assert all(str(path) in message and word in message for message in told)
    loaded = DictTable()
    rows.loaded(tmp_path, found.step, loaded)
    assert_same(loaded, past[found.step])


def test_a_base_that_is_gone_or_another_is_named(tmp_path: Path) -> None:
    run_of_deltas(tmp_path, DictTable(), num_deltas=3, num_steps=3)
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": trained()})
        rows.save(writer, 2)
    with pytest.raises(CheckpointError, match=r"step_2 is not the step that .*step_3 builds on"):
        open_checkpoint(tmp_path / "step_3")
    (tmp_path / "step_2").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"step_3 builds on .*step_2, which is not there"):
        open_checkpoint(tmp_path / "step_3")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (DictTable(dim=4), r"'users'.*another table[\s\S]*dim: 3[\s\S]*dim: 4"),
        (DictTable(name="items"), r"other tables[\s\S]*users[\s\S]*items"),
    ],
)
def test_rows_of_another_schema_are_refused_before_a_row_is_touched(
    tmp_path: Path, table: DictTable, words: str
) -> None:
    run_of_deltas(tmp_path, DictTable(), num_steps=1)
    table.rows[3] = (1.0,)
    with pytest.raises(CheckpointError, match=words):
        rows.loaded(tmp_path, 1, table)
    assert table.rows == {3: (1.0,)}
    del table.rows[3]


def test_a_checkpoint_without_tables_is_refused_by_a_model_with_some(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        rows.save(writer, 1)
    assert "tables" not in json.loads((tmp_path / "step_1" / "manifest.json").read_text())
    with pytest.raises(CheckpointError, match="other tables"):
        rows.loaded(tmp_path, 1, DictTable())


@pytest.mark.parametrize(
    "chunk",
    [
        (torch.tensor([1], dtype=torch.int32), torch.ones(1, 3)),
        (torch.tensor([1, 2]), torch.ones(1, 3)),
        (torch.tensor([1]), torch.ones(1)),
    ],
)
def test_rows_that_cannot_be_stored_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: Chunk) -> None:
    monkeypatch.setattr(rows.Held, "chunks", lambda self, part="rows": iter([chunk]))
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.attach({"users": trained()})
        rows.save(writer, 1)
        with pytest.raises(CheckpointError, match="rows that cannot be stored"):
            writer.wait()
    assert steps(tmp_path) == []


def test_rows_that_no_checkpoint_can_keep_are_refused() -> None:
    class Forgetful(nn.Module):
        learning_rate = None

        def squared_norm(self) -> Tensor:
            raise NotImplementedError

        def scale_gradients_(self, factor: float) -> None: ...

        def step(self, rate: float) -> None: ...

        def clear_gradients(self) -> None: ...

    with pytest.raises(CheckpointError, match="a Forgetful has rows that a checkpoint cannot keep"):
        tables_of([nn.Linear(1, 1), Forgetful()])


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two tables are called 'users'"):
        tables_of([DictTable(), DictTable()])  # type: ignore[list-item]


def test_a_negative_number_of_deltas_is_refused(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer, pytest.raises(ConfigError, match="num_deltas"):
        writer.attach({}, num_deltas=-1)
