"""Gradients of copies: held once, sent while the backward pass goes on, missing on all ranks where no rank has one."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.parallel import collectives, data
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.sharding import TENSOR, Sharding, ShardingRule
from kitforge.core.parallel.world import World
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task
from tests.distributed.ranks import run_ranks

SPLIT = Sharding(
    rules=(
        ShardingRule(
            module="layers.*.0", splits={"weight": {TENSOR: 0}, "bias": {TENSOR: 0}}, input_layout={TENSOR: "gather"}
        ),
        ShardingRule(module="layers.*.1", splits={"weight": {TENSOR: 1}}, output_layout={TENSOR: "reduce"}),
        ShardingRule(module="first", output_layout={TENSOR: "slice"}),
        ShardingRule(module="norm", output_layout={TENSOR: "replicate"}),
        ShardingRule(module="last", gradient="whole"),
    )
)


class Network(nn.Module):
    """Uses its second pair of layers only where a row asks for it, and the spare parts never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 6), nn.LayerNorm(6), nn.Linear(6, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(3))
        self.spare = nn.LayerNorm(6)

    def forward(self, input: Tensor) -> Tensor:
        stream = self.first(input)
        stream = stream + self.layers[0](stream)
        if bool((input[..., 0] > 0).any()):
            # Rows that do not ask for it get nothing of it.
            stream = stream + self.layers[1](stream) * (input.amax((1, 2), keepdim=True) > 100)
        return self.last(self.norm(stream)).sum(-1)


def world_of(degrees: ParallelConfig) -> World:
    return World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu") if degrees.world_size > 1 else None)


class Rarely(Task):
    """Four rows a step; every other step the last one, which is the last rank's, asks for the second pair of layers."""

    def build(self, world: World) -> nn.Module:
        self.world = world
        torch.manual_seed(0)
        network = Network().double()
        parallelize(network, SPLIT if world.mesh is not None and world.mesh.degree(TENSOR) > 1 else Sharding(), world)
        return network

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 100):
            rows = torch.rand(4, 4, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64) - 1
            rows[3, 0, 0] = 101.0 if step % 2 else -1.0
            share = 4 // self.world.num_replicas
            yield [
                {"rows": rows[share * self.world.replica :][:1]},
                {"rows": rows[share * self.world.replica :][1:share]},
            ]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return {"loss": model(micro_batch["rows"]).square().sum()}


def trained(rank: int, degrees: ParallelConfig) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    choices = {"trainer": {"max_steps": 5}, "optimizer": {"learning_rate": 0.1, "weight_decay": 0.1}}
    loop = Loop(Rarely(), from_dict(RunOptions, choices), world_of(degrees))
    loop.train()
    parallel = loop.state.parallel
    weights = {name: parallel.full_tensor(name).clone() for name in parallel.parameters()}
    return weights | {name: each for name, each in loop.state.optimizer.tensors() if name.endswith(".step")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees", [ParallelConfig(data=2), ParallelConfig(data=4), ParallelConfig(tensor=2)], ids=ParallelConfig.describe
)
def test_a_parameter_without_a_gradient_stays_as_it_is(degrees: ParallelConfig) -> None:
    alone = trained(0, ParallelConfig())
    assert alone["spare.weight.step"] == alone["layers.2.0.weight.step"] == 0
    assert alone["layers.1.0.weight.step"] == 2
    for many in run_ranks(degrees.world_size, trained, degrees):
        for name, wanted in alone.items():
            torch.testing.assert_close(many[name], wanted, rtol=0, atol=1e-9, msg=name)


def network_of(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))


def watched(rank: int, bucket_bytes: int) -> tuple[list[list[str]], list[int]]:
    """What happened in three steps, in order, and the most bytes of gradients in each of them."""
    happened: list[list[str]] = []
    most: list[int] = []
    send = collectives.start_all_reduce_
    with mock.patch.object(data, "BUCKET_BYTES", bucket_bytes):
        model = network_of(6)
        parallel = parallel_model_of(model, world_of(ParallelConfig(data=2)))
        sums: list[Tensor] = []

        def measured(input: Tensor, group: Any) -> Any:
            # The word on which parameters were used is a few numbers.
            if input.numel() > 64:
                happened[-1].append("sent")
                sums.append(input)
                held = sums + [each.grad for each in model.parameters() if each.grad is not None]
                most[-1] = max(most[-1], sum({each.data_ptr(): each.nbytes for each in held}.values()))
            return send(input, group)

        with mock.patch.object(collectives, "start_all_reduce_", measured):
            for _ in range(3):
                happened.append([])
                most.append(0)
                for is_last in (False, True):
                    parallel.micro_batch(is_last=is_last)
                    model(torch.ones(2, 64)).square().sum().backward()
                happened[-1].append("finish")
                parallel.reduce_gradients()
                sums.clear()
                model.zero_grad()
    return happened, most


LAYER_BYTES = (64 * 64 + 64) * 4


def test_all_buckets_are_sent_before_the_end_in_every_step() -> None:
    for happened, _ in run_ranks(2, watched, LAYER_BYTES):
        assert happened == [["sent"] * 6 + ["finish"]] * 3


@pytest.mark.parametrize("layers", [0, 1, 2], ids=["a parameter", "a layer", "two layers"])
def test_gradients_are_held_once(layers: int) -> None:
    for _, most in run_ranks(2, watched, max(layers * LAYER_BYTES, 1)):
        assert max(most) <= 6 * LAYER_BYTES


def twice(rank: int) -> str:
    with mock.patch.object(data, "BUCKET_BYTES", LAYER_BYTES):
        model = network_of(2)
        parallel = parallel_model_of(model, world_of(ParallelConfig(data=2)))
        parallel.micro_batch(is_last=True)
        for _ in range(2):
            model(torch.ones(2, 64)).square().sum().backward()
        try:
            parallel.reduce_gradients()
        except ModelError as error:
            return str(error)
    return ""


def test_a_second_backward_pass_is_refused_and_not_lost() -> None:
    assert all("after it had been sent" in message for message in run_ranks(2, twice))
