"""`kitforge export`."""

from __future__ import annotations

from kitforge.api import load_model, load_tokenizer, save_model
from kitforge.cli.terminal import say
from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError


def export(chosen: Composition) -> int:
    """Write a Hugging Face folder."""
    source, target = chosen.values.get("checkpoint"), chosen.values.get("output_dir")
    if source is None or target is None:
        raise ConfigError("export needs a run and a folder", fix="add checkpoint=RUN output_dir=FOLDER")
    save_model(load_model(source, "cpu"), target, load_tokenizer(source))
    say(f"wrote {target} for transformers")
    return 0
