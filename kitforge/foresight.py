"""What a run that begins will need, foreseen by a plan: one line, and a file for its report. With `trainer.foresee`."""

import json
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from kitforge.core.parallel.rendezvous import launch_info
from kitforge.foundation import device as devices
from kitforge.foundation.config import check, from_dict
from kitforge.foundation.errors import ConfigError, KitforgeError, nearest
from kitforge.foundation.files import write_text
from kitforge.foundation.log import say
from kitforge.kits.kit import AnyKit, RunInputs
from kitforge.kits.planning import GIB, ClusterConfig, plan_memory
from kitforge.preset_files import presets
from kitforge.report.foreseen import FORESEEN
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.options import RunOptions
from kitforge.yaml_options import read_yaml, to_plain_dict


class Foresight(Callback):
    """Writes what was foreseen into the folder of the run."""

    def __init__(self, figures: dict[str, object]) -> None:
        self._figures = figures

    def on_event(self, event: Event, run: RunContext) -> None:
        """The file is there from the first step on."""
        if event.kind == "start" and run.folder is not None:
            write_text(run.folder / FORESEEN, json.dumps(self._figures))


def named_cluster(name: str, values: dict[str, Any] | None = None) -> ClusterConfig:
    """The devices of a file, with single values over them; v100 is v100_32g, as no other file begins so. Raises
    ConfigError, with the nearest name."""
    known = presets("cluster")
    longer = [each for each in known if each.startswith(f"{name}_")]
    name = longer[0] if len(longer) == 1 else name
    if name not in known:
        raise ConfigError(f"unknown device {name!r}", expected=", ".join(known), fix=nearest(name, known))
    return from_dict(ClusterConfig, to_plain_dict(read_yaml(known[name])) | (values or {}), "cluster")


def own_cluster(options: RunOptions) -> tuple[str | None, ClusterConfig]:
    """The devices of a run and the name of their file: the one that `trainer.foresee` names, or here.yaml."""
    device, asked = devices.pick(options.device), options.trainer.foresee
    # The one that `kitforge plan calibrate` measures, as its page names it.
    name = asked if isinstance(asked, str) else "here" if "here" in presets("cluster") else None
    cluster = ClusterConfig(name=device.type, kind=device.type) if name is None else named_cluster(name)
    check(cluster.kind == device.type, "trainer.foresee", asked, f"a cluster of the kind {device.type}")
    return name, cluster


def foreseeing(kit: AnyKit, options: RunOptions, inputs: RunInputs[object]) -> RunInputs[object]:
    """The inputs of a run that says what it will need: rank 0 traces a step before its network is built, in some
    seconds. What cannot be planned is said, and trains all the same."""
    name, cluster = own_cluster(options)
    if (where := launch_info()) is not None and where.rank > 0:
        return inputs
    has_rows = inputs.train_dataset is not None and not hasattr(getattr(options, "data", None), "sequence_length")
    given = "a network" if inputs.model is not None else "rows" if has_rows else ""
    if given or dist.is_initialized():
        why = f"{given} in memory" if given else "its ranks are joined"
        say(f"not foreseen: {why}, and a plan is of what the options name before a run")
        return inputs
    try:
        with torch.random.fork_rng(devices=()):
            found = plan_memory(kit, options, cluster)
    except KitforgeError as error:
        say(f"not foreseen: {error}")
        return inputs
    time = found.time(cluster)
    speed = "no time of a step: `kitforge plan calibrate` measures the speed of this machine"
    if time is not None:
        speed = f"{1e3 * time.seconds:,.1f} ms a step ({name})"
    elif name is not None:
        speed = f"no time of a step: {name} has no speed in {options.precision}"
    say(f"foreseen: {found.memory.peak / GIB:,.3f} GiB of memory a rank at its peak ({found.memory.moment}); {speed}")
    figures = {
        "device": cluster.kind,
        "peak_bytes": found.by_index[0].peak,
        "step_seconds": None if time is None else time.seconds,
        "doubts": found.doubts,
    }
    return replace(inputs, callbacks=[*inputs.callbacks, Foresight(figures)])
