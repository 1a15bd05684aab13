"""`kitforge export`."""

from __future__ import annotations

from pathlib import Path

from kitforge.api import save_model
from kitforge.cli.command import Invocation, require
from kitforge.cli.console import say
from kitforge.data.gguf_file import GGUF_SUFFIX


def export(chosen: Invocation) -> int:
    """Export a run: a Hugging Face folder, a GGUF file, a faiss index of items, an ONNX file or a torch.export
    program."""
    if chosen.values.get("format") in ("onnx", "torch_export"):
        say(f"wrote {', '.join(map(str, chosen.kit.export_program(chosen.options)))}")
        return 0
    source, target = chosen.values.get("checkpoint"), chosen.values.get("output_dir")
    require("export", chosen.values, checkpoint="RUN", output_dir="FOLDER")
    path = Path(target)
    if chosen.values.get("format") == "gguf" and path.suffix != GGUF_SUFFIX:
        path /= f"model{GGUF_SUFFIX}"
    save_model(source, path, dtype=chosen.values.get("dtype"))
    written = sorted(each.name for each in path.iterdir()) if path.is_dir() else [f"{path.stat().st_size / 1e6:.1f} MB"]
    say(f"wrote {path}: {', '.join(written)}")
    return 0
