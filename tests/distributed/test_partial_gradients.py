"""Parameters that every rank of the tensor axis holds whole, while each finds a part of their gradients only."""

import pytest
import torch
from torch import Tensor

from kitforge.core.nn.lora import LoraConfig, attach
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.gather import gather_full_tensor
from kitforge.core.parallel.parallelize import parallelize
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build
from kitforge.models.sharding import DECODER
from tests.distributed.ranks import run_ranks
from tests.distributed.step import world_of

CONFIG = LlamaConfig(vocab_size=11, dim=16, num_layers=2, num_heads=4, mlp_dim=24, max_length=16, qk_norm=True)
TARGETS = LoraConfig(rank=3, target_modules=("query", "out", "down"))
TOKENS = torch.randint(0, 11, (2, 8), generator=torch.Generator().manual_seed(1))


def gradients(_rank: int, degrees: ParallelConfig, *, is_adapted: bool) -> dict[str, Tensor]:
    world = world_of(degrees)
    model = build(CONFIG, device=torch.device("cpu"), seed=0).double()
    if is_adapted:
        attach(model, "policy", TARGETS)
        # As it begins, an adapter adds nothing, and its first factor has no gradient.
        generator = torch.Generator().manual_seed(2)
        for name, parameter in model.named_parameters():
            if name.endswith("policy.up"):
                parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    parallel = parallelize(model, DECODER, world)
    parallel.micro_batch(is_last=True)
    model(TOKENS).logsumexp(-1).square().mean().backward()
    parallel.reduce_gradients()
    found = {name: piece.grad for name, piece in parallel.parameters().items() if piece.grad is not None}
    mesh = world.mesh
    return found if mesh is None else {k: gather_full_tensor(g, parallel.layouts[k], mesh) for k, g in found.items()}


def of_both(rank: int, degrees: ParallelConfig) -> list[dict[str, Tensor]]:
    return [gradients(rank, degrees, is_adapted=is_adapted) for is_adapted in (False, True)]


@pytest.mark.parametrize("sequence", [True, False])
def test_norms_of_heads_and_factors_of_adapters_have_the_gradients_of_one_process(sequence: bool) -> None:
    wanted = of_both(0, ParallelConfig())
    assert any("query_norm" in name for name in wanted[0])
    assert {name.rpartition(".")[2] for name in wanted[1]} == {"down", "up"}
    for found in run_ranks(2, of_both, ParallelConfig(tensor=2, sequence_parallel=sequence)):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
