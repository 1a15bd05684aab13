"""`kitforge export`."""

from __future__ import annotations

from pathlib import Path

from kitforge.api import save_model
from kitforge.cli.console import say
from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError
from kitforge.kits.registry import kit_of


def export(chosen: Composition) -> int:
    """Export a run: a Hugging Face folder, a faiss index of items, or a torch.export program."""
    if chosen.values.get("format") == "torch_export":
        kit = kit_of(chosen.values["task"])
        say(f"wrote {', '.join(map(str, kit.export_program(kit.read_options(chosen.values))))}")
        return 0
    source, target = chosen.values.get("checkpoint"), chosen.values.get("output_dir")
    if source is None or target is None:
        raise ConfigError("export needs a run and a folder", fix="add checkpoint=RUN output_dir=FOLDER")
    save_model(source, target, dtype=chosen.values.get("dtype"))
    say(f"wrote {target}: {', '.join(sorted(path.name for path in Path(target).iterdir()))}")
    return 0
