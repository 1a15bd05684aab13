"""generation_config.json: the tokens that end a text, and how the publisher generates.

A folder without one has the keys of its config.json that belong there, as in `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kitforge.data.tokenizer_protocol import parse_object, read_tokenizer_file
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger, warn_once

GENERATION_CONFIG = "generation_config.json"
_MODEL_CONFIG = "config.json"
_log = logger(__name__)

# Keys that change a text, and the values with which they do not.
_TEXT_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_decoder_ids": ([],),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "repetition_penalty": (1,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "suppress_tokens": ([],),
    "token_healing": (False,),
    "watermarking_config": (),
}
# Of these, the ones that say how beams are searched.
_BEAMS = ("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups")
# Keys of sampling, which begins with a temperature that the caller chooses.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Keys that name tokens and are read elsewhere, set lengths, for which there are options of ours, or change what is
# returned, the speed or the memory.
_KNOWN = frozenset(
    (
        *(f"{role}_token_id" for role in ("bos", "eos", "pad", "decoder_start")),
        *("do_sample", "max_length", "max_new_tokens", "max_time", "num_return_sequences", "trust_remote_code"),
        *("use_cache", "cache_config", "cache_implementation", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "transformers_version"),
        *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"),
        *("return_legacy_cache", "renormalize_logits", "remove_invalid_values", "is_assistant", "speculation_type"),
        *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "use_mtp"),
        *("assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind"),
        *("max_matching_ngram_size", "prompt_lookup_num_tokens", "_from_model_config", "_commit_hash"),
    )
)


def find_generation_config(folder: Path) -> bytes | None:
    """The generation_config.json of a folder, else what config.json says of it; None where there is neither."""
    if (folder / GENERATION_CONFIG).is_file():
        return read_tokenizer_file(folder / GENERATION_CONFIG)
    if not (folder / _MODEL_CONFIG).is_file():
        return None
    config = parse_object(folder / _MODEL_CONFIG, read_tokenizer_file(folder / _MODEL_CONFIG))
    keys = {*_TEXT_DEFAULTS, *_SAMPLING, *_KNOWN} - {"transformers_version", "_commit_hash", "use_cache"}
    # Of a whole config.json these speak of the network's outputs.
    keys -= {"output_attentions", "output_hidden_states"}
    found = {key: value for key, value in config.items() if key in keys and value is not None}
    return json.dumps({"_from_model_config": True, **found}).encode() if found else None


def end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a generated text. Raises DataError for what is no token."""
    return _tokens(config, "eos_token_id")


def start_token(config: Mapping[str, Any]) -> int | None:
    """The token that the target of an encoder-decoder begins with; None where the file names none."""
    return next(iter(_tokens(config, "decoder_start_token_id")), None)


def _tokens(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) for each in found):
        raise DataError(f"{GENERATION_CONFIG} names tokens that are none", got=f"{key}={value}", expected="token ids")
    # A negative number stands for no token.
    return tuple(each for each in found if each >= 0)


def repetition_penalty(config: Mapping[str, Any]) -> float:
    """The penalty that the publisher generates with, greedy or not. Raises DataError for one that is no number."""
    value = config.get("repetition_penalty")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        got = f"repetition_penalty={value!r}"
        raise DataError(f"{GENERATION_CONFIG} has an impossible penalty", got=got, expected="a number above 0")
    return float(value)


def warn_of_ignored(config: Mapping[str, Any], obeyed: Collection[str]) -> None:
    """Name the keys, once, that would give other texts in `transformers` and are not among the `obeyed` ones."""
    skipped = {*obeyed, *(_BEAMS if config.get("num_beams") in (None, 1) else ())}
    ignored = {key: value for key, value in config.items() if key not in skipped and _matters(key, value)}
    if ignored:
        keys = ", ".join(f"{key}={value!r}" for key, value in sorted(ignored.items()))[:500]
        warn_once(_log, f"{GENERATION_CONFIG}: these keys are not obeyed: {keys}")


def _matters(key: str, value: object) -> bool:
    if value is None or key in _KNOWN or key in _SAMPLING:
        return False
    return key not in _TEXT_DEFAULTS or value not in _TEXT_DEFAULTS[key]
