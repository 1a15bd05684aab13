"""Contracts of checkpoints: killed equals never killed, any layout goes on, and damage is refused."""

import dataclasses
import random
import shutil

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.foundation.errors import CheckpointError, TrainingError
from kitforge.verify.case import CHECKPOINT_EVERY, RUN_TIMEOUT, Case
from kitforge.verify.contract import Contract, Measured
from kitforge.verify.distribution import on_layouts
from kitforge.verify.killing import kill_again_and_again
from kitforge.verify.run_equality import copy_up_to, records, run_differences

INSTANTS, SAVES = 2, 2
RESUME = {"resume": "auto"}


def check_resume(case: Case) -> Measured:
    """SIGKILL at drawn instants and during drawn saves, and resume=auto until the end, against the undisturbed run."""
    folder = case.folder / "killed"
    kills = kill_again_and_again(
        lambda prepare: case.start("killed", RESUME, prepare),
        folder,
        instants=INSTANTS,
        saves=SAVES,
        seed=case.values["seed"],
        timeout=RUN_TIMEOUT,
    )
    resumed = sum(record["event"] == "resume" for record in records(folder, "event"))
    if not kills or not resumed:
        raise TrainingError("no run was killed that left a checkpoint", got=f"{kills} kills, {resumed} resumptions")
    found = run_differences(folder, case.base)
    named = f": {', '.join(found[:3])}" if found else ""
    return Measured(figure=len(found), unit=f"values differ after {kills} kills{named}")


def check_layouts(case: Case) -> Measured:
    """The first checkpoint of the undisturbed run, resumed on other ranks, against what that run did then."""

    found = on_layouts(case, "resumed", RESUME, lambda base, folder: copy_up_to(base, folder, CHECKPOINT_EVERY))
    return dataclasses.replace(found, unit=found.unit.replace("relative, ", "relative, 1 rank to "))


def check_damage(case: Case) -> Measured:
    """A byte of each file of a checkpoint flipped, one at a time: all must be refused."""
    draw = random.Random(case.values["seed"])
    root = case.folder / "damaged"
    shutil.copytree(case.base / "checkpoints", root)
    folder = step_folder(root, steps(root)[-1])
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    accepted = []
    for path in files:
        sound = path.read_bytes()
        position = draw.randrange(len(sound))
        path.write_bytes(sound[:position] + bytes([sound[position] ^ 1 << draw.randrange(8)]) + sound[position + 1 :])
        try:
            open_checkpoint(folder)
            accepted.append(path.name)
        except CheckpointError:
            pass
        path.write_bytes(sound)
    open_checkpoint(folder)
    named = f": {', '.join(accepted)}" if accepted else ""
    return Measured(figure=len(accepted), unit=f"of {len(files)} damaged files accepted{named}")


CONTRACTS = (
    Contract(name="resume", promise="killed and resumed = never killed", check=check_resume),
    Contract(name="layouts", promise="resumed under another layout", check=check_layouts),
    Contract(name="damage", promise="a checkpoint with flipped bytes refused", check=check_damage),
)
