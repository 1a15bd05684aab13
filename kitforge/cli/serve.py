"""`kitforge serve`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitforge.api import load_model, load_processor
from kitforge.cli.command import TRAINING_SECTIONS, Invocation, require
from kitforge.composition import Composition, compose_config, compose_predict, text_task_of
from kitforge.foundation.config import check
from kitforge.foundation.log import errors, say
from kitforge.inference.server.serve import serve as answer
from kitforge.kits.registry import kit_of


def compose_serve(task: str, choices: Mapping[str, Any]) -> Composition:
    """The options of the kit's own service, else those of text generation."""
    if kit_of(task).IS_SERVED:
        return compose_predict(task, choices, TRAINING_SECTIONS)
    return compose_config(text_task_of(task, choices), choices, TRAINING_SECTIONS)


def serve(chosen: Invocation) -> int:
    """Serve a run over HTTP until interrupted."""
    kit, options = chosen.kit, chosen.options
    require("serving", options, {"checkpoint": "RUN"})
    check(0 <= options.port < 65536, "port", options.port, "0 to 65535")
    tokenizer = load_processor(options.checkpoint)
    model = load_model(options.checkpoint, options.device, kit.load_dtype(options), options.task)
    name = Path(options.checkpoint).resolve().name.removesuffix(".gguf")
    service = kit.open_service(model, tokenizer, name, options)
    app = kit.new_app(service)

    def ready(address: str) -> None:
        say(f"{service.name} answers at {address} (stop with Ctrl-C)")
        pages = [address + route.path for route in app.routes if route.path in ("/", "/docs")]
        topics = {"pages": ", ".join(sorted(pages)), "routes": ", ".join(app.openapi()["paths"])}
        for topic, words in (topics | service.summary()).items():
            say(f"  {topic:8} {words}")

    errors.print("warming up", highlight=False)
    answer(service, app, options.port, ready)
    return 0
