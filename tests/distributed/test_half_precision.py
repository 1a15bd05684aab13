"""Half precision under the shard axis: no rank makes a rounded copy of the whole model, and losses stay as near."""

import gc
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kitforge.core.kernels.autograd import mixed_precision
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.norm import Norm
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import World
from kitforge.foundation.dtype import Precision
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import DECODER
from kitforge.trainer.precision import autocast
from tests.distributed.ranks import run_ranks
from tests.distributed.step import init_sharded
from tests.distributed.training import run_training, world_size, write_text
from tests.pairs import pairs

NUM_LAYERS, DIM = 4, 64
CONFIG = LlamaConfig(vocab_size=32, dim=DIM, num_layers=NUM_LAYERS, num_heads=4, mlp_dim=256, max_length=32)


class Halves(TorchDispatchMode):
    """Remembers the memory of every matrix in half precision that comes into being."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, (list, tuple)) else [output]:
            if isinstance(each, Tensor) and each.dtype.itemsize == 2 and each.dim() == 2 and min(each.shape) >= DIM:
                self._seen.append(StorageWeakRef(each.untyped_storage()))
        return output

    def alive(self) -> int:
        """Bytes of those that are still there. Gathered weights are let go by making their memory empty."""
        gc.collect()
        storages = {ref.cdata: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._seen}
        return sum(storage.nbytes() for storage in storages.values() if storage is not None)


def copies(rank: int, precision: Precision, recompute: bool, trains: bool) -> tuple[int, int, int]:
    """Bytes of rounded matrices of blocks that autograd keeps and that are alive otherwise after a forward pass, and
    how many all of them would be."""
    mixed_precision.NATIVE_DTYPES.update({torch.float16: True, torch.bfloat16: True})
    world = World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(shard=2), "cpu"), precision=precision)
    model = init_sharded(build_on_meta(CONFIG, "O1"), DECODER, world, 0)
    model.recompute = "full" if recompute else "none"
    parallel = parallel_model_of(model, world)
    parallel.micro_batch(is_last=True)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.dtype.itemsize == 2 and tensor.dim() == 2 and min(tensor.shape) >= DIM:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    tokens = torch.zeros(1, 8, dtype=torch.long)
    saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with torch.set_grad_enabled(trains), autocast(world.device, precision), saved, Halves() as halves:
        hidden = model.hidden(tokens)
        alive = halves.alive()
    del hidden
    shapes = [
        each.shape for name, each in parallel.layouts.items() if name.startswith("blocks") and len(each.shape) == 2
    ]
    return sum(storage.nbytes() for storage in kept.values()), alive, sum(2 * rows * dim for rows, dim in shapes)


CASES: list[tuple[Precision, bool, bool]] = [
    ("bf16", False, True),
    ("bf16", True, True),
    ("bf16", False, False),
    ("fp16", False, True),
]


def all_copies(rank: int) -> list[tuple[int, int, int]]:
    return [copies(rank, *case) for case in CASES]


@pytest.mark.slow
def test_no_rank_keeps_a_rounded_copy_of_the_model() -> None:
    for found in run_ranks(2, all_copies):
        for case, (kept, alive, whole) in zip(CASES, found, strict=True):
            # A block or two may be gathered at any time.
            assert kept <= whole / NUM_LAYERS and alive <= 2 * whole / NUM_LAYERS, case


class Mixed(nn.Module):
    """Layers of torch that want weights of their own kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))]
        )
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        stream = self.words(ids)
        assert stream.dtype == torch.float32
        for layer in self.layers:
            stream = stream + layer(stream)
        return self.head(stream).float()


def mixed(rank: int, degrees: ParallelConfig) -> tuple[float, set[torch.dtype]]:
    torch.manual_seed(0)
    mesh = Mesh(degrees, "cpu") if degrees.world_size > 1 else None
    world = World(device=torch.device("cpu"), mesh=mesh, precision="bf16")
    model = Mixed()
    parallel = parallelize(model, Sharding(), world)
    parallel.micro_batch(is_last=True)
    with autocast(world.device, "bf16"):
        loss = model(torch.arange(8)).square().mean()
    loss.backward()
    parallel.reduce_gradients()
    return float(parallel.grad_norm()), {
        each.grad.dtype for each in parallel.parameters().values() if each.grad is not None
    }


def test_layers_of_every_kind_are_computed() -> None:
    alone, _ = mixed(0, ParallelConfig())
    for norm, dtypes in run_ranks(2, mixed, ParallelConfig(shard=2)):
        assert norm == pytest.approx(2 * alone, rel=3e-2)
        assert dtypes == {torch.float32}


SHARDED: list[dict[str, Any]] = [
    {"parallel.zero_stage": 1},
    {"parallel.zero_stage": 3},
    # Gradients of weights come after those of norms, which a reduction has turned to fp32.
    {"parallel.zero_stage": 1, "parallel.pipeline": 2, "parallel.schedule": "zero_bubble", "model.num_layers": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "native", "ranks"),
    [*pairs(("bf16", "fp16"), (True, False), (*SHARDED[:2],)), ("bf16", True, SHARDED[2])],
)
def test_losses_are_those_of_one_process_within_half_precision(
    tmp_path: Path, precision: str, native: bool, ranks: dict[str, Any]
) -> None:
    write_text(tmp_path)
    choices: dict[str, Any] = {"precision": precision, "trainer.max_steps": 3, "trainer.micro_batch_size": 2}
    half_native = dict(mixed_precision.NATIVE_DTYPES)
    mixed_precision.NATIVE_DTYPES.update({torch.float16: native, torch.bfloat16: native})
    try:
        alone, _ = run_training(0, tmp_path, {**choices, "output_dir": str(tmp_path / "alone")})
        choices |= {"parallel.shard": 2, **ranks, "output_dir": str(tmp_path / "sharded")}
        for lines, weights in run_ranks(world_size(choices), run_training, tmp_path, choices):
            for name in ("loss", "eval/loss", "grad_norm"):
                wanted = [line[name] for line in alone if name in line]
                assert [line[name] for line in lines if name in line] == pytest.approx(wanted, rel=2e-2)
            assert {each.dtype for each in weights.values()} == {torch.float32}
    finally:
        mixed_precision.NATIVE_DTYPES.update(half_native)


def nested(rank: int) -> list[bool]:
    """Whether recomputed blocks with FSDP units within them have the gradients of others, bit for bit."""
    from torch.distributed.fsdp import fully_shard

    grid, same = Mesh(ParallelConfig(shard=2), "cpu").sub_mesh("data", "shard"), []
    for stage, half in itertools.product((2, 3), (True, False)):
        gradients = {}
        for recompute in get_args(Recompute):
            config = replace(CONFIG, num_layers=2, qk_norm=True, sandwich_norms=True)
            model = build_on_meta(config, "O1").to_empty(device="cpu")
            init_weights(model.named_parameters(), 2, 0)
            model.recompute = recompute
            norms = [each for each in model.blocks.modules() if isinstance(each, Norm)]
            for unit in (*norms, *model.blocks, model):
                fully_shard(unit, mesh=grid, reshard_after_forward=stage == 3 and unit is not model)
            for micro_batch in range(2):
                model.set_reshard_after_backward(stage == 3 or micro_batch == 1)
                tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(2 * micro_batch + rank))
                with autocast(torch.device("cpu"), "bf16" if half else "fp32"):
                    logits = model(tokens)
                logits.float().square().mean().backward()
            gradients[recompute] = [each.grad.to_local() for each in model.parameters()]
        none = gradients.pop("none")
        same += [all(map(torch.equal, each, none)) for each in gradients.values()]
    return same


def test_units_within_recomputed_blocks_change_no_bit() -> None:
    assert run_ranks(2, nested) == [[True] * 8] * 2
