"""`kitforge predict`."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.api import load_model
from kitforge.cli.command import TRAINING_SECTIONS, Invocation
from kitforge.composition import Composition, compose_predict
from kitforge.foundation.log import say
from kitforge.kits.registry import kit_of


def compose_prediction(task: str, choices: Mapping[str, Any]) -> Composition:
    """The options of a batch: of text generation for a model that writes text, else of its own task."""
    return compose_predict(kit_of(task).TEXT_TASK or task, choices, (*TRAINING_SECTIONS, "serve"))


def predict(chosen: Invocation) -> int:
    """Batch inference: one prediction per row of a file."""
    say(f"wrote {chosen.kit.predict_file(chosen.options, partial(load_model, task=chosen.options.task))}")
    return 0
