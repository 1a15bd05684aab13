"""Losses of one's own under the tensor axis, of logits or of hidden states: gradients are those of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.decoder import Decoder
from kitforge.core.parallel import collectives
from kitforge.core.parallel.apply import ParallelModel, apply, laid_out, parallel_of
from kitforge.core.parallel.degrees import Degrees
from kitforge.core.parallel.matrices import gather_whole
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.sharding import Rule, Sharding
from kitforge.core.parallel.world import ALONE, World
from kitforge.models.folder import outline
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.sharding import DECODER
from tests.distributed.ranks import run_ranks

# Nine words on four ranks: pieces of three rows and an empty one.
CONFIG = LlamaConfig(vocab_size=9, dim=16, num_layers=2, num_heads=4, num_kv_heads=4, mlp_dim=24, max_length=32)
TIED = dataclasses.replace(CONFIG, tie_embeddings=True)
GENERATOR = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, 9, (2, 8), generator=GENERATOR)
TARGETS = torch.randint(0, 9, (2, 8), generator=GENERATOR).flatten()
TEACHER = torch.randn(16, 9, generator=GENERATOR, dtype=torch.float64)


def cross_entropy(model: Decoder) -> Tensor:
    return functional.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS)


def distillation(model: Decoder) -> Tensor:
    students = model.head(model.hidden(TOKENS)).flatten(0, 1).log_softmax(-1)
    return functional.kl_div(students, TEACHER.softmax(-1), reduction="batchmean")


def with_z_loss(model: Decoder) -> Tensor:
    logits = model(TOKENS).flatten(0, 1)
    return functional.cross_entropy(logits, TARGETS) + 0.1 * logits.logsumexp(-1).square().mean()


def of_hidden(model: Decoder) -> Tensor:
    return (model.hidden(TOKENS) ** 3).mean()


def through_the_kernel(model: Decoder) -> Tensor:
    return model.kernels.linear_cross_entropy(model.hidden(TOKENS).flatten(0, 1), model.head_weight, TARGETS) / 16


def log_probs(model: Decoder) -> Tensor:
    hidden = model.hidden(TOKENS).flatten(0, 1)
    chosen, entropies = model.kernels.linear_log_probs(hidden, model.head_weight, TARGETS)
    return (entropies - chosen).mean()


def mixed(model: Decoder) -> Tensor:
    hidden = model.hidden(TOKENS)
    fused = model.kernels.linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, TARGETS) / 16
    return fused + hidden.square().mean() + model.head(hidden).logsumexp(-1).square().mean()


LOSSES = [cross_entropy, distillation, with_z_loss, of_hidden, through_the_kernel, log_probs, mixed]
Outcome = tuple[float, float, dict[str, Tensor]]


def whole_gradients(parallel: ParallelModel, world: World) -> dict[str, Tensor]:
    found = {name: piece.grad for name, piece in parallel.parameters().items() if piece.grad is not None}
    if world.mesh is not None:
        found = {name: gather_whole(each, parallel.layouts[name], world.mesh) for name, each in found.items()}
    return {name: each.clone() for name, each in found.items()}


def outcomes(
    rank: int, degrees: Degrees, config: LlamaConfig, losses: list[Callable[[Decoder], Tensor]]
) -> list[Outcome]:
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu")) if degrees.world > 1 else ALONE
    found: list[Outcome] = []
    for loss_of in losses:
        model = laid_out(outline(config, "O1").double(), DECODER, world, 0)
        parallel = parallel_of(model, world)
        parallel.micro_batch(is_last=True)
        loss = loss_of(model)
        loss.backward()
        parallel.finish_gradients()
        found.append((float(loss.detach()), float(parallel.norm()), whole_gradients(parallel, world)))
    return found


@cache
def alone(config: LlamaConfig) -> list[Outcome]:
    return outcomes(0, Degrees(), config, LOSSES)


def assert_equal(found: Outcome, wanted: Outcome) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-12)
    assert found[1] == pytest.approx(wanted[1], rel=1e-9)
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in found[2].items():
        torch.testing.assert_close(gradient, wanted[2][name], rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(tensor=2),
        Degrees(tensor=2, sequence=False),
        Degrees(tensor=4),
        pytest.param(Degrees(tensor=2, shard=2), marks=pytest.mark.slow),
    ],
    ids=["2", "2,whole", "4", "2 and shard"],
)
def test_every_gradient_is_that_of_one_process(degrees: Degrees, config: LlamaConfig) -> None:
    if degrees.shard > 1:
        # Each replica takes the loss of the whole batch, so that their sum is the loss twice.
        wanted = [
            (loss, 2 * norm, {name: 2 * each for name, each in gradients.items()})
            for loss, norm, gradients in alone(config)
        ]
    else:
        wanted = alone(config)
    for found in run_ranks(degrees.world, outcomes, degrees, config, LOSSES):
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)


def summed_again(rank: int, degrees: Degrees) -> list[Outcome]:
    """Logits whose backward pass sums over the ranks, as if each of them took a loss of its own."""
    with mock.patch.object(collectives, "replicated", collectives.gathered):
        return outcomes(rank, degrees, CONFIG, [cross_entropy])


def test_gradients_that_are_summed_once_too_often_are_seen() -> None:
    (one, *_), *_ = run_ranks(2, summed_again, Degrees(tensor=2, sequence=False))
    assert one[1] == pytest.approx(2 * alone(CONFIG)[0][1], rel=1e-9)


class Scored(nn.Module):
    """A language model with a layer of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = outline(CONFIG, "O1")
        self.score = nn.Linear(16, 1, device="meta")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.backbone.hidden(tokens)).sum(-1)


def scores(rank: int, degrees: Degrees) -> Outcome:
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu")) if degrees.world > 1 else ALONE
    model = Scored().double()
    own = Sharding(rules=(Rule(module="score", gradient="whole"),))
    parallel = apply(model, DECODER.within("backbone").beside(own), world)
    parallel.materialise(world.device)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, piece in parallel.parameters().items():
            whole = torch.randn(parallel.layouts[name].shape, generator=generator, dtype=torch.float64)
            piece.copy_(parallel.region(name).of(whole) * 0.2)
    parallel.micro_batch(is_last=True)
    loss = model(TOKENS).square().mean()
    loss.backward()
    parallel.finish_gradients()
    return float(loss.detach()), float(parallel.norm()), whole_gradients(parallel, world)


@pytest.mark.parametrize("sequence", [True, False], ids=["cut", "whole"])
def test_a_layer_that_reads_hidden_states_keeps_its_gradient(sequence: bool) -> None:
    for found in run_ranks(2, scores, Degrees(tensor=2, sequence=sequence)):
        assert_equal(found, scores(0, Degrees()))
