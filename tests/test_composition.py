"""Presets, overrides and users' own YAML become one plain dict, and nothing in them is ever run."""

import dataclasses
import hashlib
import json
import math
import operator
import random
import re
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitforge.api import Trainer
from kitforge.composition import compose, compose_config, dotted, nested, parse, task_of
from kitforge.foundation.config import from_dict, option_help, option_names, to_dict, to_yaml
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.kits.planning import ClusterConfig
from kitforge.kits.recommender.data import label_choice
from kitforge.kits.recommender.schema import FeatureSchema
from kitforge.kits.registry import kit_of, recorded_task, task_names
from kitforge.kits.rlhf.algorithms.losses import ClipOptions
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.peer_names import PEER_NAMES
from kitforge.preset_files import CONFIGS, groups, presets
from kitforge.trainer.dropped_options import DROPPED, without_dropped
from kitforge.trainer.resume import check_changes
from kitforge.yaml_options import read_yaml
from tests.preset_values import preset_values


def values(**choices: Any) -> dict[str, Any]:
    return composed({name.replace("__", "."): value for name, value in choices.items()})


def composed(choices: dict[str, Any]) -> dict[str, Any]:
    return compose("text_generation", choices, TextGenerationOptions).values


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def test_single_values_lie_over_presets() -> None:
    model = values(model="gpt2_tiny", model__dim=64)["model"]
    assert (model["family"], model["dim"], model["num_layers"]) == ("gpt2", 64, 4)


def test_nested_and_dotted_choices_mean_the_same() -> None:
    flat = composed({"optimizer": "muon", "optimizer.learning_rate": 0.5, "data.batch_size": 3})
    assert flat == composed({"optimizer": "muon", "data": {"batch_size": 3}} | {"optimizer.learning_rate": 0.5})


def test_a_recipe_changes_presets_and_values_and_null_is_none() -> None:
    recipe = values(recipe="quickstart")
    assert (recipe["optimizer"]["name"], recipe["data"]["train"]) == ("muon", "python_stdlib")
    assert values(recipe=None) == values()


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("deepfm", "recommendation"),
        ("vit_tiny", "image_classification"),
        ("t5_tiny", "text_generation"),  # two tasks train it
        ("gpt2_tiny", "text_generation"),
        ("mine", "recommendation"),
        ("nope", "text_generation"),
    ],
)
def test_a_preset_whose_family_has_one_task_chooses_it(model: str, task: str, here: Path) -> None:
    write("configs/model/mine.yaml", "family: din\ndim: 8\n")
    assert task_of({"model": model}) == task
    assert task_of({"model": model, "task": "dpo"}) == "dpo"


@pytest.mark.parametrize("name", ["model", "recipe", "optimizer"])
def test_a_value_in_the_place_of_a_preset_is_refused(name: str) -> None:
    for value in ([], [1], 3):
        with pytest.raises(ConfigError, match=f"unknown {name}"):
            composed({name: value})


def test_a_file_in_the_place_of_a_data_preset_is_led_to_the_options_of_files() -> None:
    with pytest.raises(ConfigError, match=r"unknown data 'rows\.csv'(?s:.*)data\.train=FILE.*data\.eval=FILE"):
        composed({"data": "rows.csv"})


def test_yaml_that_grows_without_bounds_is_refused(here: Path) -> None:
    levels = "".join(f"{name}: &{name} [{', '.join(['*' + before] * 9)}]\n" for before, name in pairwise("abcdefghi"))
    write("configs/model/bomb.yaml", f"a: &a [x, x]\n{levels}")
    with pytest.raises(ConfigError, match="aliases written out"):
        values(model="bomb")
    write("run/config.yaml", f"task: text_generation\na: &a [x, x]\n{levels}")
    with pytest.raises(ConfigError, match="aliases written out"):
        recorded_task("run")


def test_a_recipe_may_bring_its_task_and_what_was_asked_for_comes_first(here: Path) -> None:
    write("configs/recipe/careful.yaml", "# @package _global_\ntask: dpo\nseed: 7\n")
    assert [task_of({"recipe": name}) for name in ("careful", "quickstart", None)] == [
        "dpo",
        "text_generation",
        "text_generation",
    ]
    assert task_of({"recipe": "careful", "task": "simpo"}) == "simpo"
    simpo = compose("simpo", {"recipe": "careful"}, kit_of("simpo").OPTIONS).values
    assert (simpo["task"], simpo["preference"]["loss"], simpo["seed"]) == ("simpo", "simpo", 7)


@pytest.mark.slow
def test_every_recipe_and_preset_is_accepted_by_its_dataclass() -> None:
    for group in groups():
        for name in presets(group):
            # Rows of tables are read by one task alone, and critics learn in one.
            alone = {"data": "recommendation"}.get(group, "ppo" if name.startswith("finetune_ppo") else None)
            task = alone or task_of({group: name})
            options = kit_of(task).OPTIONS
            from_dict(options, compose(task, {group: name}, options).values)


@pytest.mark.slow
def test_the_run_is_called_after_its_preset_or_its_folder(here: Path) -> None:
    (here / "weights").mkdir()
    names = [
        compose("text_generation", choices, TextGenerationOptions).model_name
        for choices in ({}, {"model": "gpt2_tiny"}, {"model": "weights"}, {"checkpoint": "weights/"})
    ]
    assert names == ["llama_tiny", "gpt2_tiny", "weights", "weights"]


def test_a_folder_in_the_place_of_a_preset_is_the_option_it_means(here: Path) -> None:
    (here / "weights").mkdir()
    chosen = values(model="weights", tokenizer=Path("weights"))
    assert (chosen["checkpoint"], chosen["model"], chosen["tokenizer"]["name"]) == ("weights", {}, "weights")


@pytest.mark.parametrize("choice", [{"model": "gpt2_tiny"}, {"model.dim": 64}])
def test_a_checkpoint_and_a_described_network_are_one_too_many(choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="brings its own network"):
        composed({"checkpoint": "runs/a", **choice})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("trainer.max_step", "'trainer.max_steps'"),
        ("learning_rate", "'optimizer.learning_rate'"),
        ("optimzer.name", "'optimizer.name'"),
        ("trainer.optimizer.betas", "'optimizer.betas'"),
        ("batch_size", "'data.batch_size'"),
        ("zzz", "--help"),
        ("hydra.run.dir", "--help"),
    ],
)
def test_an_unknown_option_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{name}'") as told:
        composed({name: 1})
    assert nearest in str(told.value)


@pytest.mark.parametrize(
    ("task", "name", "ours"),
    [
        ("grpo", "n_samples_per_prompt", "here it is 'rl.num_generations'"),
        ("grpo", "rl.n_samples_per_prompt", "here it is 'rl.num_generations'"),
        ("ppo", "actor_rollout_ref.actor.clip_ratio_high", "did you mean 'rl.clip_ratio_high'"),
        ("dpo", "beta", "did you mean 'preference.beta'"),
        ("grpo", "beta", "here it is 'kl.coef'"),
        ("text_generation", "per_device_train_batch_size", "'data.batch_size' and 'trainer.micro_batch_size'"),
        ("text_generation", "report_to", "here it is 'trainer.wandb'"),
        ("text_generation", "config", "here it is 'recipe'"),
        ("text_generation", "data.negatives.num_negatives", "add task=recommendation"),
        ("dpo", "loss_type", "here it is 'preference.loss'"),
        ("grpo", "loss_type", "here it is 'rl.loss_mode' and 'rl.loss_aggregation' and 'rl.advantage'"),
        ("grpo", "epsilon_high", "here it is 'rl.clip_ratio_high'"),
        ("grpo", "importance_sampling_level", "here it is 'rl.loss_mode'"),
        ("grpo", "mask_truncated_completions", "did you mean 'rl.mask_truncated_completions'"),
        ("grpo", "max_prompt_length", "here it is 'data.sequence_length' and 'data.on_too_long'"),
        ("dpo", "truncation_mode", "here it is 'data.on_too_long'"),
        ("grpo", "max_tool_calling_iterations", "here it is 'rollout.max_turns'"),
        ("grpo", "actor_rollout_ref.rollout.multi_turn.max_parallel_calls", "here it is 'environment.max_workers'"),
        # The same last part means another option below another section.
        ("ppo", "critic.optim.lr", "here it is 'critic.learning_rate'"),
        ("ppo", "actor_rollout_ref.actor.optim.lr", "here it is 'optimizer.learning_rate'"),
        ("ppo", "critic.grad_clip", "here it is 'critic.max_grad_norm'"),
        ("ppo", "actor_rollout_ref.rollout.n", "here it is 'rl.num_generations'"),
    ],
)
def test_the_name_of_another_library_is_refused_and_ours_is_named(task: str, name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match="unknown option") as told:
        compose(task, {name: 1}, kit_of(task).OPTIONS)
    assert ours in str(told.value)


# Each option is a promise. A new one takes the place of another, or comes with the reason for a higher number.
# The command line names an environment by `environment.name`. A step that has run on no GPU is turned on by hand, by
# `inference.engine.fused_decode`.
NUM_OPTIONS = {"ppo": 149, "sft": 82, "recommendation": 134, "text_generation": 136} | {
    "distill": 153,
    "online_dpo": 155,
}


def test_the_options_of_a_task_do_not_grow_unseen() -> None:
    assert {task: len(option_names(kit_of(task).OPTIONS)) for task in NUM_OPTIONS} == NUM_OPTIONS


# A default or a preset that changes makes other runs of the same command: it takes a line in CHANGELOG.md.
DEFAULTS = {
    "recommendation": "c23ec854", "text_generation": "e535ddfe", "text_classification": "40c6169b",
    "token_classification": "3fb6e662", "embedding": "645e8dca", "question_answering": "a13e0e5e",
    "masked_lm": "7504c420", "image_classification": "03107288", "translation": "9bb51a98",
    "summarization": "b5347445", "sft": "dfd0a419", "reward": "bcb63e60", "dpo": "b0da800c", "ipo": "4fd7f8f9",
    "kto": "2541c302", "orpo": "087b4f9c", "simpo": "b0440a41", "ppo": "e25e8847", "grpo": "4e1661a0",
    "dr_grpo": "0afe1296", "dapo": "a924790b", "rloo": "07a6ae1a", "reinforce_pp": "c2525d50",
    "distill": "d8d97865", "online_dpo": "9b0a8c5a",
}  # fmt: skip
PRESETS = {
    "data": "651f497b", "model": "2f1a65d7", "optimizer": "cdf7387c", "recipe": "0bfeb1e1", "schedule": "9b612430",
    "tokenizer": "28136544",
}  # fmt: skip


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


@pytest.mark.slow
def test_no_default_and_no_preset_changes_unseen() -> None:
    options = {task: from_dict(kit_of(task).OPTIONS, compose_config(task, {}).values) for task in task_names()}
    assert {task: digest(to_dict(each)) for task, each in options.items()} == DEFAULTS
    assert {group: digest(preset_values(group)) for group in groups()} == PRESETS


# What a message says of a number, up to its first alternative.
NUMBER = r"(-?[\d.,]*\d)"
BOUNDS = {
    rf"(?:at least|from|between) {NUMBER}": operator.ge,
    rf"^{NUMBER} (?:or more|to )": operator.ge,
    rf"(?:above|more than) {NUMBER}": operator.gt,
    rf"(?:at most|to|and) {NUMBER}": operator.le,
    rf"below {NUMBER}": operator.lt,
    rf"not {NUMBER}": operator.ne,
    "positive()": operator.gt,
}


def bounds(message: str) -> list[tuple[Any, float]]:
    said = message.partition("expected: ")[2].split("\n")[0].split(", or ")[0].split(":")[0]
    return [(of, float(each.replace(",", "") or 0)) for how, of in BOUNDS.items() for each in re.findall(how, said)]


def refusal(options: Any, name: str, value: float) -> str:
    try:
        dataclasses.replace(options, **{name: value})
    except ConfigError as error:
        return str(error)
    return ""


def groups_in(hint: Any) -> set[Any]:
    """The dataclasses in a type, and those in them."""
    own = {hint} if dataclasses.is_dataclass(hint) else set()
    return own.union(*map(groups_in, typing.get_type_hints(hint).values() if own else typing.get_args(hint)))


def numbers_of_options() -> Iterator[tuple[Any, str, Any]]:
    """The groups of options that need no value, with the names and types of their numbers."""
    roots = [ClipOptions, ClusterConfig, FeatureSchema, *(kit_of(task).OPTIONS for task in task_names())]
    for group in set().union(*map(groups_in, roots)) - {FeatureSchema}:
        fields, hints = [each for each in dataclasses.fields(group) if each.init], typing.get_type_hints(group)
        if any({each.default, each.default_factory} == {dataclasses.MISSING} for each in fields):
            continue
        for name in [each.name for each in fields]:
            is_union = isinstance(hints[name], types.UnionType)
            kinds = {*typing.get_args(hints[name])} if is_union else {hints[name]}
            if kinds & {int, float}:
                yield group(), name, float if float in kinds else int


# Options of either sign, and those whose bounds other options or the data give.
FREE = {"alpha", "entropy_coef", "frequency_penalty", "length_penalty", "missing_eos_penalty", "pass_threshold", "seed"}
FREE |= {"positive", "presence_penalty", "simpo_gamma", "device_rows", "dim", "host_rows", "kv_cache_bytes", "port"}
FREE |= {"max_num_seqs", "max_tokens_per_microbatch", "num_top_logprobs", "num_workers", "top_k", "stages_per_rank"}
FREE |= {"price_per_hour"}
# The first number of options that begin neither above nor at 0 or 1.
FIRST = {("sequence_length", 4), ("num_buckets", 2), ("memory_bytes", 2**27)}


def test_every_option_takes_the_numbers_that_its_message_says() -> None:
    free, late = set(), set()
    for options, name, kind in numbers_of_options():
        probes = {value: refusal(options, name, value) for value in (-1, 0, 1, 2**40, *[math.nan][: kind is float])}
        said = {each for message in probes.values() for each in bounds(message)}
        step = 1 if kind is int else 2.0**-20
        edges = {kind(bound) + move for _, bound in said for move in (-step, 0, step)}
        for value, message in (probes | {edge: refusal(options, name, edge) for edge in edges}).items():
            own = bounds(message) if message else said
            is_within = all(of(value, bound) for of, bound in own)
            sound = not own or (is_within == (not message) and (not message or name in message.split("\n")[0]))
            assert sound, f"{type(options).__name__}.{name} = {value}: {message or said}"
        free |= {name} if not said else set()
        late |= {(name, bound) for of, bound in said if of in (operator.ge, operator.gt) and bound not in (0, 1)}
    assert (free, late) == (FREE, FIRST)


def recorded_before(task: str) -> dict[str, Any]:
    """The defaults of a task as the version before recorded them, with the options that are gone."""
    known, values = option_names(kit_of(task).OPTIONS), dotted(compose_config(task, {}).values)
    sections = {name.rpartition(".")[0] for name in known}
    gone = {name: each.default for name, each in DROPPED.items() if name not in {*known, *sections}}
    here = {name: value for name, value in gone.items() if name.rpartition(".")[0] in {*sections, ""}}
    assert here
    return json.loads(json.dumps(nested(values | here)))


@pytest.mark.parametrize("task", ["ppo", "sft", "recommendation", "text_generation"])
def test_a_run_of_the_version_before_is_read_and_goes_on(task: str) -> None:
    kit, before = kit_of(task), recorded_before(task)
    options = kit.read_options(compose_config(task, {}).values)
    assert kit.read_options(before) == options
    whole = nested(dotted(to_dict(options)) | dotted(before))
    assert check_changes(whole, to_dict(options), allowed=False) == []


@pytest.mark.parametrize(
    ("task", "name", "value", "words"),
    [
        ("ppo", "rollout.logit_bias", {"3": 1.0}, "rollouts are drawn from the distribution that is trained"),
        ("sft", "data.truncation", "left", "data.on_too_long=cut_left or cut_right"),
        ("recommendation", "parallel.tensor", 2, "parallel.data"),
        ("text_generation", "schedule.warmup_fraction", 0.1, "schedule.warmup_steps"),
        ("text_generation", "trainer.rollback", True, "resume=auto"),
    ],
)
def test_an_option_that_is_gone_is_refused_where_it_did_something(task: str, name: str, value: Any, words: str) -> None:
    kit = kit_of(task)
    with pytest.raises(ConfigError, match="unknown option") as told:
        compose(task, {name: value}, kit.OPTIONS)
    assert words in str(told.value)
    before = nested(dotted(recorded_before(task)) | {name: value})
    now = to_dict(kit.read_options(recorded_before(task)))
    for refused in (lambda: kit.read_options(before), lambda: check_changes(before, now, allowed=False)):
        with pytest.raises(ConfigError, match=f"no option '{name}'") as told:
            refused()
        assert words in str(told.value)
    # What it changed is over: the run is evaluated, and goes on where changes are allowed.
    read = kit.read_options(without_dropped(before, option_names(kit.OPTIONS), is_exact=False))
    assert read == kit.read_options(recorded_before(task))
    check_changes(before, now, allowed=True)


def test_what_nothing_read_is_left_out_of_a_recorded_configuration() -> None:
    before = recorded_before("ppo") | {"inference": {"top_p": 0.5}, "prompt": "now"}
    before["rollout"]["engine"]["block_size"] = 32
    assert kit_of("ppo").read_options(before) == kit_of("ppo").read_options(recorded_before("ppo"))


def test_what_stands_for_the_names_of_other_libraries_exists() -> None:
    known = {name for task in task_names() for name in option_names(kit_of(task).OPTIONS)} | set(groups())
    assert {each for ours in PEER_NAMES.values() for each in ours} <= known
    # A name that is an option of ours as well means ours, and the table would never be asked.
    assert not PEER_NAMES.keys() & {name for name in known if "." not in name}


def test_a_text_for_a_section_with_a_name_is_its_name() -> None:
    found = compose("recommendation", {"cache.policy": "lfu"}, kit_of("recommendation").OPTIONS).values
    assert found["cache"]["policy"] == {"name": "lfu"}
    with pytest.raises(ConfigError, match="given twice"):
        compose("recommendation", {"cache.policy": "lfu", "cache.policy.name": "lru"}, kit_of("recommendation").OPTIONS)


def test_a_group_of_options_takes_no_single_value() -> None:
    with pytest.raises(ConfigError, match=r"'trainer' is a group(.|\n)*trainer\.max_steps"):
        composed({"trainer": 3})


@pytest.mark.parametrize(
    ("group", "name", "nearest"),
    [("model", "lama_tiny", "'llama_tiny'"), ("optimizer", "adam", "'adamw'"), ("recipe", "quick", "'quickstart'")],
)
def test_an_unknown_preset_names_the_nearest(group: str, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown {group} '{name}'") as told:
        composed({group: name})
    assert nearest in str(told.value)


def test_presets_of_ones_own_lie_in_configs() -> None:
    write("configs/model/mine.yaml", "family: gpt2\ndim: 48\nnum_layers: 1\nnum_heads: 2\n")
    write("configs/recipe/night.yaml", "# @package _global_\ndefaults:\n  - override /model: mine\nseed: 7\n")
    assert "mine" in presets("model")
    assert (values(recipe="night")["model"]["dim"], values(recipe="night")["seed"]) == (48, 7)


def test_configs_is_found_in_a_folder_with_a_difficult_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("a folder, (really) =x/configs/model/mine.yaml", "family: gpt2\ndim: 48\nnum_layers: 1\nnum_heads: 2\n")
    monkeypatch.chdir(here / "a folder, (really) =x")
    assert values(model="mine")["model"]["dim"] == 48


def test_a_preset_of_ones_own_may_not_hide_a_shipped_one() -> None:
    write("configs/model/llama_tiny.yaml", "family: gpt2\n")
    with pytest.raises(ConfigError, match=r"configs/model/llama_tiny\.yaml"):
        values(model="llama_tiny")


@pytest.mark.parametrize("header", ["", "# @package _global_\n"])
@pytest.mark.parametrize("task", ["text_generation", "recommendation", "grpo"])
def test_a_group_of_a_file_that_is_one_value_is_refused_beside_its_options(task: str, header: str) -> None:
    draws, kit = random.Random(0), kit_of(task)
    known = option_names(kit.OPTIONS)
    for option in draws.sample([name for name in known if "." in name], 6):
        group, value = (
            option.rpartition(".")[0],
            draws.choice([3, None, True, "lru", 1.5, *([] if header else [[1, 2]])]),
        )
        write("configs/recipe/one.yaml", header + json.dumps(nested({group: value})))
        with pytest.raises(ConfigError, match=rf"(?s)'{group}'.*got:.*expected:.*group of options.*do:"):
            compose(task, {"recipe": "one", option: 1}, kit.OPTIONS)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5), st.sampled_from(["a: [1", "  b: 2", "x: 'y", "- a", "c: d: e", "@", "a: *b", "\tq: 1"]))
def test_a_mistake_in_yaml_is_told_with_the_line_and_column_of_its_reader(line: int, mistake: str) -> None:
    text = "".join(f"{mistake if each == line else f'k{each}: {each}'}\n" for each in range(6))
    write("mine.yaml", text)
    try:
        yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        assert error.problem_mark is not None
        with pytest.raises(ConfigError, match=r"(?s)mine\.yaml is not YAML.*got:.*expected:.*do:") as told:
            read_yaml(Path("mine.yaml"))
        assert re.search(r"line \d+, column \d+", str(told.value))
        assert "unicode string" not in str(told.value)


@pytest.mark.parametrize("text", ["family: [gpt2\n", "\xff\xfe: \x00", "- a\n- b\n"])
def test_yaml_that_cannot_be_used_is_named(text: str) -> None:
    write("configs/model/mine.yaml", text)
    with pytest.raises(ConfigError, match=r"configs/model/mine\.yaml"):
        values(model="mine")


@pytest.mark.parametrize(
    "line",
    [
        "_target_: os.system",
        "inner: {_target_: os.system}",
        "inner: [{_target_: os.system}]",
        "family: ${oc.env:SECRET}",
        "family: ${ oc.env:SECRET }",
        "family: ${oc.${seed}:SECRET}",
        "family: a${oc.decode:${oc.env:SECRET}}",
        "family: ${model[${oc.env:SECRET}]}",
        "inner: ['${oc.env:SECRET}']",
    ],
)
def test_yaml_can_neither_name_code_nor_reach_the_environment(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "gpt2")
    write("configs/model/mine.yaml", f"{line}\n")
    with pytest.raises(ConfigError, match="cannot (name code|use resolvers)"):
        values(model="mine")


def test_a_defaults_list_cannot_reach_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "gpt2_tiny")
    write(
        "configs/recipe/night.yaml", "# @package _global_\ndefaults:\n  - override /model: ${oc.env:SECRET}\nseed: 7\n"
    )
    with pytest.raises(ConfigError, match="cannot use resolvers"):
        values(recipe="night")


@pytest.mark.parametrize("choice", [{"model._target_": "os.system"}, {"output_dir": "${oc.env:HOME}"}])
def test_neither_can_a_single_value(choice: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cannot (name code|use resolvers)"):
        composed(choice)


def test_a_value_may_refer_to_another_option() -> None:
    assert values(output_dir="runs/seed-${seed}", seed=3)["output_dir"] == "runs/seed-3"
    with pytest.raises(ConfigError, match="nothing"):
        values(output_dir="${nothing}")


def test_a_prompt_is_text_in_which_nothing_has_a_meaning() -> None:
    assert values(prompt="${oc.env:HOME} ${x}, 1,2")["prompt"] == "${oc.env:HOME} ${x}, 1,2"


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("a.b=3", [3]),
        ("a=1e-3", [0.001]),
        ("a=null", [None]),
        ("a=[x,y]", [["x", "y"]]),
        ("a=x,2", ["x", 2]),
        ("a=range(1,4)", [1, 2, 3]),
        ("a='x,y'", ["x,y"]),
        ("++a=3", [3]),
        ("a=", [""]),
        ("a=/d/my file (1).txt", ["/d/my file (1).txt"]),
        ("a=~/é=x.txt", ["~/é=x.txt"]),
        ("prompt=Hello, world", ["Hello, world"]),
        ("prompt=42", ["42"]),
        ("prompt=你好", ["你好"]),
        ("prompt=[a,b]", [["a", "b"]]),
        ("prompt=[Verse 1] it (begins)", ["[Verse 1] it (begins)"]),
    ],
)
def test_an_argument_is_read_as_its_author_meant_it(argument: str, expected: list[Any]) -> None:
    assert parse(argument)[1] == expected


@pytest.mark.parametrize("argument", ["model", "=3", "~model", "~model=3"])
def test_what_is_no_option_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="not an option"):
        parse(argument)


@pytest.mark.slow
def test_every_task_has_words_for_the_options_that_need_them() -> None:
    for options in {kit_of(task).OPTIONS for task in task_names()}:
        words = option_help(options)
        known = option_names(options)
        groups_of_options = {name.rsplit(".", depth)[0] for name in known for depth in (1, 2)}
        assert words.keys() <= known.keys() | groups_of_options
        assert "optimizer steps" in words["trainer.max_steps"]
        assert "the whole batch of a replica" in words["trainer.micro_batch_size"]
        assert "tokenizer.name" not in known or "folder with a tokenizer" in words["tokenizer.name"]


def test_nested_undoes_dotted() -> None:
    tree = {"a": {"b": 1, "c": {"d": [2]}}, "e": None}
    assert nested(dotted(tree)) == tree


def test_what_is_remembered_is_nobodys_to_change() -> None:
    first = values(model="gpt2_tiny")
    first["model"]["dim"] = first["optimizer"]["learning_rate"] = None
    again = values(model="gpt2_tiny")
    assert again["model"]["dim"] is not None
    assert again["optimizer"]["learning_rate"] is not None


def test_a_preset_of_ones_own_is_read_anew_each_time() -> None:
    for dim in (48, 64):
        write("configs/model/mine.yaml", f"family: gpt2\ndim: {dim}\n")
        assert values(model="mine")["model"]["dim"] == dim


def test_a_program_that_hydra_runs_keeps_its_own_hydra() -> None:
    # With presets of one's own none is remembered.
    write("configs/model/mine.yaml", "family: gpt2\n")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        assert values(model="gpt2_tiny")["model"]["family"] == "gpt2"
        assert hydra_compose("config").model.family == "llama"


def test_a_schema_given_as_a_mapping_has_columns_with_dots_in_their_names() -> None:
    schema = {"label": {"name": "click"}, "categorical": {"user.id": {"encoding": "hash"}}}
    more = {"data.schema.categorical.site.encoding": "exact"}
    for choices in ({"data": {"schema": schema}}, {"data.schema": schema}, more | {"data.schema": schema}):
        found = compose_config("recommendation", choices).values["data"]["schema"]
        site = {"site": {"encoding": "exact"}} if len(choices) == 2 else {}
        assert found == {**schema, "categorical": {"user.id": {"encoding": "hash"}} | site}
    assert schema["categorical"] == {"user.id": {"encoding": "hash"}}


@pytest.mark.parametrize(("value", "wanted"), [(5, "5"), (5.0, "5"), (1e3, "1000"), (True, "true"), ("True", "true")])
def test_the_positive_value_of_a_label_is_of_any_type(value: object, wanted: str) -> None:
    options = kit_of("recommendation").read_options(compose_config("recommendation", {"data.positive": value}).values)
    assert label_choice(options.data).positive == wanted


# A configuration comes back


def printed(task: str, **choices: object) -> str:
    """What `kitforge config` prints."""
    kit = kit_of(task)
    return to_yaml(kit.resolved(kit.read_options(compose_config(task, choices).values)))


CHOICES: dict[str, dict[str, object]] = {
    "text_generation": {"model": "gpt2_tiny", "optimizer": "muon", "model.dim": 64},
    "translation": {"model": "t5_tiny"},
    "image_classification": {"model": "vit_tiny"},
    "recommendation": {"model": "deepfm", "data": "criteo"},
    "ppo": {"checkpoint": "home", "optimizer.learning_rate": 3e-4, "lora.rank": 4},
    "grpo": {"reward": "lowercase", "rollout.temperature": 0.5},
}


@pytest.mark.parametrize("task", CHOICES)
def test_a_printed_configuration_is_a_recipe_that_gives_it_again(here: Path, task: str) -> None:
    Path("home").mkdir()
    write("again.yaml", text := printed(task, **CHOICES[task]))
    write("configs/recipe/own.yaml", text)
    assert task_of({"recipe": "again.yaml"}) == task
    assert printed(task, recipe="again.yaml") == text
    assert printed(task, recipe="own") == text


def test_what_is_typed_lies_over_a_file(here: Path) -> None:
    write("again.yaml", printed("text_generation", model="gpt2_tiny", optimizer="muon", **{"data.train": "a.txt"}))
    over = {"recipe": "again.yaml", "model": "llama_tiny", "optimizer": "adamw", "seed": 3}
    assert printed("text_generation", **over) == printed(
        "text_generation", model="llama_tiny", optimizer="adamw", seed=3, **{"data.train": "a.txt"}
    )
    write("clicks.yaml", printed("recommendation", **{"data.train": "clicks.csv"}))
    data = compose_config("recommendation", {"recipe": "clicks.yaml", "data": "criteo"}).values["data"]
    assert (data["train"], data["format"]) == ("clicks.csv", "criteo")


def test_a_recipe_needs_no_first_line_and_may_lie_anywhere(here: Path) -> None:
    text = "defaults:\n  - override /optimizer: muon\n  - _self_\nseed: 7\n"
    write("configs/recipe/night.yaml", text)
    write("configs/recipe/day.yaml", f"# @package _global_\n{text}")
    write("elsewhere/night.yml", f"# @package _global_\n{text}")
    night, day, elsewhere = (values(recipe=name) for name in ("night", "day", "elsewhere/night.yml"))
    assert night == day == elsewhere
    assert (night["optimizer"]["name"], night["seed"]) == ("muon", 7)
    write("odd.yaml", "defaults: [quickstart]")
    with pytest.raises(ConfigError, match=r"defaults of odd\.yaml.*\n.*quickstart"):
        values(recipe="odd.yaml")
    with pytest.raises(
        DataError, match=r"od.yaml does not exist(.|\n)*expected: a recipe, or the config.yaml of a run"
    ):
        values(recipe="od.yaml")


def rewarded(**choices: object) -> dict[str, Any]:
    return compose_config("grpo", choices).values


def test_a_function_of_a_file_is_trusted_on_request_only(here: Path) -> None:
    for path in ("again.yaml", "configs/recipe/again.yaml"):
        write(path, "# @package _global_\ntask: grpo\nreward: rewards:shortness\n")
    for recipe in ("again.yaml", "again"):
        with pytest.raises(ConfigError, match="allow_code=true"):
            rewarded(recipe=recipe)
        assert rewarded(recipe=recipe, reward="rewards:other")["reward"] == "rewards:other"
        assert rewarded(recipe=recipe, allow_code=True)["reward"] == "rewards:shortness"
    write("bold.yaml", "allow_code: true\nreward: rewards:shortness\n")
    with pytest.raises(ConfigError, match="cannot name code"):
        rewarded(recipe="bold.yaml")
    write("game.yaml", "task: grpo\nenvironment: {name: games:Guess}\n")
    with pytest.raises(ConfigError, match=r"(?s)cannot name code.*environment\.name: games:Guess"):
        rewarded(recipe="game.yaml")
    assert rewarded(recipe="game.yaml", environment="own:Guess")["environment"]["name"] == "own:Guess"
    # A module alone is none of these, and would be imported to look into it.
    write("module.yaml", "task: grpo\nenvironment: {name: games}\n")
    with pytest.raises(ConfigError, match=r"package\.module:Class"):
        kit_of("grpo").read_options(rewarded(recipe="module.yaml"))


def test_the_record_of_a_run_leaves_the_folder_of_that_run(here: Path) -> None:
    write("runs/x/config.yaml", "output_dir: runs/x\nresume: auto\n")
    record, copy = "runs/x/config.yaml", "copy.yaml"
    Path(copy).write_text(Path(record).read_text())
    assert [values(recipe=name)["output_dir"] for name in (record, copy)] == [None, "runs/x"]
    assert values(recipe=record)["resume"] is None
    assert values(recipe=record, resume="auto")["output_dir"] == "runs/x"


def test_a_file_refers_to_what_a_preset_says(here: Path) -> None:
    write("night.yaml", "output_dir: runs/lr-${optimizer.learning_rate}\n")
    assert values(recipe="night.yaml", optimizer__learning_rate=0.5)["output_dir"] == "runs/lr-0.5"


def test_a_rate_that_is_given_follows_no_other_although_it_is_that_of_the_preset(here: Path) -> None:
    Path("home").mkdir()
    rates = {"optimizer.learning_rate": 3e-4, "critic.learning_rate": 1e-5}
    write("critic.yaml", to_yaml({"task": "ppo", "checkpoint": "home", **nested(rates)}))
    for choices in ({"recipe": "critic.yaml"}, {"checkpoint": "home", **rates}):
        assert compose_config("ppo", choices).values["critic"]["learning_rate"] == 1e-5


@pytest.mark.parametrize("preset", ["gpt2_tiny", "deepfm", "mine"])
@pytest.mark.parametrize(
    ("role", "given"),
    [
        *((role, "{}") for role in ("checkpoint", "reference", "teacher", "reward")),
        ("reward", ["exact", "{}"]),
        ("reward", {"deepfm": [0.5, "{}"]}),
    ],
)
def test_weights_named_by_a_preset_are_refused_in_every_role(role: str, given: Any, preset: str) -> None:
    write("configs/model/mine.yaml", "family: gpt2\ndim: 48\nnum_layers: 1\nnum_heads: 2\n")
    given = json.loads(json.dumps(given).replace("{}", preset))
    words = rf"(?s)without weights.*got: +{role}={preset}\n.*expected:.*do:.*{role}=runs"
    task = "distill" if role == "teacher" else "ppo"
    with pytest.raises(ModelError, match=words):
        compose_config(task, {role: given})
    if role != "checkpoint":
        with pytest.raises(ModelError, match=words):
            Trainer(task, roles={role: given})
    # A folder of that name has weights.
    if isinstance(given, str) and preset != "mine":
        Path(preset).mkdir()
        compose_config(task, {role: given})
