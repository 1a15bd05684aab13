"""Options that earlier versions recorded and this one does not have."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from kitforge.foundation.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dropped:
    """An option that is gone."""

    instead: str  # what to do without it
    default: Any = None  # its value where nobody chose one
    matters: bool = True  # whether another value changed the run


def _all(section: str, instead: str, defaults: Mapping[str, Any], matters: bool = True) -> dict[str, Dropped]:
    return {f"{section}.{name}": Dropped(instead, value, matters) for name, value in defaults.items()}


_ROLLOUT = "leave it out: rollouts are drawn from the distribution that is trained, which only the temperature shapes"
_ENGINE = "leave it out: it changes no text; kitforge.inference.options.EngineOptions has it"
_SKIPS = "leave it out: a run fails after 25 steps in a row without finite gradients; resume=auto takes it up"
_STEPS = {"block_size": 16, "prefix_cache": True, "kv_layout": "auto", "cuda_graphs": True, "num_scheduler_steps": 4}
# By full name, for the tasks that do not have it. A section stands for all options in it.
DROPPED: dict[str, Dropped] = {
    "inference": Dropped("name it with task=text_generation, or in predict, generate and serve", matters=False),
    "dtype": Dropped("leave it out: what a recommender writes stays in fp32"),
    "prompt": Dropped("name it in generate: the report of this task shows completions of its own", matters=False),
    **_all("inference", "name it for one call or request", {"ignore_eos": False, "prompt_logprobs": None}),
    **_all("inference.engine", _ENGINE, _STEPS, matters=False),
    **_all("rollout.engine", _ENGINE, _STEPS, matters=False),
    **_all(
        "rollout",
        _ROLLOUT,
        {"top_k": None, "top_p": None, "min_p": None, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ),
    **_all(
        "rollout",
        _ROLLOUT,
        {"repetition_penalty": None, "logit_bias": {}, "suppress_tokens": None, "ignored_settings": ()},
    ),
    **_all("rollout", _ROLLOUT, {"min_new_tokens": 0, "ignore_eos": False, "stop_ids": ()}),
    **_all("rollout.engine", _ROLLOUT, {"prompt_lookup_tokens": 0, "quantization": "none"}),
    "rollout.engine.max_num_batched_tokens": Dropped(_ENGINE, 4096, matters=False),
    "rollout.seed": Dropped("seed", 0),
    **_all("rollout", "precision", {"dtype": "auto", "prompt_logprobs": None}, matters=False),
    **_all("trainer", _SKIPS, {"max_consecutive_skips": 25, "rollback": False, "max_rollbacks": 10}),
    "trainer.incremental_checkpoints": Dropped("leave it out: only embedding tables have it", 0),
    "trainer.activation_checkpointing": Dropped("trainer.micro_batch_size", "none"),
    "optimizer.matrix_learning_rate": Dropped("optimizer.learning_rate, which Muon's update is scaled for"),
    "schedule.warmup_fraction": Dropped("schedule.warmup_steps, which below 1 is a fraction of all steps", 0.02),
    **_all("schedule", "schedule.plateau_patience", {"plateau_factor": 0.5, "plateau_threshold": 0.001}),
    **_all(
        "parallel",
        "parallel.data: a recommender's network is small, and its rows are sharded over all ranks anyway",
        {"tensor": 1, "context": 1, "pipeline": 1, "expert": 1, "sequence_parallel": True, "zero_stage": 3},
    ),
    "data.on_bad_row": Dropped("data.on_invalid=refuse or skip", "error"),
    "data.truncation": Dropped("data.on_too_long=cut_left or cut_right"),
    "tokenizer.path": Dropped("tokenizer.name=PATH"),
    **_all("rl", "rl.gae_lambda", {"value_gae_lambda": None, "length_adaptive_alpha": None}),
    "rl.whiten_rewards": Dropped("rl.whiten_advantages", default=False),
    **_all("tables.deep", "tables.deep.l2 with ftrl", {"beta": 0.0, "touched_weight_decay": 0.0}),
    **_all("tables.wide", "tables.wide.l2 with ftrl", {"beta": 0.0, "touched_weight_decay": 0.0}),
    "cache.admission.probability": Dropped("cache.admission.count", 0.1),
    "cache.file_rows": Dropped("leave cache.path out: host memory holds what is above the remote"),
    "cache.admission.age": Dropped("leave it out: a count is kept for 10,000 steps", 10_000),
    **_all("cache.policy", "cache.policy.name", {"half_life": 100.0, "window": 8}, matters=False),
    "cache.expiry.min_updates": Dropped("cache.expiry.max_age"),
    "serve.max_top_k": Dropped("leave it out: it is 1000", matters=False),
    "serve.max_inflight_bytes": Dropped("serve.max_body_bytes, of which it is 64", matters=False),
}


def dropped(name: str, known: Collection[str]) -> Dropped | None:
    """The option that is gone by this name, or that had such entries; None for another name."""
    sections = _with_sections(known)
    found = (DROPPED.get(each) for each in sorted(_with_sections([name])) if each not in sections)
    return next(filter(None, found), None)


def without_dropped(values: Mapping[str, Any], known: Collection[str], *, is_exact: bool = True) -> dict[str, Any]:
    """The recorded options without those that are gone: no option among the `known` names. Raises ConfigError for one
    whose value had an effect, if `is_exact`."""
    return _kept(values, _with_sections(known), is_exact, "")


def _with_sections(names: Collection[str]) -> set[str]:
    """The names, and those of the sections that they are in."""
    return {name[:end] for name in names for end, letter in enumerate(f"{name}.") if letter == "."}


def _kept(values: Mapping[str, Any], known: Collection[str], is_exact: bool, path: str) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{path}{key}"
        gone = None if name in known else DROPPED.get(name)
        if gone is None:
            inner = _kept(value, known, is_exact, f"{name}.") if isinstance(value, Mapping) else value
            if inner or not value:
                kept[key] = inner
        elif is_exact and gone.matters and value != (list(gone.default) if gone.default == () else gone.default):
            raise ConfigError(f"this version has no option {name!r}", got=f"{name}={value}", fix=gone.instead)
    return kept
