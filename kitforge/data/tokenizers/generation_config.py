"""generation_config.json: the tokens that end a text, and how the publisher generates.

A folder without one has the keys of its config.json that belong there, as in `transformers`.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kitforge.data.tokenizers.protocol import parse_object, read_tokenizer_file
from kitforge.foundation.errors import DataError
from kitforge.foundation.known_keys import KnownKeys
from kitforge.foundation.log import logger, warn_once

GENERATION_CONFIG = "generation_config.json"
_MODEL_CONFIG = "config.json"
_log = logger(__name__)

# Keys of sampling, which begins with a temperature that the caller chooses; a server without one takes the publisher's.
_SAMPLING = "do_sample temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff"
# Lengths, times and numbers of texts, for which there are options of ours.
_LENGTHS = "max_length max_new_tokens max_time num_return_sequences"
# The beams of a search, which `num_beams` asks for.
_BEAMS = "diversity_penalty early_stopping length_penalty num_beam_groups"
# What changes speed, memory or what is returned beside a text, and how drafts are made, which change no text.
_COMPUTING = """
assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind cache_config
cache_implementation compile_config continuous_batching_config disable_compile is_assistant low_memory max_cache_len
max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states
output_logits output_scores prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values renormalize_logits
return_dict_in_generate return_legacy_cache speculation_type target_lookbehind use_cache use_mtp
"""
# What publishers and tools note beside; the options of from_pretrained come with the file that it saves.
_NOTES = """
attn_implementation chat_format device_map dtype max_window_size model_type revision torch_dtype
transformers_weights trust_remote_code
"""
_NOTHING: tuple[Any, ...] = (None, [])
# Keys that change a text, with the values with which they do not.
_TEXT: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": _NOTHING,
    "begin_suppress_tokens": _NOTHING,
    "constraints": _NOTHING,
    "dola_layers": (None,),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1),
    "exponential_decay_length_penalty": (None,),
    "force_words_ids": _NOTHING,
    "forced_bos_token_id": (None,),
    "forced_decoder_ids": _NOTHING,
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1),
    # Both count the token that a text or a target begins with.
    "min_length": (None, 0, 1),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "num_beams": (None, 1),
    "penalty_alpha": (None, 0),
    "repetition_penalty": (None, 1),
    "sequence_bias": (None, {}, []),
    "stop_strings": (None, [], ""),
    "suppress_tokens": _NOTHING,
    "token_healing": (None, False),
    "watermarking_config": (None, {}),
}
_FIX = "inference.ignored_settings=[{key}] generates without it"


def _known(obeyed: str, unused: str = "", further: Mapping[str, tuple[Any, ...]] = MappingProxyType({})) -> KnownKeys:
    computed = frozenset(obeyed.split())
    tokens = (f"{role}_token_id" for role in ("bos", "eos", "pad", "decoder_start"))
    return KnownKeys(
        file=GENERATION_CONFIG,
        refusal="the publisher generates texts as Kitforge does not",
        obeyed=computed.union(tokens),
        accepted={key: values for key, values in {**_TEXT, **further}.items() if key not in computed},
        unused=frozenset(f"{_SAMPLING} {_LENGTHS} {_COMPUTING} {_NOTES} {unused}".split()),
        unused_names=re.compile(r"_.*|.*_version|.*_token_ids?"),
        fixes={key: f"inference.min_new_tokens=N sets it; {_FIX}" for key in ("min_length", "min_new_tokens")},
        fix=_FIX,
    )


# Of what continues a text, token by token.
TEXT_SETTINGS = _known("bad_words_ids repetition_penalty stop_strings suppress_tokens", unused=_BEAMS)
# Of what writes a target for a source, which searches with beams.
TARGET_SETTINGS = dataclasses.replace(
    _known(
        "early_stopping length_penalty num_beams",
        further={"diversity_penalty": (None, 0), "num_beam_groups": (None, 1)},
    ),
    fixes={},
)


def find_generation_config(folder: Path) -> bytes | None:
    """The generation_config.json of a folder, else what config.json says of it; None where there is neither."""
    if (folder / GENERATION_CONFIG).is_file():
        return read_tokenizer_file(folder / GENERATION_CONFIG)
    if not (folder / _MODEL_CONFIG).is_file():
        return None
    config = parse_object(folder / _MODEL_CONFIG, read_tokenizer_file(folder / _MODEL_CONFIG))
    named = f"{_SAMPLING} {_LENGTHS} {_COMPUTING} {_BEAMS}".split()
    tokens = (f"{role}_token_id" for role in ("bos", "eos", "pad", "decoder_start"))
    # Of a whole config.json these speak of the network's outputs.
    keys = {*_TEXT, *named, *tokens} - {"use_cache", "output_attentions", "output_hidden_states"}
    found = {key: value for key, value in config.items() if key in keys and value is not None}
    return json.dumps({"_from_model_config": True, **found}).encode() if found else None


def end_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a generated text. Raises DataError for what is not a token."""
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
    """The penalty that the publisher generates with, greedy or not. Raises DataError for one that is not a number."""
    value = config.get("repetition_penalty")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        got = f"repetition_penalty={value!r}"
        raise DataError(f"{GENERATION_CONFIG} has an impossible penalty", got=got, expected="a number above 0")
    return float(value)


def stop_strings(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The strings that end a text. Raises DataError for what is not a string."""
    value = config.get("stop_strings") or []
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise DataError(
            f"{GENERATION_CONFIG} names stop strings that are none",
            got=f"stop_strings={value!r}",
            expected="a list of texts",
        )
    return tuple(found)


def suppressed_tokens(config: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that are never generated: `suppress_tokens`, and the words of `bad_words_ids` that are one token.
    Raises DataError for what is not a token."""
    words = [word[0] for word in bad_words(config) if len(word) == 1]
    return tuple(dict.fromkeys([*_tokens(config, "suppress_tokens"), *words]))


def bad_words(config: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The words that are never generated, of which an end token alone does not count, as in `transformers`. Raises
    DataError for what is not a list of tokens."""
    words = config.get("bad_words_ids") or []
    if not isinstance(words, list) or not all(isinstance(each, list) and each for each in words):
        got, fix = f"bad_words_ids={words!r}"[:200], _FIX.replace("{key}", "bad_words_ids")
        raise DataError(f"{GENERATION_CONFIG}: words that are none", got=got, expected="lists of tokens", fix=fix)
    ends = end_tokens(config)
    found = (_tokens({"bad_words_ids": word}, "bad_words_ids") for word in words)
    # A word with a number that stands for no token cannot be written.
    whole = (word for word, given in zip(found, words, strict=True) if len(word) == len(given))
    return tuple(word for word in whole if len(word) > 1 or word[0] not in ends)


def published_sampling(config: Mapping[str, Any]) -> dict[str, float]:
    """How the publisher samples, by the names of the options of generation; `do_sample` of false is a temperature of 0.
    Raises DataError for numbers with which one cannot sample."""
    most = {"temperature": 1e9, "top_k": 1e9, "top_p": 1.0, "min_p": 1.0}
    found = {name: config[name] for name in most if config.get(name) is not None}
    for name, value in found.items():
        if type(value) not in (int, float) or not 0 <= value <= most[name] or (name == "top_k" and value % 1):
            words = "a whole number" if name == "top_k" else f"a number from 0 to {most[name]:g}"
            problem, fix = f"{GENERATION_CONFIG} has an impossible {name}", _FIX.replace("{key}", name)
            raise DataError(problem, got=f"{name}={value!r}"[:200], expected=words, fix=fix)
    # The smallest nucleus is the most likely token; other zeros exclude none, as in `transformers`.
    is_greedy = config.get("do_sample") is False or 0 in (found.get("temperature"), found.get("top_p"))
    return {name: int(value) if name == "top_k" else value for name, value in found.items() if value} | (
        {"temperature": 0.0} if is_greedy else {}
    )


def searched_beams(config: Mapping[str, Any]) -> dict[str, Any]:
    """The beam search of the publisher, by the names of the options of generation. Raises DataError for what is no
    number of beams, no number or no rule."""
    names = ("num_beams", "length_penalty", "early_stopping")
    found = {name: config[name] for name in names if config.get(name) is not None}
    expected: dict[str, Any] = {
        "num_beams": lambda value: isinstance(value, int) and value > 0 and not isinstance(value, bool),
        "length_penalty": lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
        "early_stopping": lambda value: isinstance(value, bool) or value == "never",
    }
    wrong = [name for name, value in found.items() if not expected[name](value)]
    if wrong:
        got = ", ".join(f"{name}={found[name]!r}" for name in wrong)
        words = "num_beams of at least 1, a number as length_penalty, early_stopping of true, false or never"
        raise DataError(f"{GENERATION_CONFIG} has an impossible search", got=got, expected=words)
    return found


_READERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "bad_words_ids": bad_words,
    "early_stopping": searched_beams,
    "length_penalty": searched_beams,
    "num_beams": searched_beams,
    "repetition_penalty": repetition_penalty,
    "stop_strings": stop_strings,
    "suppress_tokens": suppressed_tokens,
}


def check_settings(
    config: Mapping[str, Any], known: KnownKeys, ignored: Collection[str], *, in_training: bool = False
) -> dict[str, Any]:
    """The settings without the `ignored` keys. Raises DataError for the first that would give another text in
    `transformers` and is not `known`. Within a training, which it does not change, that is a warning, and the texts
    are written without it."""
    settings = {key: value for key, value in config.items() if key not in ignored}
    refused = dict[str, DataError]()
    for key, value in settings.items():
        try:
            known.check({key: value}, DataError)
            if key in known.obeyed and key in _READERS:
                _READERS[key]({key: value})
        except DataError as error:
            refused[key] = error
    if refused and not in_training:
        raise next(iter(refused.values()))
    if refused:
        keys = ", ".join(f"{key}={settings[key]!r}" for key in sorted(refused))[:500]
        warn_once(_log, f"{GENERATION_CONFIG}: the texts of this run are generated without {keys}")
    return {key: value for key, value in settings.items() if key not in refused}
