"""Sharding declarations of model families: plain data by names of modules and mesh axes.

The only file of `core.parallel` that a model may import. `parallelize` applies a declaration; a network is written for
one process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.schedules import Pipeline
from kitforge.foundation.errors import ConfigError

Axis = Literal["tensor", "expert"]
TENSOR: Axis = "tensor"
EXPERT: Axis = "expert"

# What a module does with its input or output along an axis. The stream between blocks is sharded along the sequence:
#   gather     a shard of the stream becomes the whole of it, of which each rank then computes something else
#   replicate  a shard of the stream becomes the whole of it, of which all ranks then compute the same
#   reduce     a partial sum becomes a shard of the sum
#   slice      the whole becomes a shard
Redistribute = Literal["gather", "replicate", "reduce", "slice"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """The sharding of the modules of a name, and their communication."""

    module: str  # dotted, `*` for one part; "" is the model itself
    splits: Mapping[str, Mapping[Axis, int]] = field(default_factory=dict)  # parameter to the dim that is cut
    input_layout: Mapping[Axis, Redistribute] = field(default_factory=dict)
    output_layout: Mapping[Axis, Redistribute] = field(default_factory=dict)
    is_embedding: bool = False  # an embedding whose rows are cut
    # What each rank finds of the gradient of a parameter that is not cut. stream: a part where the stream is held in
    # pieces, else all of it. part: always a part, as of a norm within heads. whole: always all of it, as of a layer
    # that reads what was replicated.
    gradient: Literal["stream", "part", "whole"] = "stream"

    def matches(self, name: str) -> bool:
        """Whether the rule is for the module of that name."""
        pattern = re.escape(self.module).replace(r"\*", r"[^.]+")
        return re.fullmatch(pattern, name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """The sharding declaration of a network."""

    rules: Sequence[ShardingRule] = ()
    # Counts of the network's geometry that the degree of an axis has to divide.
    divisible: Mapping[Axis, Sequence[str]] = field(default_factory=dict)
    # The modules that are called by themselves, and by which methods beside their forward pass.
    fsdp_roots: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": ()})
    # The ends of a stack of blocks: modules and parameters that the first stage of a pipeline has, and those that the
    # last has, beside the matrix of the head. A block is on one stage, and what is named nowhere on all of them.
    first: Sequence[str] = ()
    last: Sequence[str] = ()
    cuts_rows: bool = False  # whether the context axis may cut its rows: `hidden` reads tokens by their positions alone

    def with_prefix(self, name: str) -> Sharding:
        """The declaration with a prefix before all names."""
        rules = [replace(rule, module=f"{name}.{rule.module}".rstrip(".")) for rule in self.rules]
        roots = {f"{name}.{root}".rstrip("."): ways for root, ways in self.fsdp_roots.items()}
        first, last = (tuple(f"{name}.{own}" for own in ends) for ends in (self.first, self.last))
        return replace(self, rules=tuple(rules), fsdp_roots=roots, first=first, last=last)

    def merged_with(self, other: Sharding) -> Sharding:
        """The union of two declarations."""
        return Sharding(
            rules=(*self.rules, *other.rules),
            divisible={**self.divisible, **other.divisible},
            fsdp_roots={**self.fsdp_roots, **other.fsdp_roots},
            first=(*self.first, *other.first),
            last=(*self.last, *other.last),
            cuts_rows=self.cuts_rows and other.cuts_rows,
        )

    def rule(self, name: str) -> ShardingRule:
        """The rule of the module of that name, by default an empty one."""
        return next((rule for rule in self.rules if rule.matches(name)), ShardingRule(module=name))


# Where the name of a count is not that of the option.
_OPTIONS = {"num_experts": "experts.num_experts"}


def check_geometry(sharding: Sharding, geometry: Any, degrees: ParallelConfig) -> None:
    """Raise ConfigError, with the arithmetic, for degrees that do not divide the geometry of a network (None: no
    check)."""
    own, matrices = "or network of your own", "this network does not say how its matrices are split"
    rows = "the rows of this network cannot be cut along the sequence"
    ends = "this network does not say what stands before its blocks and behind them"
    experts = "this network has no experts to be divided among ranks"
    num_experts = getattr(geometry, "num_experts", None)
    for axis, can_run, what, others in (
        ("tensor", sharding.rules, matrices, "a network of one of the families"),
        ("context", sharding.cuts_rows, rows, f"a decoder: no encoder-decoder, vision transformer {own}"),
        ("pipeline", sharding.last, ends, f"one stack of blocks: no encoder-decoder {own}"),
        ("expert", num_experts, experts, "a mixture of experts such as model=llama_moe_tiny"),
    ):
        if getattr(degrees, axis) > 1 and not can_run:
            got, fix = f"parallel.{axis}={getattr(degrees, axis)}", "parallel.data and parallel.shard split any network"
            raise ConfigError(what, got=got, expected=f"parallel.{axis}=1, or {others}", fix=fix)
    if geometry is None:
        return
    check_stages(geometry.num_layers, degrees.stages)
    by_heads = degrees.context > 1 and degrees.context_by == "heads"
    if by_heads and geometry.num_heads % (degrees.context * degrees.tensor):
        count, ranks = geometry.num_heads, degrees.context * degrees.tensor
        raise ConfigError(
            f"parallel.context={degrees.context} x parallel.tensor={degrees.tensor} does not divide "
            f"model.num_heads={count}",
            got=f"{count} / {ranks} = {count / ranks:.2f}",
            expected="their product to divide the heads, which both axes divide among their ranks",
            fix="parallel.context_by=keys, or parallel.shard, which have no such limit",
        )
    for axis, names in sharding.divisible.items():
        degree: int = getattr(degrees, axis)
        for name in names:
            count = getattr(geometry, name)
            if count % degree:
                fits = [str(divisor) for divisor in range(1, count + 1) if count % divisor == 0]
                raise ConfigError(
                    f"parallel.{axis}={degree} does not divide model.{_OPTIONS.get(name, name)}={count}",
                    got=f"{count} / {degree} = {count / degree:.2f}",
                    expected=f"parallel.{axis} to be one of {', '.join(fits)}",
                )


def check_stages(num_layers: int, pipeline: Pipeline) -> None:
    """Raise ConfigError for fewer blocks than stages."""
    num_stages, each = pipeline.num_stages, pipeline.stages_per_rank
    if num_layers < num_stages:
        several = "" if each == 1 else f" with {each} stages on each rank ({pipeline.schedule})"
        most = num_layers // each
        raise ConfigError(
            f"parallel.pipeline={pipeline.num_ranks}{several} is more stages than model.num_layers={num_layers}",
            got=f"{num_layers} / {num_stages} = {num_layers / num_stages:.2f} blocks a stage",
            expected="a block or more on each stage",
            fix=f"{'parallel.schedule=1f1b' if most < 2 <= each else f'parallel.pipeline={most} at most'}; "
            "parallel.shard and parallel.tensor have no such limit",
        )
