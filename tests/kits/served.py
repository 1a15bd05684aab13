"""The server of a folder in this process."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx

from kitforge.api import load_model, load_processor
from kitforge.cli.serve import compose_serve
from kitforge.composition import task_of
from kitforge.kits.registry import kit_of
from tests.inference.server.conftest import serving
from tests.patience import PATIENCE


@contextlib.contextmanager
def served(folder: Path, *choices: str) -> Iterator[httpx.Client]:
    """As `kitforge serve` does it."""
    given = dict(choice.split("=") for choice in choices) | {"checkpoint": str(folder), "device": "cpu"}
    kit = kit_of(task_of(given))
    options = kit.read_options(compose_serve(task_of(given), given).values)
    model = load_model(options.checkpoint, "cpu", kit.load_dtype(options), options.task)
    service = kit.open_service(model, load_processor(folder), "scorer", options)
    with serving(service, kit.new_app(service)) as found, httpx.Client(base_url=found.url, timeout=PATIENCE) as client:
        yield client
