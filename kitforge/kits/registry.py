"""The tasks by name, and the kits that have them. A kit is imported when one of its tasks is first used.

Kits outside this package register with the entry point group `kitforge.kits`, whose values are dicts of tasks:

    [project.entry-points."kitforge.kits"]
    mine = "my_package.kit:TASKS"
"""

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from kitforge.foundation.errors import ConfigError, KitforgeError, nearest
from kitforge.foundation.files import user_path
from kitforge.foundation.untrusted import load_yaml, yaml_error
from kitforge.kits.kit import AnyKit, Kit
from kitforge.models.catalog import FAMILIES, Kind
from kitforge.models.classifier_heads import QUESTION_ANSWERING, TOKEN_CLASSIFIER
from kitforge.models.loading import kind_of, labels_of

RLHF_TASKS = (
    *("sft", "reward", "dpo", "ipo", "kto", "orpo", "simpo"),
    *("ppo", "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "distill", "online_dpo"),
)
DEFAULT_TASK = "text_generation"
ENTRY_POINTS = "kitforge.kits"
_MODULES = {
    "recommendation": "kitforge.kits.recommender.build",
    DEFAULT_TASK: "kitforge.kits.transformers.build",
    "text_classification": "kitforge.kits.transformers.build",
    "token_classification": "kitforge.kits.transformers.build",
    "embedding": "kitforge.kits.transformers.build",
    "question_answering": "kitforge.kits.transformers.build",
    "masked_lm": "kitforge.kits.transformers.build",
    "image_classification": "kitforge.kits.transformers.build",
    "translation": "kitforge.kits.transformers.build",
    "summarization": "kitforge.kits.transformers.build",
    **dict.fromkeys(RLHF_TASKS, "kitforge.kits.rlhf.build"),
}

# The only task that trains a network of this kind, and the task of a Hugging Face folder that holds one.
_ONLY_TASKS: dict[Kind, str] = {"vision": "image_classification", "recommender": "recommendation"}
_TASKS_OF_KINDS: dict[Kind, str] = {"encoder": "masked_lm", "encoder-decoder": "translation", **_ONLY_TASKS}


def task_names() -> list[str]:
    """All tasks: those of this package, then those of installed kits."""
    return [*_MODULES, *_installed_tasks()]


def kit_of(task: str) -> AnyKit:
    """The kit of a task. Raises ConfigError with the nearest name for an unknown one."""
    if task in _MODULES:
        kit: AnyKit = import_module(_MODULES[task]).TASKS[task]
        return kit
    if task not in _installed_tasks():
        raise ConfigError(f"unknown task {task!r}", fix=nearest(task, task_names()))
    return _installed_tasks()[task]


@cache
def _installed_tasks() -> Mapping[str, AnyKit]:
    found: dict[str, AnyKit] = {}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            tasks = point.load()
        except Exception as error:
            raise KitforgeError(
                "an installed kit cannot be imported",
                got=f"{point.name} = {point.value}: {type(error).__name__}: {error}",
                fix="mend or uninstall that package",
            ) from error
        if not isinstance(tasks, Mapping) or not all(isinstance(each, Kit) for each in tasks.values()):
            expected = "a dict of task names to kitforge.kits.kit.Kit"
            raise KitforgeError("an installed kit has no tasks", got=f"{point.name} = {point.value}", expected=expected)
        for name in tasks:
            if name in found or name in _MODULES:
                raise KitforgeError("two kits have a task of the same name", got=f"{name}, in {point.value}")
        found |= tasks
    return found


def recorded_config(folder: str | Path) -> Path | None:
    """config.yaml of a run, or of the run that a step belongs to; None for another folder."""
    path = user_path(folder)
    # A step is RUN/checkpoints/step_N.
    parents = (path, path.resolve().parent.parent) if path.is_dir() else ()
    candidates = (parent / "config.yaml" for parent in parents)
    return next((each for each in candidates if each.is_file()), None)


def recorded_task(folder: object) -> str | None:
    """The task that a run or a step was trained for; None if nothing says so."""
    if not isinstance(folder, (str, Path)):
        return None
    if (config := recorded_config(folder)) is None:
        path = user_path(folder)
        labels = labels_of(path)
        if labels is not None:
            is_reward = len(labels) == 1 and kind_of(path) != "encoder"
            return "reward" if is_reward else "text_classification"
        if labels_of(path, TOKEN_CLASSIFIER) is not None:
            return "token_classification"
        if labels_of(path, QUESTION_ANSWERING) is not None:
            return "question_answering"
        return _TASKS_OF_KINDS.get(kind_of(path) or "language model")
    try:
        values = load_yaml(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise yaml_error(config, error) from None
    task = values.get("task") if isinstance(values, Mapping) else None
    return task if isinstance(task, str) and task in task_names() else None


def task_of_family(family: object) -> str | None:
    """The task of a family of networks, if there is only one."""
    return _ONLY_TASKS.get(FAMILIES[str(family)].kind) if family in FAMILIES else None


def kit_of_folder(folder: Path, task: str | None = None) -> AnyKit:
    """The kit of the task recorded in a run, or of the network that a Hugging Face folder holds. One output is a reward
    model, or what the `task` makes of it; a language model to embed with needs no head."""
    found = recorded_task(folder) or DEFAULT_TASK
    is_chosen = (found, task) in (("reward", "text_classification"), (DEFAULT_TASK, "embedding"))
    return kit_of(task if task and is_chosen and recorded_config(folder) is None else found)
