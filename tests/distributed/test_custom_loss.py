"""Losses of one's own under the tensor axis, of logits or of hidden states: gradients are those of one process."""

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
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.gather import gather_full_tensor
from kitforge.core.parallel.parallelize import ParallelModel, parallel_model_of, parallelize
from kitforge.core.parallel.sharding import Sharding, ShardingRule
from kitforge.core.parallel.world import World
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import DECODER
from tests.distributed.ranks import run_ranks
from tests.distributed.step import init_sharded, world_of

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
        found = {name: gather_full_tensor(each, parallel.layouts[name], world.mesh) for name, each in found.items()}
    return {name: each.clone() for name, each in found.items()}


def outcomes(
    rank: int, degrees: ParallelConfig, config: LlamaConfig, losses: list[Callable[[Decoder], Tensor]]
) -> list[Outcome]:
    world = world_of(degrees)
    found: list[Outcome] = []
    for loss_of in losses:
        model = init_sharded(build_on_meta(config, "O1").double(), DECODER, world, 0)
        parallel = parallel_model_of(model, world)
        parallel.micro_batch(is_last=True)
        loss = loss_of(model)
        loss.backward()
        parallel.reduce_gradients()
        found.append((float(loss.detach()), float(parallel.grad_norm()), whole_gradients(parallel, world)))
    return found


@cache
def alone(config: LlamaConfig) -> list[Outcome]:
    return outcomes(0, ParallelConfig(), config, LOSSES)


def assert_equal(found: Outcome, wanted: Outcome) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-12)
    assert found[1] == pytest.approx(wanted[1], rel=1e-9)
    assert found[2].keys() == wanted[2].keys()
    for name, gradient in found[2].items():
        torch.testing.assert_close(gradient, wanted[2][name], rtol=1e-8, atol=1e-11, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "config", "losses"),
    [
        (ParallelConfig(tensor=2), CONFIG, LOSSES),
        (ParallelConfig(tensor=2), TIED, LOSSES),
        (ParallelConfig(tensor=2, sequence_parallel=False), CONFIG, LOSSES),
        # An empty piece of the words, and the shards of all: by the kernels, and by logits and hidden states.
        (ParallelConfig(tensor=4), CONFIG, [log_probs, mixed]),
        (ParallelConfig(tensor=2, shard=2), TIED, [mixed]),
    ],
    ids=["2-untied", "2-tied", "2,whole-untied", "4-untied", "2 and shard-tied"],
)
def test_every_gradient_is_that_of_one_process(
    degrees: ParallelConfig, config: LlamaConfig, losses: list[Callable[[Decoder], Tensor]]
) -> None:
    # Each replica takes the loss of the whole batch, so that their sum is the loss twice.
    times = degrees.shard
    wanted = [
        (loss, times * norm, {name: times * each for name, each in gradients.items()})
        for loss, norm, gradients in (alone(config)[LOSSES.index(each)] for each in losses)
    ]
    for found in run_ranks(degrees.world_size, outcomes, degrees, config, losses):
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)


def summed_again(rank: int, degrees: ParallelConfig) -> list[Outcome]:
    """Logits whose backward pass sums over the ranks, as if each of them took a loss of its own."""
    with mock.patch.object(collectives, "all_gather_replicated", collectives.all_gather_autograd):
        return outcomes(rank, degrees, CONFIG, [cross_entropy])


def test_gradients_that_are_summed_once_too_often_are_seen() -> None:
    (one, *_), *_ = run_ranks(2, summed_again, ParallelConfig(tensor=2, sequence_parallel=False))
    assert one[1] == pytest.approx(2 * alone(CONFIG)[0][1], rel=1e-9)


class Scored(nn.Module):
    """A language model with a layer of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = build_on_meta(CONFIG, "O1")
        self.score = nn.Linear(16, 1, device="meta")

    def forward(self, tokens: Tensor) -> Tensor:
        return self.score(self.backbone.hidden(tokens)).sum(-1)


def scores(rank: int, degrees: ParallelConfig) -> Outcome:
    world = world_of(degrees)
    model = Scored().double()
    own = Sharding(rules=(ShardingRule(module="score", gradient="whole"),))
    parallel = parallelize(model, DECODER.with_prefix("backbone").merged_with(own), world)
    parallel.materialize(world.device)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, piece in parallel.parameters().items():
            whole = torch.randn(parallel.layouts[name].shape, generator=generator, dtype=torch.float64)
            piece.copy_(parallel.region(name).of(whole) * 0.2)
    parallel.micro_batch(is_last=True)
    loss = model(TOKENS).square().mean()
    loss.backward()
    parallel.reduce_gradients()
    return float(loss.detach()), float(parallel.grad_norm()), whole_gradients(parallel, world)


@pytest.mark.parametrize("sequence", [True, False], ids=["cut", "whole"])
def test_a_layer_that_reads_hidden_states_keeps_its_gradient(sequence: bool) -> None:
    for found in run_ranks(2, scores, ParallelConfig(tensor=2, sequence_parallel=sequence)):
        assert_equal(found, scores(0, ParallelConfig()))
