"""`kitforge export`."""

from pathlib import Path

from kitforge.api import save_model
from kitforge.cli.command import Invocation, require
from kitforge.data.gguf_file import GGUF_SUFFIX
from kitforge.foundation.files import user_path
from kitforge.foundation.log import say
from kitforge.foundation.untrusted import parse_json


def export(chosen: Invocation) -> int:
    """Export a run: a Hugging Face folder, a GGUF file, a faiss index of items, an ONNX file or a torch.export
    program."""
    if chosen.values.get("format") in ("onnx", "torch_export"):
        say(f"wrote {', '.join(map(str, chosen.kit.export_program(chosen.options)))}")
        return 0
    require("export", chosen.options, {"checkpoint": "RUN", "output_dir": "FOLDER"})
    source, target = chosen.values["checkpoint"], chosen.values["output_dir"]
    path = user_path(target)
    if chosen.values.get("format") == "gguf" and path.suffix != GGUF_SUFFIX:
        path /= f"model{GGUF_SUFFIX}"
    before = _times(path)
    save_model(source, path, dtype=chosen.values.get("dtype"), overwrite=chosen.options.overwrite)
    written = [f"{path.stat().st_size / 1e6:.1f} MB"]
    if path.is_dir():
        written = sorted(name for name, time in _times(path).items() if before.get(name) != time)
    say(f"wrote {path}: {', '.join(written)}")
    config = parse_json((path / "config.json").read_bytes()) if "config.json" in written else {}
    if chosen.values.get("dtype") is None and config.get("dtype", "float32") != "float32":
        say(f"weights in {config['dtype']}, as they were published; dtype=float32 writes them as they were trained")
    return 0


def _times(folder: Path) -> dict[str, int]:
    """When each file of a folder was written."""
    return {each.name: each.stat().st_mtime_ns for each in folder.glob("[!.]*")}
