"""How the publisher of a model generates, where the options do not say otherwise."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from kitforge.data.tokenizers.generation_config import (
    GENERATION_CONFIG,
    TARGET_SETTINGS,
    TEXT_SETTINGS,
    bad_words,
    check_settings,
    published_sampling,
    repetition_penalty,
    searched_beams,
    stop_strings,
    suppressed_tokens,
)
from kitforge.foundation.log import logger, warn_once
from kitforge.inference.seq2seq import Seq2SeqInference
from kitforge.inference.text_engine import InferenceOptions

T = TypeVar("T", bound=InferenceOptions)
_log = logger(__name__)


def with_folder_defaults(options: T, generation_config: Mapping[str, Any], *, in_training: bool = False) -> T:
    """The options, and where they set none the repetition penalty, stop strings and excluded tokens of a folder's
    generation_config.json. Raises DataError for a setting there that would give another text and is not computed;
    within a training such a setting is named once in the log."""
    chosen = {
        "repetition_penalty": options.repetition_penalty is not None,
        "stop_strings": bool(options.stop),
        "suppress_tokens": options.suppress_tokens is not None,
        "bad_words_ids": options.suppress_tokens is not None,
        "min_new_tokens": options.min_new_tokens > 0,
        "min_length": options.min_new_tokens > 0,
    }
    ignored = {*options.ignored_settings, *(key for key, is_chosen in chosen.items() if is_chosen)}
    settings = check_settings(generation_config, TEXT_SETTINGS, ignored, in_training=in_training)
    values: dict[str, Any] = {}
    if options.repetition_penalty is None:
        values["repetition_penalty"] = repetition_penalty(settings)
    if options.suppress_tokens is None:
        values["suppress_tokens"] = suppressed_tokens(settings)
        words = tuple(word for word in bad_words(settings) if len(word) > 1)
        values["bad_words"] = options.bad_words or words
    if not options.stop:
        values["stop"] = stop_strings(settings)
    _tell({name: value for name, value in values.items() if value and value != 1})
    return dataclasses.replace(options, **values)


def served_defaults(options: InferenceOptions, generation_config: Mapping[str, Any]) -> InferenceOptions:
    """The same for a server, which also takes the sampling there, and else the temperature of 1 that clients of OpenAI
    expect."""
    settings = {key: value for key, value in generation_config.items() if key not in options.ignored_settings}
    found = {"temperature": 1.0, **published_sampling(settings)}
    unset: dict[str, Any] = {name: value for name, value in found.items() if getattr(options, name) is None}
    return with_folder_defaults(dataclasses.replace(options, **unset), generation_config)


def with_folder_search(
    options: Seq2SeqInference, generation_config: Mapping[str, Any], *, in_training: bool = False
) -> Seq2SeqInference:
    """The options, and where they set none the beams of a folder's generation_config.json; the same for an
    encoder-decoder."""
    settings = check_settings(generation_config, TARGET_SETTINGS, options.ignored_settings, in_training=in_training)
    found = {name: value for name, value in searched_beams(settings).items() if getattr(options, name) is None}
    _tell(found if found.get("num_beams", 1) > 1 else {})
    return dataclasses.replace(options, **found)


def _tell(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        warn_once(_log, f"{GENERATION_CONFIG}: {name}={value} is used where inference.{name} is not given")
