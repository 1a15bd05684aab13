"""The load of the experts of a network over a step: what it says to people, and to the biases that balance it."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from kitforge.core.nn.moe import ExpertsConfig, MoE
from kitforge.core.parallel import collectives
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import logger, warn_once
from kitforge.foundation.types import Sums

# Of a step's sums: float64 [layers, E + 1], see `MoE.load`.
LOAD = "experts"
_log = logger(__name__)


def named_experts(model: nn.Module) -> dict[str, MoE]:
    """The mixtures of experts of a network, in the order of its blocks."""
    return {name: each for name, each in model.named_modules() if isinstance(each, MoE)}


def experts_of(model: nn.Module) -> list[ExpertsConfig]:
    """The configurations of the mixtures of a network that is not cut; see `ParallelModel.experts`."""
    return [each.config.experts for each in named_experts(model).values()]


def check_balance(experts: Iterable[ExpertsConfig], num_micro_batches: int, num_replicas: int) -> None:
    """Raise ConfigError for a balance over micro-batches where a batch is several of them, and warn of it otherwise."""
    if "batch" not in {each.balance for each in experts}:
        return
    if num_micro_batches * num_replicas > 1:
        raise ConfigError(
            "model.experts.balance=batch balances each micro-batch by itself, so that the split changes the gradients",
            got=f"{num_micro_batches} micro-batches a step on each of {num_replicas} replicas",
            expected="one micro-batch on one replica",
            fix="use model.experts.balance=sequence, or one rank and no trainer.micro_batch_size",
        )
    warn_once(_log, "model.experts.balance=batch: gradients depend on data.batch_size; sequence does not")


def check_capacity(experts: Iterable[ExpertsConfig], is_composed: bool) -> None:
    """Raise ConfigError for experts with a capacity under a task that does not pack its rows: counted over padding, and
    over the texts that share a prefix, it makes a text's result depend on those beside it."""
    factors = {each.capacity_factor for each in experts} - {None}
    if factors and not is_composed:
        raise ConfigError(
            "padding would take a part of the capacity of experts, which only text_generation and sft count by row",
            got=f"model.experts.capacity_factor={', '.join(map(str, factors))}",
            expected="null in this task",
            fix="add model.experts.capacity_factor=null; of a trained model, start from its export, which has none",
        )


def load_of(
    parallel: ParallelModel,
    is_composed: bool,
    layers: range | None = None,
    loads: Mapping[nn.Module, Tensor] | None = None,
) -> Sums:
    """The load of the last forward pass, or what it has written into `loads`, under its name, over the ranks with
    shards of its rows: a row for each mixture of the whole network, zero where it is on another stage, or of a stack
    not in those layers. Empty for a network without experts, and for a task that has `loss` instead of `inputs` and
    `loss_of`, whose passes know nothing of its weight."""
    experts = parallel.experts
    if not is_composed and any(each.balance != "none" for each in experts.values()):
        warn_once(_log, "this task trains a mixture of experts without balancing its load")
    if not experts or not is_composed:
        return {}
    own, size = named_experts(parallel.model), (len(experts), max(each.num_experts for each in experts.values()) + 1)
    found = torch.zeros(size, dtype=torch.float64, device=parallel.device)
    for number, name in enumerate(experts):
        is_here = name in own and (layers is None or int(name.split(".")[1]) in layers)
        if is_here and (load := own[name].load if loads is None else loads.get(own[name])) is not None:
            found[number] = load
    return {LOAD: collectives.all_reduce_(found, None if parallel.mesh is None else parallel.mesh.group("context"))}


def load_sums(load: Tensor) -> Sums:
    """Metrics of a load, each times the number of choices, which is the last of them: of each expert its tokens over
    the mean, over all layers; the same of the fullest expert of any layer; and the share that capacity dropped."""
    counts, dropped = load[:, :-1], load[:, -1].sum()
    total, by_expert = counts.sum(), counts.sum(0)
    fullest = (counts.amax(1) / counts.mean(1).clamp(min=1e-9)).amax()
    loads = {f"experts/load/{expert}": each * len(by_expert) for expert, each in enumerate(by_expert.unbind())}
    return {**loads, "experts/fullest": fullest * total, "experts/dropped": dropped, "experts/choices": total}


@torch.no_grad()
def move_biases(parallel: ParallelModel, load: Tensor) -> None:
    """Move the biases of routers towards experts with fewer tokens than the mean, by the load over all ranks."""
    shards, held = parallel.parameters(), named_experts(parallel.model)
    for name, counts in zip(parallel.experts, load[:, :-1], strict=True):
        own = f"{name}.router.bias"
        # Under an adapter the whole router is frozen, and the run that it adapts has the same tensor.
        if own in shards and held[name].router.weight.requires_grad:
            towards = (counts.mean() - counts).sign() * held[name].config.experts.bias_rate
            shards[own].add_(parallel.region(own).of(towards).to(shards[own]))
