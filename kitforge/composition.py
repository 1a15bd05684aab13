"""Composes presets and overrides into one plain dict. Hydra is used in this file only.

The options dataclass of the task defines which options exist.
"""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kitforge.foundation.config import check_groups, option_names
from kitforge.foundation.errors import ConfigError, ModelError, nearest
from kitforge.foundation.files import missing_file_error, user_path
from kitforge.kits.registry import DEFAULT_TASK, kit_of, recorded_config, recorded_task, task_names, task_of_family
from kitforge.models.hub import NAMED, is_pretrained, resolve
from kitforge.peer_names import PEER_NAMES
from kitforge.preset_files import CONFIGS, OWN_CONFIGS, RECIPE_SUFFIXES, groups, presets
from kitforge.trainer.dropped_options import dropped, without_dropped
from kitforge.yaml_options import (
    CODE_OPTIONS,
    RecipeFile,
    needs_hydra,
    read_recipe,
    read_yaml,
    refuse_code,
    refuse_functions,
    to_plain_dict,
)

# Groups whose value may be a folder, and the option that the folder sets.
FOLDER_OPTIONS = {"model": "checkpoint", "tokenizer": "tokenizer.name"}
# Further options that name weights.
WEIGHT_OPTIONS = ("checkpoint", "reference", "teacher", "reward")
# Groups without a default preset.
OPTIONAL_GROUPS = ("data", "recipe")
# Options with free text: commas and `${` have no special meaning.
TEXT_OPTIONS = ("prompt", "regex")
# Options that may be given without their section, if exactly one option of the verb has this name.
SHORT_NAMES = ("max_new_tokens", "temperature", "top_p", "num_generations")


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """The composed options of a task, and the name of the model: its preset or its folder."""

    values: dict[str, Any]
    model_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning:
    """Changes to the configuration of a run that starts from weights."""

    optimizer: str  # the optimizer preset to use; its LoRA variant ends in `_lora`
    has_network: bool  # the model is an object, not a checkpoint


def compose(
    task: str,
    choices: Mapping[str, Any],
    options: type[Any],
    ignored_sections: Sequence[str] = (),
    fine_tuning: FineTuning | None = None,
) -> Composition:
    """Compose presets, then single values over them. A choice is `optimizer` (a preset), `optimizer.learning_rate` (a
    value) or a nested mapping. Raises ConfigError with the nearest name for unknown choices; options in
    `ignored_sections` are suggested last."""
    named, typed = _split_choices(choices)
    trusts_file = typed.pop("allow_code", False) is True
    single = _full_names(typed, options, ignored_sections)
    texts = {name: single.pop(name) for name in TEXT_OPTIONS if name in single}
    file = _recipe_file(named, single)
    presets_of_all = file.presets | named
    try:
        values, preset = _composed(task, presets_of_all, single, options, file)
        checkpoint = values.get("checkpoint")
        if fine_tuning is not None and (checkpoint is not None or fine_tuning.has_network):
            if "optimizer" not in presets_of_all and not _chooses_optimizer(named.get("recipe")):
                lora = "_lora" if values.get("lora", {}).get("rank", 0) else ""
                changed = presets_of_all | {"optimizer": fine_tuning.optimizer + lora}
                values, _ = _composed(task, changed, single, options, file)
                followed = read_yaml(presets("optimizer")[fine_tuning.optimizer + lora])
                _follow_learning_rate(values, followed, {*dotted(file.plain), *single})
            values["model"] = {}
    except (HydraException, OmegaConfBaseException) as error:
        got, fix = " ".join(str(error).split()), "mend the file or the option that is named"
        raise ConfigError("the configuration cannot be composed", got=got, fix=fix) from None
    refuse_functions(values, CODE_OPTIONS if trusts_file else single)
    if checkpoint is not None:
        _refuse_two_networks(str(checkpoint), named, single)
        values["model"] = {}
        preset = Path(str(checkpoint)).resolve().name
    return Composition(values=values | texts, model_name=preset)


def _composed(
    task: str, named: Mapping[str, str], single: Mapping[str, Any], options: type[Any], file: RecipeFile
) -> tuple[dict[str, Any], str]:
    """The composed options, and the name of the model preset."""
    has_preset, option_sections = task in presets("task"), {each.name for each in dataclasses.fields(options)}
    of_task = {"task": task, **named} if has_preset else named
    overrides, own = [f"{group}={name}" for group, name in of_task.items()], _search_path()
    # Shipped presets compose once; what they give is not to be changed.
    config, preset = _hydra_config(*overrides, *own) if own else _shipped_config(*overrides)
    if not has_preset:
        # A task of an installed kit: only the groups among its options.
        for name in named.keys() - option_sections - {"recipe"}:
            raise ConfigError(f"task {task!r} has no option {name!r}", got=f"{name}={named[name]}", fix="leave it out")
        config = OmegaConf.masked_copy(config, [str(each) for each in config if each in option_sections])
        preset = preset if "model" in option_sections else task
    for each in (file.values, config):
        # Single values would lie over them unseen.
        check_groups(options, OmegaConf.to_container(each, resolve=False))
    if "family" in file.values.get("model", {}):
        # A whole network: another family has other options.
        preset = str(file.values.model.family)
        config = OmegaConf.masked_copy(config, [str(each) for each in config if each != "model"])
    # The requested task overrides that of a recipe.
    return to_plain_dict(OmegaConf.merge(config, file.values, nested(single), {"task": task})), preset


def _recipe_file(named: dict[str, str], typed: Collection[str]) -> RecipeFile:
    """The recipe, taken out of `named`, if it is a file that Hydra does not compose. A preset that was named is over
    the file's section."""
    path = _recipe_path(named.get("recipe"))
    if path is None or (named["recipe"] in presets("recipe") and needs_hydra(path)):
        return RecipeFile(presets={}, values=OmegaConf.create())
    del named["recipe"]
    file = read_recipe(path, typed)
    for group in file.values.keys() & named.keys():
        section = file.values.pop(group)
        if group == "data":
            # The preset says how rows are read, the file which.
            file.values[group] = OmegaConf.merge(section, read_yaml(presets(group)[named[group]]))
    return file


def _recipe_path(name: Any) -> Path | None:
    """The file of a recipe by its name or path; None for what is neither. Raises DataError for a file that is not."""
    path = presets("recipe").get(str(name))
    if path is None and str(name).endswith(RECIPE_SUFFIXES):
        path = user_path(name)
        if not path.is_file():
            raise missing_file_error(path, expected="a recipe, or the config.yaml of a run")
    return path


def _follow_learning_rate(values: dict[str, Any], preset: Mapping[str, Any], given: Collection[str]) -> None:
    """If the learning rate differs from the preset's, drop the preset's further rates (such as the critic's), which
    belong to it, unless they are `given`."""
    is_moved = "optimizer" in preset and values["optimizer"]["learning_rate"] != preset["optimizer"]["learning_rate"]
    for name in preset if is_moved else ():
        is_own = values[name]["learning_rate"] == preset[name]["learning_rate"]
        if is_own and f"{name}.learning_rate" not in given:
            values[name]["learning_rate"] = None


def _chooses_optimizer(recipe: str | None) -> bool:
    """Whether a recipe overrides the optimizer preset of its task."""
    defaults = read_yaml(presets("recipe")[recipe]).get("defaults", []) if recipe is not None else []
    return any(isinstance(each, DictConfig) and "override /optimizer" in each for each in defaults)


def _full_names(typed: Mapping[str, Any], options: type[Any], ignored_sections: Sequence[str]) -> dict[str, Any]:
    single: dict[str, Any] = {}
    for short, value in typed.items():
        name = full_name(short, value, options, ignored_sections)
        if name in typed and name != short:
            raise ConfigError(f"option {name!r} is given twice", got=f"{short}={value} and {name}={typed[name]}")
        single[name] = value
    return single


def compose_over(
    base: Mapping[str, Any], choices: Mapping[str, Any], options: type[Any], ignored_sections: Sequence[str] = ()
) -> Composition:
    """The recorded options of a run, with single values or presets (no recipes) over them."""
    named, typed = _split_choices(choices)
    single = _full_names(typed, options, ignored_sections)
    if "recipe" in named:
        fix = "leave recipe= out, or name single options"
        raise ConfigError("a run is evaluated by its own options", got=f"recipe={named['recipe']}", fix=fix)
    checkpoint = str(single["checkpoint"])
    _refuse_two_networks(checkpoint, named, single)
    chosen = {group: read_yaml(presets(group)[name]) for group, name in named.items()}
    texts = {name: single.pop(name) for name in TEXT_OPTIONS if name in single}
    check_groups(options, base)
    values = to_plain_dict(OmegaConf.merge(dict(base), chosen, nested(single)))
    return Composition(values=values | texts, model_name=Path(checkpoint).resolve().name)


def task_of(choices: Mapping[str, Any]) -> str:
    """The task: by name, else of the recipe, else of the checkpoint, else the only one of the model's family, else the
    default."""
    recipe = None if choices.get("task") else _recipe_path(choices.get("recipe"))
    named = choices.get("task") or (None if recipe is None else read_yaml(recipe).get("task"))
    named = named or recorded_task(_resolved(choices.get("checkpoint")))
    preset = presets().get(str(choices.get("model")))
    family = None if named or preset is None else read_yaml(preset).get("family")
    return str(named or task_of_family(family) or DEFAULT_TASK)


def text_task_of(task: str, choices: Mapping[str, Any]) -> str:
    """The task whose options generate text with a model of `task`. ConfigError for a model without text output."""
    if (text_task := kit_of(task).TEXT_TASK) is None:
        raise ConfigError(
            f"a run of {task} writes no text from a prompt",
            got=f"checkpoint={choices.get('checkpoint')}",
            expected="a run of text_generation or of a stage that trains a policy",
            fix="give it a file: kitforge predict checkpoint=RUN data.eval=FILE output=FILE",
        )
    return text_task


def compose_config(
    task: str, choices: Mapping[str, Any], ignored_sections: Sequence[str] = (), *, has_network: bool = False
) -> Composition:
    """The configuration of a task: presets, then single values over them. Short option names skip `ignored_sections`. A
    run from weights (a checkpoint, or a model object if `has_network`) uses the optimizer preset `Kit.FINE_TUNING`."""
    kit = kit_of(task)
    preset = kit.FINE_TUNING
    fine_tuning = None if preset is None else FineTuning(optimizer=preset, has_network=has_network)
    return compose(task, choices, kit.OPTIONS, ignored_sections, fine_tuning)


def compose_eval_config(task: str, choices: Mapping[str, Any], ignored_sections: Sequence[str] = ()) -> Composition:
    """The configuration of an evaluation, over the run's options if `Kit.evaluation_options` gives them."""
    checkpoint, kit, base = _resolved(choices.get("checkpoint")), kit_of(task), None
    config = recorded_config(checkpoint) if isinstance(checkpoint, (str, Path)) else None
    if config is not None and recorded_task(checkpoint) == task:
        recorded = without_dropped(to_plain_dict(read_yaml(config)), option_names(kit.OPTIONS), is_exact=False)
        base = kit.evaluation_options(recorded, dotted(choices))
    if base is None:
        return compose_config(task, choices, ignored_sections)
    return compose_over(base, choices, kit.OPTIONS, ignored_sections)


def compose_predict(
    task: str, choices: Mapping[str, Any], ignored_sections: Sequence[str] = (), model: object = None
) -> Composition:
    """The configuration of predictions with the model of a folder or of a run, by default that of `checkpoint`; over
    the options of its run if `Kit.PREDICTS_AS_TRAINED`."""
    folder = getattr(model, "folder", model)
    if not kit_of(task).PREDICTS_AS_TRAINED:
        return compose_config(task, choices, ignored_sections)
    if isinstance(folder, (str, Path)):
        choices = {**choices, "checkpoint": str(folder)}
    return compose_eval_config(task, choices, ignored_sections)


def recorded_values(path: Path, changes: Mapping[str, Any], options: type[Any]) -> dict[str, Any]:
    """The recorded options of a run, with changes by dotted name."""
    check_groups(options, OmegaConf.to_container(read_yaml(path), resolve=False))
    return to_plain_dict(OmegaConf.merge(read_yaml(path), nested(changes)))


def parse(argument: str) -> tuple[str, list[Any]]:
    """The name and the values of `name=value`; several values for a sweep in Hydra's grammar.

    Values that the grammar cannot read (most punctuation, non-Latin scripts) are plain text.
    """
    name, found, text = argument.partition("=")
    name = name.lstrip("+")
    if not found or not name or name.startswith("~"):
        raise ConfigError("this is not an option", got=argument, expected="name=value")
    if name in TEXT_OPTIONS and not text.startswith("["):
        return name, [text]
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(f"value={text}")
        if not override.is_sweep_override():
            return name, [override.value()]
        return name, [parser.parse_override(f"value={each}").value() for each in override.sweep_string_iterator()]
    except HydraException:
        return name, [text]


def full_name(name: str, value: Any, options: type[Any], ignored_sections: Sequence[str] = ()) -> str:
    """The full name of an option. `SHORT_NAMES` are resolved if exactly one option outside `ignored_sections` ends so;
    `cache.policy=TEXT` means `cache.policy.name`. Raises ConfigError with suggestions for unknown names."""
    known = option_names(options)
    free = [
        option
        for option, hint in known.items()
        if any(typing.get_origin(each) is dict for each in (hint, *typing.get_args(hint)))
    ]
    if name in known or name.startswith(tuple(f"{option}." for option in free)):
        return name
    if isinstance(value, str) and f"{name}.name" in known:
        return f"{name}.name"
    if below := [option for option in known if option.startswith(f"{name}.")]:
        searched = "auto, for which `kitforge plan` and `kitforge train` search a layout; or " * (name == "parallel")
        fix = "give the degrees that `kitforge plan ... parallel=auto` prints" if value == "auto" else None
        got = None if value is None else f"{name}={value}"
        raise ConfigError(f"{name!r} is a group of options", got=got, expected=searched + ", ".join(below), fix=fix)
    read = [option for option in known if option.split(".")[0] not in ignored_sections]
    meant = _ending_in(name, read)
    if name in SHORT_NAMES and len(meant) == 1 and meant[0].count(".") < 2:
        return meant[0]
    last = name.split(".")[-1]
    same = [_ending_in(last, options) for options in (read, known)]
    parts = name.split(".")
    peer_name = next((each for start in range(len(parts)) if (each := ".".join(parts[start:])) in PEER_NAMES), "")
    ours = [option for option in PEER_NAMES.get(peer_name, ()) if option in known or option in groups()]
    if ours and not any(option.count(".") < 2 for options in same for option in options):
        words = " and ".join(map(repr, ours))
        raise ConfigError(f"unknown option {name!r}", got="a name of another library", fix=f"here it is {words}")
    if (gone := dropped(name, known)) is not None:
        raise ConfigError(f"unknown option {name!r}", got="an option of an earlier version", fix=gone.instead)
    if tasks := [task for task in task_names() if name in option_names(kit_of(task).OPTIONS)]:
        got = f"an option of task={' or '.join(tasks[:3])}"
        raise ConfigError(f"unknown option {name!r}", got=got, fix=f"add task={tasks[0]}, or leave the option out")
    close = next(filter(None, (*same, _similar_names(name, read, 0.8), _similar_names(name, known, 0.5))), [])
    fix = f"did you mean {' or '.join(map(repr, close))}?" if close else "kitforge train --help lists every option"
    raise ConfigError(f"unknown option {name!r}", fix=fix)


def _ending_in(name: str, options: Iterable[str]) -> list[str]:
    """The options with that last name and the fewest sections: `temperature` is not `rl.eval.temperature`."""
    same = [option for option in options if option.split(".")[-1] == name]
    return [option for option in same if option.count(".") == min(each.count(".") for each in same)]


def _similar_names(name: str, known: Iterable[str], cutoff: float) -> list[str]:
    """The option with the most similar name; else those with a nearly equal last part."""
    if whole := difflib.get_close_matches(name, known, n=1, cutoff=cutoff):
        return whole
    last = {option: option.split(".")[-1] for option in known}
    near = difflib.get_close_matches(name.split(".")[-1], set(last.values()), n=1, cutoff=0.85)
    return [option for option in known if last[option] in near]


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`; what holds other names comes before them."""
    result: dict[str, Any] = {}
    for name, value in sorted(values.items(), key=lambda pair: pair[0].count(".")):
        node, (*parents, last) = result, name.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = deepcopy(value) if isinstance(value, Mapping) else value
    return result


def dotted(choices: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; a schema stays whole, since its columns may have dots in their names."""
    result: dict[str, Any] = {}
    for name, value in choices.items():
        if isinstance(value, Mapping) and value and path + name != "data.schema":
            result |= dotted(value, f"{path}{name}.")
        else:
            result[path + name] = str(value) if isinstance(value, Path) else value
    return result


def _hydra_config(*overrides: str) -> tuple[DictConfig, str]:
    # Restored below for programs that run under Hydra themselves.
    before = get_gh_backup()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = hydra_compose("config", [*overrides], return_hydra_config=True)
    finally:
        restore_gh_from_backup(before)
    preset = str(config.hydra.runtime.choices.model)
    # Most options are in no YAML file; the dataclass defines which exist.
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    return config, preset


_shipped_config = functools.lru_cache(maxsize=256)(_hydra_config)


def _split_choices(choices: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Presets by group, and single values by dotted name. A folder in place of a preset sets its option."""
    named: dict[str, str] = {}
    single: dict[str, Any] = {}
    for name, value in dotted(choices).items():
        if name not in groups():
            if (section := name.partition(".")[0]) in WEIGHT_OPTIONS:
                refuse_presets(section, value)
            single[name] = _resolved(value) if name in ("checkpoint", "reference") else value
        elif name in OPTIONAL_GROUPS and value is None:
            continue
        elif isinstance(value, str) and (value in presets(name) or (name == "recipe" and _recipe_path(value))):
            named[name] = value
        elif name in FOLDER_OPTIONS and is_pretrained(value):
            single[FOLDER_OPTIONS[name]] = str(resolve(value))
        else:
            known = f"a preset, a folder, a .gguf file, {', '.join(NAMED)}, or an id of the Hugging Face Hub"
            expected = known if name in FOLDER_OPTIONS else f"a preset of kitforge/configs/{name} or ./configs/{name}"
            expected += ", or data.train=FILE to train on a file, data.eval=FILE to score it" if name == "data" else ""
            raise ConfigError(f"unknown {name} {value!r}", expected=expected, fix=nearest(str(value), presets(name)))
    return named, single


def refuse_presets(role: str, given: object) -> None:
    """Raise ModelError where the weights of a role, one or several, are named by a preset, which has none."""
    if isinstance(given, (list, tuple, Mapping)):
        for each in given.values() if isinstance(given, Mapping) else given:
            refuse_presets(role, each)
    elif isinstance(given, str) and given in presets() and not is_pretrained(given):
        task = "task=reward " if role == "reward" else ""
        expected, what = "a run, a Hugging Face folder or a .gguf file", "a preset is a network without weights"
        fix = f"train it first, kitforge train {task}model={given} output_dir=runs/mine, then {role}=runs/mine"
        raise ModelError(what, got=f"{role}={given}", expected=expected, fix=fix)


def _resolved(model: Any) -> Any:
    """The path of named weights; anything else as it is."""
    return str(resolve(model)) if is_pretrained(model) else model


def _refuse_two_networks(checkpoint: str, named: Mapping[str, str], single: Mapping[str, Any]) -> None:
    described = [f"model={named['model']}"] if "model" in named else []
    described += [f"{name}={value}" for name, value in single.items() if name.startswith("model.")]
    if described:
        raise ConfigError(
            "a checkpoint brings its own network", got=f"checkpoint={checkpoint} and {described[0]}", fix="keep one"
        )


def _search_path() -> list[str]:
    """The override that adds ./configs to Hydra's search path, after a check of its defaults lists for resolvers."""
    for group in groups():
        for path in (OWN_CONFIGS / group).glob("*.yaml"):
            content = OmegaConf.to_container(read_yaml(path), resolve=False)
            refuse_code(content.get("defaults") if isinstance(content, dict) else None, f"{path} defaults")
    return [f"hydra.searchpath=['file://{OWN_CONFIGS.resolve()}']"] if OWN_CONFIGS.is_dir() else []
