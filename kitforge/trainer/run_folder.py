"""The run folder, the loop of a run with its default callbacks, and training in that folder."""

import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from torch import nn

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.parallel.world import World
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.foundation.files import check_own, held_folder, mark_own, user_path, write_text
from kitforge.foundation.log import console
from kitforge.report.foreseen import FORESEEN
from kitforge.report.metrics import read_run
from kitforge.report.notebook import Rows
from kitforge.report.rank_trace import FOLDER
from kitforge.report.summary import metric_words
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.callbacks.checkpointing import CheckpointCallback
from kitforge.trainer.callbacks.early_stopping import EarlyStopping
from kitforge.trainer.callbacks.metrics_file import MetricsFile
from kitforge.trainer.callbacks.plateau import PlateauCallback
from kitforge.trainer.callbacks.profiler import Profiler
from kitforge.trainer.callbacks.progress import ProgressDisplay
from kitforge.trainer.callbacks.report_page import ReportPage
from kitforge.trainer.callbacks.tracking import TensorBoardCallback, WandbCallback
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.resume import find_resume_checkpoint
from kitforge.trainer.task import Task

# What a run writes into its folder: of others it may hold anything else, such as a log.
RUN_NAMES = ("config.yaml", "metrics.jsonl", "report.html", "checkpoints", "tokenizer", "samples", FOLDER, FORESEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run; accepted wherever a model is."""

    folder: Path
    model: nn.Module
    processor: Any
    metrics: dict[str, float]
    was_interrupted: bool = False

    @property
    def history(self) -> Rows:
        """The logged metrics as dicts, one for each step; what pandas.DataFrame takes."""
        record, rows = read_run(self.folder), dict[int, dict[str, float]]()
        for name, series in (*record.train.items(), *record.eval.items()):
            for step, value in zip(series.steps, series.values, strict=True):
                rows.setdefault(step, {"step": step})[name] = value
        return Rows(rows[step] for step in sorted(rows))

    def _repr_html_(self) -> str:
        report = self.folder / "report.html"
        link = f' <a href="{quote(str(report))}" target="_blank">report</a>' if report.is_file() else ""
        metrics = Rows({"metric": name, "value": text} for name, text in metric_words(self.metrics))
        return f"{metrics._repr_html_()}<p><code>{escape(str(self.folder))}</code>{link}</p>"


def default_folder(options: RunOptions, model_name: str, *, is_claimed: bool = False) -> Path:
    """`output_dir`, or a new folder below runs/, made now if it is claimed: of two runs that start within one second,
    each has its own."""
    if options.output_dir is None and options.resume == "auto":
        raise ConfigError("resume=auto needs a run folder", got="output_dir=null", fix="add output_dir=runs/latest")
    if options.output_dir is None:
        name = "-".join(dict.fromkeys((time.strftime("%Y%m%d-%H%M%S"), options.task, model_name)))
        folders = (Path("runs") / (name if number == 1 else f"{name}-{number}") for number in itertools.count(1))
        return next(folder for folder in folders if not folder.exists() and (not is_claimed or _is_made(folder)))
    folder = user_path(options.output_dir)
    files = [path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()]
    fix = f"choose another output_dir: {files[0] if files else folder} is a file"
    check(not files, "output_dir", options.output_dir, "folders", fix)
    # The target of runs/latest, as the link will point to this run.
    return Path(os.path.relpath(folder.resolve())) if folder.is_symlink() else folder


def make_loop(
    task: Task,
    options: RunOptions,
    folder: Path,
    *,
    world: World,
    config: Mapping[str, Any],
    callbacks: Sequence[Callback],
) -> Loop:
    """The loop of a run with `callbacks`, then the default ones."""
    standing = _default_callbacks(options, folder, dict(config), world)
    return Loop(task, options, world, folder=folder, callbacks=[*callbacks, *standing], config=config)


def train(loop: Loop, options: RunOptions, folder: Path, config_text: str) -> dict[str, float]:
    """Train in `folder`, from the checkpoint that `options.resume` names, if any."""
    found = _resumed(loop.world, options, folder)
    if found is not None:
        loop.resume(found)
    loop.world.all_gather_object(None)
    if loop.world.rank > 0:
        return loop.train()
    before, made = _latest_target(folder), [path for path in (folder, *folder.parents) if not path.exists()]
    is_empty = _is_made(folder) or not any(folder.iterdir())
    with held_folder(folder):
        mark_own(folder, "train")
        write_text(folder / "config.yaml", config_text)
        _link_latest(folder, folder.name)
        try:
            return loop.train()
        except KitforgeError:
            # A run that fails before its first step leaves no folder.
            if is_empty and loop.state.cursor.step == 0:
                _link_latest(folder, before)
                for path in made[-1:] or folder.iterdir():
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
            raise


def _is_made(folder: Path) -> bool:
    """Make the folder of a run; False if it is there. Raises ConfigError where it cannot be made."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        fix = "choose another output_dir"
        raise ConfigError(f"{folder} cannot be made", got=error, expected="a folder to write to", fix=fix) from error
    return True


@contextmanager
def claim(options: RunOptions, folder: Path) -> Iterator[None]:
    """If the block fails before anything is in a folder below runs/ that was made for it, neither of both stays."""
    try:
        yield
    except BaseException:
        for path in (folder, folder.parent) if options.output_dir is None else ():
            with suppress(OSError):
                path.rmdir()
        raise


def _resumed(world: World, options: RunOptions, folder: Path) -> Checkpoint | None:
    """The checkpoint to go on from, of which a rank that trains nothing reads the state alone. Refusals come before any
    rank touches a file of the run."""
    found = None
    if world.is_training:
        found = find_resume_checkpoint(
            options.resume, folder, lambda event, message: console.print(f"{event}: {message}", markup=False), world
        )
        if not steps(folder / "checkpoints"):
            check_own(folder, "train", overwrite=options.overwrite, names=RUN_NAMES)
    step = world.broadcast_object(found and found.folder)
    return found if world.is_training or step is None else open_checkpoint(step, verify=False)


def _default_callbacks(options: RunOptions, folder: Path, config: dict[str, Any], world: World) -> list[Callback]:
    """The default callbacks, in the order in which they handle an event: decisions, metrics, checkpoints, displays. All
    ranks decide and save their shards; rank 0 writes and displays."""
    trainer = options.trainer
    chosen: list[Callback] = []
    if options.schedule.name == "plateau":
        chosen.append(PlateauCallback())
    if trainer.early_stopping is not None:
        chosen.append(EarlyStopping(trainer.early_stopping))
    is_first = world.rank == 0
    if trainer.profile:
        chosen.append(Profiler(folder / FOLDER, trainer.profile_steps))
    if is_first:
        chosen.append(MetricsFile(folder / "metrics.jsonl"))
    chosen.append(
        CheckpointCallback(
            folder / "checkpoints",
            save_total_limit=trainer.save_total_limit,
            world=world,
            num_increments=trainer.incremental_checkpoints,
        )
    )
    if trainer.wandb is not None and is_first:
        chosen.append(WandbCallback(trainer.wandb, config))
    if trainer.tensorboard and is_first:
        chosen.append(TensorBoardCallback(folder / "tensorboard"))
    if trainer.progress and is_first:
        chosen.append(ProgressDisplay())
    if is_first:
        chosen.append(ReportPage())
    return chosen


def _latest_target(folder: Path) -> str | None:
    try:
        return os.readlink(folder.parent / "latest")
    except OSError:
        return None


def _link_latest(folder: Path, target: str | None) -> None:
    """Set or remove the link `latest` next to the run, unless that is a file; file systems without links have none."""
    link = folder.parent / "latest"
    if link.exists() and not link.is_symlink():
        return
    draft = folder.parent / f".latest.{os.getpid()}"
    try:
        draft.unlink(missing_ok=True)
        if target is None:
            link.unlink(missing_ok=True)
            return
        draft.symlink_to(target)
        os.replace(draft, link)
    except OSError:
        draft.unlink(missing_ok=True)
