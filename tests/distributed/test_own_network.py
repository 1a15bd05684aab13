"""A network of one's own, of torch's layers, under a declaration of one's own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.sharding import TENSOR, Sharding, ShardingRule
from tests.distributed.ranks import run_ranks
from tests.distributed.step import world_of

SHARDING = Sharding(
    rules=(
        ShardingRule(
            module="layers.*.up", splits={"weight": {TENSOR: 0}, "bias": {TENSOR: 0}}, input_layout={TENSOR: "gather"}
        ),
        ShardingRule(module="layers.*.down", splits={"weight": {TENSOR: 1}}, output_layout={TENSOR: "reduce"}),
        ShardingRule(module="first", output_layout={TENSOR: "slice"}),
        ShardingRule(module="last", input_layout={TENSOR: "gather"}),
    )
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, stream: Tensor) -> Tensor:
        return stream + self.down(functional.gelu(self.up(self.norm(stream))))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, input: Tensor) -> Tensor:
        stream = self.first(input)
        for layer in self.layers:
            stream = layer(stream)
        # Not a view, of which torch warns where a sharded network returns one.
        return self.last(stream) * 1.0


def gradients(rank: int, degrees: ParallelConfig) -> tuple[float, dict[str, Tensor]]:
    world = world_of(degrees)
    torch.manual_seed(0)
    model = Network().double()
    input = torch.randn(4, 8, 3, dtype=torch.float64)
    parallel = parallelize(model, SHARDING, world)
    share = 4 // world.num_replicas
    parallel.micro_batch(is_last=True)
    # What follows a gather is computed whole on every rank of the axis, so each takes its part of the loss.
    loss = model(input[share * world.replica :][:share]).square().sum() / degrees.tensor
    loss.backward()
    parallel.reduce_gradients()
    whole: dict[str, Any] = {}
    for name, piece in parallel.parameters().items():
        assert piece.grad is not None
        with torch.no_grad():
            piece.copy_(piece.grad)
        whole[name] = parallel.full_tensor(name).clone()
    return float(world.sum({"loss": loss.detach()})["loss"]) * degrees.tensor, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [ParallelConfig(tensor=2), ParallelConfig(tensor=2, shard=2), ParallelConfig(data=2), ParallelConfig(shard=2)],
    ids=ParallelConfig.describe,
)
def test_its_gradients_are_those_of_one_process(degrees: ParallelConfig) -> None:
    loss, alone = gradients(0, ParallelConfig())
    for found, whole in run_ranks(degrees.world_size, gradients, degrees):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, gradient in whole.items():
            torch.testing.assert_close(gradient, alone[name], rtol=0, atol=1e-9, msg=name)
