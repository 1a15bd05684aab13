"""torch's optimizers, which nothing compiles, without what keeps them out of a compiled graph.

The guards import torch's compiler at the first use: seconds of a start, more than all other imports together.
"""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def without_compile(kind: type[Kind]) -> type[Kind]:
    """The class with `add_param_group` and `step` as they were written."""
    add, step = inspect.unwrap(kind.add_param_group), inspect.unwrap(kind.step)
    return type(kind.__name__, (kind,), {"add_param_group": add, "step": torch.no_grad()(step)})
