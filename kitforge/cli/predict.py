"""`kitforge predict`."""

from __future__ import annotations

from functools import partial

from kitforge.api import load_model
from kitforge.cli.console import say
from kitforge.composition import Composition
from kitforge.kits.registry import kit_of


def predict(chosen: Composition) -> int:
    """Batch inference: one prediction per row of a file."""
    kit = kit_of(chosen.values["task"])
    options = kit.read_options(chosen.values)
    say(f"wrote {kit.predict_file(options, partial(load_model, task=options.task))}")
    return 0
