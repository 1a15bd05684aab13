"""How the publisher of a model generates, where the options do not say otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

from kitforge.data.generation_config import GENERATION_CONFIG, repetition_penalty, warn_of_ignored
from kitforge.foundation.log import logger
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
        _tell(penalty)
    return dataclasses.replace(options, repetition_penalty=penalty)


@lru_cache(maxsize=64)
def _tell(penalty: float) -> None:
    text = "%s: repetition_penalty=%s is used; inference.repetition_penalty=1 goes without"
    _log.warning(text, GENERATION_CONFIG, penalty)
