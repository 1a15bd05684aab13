"""The stages of a pipeline: where each part of a network stands, and the cut that leaves a rank with its own.

Knows no order of passes, and nothing of what stages send.
"""

from collections.abc import Collection
from typing import Any

from torch import nn

from kitforge.core.nn.stack import Stack
from kitforge.core.parallel.sharding import Sharding


def stage_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, of all as many but for one."""
    ends = [stage * num_layers // num_stages for stage in range(num_stages + 1)]
    return [range(first, last) for first, last in zip(ends, ends[1:], strict=False)]


def cut_stages(
    model: nn.Module, sharding: Sharding, names: Collection[str], num_stages: int, own: int
) -> dict[str, tuple[int, ...]]:
    """Leave a model with the modules of the stage `own`: others are None at their places, so that what stays keeps its
    name. Returns the stages, as indices along `pipeline`, of those parameters and buffers that not all of them have."""
    found: dict[str, tuple[int, ...]] = {}
    for path, stack in [(path, each) for path, each in model.named_modules() if isinstance(each, Stack)]:
        prefix, layers = f"{path}.".lstrip("."), stage_layers(len(stack.blocks), num_stages)
        for name in (each for each in names if each.startswith(prefix)):
            end, *inner = name.removeprefix(prefix).split(".")
            holder, part = (stack.blocks, inner[0]) if end == "blocks" else (stack, end)
            on_first, on_last = (f"{prefix}{end}" in declared for declared in (sharding.first, sharding.last))
            on_last |= name == f"{prefix}{getattr(stack, 'head_name', None)}"
            if end == "blocks":
                found[name] = tuple(stage for stage, each in enumerate(layers) if int(part) in each)
            elif on_first or on_last:
                found[name] = (0,) * on_first + (num_stages - 1,) * on_last
            if own not in found.get(name, (own,)):
                held: Any = holder._modules if part in holder._modules else holder._parameters
                held[part] = None
    return found
