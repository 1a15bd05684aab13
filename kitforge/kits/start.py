"""Where a run starts: from the weights of an earlier run, which stays as it was, or of another task."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.parallel import collectives
from kitforge.core.parallel.parallelize import ParallelModel, parallel_model_of
from kitforge.core.parallel.world import ALONE
from kitforge.foundation.errors import KitforgeError, ModelError
from kitforge.foundation.untrusted import load_yaml
from kitforge.kits.kit import AnyKit, RunInputs
from kitforge.kits.registry import kit_of, recorded_task
from kitforge.trainer.options import RunOptions


def with_open_model(options: RunOptions, inputs: RunInputs[object]) -> RunInputs[object]:
    """The inputs, with the loader of the kit that trained the checkpoint if that is another task's."""
    trained_for = recorded_task(getattr(options, "checkpoint", None))
    if inputs.model is not None or trained_for is None or trained_for == options.task:
        return inputs
    return dataclasses.replace(inputs, open_model=kit_of(trained_for).open_model)


def apart_from_run(kit: AnyKit, options: RunOptions, inputs: RunInputs[object]) -> tuple[RunOptions, RunInputs[object]]:
    """Options and inputs of a training that leaves a given Run as it was. Where training would change its network, the
    checkpoint is its folder instead, or the model is a copy if the folder does not hold these weights. Raises
    ModelError for a network on several ranks that cannot be copied."""
    model, folder = inputs.model, inputs.model_folder
    if model is None or folder is None or not kit.trains_given_network(options):
        return options, inputs
    if hasattr(options, "checkpoint") and _is_stored(model, folder):
        changes: dict[str, Any] = {"checkpoint": str(folder), "model": {}}
        return dataclasses.replace(options, **changes), dataclasses.replace(inputs, model=None)
    if parallel_model_of(model, ALONE).mesh is not None:
        raise ModelError(
            "a Run on several ranks cannot be copied, and its folder does not hold its weights",
            got=folder,
            fix="pass its network, which is then trained in place: model=run.model",
        )
    return options, dataclasses.replace(inputs, model=copy.deepcopy(model))


def _is_stored(model: nn.Module, folder: Path) -> bool:
    """Whether a run folder holds these weights, bit for bit. It does not if they were changed in memory, if the run was
    resumed since, or for a network of the caller's own, which no folder can rebuild. Reads one tensor at a time; all
    ranks of the model call it."""
    config, parallel, is_equal = folder / "config.yaml", parallel_model_of(model, ALONE), False
    if config.is_file() and load_yaml(config.read_text(encoding="utf-8")).get("model"):
        parallel.reshard()
        is_equal = _has_weights(folder, parallel)
    group = None if parallel.mesh is None else parallel.mesh.world
    return all(collectives.all_gather_object(is_equal, group=group))


def _has_weights(folder: Path, parallel: ParallelModel) -> bool:
    """Whether the result of a run folder holds this rank's weights."""
    try:
        checkpoint = find_checkpoint(folder, verify=False)
    except KitforgeError:
        return False
    if checkpoint is None:
        return False
    names, shards = set(checkpoint.names("model")), parallel.parameters()
    return all(
        torch.equal(checkpoint.read(name, parallel.region(name)).to(shards[name]), shards[name])
        for name in names & shards.keys()
    )
