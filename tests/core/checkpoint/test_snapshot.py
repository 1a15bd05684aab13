"""Whatever is put into a snapshot comes back to the bit, or is refused by name."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.checkpoint.snapshot import CHUNK_BYTES, Snapshot
from kitforge.foundation.errors import CheckpointError
from tests.core.checkpoint import example


def round_trip(
    root: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor] | None = None, shard_bytes: int = 2**30
) -> Path:
    """Save step 0, assert that it comes back to the bit, return its folder."""
    optimizer = optimizer or {}
    with closing(CheckpointWriter(root, shard_bytes=shard_bytes)) as writer:
        writer.save(0, model=model.items(), optimizer=optimizer.items(), state={})
    checkpoint = open_checkpoint(step_folder(root, 0))
    example.assert_equal(dict(checkpoint.model()), model)
    example.assert_equal(dict(checkpoint.optimizer()), optimizer)
    return checkpoint.folder


def taken(snapshot: Snapshot, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The buffers after a snapshot of `tensors`."""
    snapshot.take(0, model=tensors.items(), optimizer=[], state={})
    return dict(snapshot.buffers)


def test_buffers_are_used_again_where_they_fit() -> None:
    snapshot = Snapshot()
    first = taken(snapshot, {"same": torch.ones(3), "grown": torch.ones(4), "wider": torch.ones(5)})
    second = taken(snapshot, {"same": torch.zeros(3), "grown": torch.zeros(5), "wider": torch.zeros(5).double()})
    assert second["same"] is first["same"]
    example.assert_equal(second, {"same": torch.zeros(3), "grown": torch.zeros(5), "wider": torch.zeros(5).double()})


@pytest.mark.parametrize("num_bytes", [2**17, 2**17 + 2, CHUNK_BYTES - 2, CHUNK_BYTES + 2, 3 * CHUNK_BYTES])
def test_large_tensors_are_copied_whole(num_bytes: int) -> None:
    numbers = torch.arange(num_bytes // 2, dtype=torch.int16)
    tensors = {"plain": numbers, "half": numbers.view(torch.bfloat16), "skipping": numbers[::2]}
    example.assert_equal(taken(Snapshot(), tensors), tensors)


@pytest.mark.parametrize("dtype", safetensors_file.DTYPE_NAMES, ids=str)
def test_every_dtype_comes_back_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    full = raw.view(dtype)
    round_trip(tmp_path, {"full": full, "scalar": full[0].clone(), "empty": full[:0].reshape(0, 3)})


def test_values_that_are_no_numbers_come_back_to_the_bit(tmp_path: Path) -> None:
    round_trip(tmp_path, {"odd": torch.tensor([float("nan"), float("inf"), -0.0])})


def test_every_tensor_is_mapped_at_a_multiple_of_its_element(tmp_path: Path) -> None:
    folder = round_trip(tmp_path, {"flag": torch.tensor(True), "half": torch.ones(1).half(), "wide": torch.ones(3)})
    loaded = dict(open_checkpoint(folder).model())
    assert {name: tensor.data_ptr() % tensor.element_size() for name, tensor in loaded.items()} == dict.fromkeys(
        loaded, 0
    )


def test_views_come_back_as_they_looked(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    round_trip(tmp_path, {"transposed": whole.T, "column": whole[:, 1], "expanded": whole[:1].expand(3, 4)})


def test_a_model_without_an_optimizer_has_no_optimizer_file(tmp_path: Path) -> None:
    folder = round_trip(tmp_path, {"weight": torch.ones(2)})
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "state.json",
    ]


def test_nothing_at_all_is_saved_as_nothing(tmp_path: Path) -> None:
    round_trip(tmp_path, {})


def test_shards_hold_no_more_than_they_may(tmp_path: Path) -> None:
    folder = round_trip(tmp_path, {f"weight{number}": torch.ones(8) for number in range(5)}, shard_bytes=64)
    sizes = [sum(t.nbytes for t in tensors(path)) for path in sorted(folder.glob("model-*"))]
    assert sizes == [64, 64, 32]


def tensors(path: Path) -> list[Tensor]:
    file = safetensors_file.TensorFile(path, CheckpointError)
    return [file.tensor(name) for name in file.names()]


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    weight = torch.ones(100)
    folder = round_trip(tmp_path, {"embedding": weight, "head": weight, "row": weight[:10]})
    assert [t.nbytes for t in tensors(folder / "model-00001-of-00001.safetensors")] == [400, 40]
    assert [entry.alias_of for entry in open_checkpoint(folder).manifest.model] == [None, "embedding", None]


def test_tensors_made_on_the_way_are_not_taken_for_tied_ones(tmp_path: Path) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer:
        passing = ((f"step{number}", torch.tensor(float(number))) for number in range(50))
        writer.save(0, model=[], optimizer=passing, state={})
    values = [tensor.item() for _, tensor in open_checkpoint(step_folder(tmp_path, 0)).optimizer()]
    assert values == list(range(50))


@pytest.mark.slow
@settings(max_examples=40)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=6),
    names=st.lists(st.text(), min_size=6, max_size=6, unique=True),
    seed=st.integers(0, 2**31),
    shard_bytes=st.integers(1, 300),
)
def test_any_tensors_come_back(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[int]], names: list[str], seed: int, shard_bytes: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.float16, torch.uint8]
    values = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    named = dict(zip(names, values, strict=False))
    halves = dict(list(named.items())[::2]), dict(list(named.items())[1::2])
    root = tmp_path_factory.mktemp("any")
    round_trip(root, *halves, shard_bytes=shard_bytes)
    shutil.rmtree(root)


def test_state_comes_back(tmp_path: Path) -> None:
    state = {"a": [1, 2.5, True, None, "é\n"], "nested": {"big": 2**80, "small": 1e-300, "infinite": float("inf")}}
    with closing(CheckpointWriter(tmp_path)) as writer:
        writer.save(7, model=[], optimizer=[], state=state)
    checkpoint = open_checkpoint(step_folder(tmp_path, 7))
    assert (checkpoint.step, checkpoint.state) == (7, state)


def test_tensors_among_the_state_come_back(tmp_path: Path) -> None:
    values = torch.arange(6, dtype=torch.float64).view(2, 3)
    with closing(CheckpointWriter(tmp_path, asynchronous=True)) as writer:
        writer.save(7, model=[], optimizer=[], state={"a": [1, {"t": values.T}], "b": values > 2})
        values += 1
    state = open_checkpoint(step_folder(tmp_path, 7)).state
    assert torch.equal(state["a"][1]["t"], (values - 1).T) and torch.equal(state["b"], values > 3)
    assert state["a"][0] == 1


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"a": {"state_tensor": 1}}, "state.a"),
        ({"a": {3: 1}}, "state.a"),
        ({"a": [0, {1}]}, r"state\.a\[1\]"),
        ({"t": torch.ones(1, dtype=torch.complex128)}, r"state\.t"),
    ],
)
def test_state_that_json_would_change_is_refused(tmp_path: Path, state: dict[str, object], named: str) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer, pytest.raises(CheckpointError, match=named):
        writer.save(1, model=[], optimizer=[], state=state)


@pytest.mark.parametrize(
    "tensor", [torch.empty(2, device="meta"), torch.ones(2, 2).to_sparse(), torch.ones(2, dtype=torch.complex128)]
)
def test_a_tensor_that_cannot_be_stored_is_named(tmp_path: Path, tensor: Tensor) -> None:
    with closing(CheckpointWriter(tmp_path)) as writer, pytest.raises(CheckpointError, match="'odd' cannot be stored"):
        writer.save(1, model=[("odd", tensor)], optimizer=[], state={})


@pytest.mark.parametrize("second", [("model", "model"), ("model", "optimizer")])
def test_a_name_given_twice_is_refused(tmp_path: Path, second: tuple[str, str]) -> None:
    given: dict[str, list[tuple[str, Tensor]]] = {"model": [], "optimizer": []}
    for part in second:
        given[part].append(("weight", torch.ones(1)))
    with closing(CheckpointWriter(tmp_path)) as writer, pytest.raises(CheckpointError, match="two tensors"):
        writer.save(1, model=given["model"], optimizer=given["optimizer"], state={})
