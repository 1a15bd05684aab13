"""`kitforge generate`."""

from __future__ import annotations

import sys

from kitforge.api import load_model, load_processor
from kitforge.cli.console import say
from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import sanitize
from kitforge.kits.registry import kit_of


def generate(chosen: Composition) -> int:
    """Continue one prompt or several."""
    options = kit_of(chosen.values["task"]).read_options(chosen.values)
    if chosen.values.get("output") is not None:
        say(f"wrote {kit_of(options.task).predict_file(options, load_model)}")
        return 0
    if options.checkpoint is None or options.prompt is None:
        raise ConfigError("generation needs a model and a prompt", fix='add checkpoint=RUN prompt="Once upon a time"')
    model = load_model(options.checkpoint, options.device, kit_of(options.task).load_dtype(options))
    opened = kit_of(options.task).open_pipeline(model, load_processor(options.checkpoint), options)
    prompts = [options.prompt] if isinstance(options.prompt, str) else options.prompt
    for answer in opened(prompts):
        text = answer[0]["generated_text"]
        sys.stdout.write((sanitize(text) if sys.stdout.isatty() else text) + "\n")
    return 0
