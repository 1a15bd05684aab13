"""What two runs leave behind, compared to the last bit: metrics, weights, optimizer, tables and state."""

import json
import shutil
from collections.abc import Iterable, Mapping
from math import inf, isnan, nan
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.core.checkpoint.state_tensors import detach_tensors
from kitforge.verify.contract import furthest

# Rows by id of every part of every table, as bits.
Tables: TypeAlias = dict[str, dict[str, dict[int, bytes]]]


def records(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of these kinds (train and eval where none is named), without what a clock decides."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    wanted = kinds or ("train", "eval")
    return [without_clock(record) for record in map(json.loads, lines) if record["kind"] in wanted]


def without_clock(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without `time/*`."""
    return {name: value for name, value in record.items() if not name.startswith("time/")}


def copy_up_to(source: Path, target: Path, step: int) -> Path:
    """The run as a kill after the checkpoint of `step` leaves it: later lines are there, later checkpoints are not."""
    shutil.copytree(source, target)
    for later in steps(target / "checkpoints"):
        if later > step:
            shutil.rmtree(step_folder(target / "checkpoints", later))
    return target


def last_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run."""
    root = folder / "checkpoints"
    return open_checkpoint(step_folder(root, steps(root)[-1]))


def checkpoint_content(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of model and optimizer, and the state; without clock and paths."""
    tensors = dict(checkpoint.model()) | dict(checkpoint.optimizer())
    training = checkpoint.state["training"]
    del training["seconds"], checkpoint.state["config"]
    training["log_accumulator"] = without_clock(training["log_accumulator"])
    return tensors, checkpoint.state


def tables_in(checkpoint: Checkpoint) -> Tables:
    """All rows of a checkpoint."""
    return {
        name: {part: bits_of(checkpoint.table(name).chunks(part)) for part in checkpoint.table(name).parts}
        for name in checkpoint.tables
    }


def bits_of(chunks: Iterable[tuple[Tensor, Tensor]]) -> dict[int, bytes]:
    """Rows by id, as bytes."""
    found: dict[int, bytes] = {}
    for ids, rows in chunks:
        for row_id, row in zip(ids.tolist(), rows.contiguous().view(torch.uint8).numpy(), strict=True):
            assert row_id not in found
            found[row_id] = row.tobytes()
    return found


def run_differences(got: Path, wanted: Path, *, with_state: bool = True) -> list[str]:
    """What differs between two runs that ended, by name; empty if nothing does, to the last bit. Without the state,
    options may differ."""
    lines, wanted_lines = records(got), records(wanted)
    found = [] if len(lines) == len(wanted_lines) else [f"{len(lines)} lines of metrics, not {len(wanted_lines)}"]
    for line, other in zip(lines, wanted_lines, strict=False):
        names = [name for name in line.keys() | other.keys() if not _is_same(line.get(name), other.get(name))]
        found += [f"{name} of step {other['step']}" for name in sorted(names)]
    checkpoints = last_checkpoint(got), last_checkpoint(wanted)
    (tensors, state), (wanted_tensors, wanted_state) = map(checkpoint_content, checkpoints)
    if with_state and detach_tensors(state, tensors) != detach_tensors(wanted_state, wanted_tensors):
        found.append("the state of the last checkpoint")
    names = sorted(tensors.keys() | wanted_tensors.keys())
    found += [name for name in names if not is_equal(tensors.get(name), wanted_tensors.get(name))]
    rows, wanted_rows = map(tables_in, checkpoints)
    found += [f"table {name}" for name in rows.keys() | wanted_rows.keys() if rows.get(name) != wanted_rows.get(name)]
    for name in rows.keys() & wanted_rows.keys():
        states, wanted_states = (checkpoint.table(name).state for checkpoint in checkpoints)
        keys = states.keys() | wanted_states.keys()
        if not all(is_equal(states.get(key), wanted_states.get(key)) for key in keys):
            found.append(f"state of table {name}")
    return found


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are there, and have the same bits."""
    return one is not None and other is not None and one.equal(other)


def _is_same(one: object, other: object) -> bool:
    # NaN equals NaN.
    return one == other or (isinstance(one, float) and isinstance(other, float) and isnan(one) and isnan(other))


def distance(got: Path, wanted: Path, names: Iterable[str] = ("loss", "eval/loss", "grad_norm")) -> float:
    """The largest relative difference of these metrics in lines of the same step and kind; infinite if there is none to
    compare, for values that are not finite, and for what one of the runs alone wrote."""
    lines, others = ({(each["kind"], each["step"]): each for each in records(run)} for run in (got, wanted))
    pairs = [(lines.get(key, {}), others.get(key, {})) for key in lines.keys() | others.keys()]
    values = [(one.get(name), other.get(name)) for one, other in pairs for name in {*names} & {*one, *other}]
    # A policy's loss is zero but for rounding where its ratios are one.
    return furthest(relative(one, other, floor=1e-2) for one, other in values)


def relative(got: float | None, wanted: float | None, floor: float) -> float:
    """|got - wanted| / max(|wanted|, floor); infinite where that is NaN, or where one of both is absent."""
    found = nan if got is None or wanted is None else abs(got - wanted) / max(abs(wanted), floor)
    return inf if isnan(found) else found
