"""`kitforge evaluate`."""

import json
import math
import sys
from collections.abc import Mapping
from typing import Any

from kitforge.api import evaluate as evaluate_task
from kitforge.api import load_model
from kitforge.cli.command import Invocation
from kitforge.cli.console import is_main_process
from kitforge.composition import Composition, compose_eval_config, text_task_of
from kitforge.kits.kit import RunInputs


def compose_evaluate(task: str, choices: Mapping[str, Any]) -> Composition:
    """The options of the run, with those chosen over them. Benchmarks run on any model that generates text."""
    task = text_task_of(task, choices) if choices.get("tasks") else task
    return compose_eval_config(task, choices, ("serve", "optimizer", "schedule"))


def evaluate(chosen: Invocation) -> int:
    """Evaluate a checkpoint. The last line of output is one JSON object."""
    if chosen.values.get("tasks"):
        metrics = chosen.kit.evaluate_benchmarks(chosen.options, load_model)
    else:
        metrics = evaluate_task(chosen.options, RunInputs(), chosen.kit)
    # JSON has no infinity and no NaN.
    line = {name.removeprefix("eval/"): value if math.isfinite(value) else None for name, value in metrics.items()}
    sys.stdout.write(json.dumps(line) + "\n" if is_main_process() else "")
    return 0
