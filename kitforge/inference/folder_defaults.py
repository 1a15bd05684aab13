"""How the publisher of a model generates, where the options do not say otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kitforge.data.generation_config import GENERATION_CONFIG, repetition_penalty, warn_of_ignored
from kitforge.foundation.log import logger, warn_once
from kitforge.inference.sampling import SamplingOptions

S = TypeVar("S", bound=SamplingOptions)
_log = logger(__name__)


def with_folder_defaults(options: S, generation_config: Mapping[str, Any]) -> S:
    """The options, with the repetition penalty of a folder's generation_config.json unless they set one. Warns once of
    keys there that are not obeyed. Raises DataError for an impossible penalty."""
    warn_of_ignored(generation_config, ("repetition_penalty",))
    if options.repetition_penalty is not None:
        return options
    penalty = repetition_penalty(generation_config)
    if penalty != 1:
        words = (
            f"{GENERATION_CONFIG}: repetition_penalty={penalty} is used; inference.repetition_penalty=1 goes without"
        )
        warn_once(_log, words)
    return dataclasses.replace(options, repetition_penalty=penalty)
