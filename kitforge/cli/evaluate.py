"""`kitforge evaluate`."""

from __future__ import annotations

import json
import math
import sys

from kitforge.api import evaluate as evaluate_task
from kitforge.api import load_model
from kitforge.cli.console import is_main_process
from kitforge.composition import Composition
from kitforge.kits.kit import RunInputs
from kitforge.kits.registry import kit_of


def evaluate(chosen: Composition) -> int:
    """Evaluate a checkpoint. The last line of output is one JSON object."""
    kit = kit_of(chosen.values["task"])
    options = kit.read_options(chosen.values)
    if chosen.values.get("tasks"):
        metrics = kit.evaluate_benchmarks(options, load_model)
    else:
        metrics = evaluate_task(options, RunInputs())
    # JSON has no infinity and no NaN.
    line = {name.removeprefix("eval/"): value if math.isfinite(value) else None for name, value in metrics.items()}
    sys.stdout.write(json.dumps(line) + "\n" if is_main_process() else "")
    return 0
