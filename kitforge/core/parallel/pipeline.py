"""The stages of a pipeline: where each part of a network stands, and the cut that leaves a rank with its own.

Knows no order of passes, and nothing of what stages send.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from torch import nn

from kitforge.core.nn.moe import Experts, MoE
from kitforge.core.nn.stack import Stack
from kitforge.core.parallel.schedules import Pipeline
from kitforge.core.parallel.sharding import Sharding, check_stages


class StageLayers(NamedTuple):
    """What a stage has of a stack."""

    layers: range
    products: int  # multiplications of a token with the parameters, without those of attention scores


class Cut(NamedTuple):
    """Of a network that is cut: of those parameters and buffers that not all stages have, the stages and the indices
    along `pipeline` of their ranks; and what each stage has by the path of each stack."""

    parts: dict[str, tuple[int, ...]]
    ranks: dict[str, tuple[int, ...]]
    layers: dict[str, list[StageLayers]]


def divide_layers(costs: Sequence[int], num_stages: int, first: int = 0, last: int = 0) -> list[StageLayers]:
    """Cut layers of these costs into stages in their order, at least one each, `first` and `last` being the costs of
    the ends: the costliest stage costs as little as it can, then the second costliest, and so on.

    Exact, by dynamic programming over the number of layers: of two lists of costs, sorted from the top, the lesser one
    stays so when a further stage is added to both.
    """
    best: dict[int, list[StageLayers]] = {0: []}  # by the number of layers that the stages so far have
    for stage in range(num_stages):
        ends, found = first * (stage == 0) + last * (stage == num_stages - 1), {}
        for end in range(stage + 1, len(costs) + 1):
            cuts = (
                [*before, StageLayers(range(begin, end), sum(costs[begin:end]) + ends)]
                for begin, before in best.items()
                if begin < end
            )
            found[end] = min(cuts, key=lambda stages: sorted((each.products for each in stages), reverse=True))
        best = found
    return best[len(costs)]


def cut_stages(
    model: nn.Module, sharding: Sharding, shapes: Mapping[str, Sequence[int]], pipeline: Pipeline, own: int
) -> Cut:
    """Leave a model with the modules of the stages of the rank `own`: others are None at their places, so that what
    stays keeps its name. `shapes` are those of its whole parameters and buffers. Raises ConfigError for fewer blocks
    than stages."""
    cut, num_stages = Cut({}, {}, {}), pipeline.num_stages
    for path, stack in [(path, each) for path, each in model.named_modules() if isinstance(each, Stack)]:
        check_stages(len(stack.blocks), pipeline)
        prefix = f"{path}.".lstrip(".")
        parts = {name: name.removeprefix(prefix).split(".") for name in shapes if name.startswith(prefix)}
        layer_of = {name: int(part[1]) for name, part in parts.items() if part[0] == "blocks"}
        first = [name for name, part in parts.items() if f"{prefix}{part[0]}" in sharding.first]
        last = [name for name, part in parts.items() if f"{prefix}{part[0]}" in sharding.last]
        last += [name for name in parts if name == f"{prefix}{getattr(stack, 'head_name', None)}" and name not in last]
        costs = [0] * len(stack.blocks)
        for name, layer in layer_of.items():
            costs[layer] += _products(model, name, shapes[name])
        before = sum(_products(model, name, shapes[name]) for name in first)
        found = divide_layers(costs, num_stages, before, sum(prod(shapes[name]) for name in last))
        cut.layers[path] = found
        stack.layers = tuple(found[stage].layers for stage in pipeline.stages_of(own))
        for name, part in parts.items():
            if name in layer_of:
                cut.parts[name] = tuple(stage for stage, each in enumerate(found) if layer_of[name] in each.layers)
            elif name in first or name in last:
                cut.parts[name] = (0,) * (name in first) + (num_stages - 1,) * (name in last)
            if name in cut.parts:
                cut.ranks[name] = tuple(sorted(set(map(pipeline.rank_of, cut.parts[name]))))
            if own not in cut.ranks.get(name, (own,)):
                holder, key = (stack.blocks, part[1]) if name in layer_of else (stack, part[0])
                held: Any = holder._modules if key in holder._modules else holder._parameters
                held[key] = None
    return cut


def _products(model: nn.Module, name: str, shape: Sequence[int]) -> int:
    """Multiplications of a token with a tensor: experts count as far as a token chooses them, a table as a row."""
    path = name.rpartition(".")[0]
    owner = model.get_submodule(path)
    if isinstance(owner, (nn.Embedding, Stack)):
        return shape[-1]
    if isinstance(owner, Experts):
        mixture = model.get_submodule(path.rpartition(".")[0])
        assert isinstance(mixture, MoE)
        return prod(shape) * mixture.config.experts.top_k // mixture.config.experts.num_experts
    return prod(shape)
