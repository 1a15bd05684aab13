"""`kitforge generate`."""

import sys
from collections.abc import Mapping
from typing import Any

from kitforge.api import load_model, load_processor
from kitforge.cli.command import TRAINING_SECTIONS, Invocation, require
from kitforge.composition import Composition, compose_config, text_task_of
from kitforge.foundation.log import sanitize, say


def compose_generation(task: str, choices: Mapping[str, Any]) -> Composition:
    """The options of text generation, whichever task trained the model."""
    return compose_config(text_task_of(task, choices), choices, (*TRAINING_SECTIONS, "serve"))


def generate(chosen: Invocation) -> int:
    """Continue one prompt or several."""
    kit, options = chosen.kit, chosen.options
    if options.output is not None:
        say(f"wrote {kit.predict_file(options, load_model)}")
        return 0
    require("generation", options, {"checkpoint": "RUN", "prompt": '"Once upon a time"'})
    model = load_model(options.checkpoint, options.device, kit.load_dtype(options))
    opened = kit.open_pipeline(model, load_processor(options.checkpoint), options)
    prompts = [options.prompt] if isinstance(options.prompt, str) else options.prompt
    structure = {name: getattr(options, name, None) for name in ("schema", "regex", "choices")}
    for answer in opened(prompts, **{name: value for name, value in structure.items() if value is not None}):
        text = answer[0]["generated_text"]
        sys.stdout.write((sanitize(text) if sys.stdout.isatty() else text) + "\n")
    return 0
