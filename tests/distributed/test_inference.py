"""An engine over ranks that each hold a piece of every matrix generates what one process generates."""

import random
from dataclasses import replace

import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.errors import ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import DECODER
from tests.distributed.ranks import run_ranks
from tests.distributed.step import FAMILIES
from tests.inference import workload

pytestmark = pytest.mark.slow

OPTIONS = EngineOptions(block_size=4, max_num_seqs=3, max_num_batched_tokens=8, prompt_lookup_tokens=2)


def network(family: str, world: World) -> Decoder:
    # The workload has a text that fills the whole length of the network.
    config = replace(FAMILIES[family], max_length=32)
    with torch.device("meta"):
        model = build_on_meta(config, "O1")
    parallel = parallelize(model, DECODER, world)
    parallel.materialize(torch.device("cpu"))
    regions = {name: parallel.region(name) for name in parallel.parameters()}
    init_weights(parallel.parameters().items(), 2, 3, regions)
    for parameter in parallel.parameters().values():
        parameter.requires_grad_(False).mul_(4)
    return model.to(torch.float64).eval()


def served(model: Decoder) -> workload.Result:
    wanted = workload.requests(random.Random(2), model)
    return workload.serve(Engine(model, OPTIONS), wanted)


def on_rank(rank: int, family: str, degrees: ParallelConfig) -> tuple[workload.Result, str]:
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu"))
    model = network(family, world)
    result = served(model)
    try:
        Engine(model, EngineOptions(quantization="int8"))
    except ModelError as error:
        return result, str(error)
    return result, ""


@pytest.mark.parametrize(
    ("family", "degrees"),
    [
        ("gpt2", ParallelConfig(tensor=2)),
        ("bloom", ParallelConfig(tensor=2)),
        ("pangu_alpha", ParallelConfig(tensor=2)),
        ("llama", ParallelConfig(tensor=4)),
        ("glm", ParallelConfig(shard=2)),
    ],
)
def test_ranks_together_generate_what_one_process_does(family: str, degrees: ParallelConfig) -> None:
    alone = served(network(family, ALONE))
    for result, refusal in run_ranks(degrees.world_size, on_rank, family, degrees):
        for samples, wanted in zip(result.completions, alone.completions, strict=True):
            assert [each.tokens for each in samples] == [each.tokens for each in wanted]
            for got, expected in zip(samples, wanted, strict=True):
                assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-9)
        assert result.stats["blocks_used"] == 0
        assert "int8 needs" in refusal
