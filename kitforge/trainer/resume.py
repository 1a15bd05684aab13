"""Resume: the checkpoint to continue from, and the check that options have not changed."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kitforge.core.checkpoint.load import Checkpoint, newest, open_checkpoint
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.device import pick
from kitforge.foundation.errors import CheckpointError, ConfigError
from kitforge.foundation.files import user_path
from kitforge.trainer.dropped_options import without_dropped

# Options, and sections of them, that may change on resume: they affect logging, placement and length, never what a step
# computes beyond rounding.
RESUMABLE_OPTIONS = (
    *("output", "output_dir", "overwrite", "resume", "recipe", "checkpoint", "prompt", "tasks", "port", "format"),
    *("inference", "serve", "dtype", "compile_level", "deterministic"),
    "trainer.micro_batch_size",
    "trainer.activation_checkpointing",
    "trainer.offload",
    "trainer.offload_fraction",
    "trainer.log_every",
    "trainer.eval_every",
    "trainer.eval_first",
    "trainer.eval_batches",
    "trainer.checkpoint_every",
    "trainer.save_total_limit",
    "trainer.incremental_checkpoints",
    "trainer.early_stopping",
    "trainer.allow_config_changes",
    "trainer.allow_data_changes",
    "trainer.progress",
    "trainer.profile",
    "trainer.profile_steps",
    "trainer.foresee",
    "trainer.tensorboard",
    "trainer.wandb",
    "rollout.keep_rollout_files",
    # Data paths; contents are compared by fingerprint. `data.eval_fraction` moves rows from one to the other.
    "data.train",
    "data.eval",
    "data.eval_texts",
    "data.cache",
    "data.tasks",
    "data.prefetch",
    "data.num_workers",
    # Placement and prefetching of table rows.
    "cache.device_rows",
    "cache.host_rows",
    "cache.path",
    "cache.remote",
    "cache.remote_ca_file",
    "cache.remote_prefix",
    "cache.placement",
    "cache.prefetch_batches",
    "cache.policy",
    "cache.fail_on_overflow",
    # Another layout changes rounding, but neither data position, random streams nor order.
    "parallel",
    "role_ranks",
)


def find_resume_checkpoint(
    resume: str | Path | None, folder: Path | None, log_event: Callable[[str, str], None], world: World = ALONE
) -> Checkpoint | None:
    """The checkpoint of the option `resume`: null for a new run, "auto" for the newest valid one of `folder`, else a
    run folder or a step folder. A damaged checkpoint is reported with `log_event`, and the one before it is used."""
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
    newest_valid = partial(newest, on_damaged=lambda error: log_event("damaged", str(error)), world=world)
    if resume == "auto":
        return None if root is None else newest_valid(root)
    path = user_path(resume)
    is_step = (path / "manifest.json").exists()
    found = open_checkpoint(path, world=world) if is_step else newest_valid(path / "checkpoints")
    if found is None:
        raise CheckpointError("no checkpoint to resume from", got=path, expected="a run folder or a step folder")
    if root is not None:
        # The next resume=auto would go on from steps that are not from before this one.
        is_own = found.folder.resolve().parent == root.resolve()
        strangers = [step for step in steps(root) if not is_own or step > found.step]
        if strangers:
            raise ConfigError(
                "the output folder holds checkpoints that are not from before this one",
                got=f"{root} with steps {', '.join(map(str, strangers[:5]))}",
                expected=f"none but those up to step {found.step} of the same run",
                fix="choose another output_dir, or remove them",
            )
    return found


def check_changes(before: Mapping[str, Any], now: Mapping[str, Any], *, allowed: bool) -> list[str]:
    """The changed options of two nested configurations, one line each. Raises ConfigError if a change makes an exact
    continuation impossible and is not allowed."""
    new = _flatten(now)
    old = _flatten(without_dropped(before, new, is_exact=not allowed))
    changed = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    lines = [f"{name}: {old.get(name)!r} -> {new.get(name)!r}" for name in changed]
    same_kind = device_type_of(old.get("device")) == device_type_of(new.get("device"))
    harmless = tuple(f"{name}." for name in (*RESUMABLE_OPTIONS, *["device"] * same_kind))
    breaking = [line for name, line in zip(changed, lines, strict=True) if not f"{name}.".startswith(harmless)]
    if breaking and not allowed:
        raise ConfigError(
            "the options differ from those of the run, so that it cannot continue exactly",
            got="; ".join(breaking),
            expected="the same options",
            fix="restore them, or add trainer.allow_config_changes=true to continue anyway",
        )
    return [line for name, line in zip(changed, lines, strict=True) if name != "resume"]


def device_type_of(device: object) -> str:
    """The device type of an option: "cuda" for "cuda:1"; "auto" is resolved on this machine."""
    name = str(device)
    return pick().type if name == "auto" else name.partition(":")[0]


def _flatten(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= _flatten(value, f"{path}{name}.")
        else:
            # Runs of earlier versions recorded labels that are numbers as texts.
            result[path + name] = list(map(str, value)) if name == "labels" and value else value
    return result
