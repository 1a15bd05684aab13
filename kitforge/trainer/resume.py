"""Where a run goes on from, and whether the options it goes on with are still those it began with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kitforge.core.checkpoint.load import Checkpoint, newest, open_checkpoint
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.device import pick
from kitforge.foundation.errors import CheckpointError, ConfigError

# Options, by how their names begin, that change how a run is watched, where it runs or how far it goes, never what a
# step computes beyond the last digits.
RESUMABLE_OPTIONS = (
    "output",
    "resume",
    "recipe",
    "checkpoint",
    "inference.",
    "prompt",
    "tasks",
    "port",
    "format",
    "serve.",
    "dtype",
    "compile_level",
    "deterministic",
    "trainer.micro_batch_size",
    "trainer.activation_checkpointing",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.eval_first",
    "trainer.eval_batches",
    "trainer.checkpoint_every",
    "trainer.save_total_limit",
    "trainer.incremental_checkpoints",
    "trainer.early_stopping",
    "trainer.max_consecutive_skips",
    "trainer.rollback",
    "trainer.max_rollbacks",
    "trainer.allow_config_changes",
    "trainer.allow_data_changes",
    "trainer.progress",
    "trainer.profile",
    "trainer.wandb",
    "rollout.keep_rollout_files",
    # Where the data lie; what they hold is compared by their content.
    "data.train",
    "data.eval",
    "data.cache",
    "data.tasks",
    "data.prefetch",
    "data.num_workers",
    # Where rows live, and when they get there.
    "cache.device_rows",
    "cache.host_rows",
    "cache.path",
    "cache.file_rows",
    "cache.remote",
    "cache.placement",
    "cache.prefetch_batches",
    "cache.policy.",
    "cache.fail_on_overflow",
    # Numbers differ in their last digits under another layout, but position, noise and order do not.
    "parallel.",
    "role_ranks.",
)


def find_resume_checkpoint(
    resume: str | Path | None, folder: Path | None, log_event: Callable[[str, str], None], world: World = ALONE
) -> Checkpoint | None:
    """The checkpoint that `resume` means: None for a fresh run, "auto" for the newest good one of `folder`, else a
    run folder or a step folder. A damaged checkpoint is named through `note` and the one before it is used."""
    root = None if folder is None else folder / "checkpoints"
    if resume is None:
        if root is not None and steps(root):
            raise ConfigError(
                "the output folder belongs to another run",
                got=f"{folder} with checkpoints up to step {steps(root)[-1]}",
                expected="an empty or new folder",
                fix="add resume=auto to go on with that run, or choose another output_dir",
            )
        return None
    if resume == "auto":
        return (
            None
            if root is None
            else newest(root, on_damaged=lambda error: log_event("damaged", str(error)), world=world)
        )
    found = _open_named(Path(resume), log_event, world)
    if root is not None:
        _check_same_history(found, root)
    return found


def _check_same_history(found: Checkpoint, root: Path) -> None:
    """Checkpoints that the resumed run did not come from would be taken for its own by the next resume=auto."""
    is_own = found.folder.resolve().parent == root.resolve()
    strangers = [step for step in steps(root) if not is_own or step > found.step]
    if strangers:
        raise ConfigError(
            "the output folder holds checkpoints that are not from before this one",
            got=f"{root} with steps {', '.join(map(str, strangers[:5]))}",
            expected=f"none but those up to step {found.step} of the same run",
            fix="choose another output_dir, or remove them",
        )


def _open_named(path: Path, log_event: Callable[[str, str], None], world: World) -> Checkpoint:
    if (path / "manifest.json").exists():
        return open_checkpoint(path, world=world)
    found = newest(path / "checkpoints", on_damaged=lambda error: log_event("damaged", str(error)), world=world)
    if found is None:
        raise CheckpointError("no checkpoint to resume from", got=path, expected="a run folder or a step folder")
    return found


def check_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, allowed: bool) -> list[str]:
    """What changed between two nested configurations, as lines to show; that a run is resumed is said elsewhere. Raises
    ConfigError when a change makes an exact continuation impossible, unless it is allowed."""
    old, new = _flatten(before), _flatten(now)
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    lines = [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in changed]
    same_kind = device_type_of(old.get("device")) == device_type_of(new.get("device"))
    harmless = (*RESUMABLE_OPTIONS, "device") if same_kind else RESUMABLE_OPTIONS
    breaking = [line for name, line in zip(changed, lines, strict=True) if not name.startswith(harmless)]
    if breaking and not allowed:
        raise ConfigError(
            "the options differ from those the run was started with, so it cannot go on exactly",
            got="; ".join(breaking),
            expected="the same options",
            fix="put them back, or add trainer.allow_config_changes=true to go on all the same",
        )
    return [line for name, line in zip(changed, lines, strict=True) if name != "resume"]


def device_type_of(device: object) -> str:
    """The kind of device that an option names: the first of "cuda:1", and what "auto" finds here."""
    name = str(device)
    return pick().type if name == "auto" else name.partition(":")[0]


def _flatten(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= _flatten(value, f"{path}{name}.")
        else:
            result[path + name] = value
    return result
