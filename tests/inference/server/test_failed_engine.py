"""An engine that fails is told to everybody who waits, and ends its server."""

import json
import threading
from queue import Queue

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import DeviceError, EngineError
from kitforge.inference.options import EngineOptions
from kitforge.inference.server import serve
from kitforge.inference.server.app import create_app
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.service import Service
from tests.inference.server.conftest import make_service, serving, until
from tests.patience import PATIENCE

COMPLETIONS = "/v1/completions"


def failing(model: Decoder, monkeypatch: pytest.MonkeyPatch, error: type[Exception] = RuntimeError) -> Service:
    """A service whose engine fails in its third step."""
    service = make_service(model, ServeOptions(), EngineOptions())
    texts, num_steps = service.worker._text_engine, iter(range(100))
    step = texts.step

    def broken() -> object:
        if next(num_steps) == 2:
            raise error("boom")
        return step()

    monkeypatch.setattr(texts, "step", broken)
    return service


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, DeviceError])
def test_those_who_wait_and_those_who_come_are_told(
    model: Decoder, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    service = failing(model, monkeypatch, error)
    told: list[bool] = []
    service.worker.on_failure = lambda: told.append(True)
    with serving(service) as served:
        asked = {"prompt": "a", "max_tokens": 50}
        stream = httpx.post(served.url + COMPLETIONS, json=asked | {"stream": True}, timeout=PATIENCE)
        *_, last = stream.text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
        for answer in (
            httpx.post(served.url + COMPLETIONS, json=asked, timeout=PATIENCE),
            httpx.get(f"{served.url}/health", timeout=PATIENCE),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")
            assert "boom" not in answer.text
        assert (service.num_active, told) == (0, [True])


@pytest.mark.slow
def test_a_failure_between_two_steps_is_told_as_well(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(max_num_seqs=1))

    def broken(_request: int) -> None:
        raise ValueError("not in list")

    monkeypatch.setattr(service.worker._text_engine, "cancel", broken)
    with serving(service) as served:
        with httpx.stream(
            "POST",
            served.url + COMPLETIONS,
            json={"prompt": ["a"] * 8, "max_tokens": 120, "stream": True},
            timeout=PATIENCE,
        ) as answer:
            next(answer.iter_bytes())
        until(lambda: service.worker.failure is not None)
        answer = httpx.post(served.url + COMPLETIONS, json={"prompt": "a"}, timeout=PATIENCE)
        assert answer.status_code == 503


def test_the_server_ends_with_the_reason(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[int] = []
    monkeypatch.setattr(serve, "raise_file_limit", lambda: raised.append(1))
    service, found, errors = failing(model, monkeypatch), Queue[str](), []

    def serve_until_stopped() -> None:
        try:
            serve.serve(service, create_app(service), 0, found.put)
        except EngineError as error:
            errors.append(str(error))

    thread = threading.Thread(target=serve_until_stopped)
    thread.start()
    url = found.get(timeout=PATIENCE)
    answer = httpx.post(url + COMPLETIONS, json={"prompt": "a", "max_tokens": 50}, timeout=PATIENCE)
    assert answer.status_code == 503
    thread.join(PATIENCE)
    assert not thread.is_alive() and raised == [1]
    assert "RuntimeError: boom" in errors[0] and "start the server again" in errors[0]
