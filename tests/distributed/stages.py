"""A training step of a network on stages, by the product's own loop over micro-batches, and the same on one process."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.init import init_weights
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.expert_load import LOAD
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.micro_batches import Losses, run_micro_batches
from kitforge.core.parallel.parallelize import ParallelModel, parallelize
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import World
from kitforge.foundation.types import Sums
from kitforge.kits.network_source import sharding_of
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel
from kitforge.models.loading import build_on_meta
from tests.distributed.step import ALL, BATCH, LENGTH, Outcome, make_batch

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step of stages."""

    family: str
    degrees: Mapping[str, Any] = field(default_factory=dict)  # beside two stages, or with `pipeline`
    is_relayed: bool = False  # a policy and a critic, whose loss is computed by every stage
    micro_batches: int = 3  # of each replica
    num_layers: int = 4
    recompute: Recompute = "none"
    frozen: tuple[str, ...] = ()  # the beginnings of names

    @property
    def all_degrees(self) -> ParallelConfig:
        """With the stages."""
        return ParallelConfig(**{"pipeline": 2, **self.degrees})


class TokenLoss(Losses):
    """The cross-entropies of a micro-batch, whose hidden states may be on another stage than its inputs."""

    def inputs(self, micro_batch: Any) -> tuple[Tensor, Context]:
        key = DropoutKey(seed=0, step=0, samples=micro_batch["samples"])
        counted = micro_batch["targets"] != IGNORED
        context = Context.packed(micro_batch["positions"], micro_batch["documents"], key, counted=counted)
        return micro_batch["tokens"], replace(context, is_tokenwise=type(self) is TokenLoss)

    def loss_of(self, model: Any, hidden: Tensor, micro_batch: Any) -> Sums:
        targets = micro_batch["targets"].flatten()
        loss = model.kernels.linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, targets)
        return {"loss": loss, "rows": torch.tensor(float(len(micro_batch["tokens"])))}


class AnyLoss(TokenLoss):
    """Log-probabilities, logits and entropies of a policy, beside the values of a critic: no task of ours uses more."""

    def loss(self, model: Any, micro_batch: Any) -> Sums:
        tokens, context = self.inputs(micro_batch)
        hidden, targets = model.hidden(tokens, context), micro_batch["targets"]
        mask = targets != IGNORED
        with torch.no_grad():
            best = model.head(model.hidden(tokens)[mask]).amax(-1)
        log_probs, entropies = model.kernels.linear_log_probs(hidden[mask], model.head_weight, targets[mask], 0.7)
        values = model.critic(tokens, replace(context, dropout=None))[mask]
        ends = model.critic.scores_at(tokens, mask.sum(1).clamp(min=1) - 1)
        loss = (log_probs * values.sigmoid() - 0.1 * entropies + 0.01 * best * values).sum() + ends.square().sum()
        return {"loss": loss, "rows": torch.tensor(float(len(tokens)))}


def micro_batches(case: Case, replica: int, replicas: int) -> Iterator[dict[str, Any]]:
    """Those of a replica; each second one is shorter, and all rows are packed."""
    batch, share = make_batch(LENGTH), BATCH // replicas
    first, size = share * replica, -(-share // case.micro_batches)
    for number, start in enumerate(range(first, first + share, size)):
        rows = range(start, min(start + size, first + share))
        columns = {name: each[rows, : LENGTH // (1 + number % 2)] for name, each in batch.items()}
        yield columns | {"samples": tuple(rows)}


def built(case: Case, world: World, dtype: torch.dtype = torch.float64) -> tuple[Any, ParallelModel]:
    """The stage of this rank, or the whole network, with the same weights."""
    own = replace(ALL[case.family], num_layers=case.num_layers)
    model: Any = build_on_meta(own, "O1").to(dtype)
    sharding = sharding_of(model)
    if case.is_relayed:
        critic = ValueHeadModel(build_on_meta(own, "O1").double())
        parts = {"policy": sharding, "critic": sharding_of(critic)}
        sharding = reduce(Sharding.merged_with, [each.with_prefix(name) for name, each in parts.items()])
        model = ActorCritic(model, critic)
    for module in model.modules():
        if hasattr(module, "recompute"):
            module.recompute = case.recompute
    for name, each in model.named_parameters():
        each.requires_grad_(each.requires_grad and not name.startswith(case.frozen or ("-",)))
    parallel = parallelize(model, sharding, world)
    parallel.materialize(world.device)
    pieces = parallel.parameters()
    init_weights(pieces.items(), 2, 0, {name: parallel.region(name) for name in pieces})
    return model.train(), parallel


def alone(case: Case) -> Outcome:
    """The step of one process, with the micro-batches of all replicas one after another."""
    replicas = case.all_degrees.num_replicas
    parts = [each for replica in range(replicas) for each in micro_batches(case, replica, replicas)]
    return _outcome(case, World(device=torch.device("cpu")), parts)


def on_stages(_rank: int, case: Case) -> Outcome:
    """The step on this rank."""
    world = world_of(case.all_degrees)
    return _outcome(case, world, list(micro_batches(case, world.replica, world.num_replicas)))


_worlds: dict[ParallelConfig, World] = {}


def world_of(degrees: ParallelConfig) -> World:
    """It is kept, since its groups of ranks take as long as a step."""
    if degrees not in _worlds:
        _worlds[degrees] = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu"))
    return _worlds[degrees]


def _outcome(case: Case, world: World, parts: list[Any]) -> Outcome:
    model, parallel = built(case, world)
    count = world.sum({"loss": torch.tensor(float(sum((each["targets"] != IGNORED).sum() for each in parts)))})["loss"]
    task = AnyLoss() if case.is_relayed else TokenLoss()
    weight = 1.0 / float(count)
    sums = world.sum(run_micro_batches(parallel, task, parts, weight, contextlib.nullcontext))
    norm, pieces = float(parallel.grad_norm()), parallel.parameters()
    return Outcome(
        loss=float(sums["loss"]) * weight,
        norm=norm,
        weights={"rows": sums["rows"]} | ({LOAD: sums[LOAD]} if LOAD in sums else {}),
        gradients={name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in pieces.items()},
        regions={name: parallel.region(name) for name in pieces},
        order={},
    )
