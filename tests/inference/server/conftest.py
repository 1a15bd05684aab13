"""A server of a tiny random model in a thread of its own."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import pytest
import uvicorn

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.app import create_app
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.serve import build_server
from kitforge.inference.server.service import Service
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from tests.patience import PATIENCE
from tests.tiny import built
from tests.trainer import tiny


@dataclass(frozen=True)
class Served:
    url: str
    service: Service
    server: uvicorn.Server

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE)

    def ask(self, path: str, **body: Any) -> Any:
        """The answer to a body, which there is."""
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def small_model() -> Decoder:
    return cast(Decoder, built(tiny.LLAMA, ByteTokenizer.vocab_size))


def make_service(model: Decoder, limits: ServeOptions, engine: EngineOptions) -> Service:
    tokenizer = ByteTokenizer()
    texts = TextEngine(Engine(model, engine, stop_ids=tokenizer.eos_ids), tokenizer)
    return Service(texts, "tiny", InferenceOptions(max_new_tokens=16), limits)


@contextlib.contextmanager
def serving(service: Any, app: Any = None) -> Iterator[Served]:
    """The server behind a real socket, of text generation unless the `app` is another; it has ended when the block
    has."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = build_server(service, app or create_app(service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", service, server)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def metric(url: str, name: str) -> float:
    """One number of /metrics, which must be there; `name` with its labels, if it has any."""
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE).text.splitlines()
    (value,) = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name]
    return float(value)


def until(holds: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for something to hold; it is an error when it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(scope="package")
def model() -> Decoder:
    return small_model()


@pytest.fixture(scope="package")
def served(model: Decoder) -> Iterator[Served]:
    """A server with the limits that it has by default."""
    with serving(make_service(model, ServeOptions(), EngineOptions())) as found:
        yield found


@pytest.fixture(scope="package")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0) as found:
        yield found
