"""`kitforge serve`."""

from __future__ import annotations

from pathlib import Path

from kitforge.api import load_model, load_processor
from kitforge.cli.console import say
from kitforge.composition import Composition
from kitforge.foundation.errors import ConfigError
from kitforge.inference.server.serve import serve as answer
from kitforge.kits.registry import kit_of


def serve(chosen: Composition) -> int:
    """Serve a run over HTTP until interrupted."""
    kit = kit_of(chosen.values["task"])
    options = kit.read_options(chosen.values)
    if options.checkpoint is None:
        raise ConfigError("serving needs a model", fix="add checkpoint=RUN")
    tokenizer = load_processor(options.checkpoint)
    model = load_model(options.checkpoint, options.device, kit.load_dtype(options))
    service = kit.open_service(model, tokenizer, Path(options.checkpoint).resolve().name, options)
    app = kit.new_app(service)
    answer(service, app, options.port, lambda address: say(f"{service.name} answers at {address} (stop with Ctrl-C)"))
    return 0
