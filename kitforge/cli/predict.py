"""`kitforge predict`."""

from __future__ import annotations

from kitforge.api import kit_of, load_model
from kitforge.cli.console import say
from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError


def predict(chosen: Composition) -> int:
    """Write a prediction for every row of a file."""
    kit = kit_of(chosen.values["task"])
    options = kit.read_options(chosen.values)
    if not hasattr(kit, "predict_file"):
        raise ConfigError(
            f"a run of {options.task} predicts no files",
            got=f"checkpoint={options.checkpoint}",
            expected="a run of recommendation, or one that continues text",
            fix=f'score rows with pipeline("{options.task}", model=RUN)',
        )
    say(f"wrote {kit.predict_file(options, load_model)}")
    return 0
