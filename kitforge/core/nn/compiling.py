"""The recompile limit of torch.compile for the blocks of a model, and a warning when it is reached."""

from __future__ import annotations

import logging
import warnings
from typing import final

import torch

# A run compiles blocks for training and evaluation, with one document in a row and several, for full and last batches,
# with a window and without: at most 16 graphs. torch's default limit is 8.
GRAPHS = 32


def make_room() -> None:
    """Raise the recompile limit to `GRAPHS`, and warn the user when that is reached."""
    options = torch._dynamo.config
    options.recompile_limit = max(options.recompile_limit, GRAPHS)
    log = logging.getLogger("torch._dynamo.convert_frame")
    if not any(isinstance(each, _LimitNotice) for each in log.filters):
        log.addFilter(_LimitNotice())


@final
class _LimitNotice(logging.Filter):
    """Turns torch's log record of the limit into a warning."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        if "recompile_limit" in record.getMessage():
            warnings.warn(
                "compile_level=O2: torch has reached its limit of compiled graphs of a block, and runs every further "
                "shape of batch uncompiled. Give all batches one shape, or train with compile_level=O1.",
                stacklevel=2,
            )
        return True
