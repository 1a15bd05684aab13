"""How many graphs torch may compile for the blocks of a model, and what is said where they are not enough."""

from __future__ import annotations

import logging
import warnings
from typing import final

import torch

# A run compiles blocks for training and for evaluation, rows of one document and of several, whole batches and the
# smaller last ones, layers with a window and without: 16 at most. torch's own limit is 8.
GRAPHS = 32


def make_room() -> None:
    """Let torch compile so many graphs of a block, and tell the user where even those are too few."""
    options = torch._dynamo.config
    options.recompile_limit = max(options.recompile_limit, GRAPHS)
    log = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(each, _LimitNotice) for each in log.filters):
        log.addFilter(_LimitNotice())


@final
class _LimitNotice(logging.Filter):
    """Repeats as a warning what torch says to its own log alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if "recompile_limit" in record.getMessage():
            warnings.warn(
                "compile_level=O2: torch has compiled as many graphs of a block as it may, and runs every further "
                "shape of batch uncompiled. Give all batches one shape, or train with compile_level=O1.",
                stacklevel=2,
            )
        return True
