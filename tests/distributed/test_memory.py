"""No rank ever holds a whole model that is cut: not when it is read, evaluated, trained or written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from safetensors.torch import load_file
from torch import Tensor

from kitforge.api import save_model
from kitforge.composition import compose_config
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import KitforgeError, ModelError
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.transformers.build import TASKS as TRANSFORMERS_TASKS
from kitforge.kits.transformers.build import Inputs
from kitforge.models import loading as model_folder
from tests.allocations import Allocations
from tests.distributed import training
from tests.distributed.ranks import run_ranks
from tests.distributed.training import TestRendezvous, ready, run_training, write_text
from tests.kits.rlhf import runs

KIT = TRANSFORMERS_TASKS["text_generation"]

pytestmark = pytest.mark.slow

# Every matrix is large beside all that a step of the few tokens here makes, and no dim of the first is divided evenly.
WIDE = {
    "model": "llama_tiny",
    "model.num_layers": 2,
    "model.dim": 96,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.mlp_dim": 250,
    "model.vocab_size": 1001,
}
MESHES: list[dict[str, Any]] = [
    {"parallel.shard": 2},
    {"parallel.tensor": 2},
    {"parallel.shard": 2, "parallel.tensor": 2},
]
SMALL = {"data.sequence_length": 4, "data.batch_size": 2, "trainer.max_steps": 1, "trainer.eval_batches": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, and its export."""
    folder = tmp_path_factory.mktemp("memory")
    write_text(folder)
    run_training(0, folder, {**WIDE, **SMALL, "output_dir": str(folder / "run")})
    model = model_folder.load(folder / "run", device=torch.device("cpu"))
    model_folder.save(model, folder / "exported")
    (folder / "exported" / "kitforge_tokenizer.json").write_text(json.dumps({"kind": "byte"}))
    return folder


def degrees(choices: Mapping[str, Any]) -> int:
    return choices.get("parallel.shard", 1) * choices.get("parallel.tensor", 1) * choices.get("parallel.data", 1)


def read(rank: int, folder: Path, source: str, choices: Mapping[str, Any]) -> dict[str, Tensor]:
    """Put a run together from weights; nothing that is made on the way is larger than the largest piece."""
    given = {**SMALL, **choices, "checkpoint": str(folder / source), "output_dir": str(folder / "new")}
    training.LLAMA.clear()
    with Allocations() as made:
        assembly, _ = ready(rank, folder, given)
    parallel = assembly.loop.state.parallel
    pieces = parallel.parameters()
    # All ranks of `shard` have room for as many rows as the one with the most.
    limit = max(each.nbytes for each in pieces.values()) + 4 * WIDE["model.dim"]
    assert made.largest <= limit, f"{made.largest:,} bytes at once, at most {limit:,} expected"
    return {name: parallel.full_tensor(name).clone() for name in pieces}


@pytest.mark.parametrize(("source", "mesh"), [("run", MESHES[1]), ("exported", MESHES[0])], ids=str)
def test_weights_are_read_by_pieces(place: Path, source: str, mesh: dict[str, Any]) -> None:
    expected = dict(model_folder.load(place / source, device=torch.device("cpu")).named_parameters())
    for weights in run_ranks(degrees(mesh), read, place, source, mesh):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def trained(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[Decoder, Any]:
    """A model cut over the ranks, with weights of the run, as `Run.model` is."""
    training.LLAMA.clear()
    given = {**SMALL, **choices, "checkpoint": str(folder / "run"), "output_dir": str(folder / "new")}
    loop = ready(rank, folder, given)[0].loop
    assert isinstance(loop.model, Decoder)
    return loop.model, loop.state.parallel


def write(rank: int, folder: Path, target: str, choices: Mapping[str, Any], dtype: Any) -> tuple[int, int]:
    model, parallel = trained(rank, folder, choices)
    with Allocations() as made:
        KIT.save(model, folder / target, None, dtype)
    return made.largest, max(each.nbytes for each in parallel.parameters().values())


def test_weights_are_written_tensor_by_tensor(place: Path) -> None:
    target, mesh, dtype = "written", MESHES[2], "bfloat16"
    made = run_ranks(degrees(mesh), write, place, target, mesh, dtype)
    expected = load_file(place / "exported" / "model.safetensors")
    found = load_file(place / target / "model.safetensors")
    wanted = getattr(torch, dtype)
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[name].to(wanted)) for name, each in found.items())
    assert json.loads((place / target / "config.json").read_text())["dtype"] == str(wanted).removeprefix("torch.")
    # The largest matrix is whole on rank 0, and nowhere else.
    assert made[0][0] <= max(each.nbytes for each in found.values())
    assert all(largest <= piece for largest, piece in made[1:])


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_folder_is_exported_tensor_by_tensor(place: Path, dtype: str | None) -> None:
    """Also one whose tensors were saved in parts, in as little memory."""
    given = {**WIDE, **SMALL, "output_dir": str(place / "parts"), "parallel.shard": 2}
    if not (place / "parts").exists():
        run_ranks(2, run_training, place, given)
    source = model_folder.load(place / "parts", device=torch.device("cpu"))
    model_folder.save(source, place / f"whole-{dtype}", dtype=dtype)  # type: ignore[arg-type]
    with Allocations() as made:
        save_model(place / "parts", place / f"streamed-{dtype}", dtype=dtype)
    expected, found = (load_file(place / f"{way}-{dtype}" / "model.safetensors") for way in ("whole", "streamed"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(each, expected[name]) for name, each in found.items())
    # A matrix is put together from its parts in the dtype that it has there.
    largest = max(each.numel() for each in found.values())
    assert 0 < made.most <= largest * (4 if dtype is None else 6)


def cannot_write(rank: int, folder: Path) -> str:
    model, parallel = trained(rank, folder, {"parallel.shard": 2})
    # What float16 cannot hold is found in the middle of the stream.
    with torch.no_grad():
        parallel.parameters()["blocks.1.mlp.up.weight"].fill_(1e5)
    with pytest.raises(KitforgeError) as told:
        KIT.save(model, folder / "refused", None, "float16")
    assert rank > 0 or isinstance(told.value, ModelError)
    return str(told.value)


def test_what_fails_while_rank_0_writes_is_told_by_all(place: Path) -> None:
    words = run_ranks(2, cannot_write, place)
    assert words[0] == words[1]
    assert "mlp.up_proj.weight' has weights that float16 cannot hold" in words[0]
    assert not (place / "refused" / "config.json").exists()


def measure(rank: int, folder: Path, source: str, choices: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    torch.set_num_threads(1)
    given = {
        **training.BASE,
        **SMALL,
        **choices,
        "data.eval": str(folder / "text.txt"),
        "data.cache": str(folder / "cache"),
        "checkpoint": str(folder / source),
    }
    options = KIT.read_options(compose_config("text_generation", given).values)
    with Allocations() as made:
        inputs = Inputs(open_model=TASKS["sft"].open_model if source == "aligned" else None)
        metrics = KIT.evaluate(options, inputs, TestRendezvous(options.parallel))  # type: ignore[arg-type]
    return metrics, made.largest


@pytest.mark.parametrize("source", ["exported", "aligned"])
def test_an_evaluation_reads_pieces_too(place: Path, source: str) -> None:
    """Also of the policy of a run of alignment, with its adapter."""
    if source == "aligned":
        given = model_folder.load(place / "run", device=torch.device("cpu"))
        begun = runs.begin("sft", place / "aligned", {"lora.rank": 2, "trainer.max_steps": 1}, model=given)
        runs.finish(begun)
    whole, most = measure(0, place, source, {})
    for metrics, largest in run_ranks(2, measure, place, source, {"parallel.tensor": 2}):
        assert metrics["eval/loss"] == pytest.approx(whole["eval/loss"], abs=2e-6)
        assert largest < 0.6 * most
