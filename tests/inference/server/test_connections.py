"""Clients that keep silent, hold back or flood cost the other clients nothing, and fill no log."""

import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError
from kitforge.inference.options import EngineOptions
from kitforge.inference.server import connections
from kitforge.inference.server.connections import connection_limits, raise_file_limit
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.serve import LogRateLimit
from tests.inference.server.conftest import Served, make_service, metric, serving, until
from tests.inference.server.test_bad_input import COMPLETIONS, answered, post, raw_request
from tests.patience import PATIENCE

ASKED = b'{"prompt": "a", "max_tokens": 2}'
HALF_HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
HEAD = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
# Nothing here may depend on how busy the machine is.
PATIENT = 3600.0


class Clients:
    """Connections that are closed at the end of a test."""

    def __init__(self) -> None:
        self.open: list[socket.socket] = []

    def __call__(self, served: Served, words: bytes) -> socket.socket:
        """One that has said so much and waits."""
        client = socket.create_connection(served.address, timeout=PATIENCE)
        self.open.append(client)
        client.sendall(words)
        return client

    def close(self) -> None:
        for client in self.open:
            client.close()


@pytest.fixture
def connected() -> Iterator[Clients]:
    clients = Clients()
    yield clients
    clients.close()


def received(client: socket.socket) -> bytes:
    """All that a connection gives until it is closed."""
    found = b""
    try:
        while chunk := client.recv(65536):
            found += chunk
    except ConnectionResetError:
        pass
    return found


def is_well(client: socket.socket) -> None:
    """Read the answer of /health, and no more."""
    found = b""
    while not found.endswith(b'{"status":"ok"}'):
        chunk = client.recv(65536)
        assert chunk, found
        found += chunk


def body_of(size: int, sent: int) -> bytes:
    """The beginning of a request with a body of `size` bytes, of which `sent` come."""
    return (HEAD % size).encode() + b'{"prompt": "' + b"x" * (sent - 12)


@pytest.mark.slow
def test_silent_connections_make_room_for_those_that_ask(model: Decoder, connected: Clients) -> None:
    limits = ServeOptions(max_connections=6, client_timeout=PATIENT)
    with serving(make_service(model, limits, EngineOptions())) as served:
        said = [b"", HALF_HEAD, body_of(1000, 100)]
        for place in range(30):
            connected(served, said[place % 3])
        for _ in range(3):
            assert httpx.get(f"{served.url}/health", timeout=PATIENCE).status_code == 200
            assert post(served, COMPLETIONS, ASKED).status_code == 200
        assert len(served.server.server_state.connections) <= 6
        assert metric(served.url, "kitforge_evicted_connections_total") >= 24
        connected.close()


def test_a_connection_with_a_request_under_way_is_never_closed_for_others(model: Decoder, connected: Clients) -> None:
    limits = ServeOptions(max_connections=2, client_timeout=PATIENT)
    service = make_service(model, limits, EngineOptions(max_num_seqs=1))
    with serving(service) as served:
        asked = {"prompt": ["a"] * 16, "max_tokens": 120, "stream": True}
        busy = [raw_request(served, asked) for _ in range(2)]
        until(lambda: service.num_active_prompts == 32)
        head, _, body = received(connected(served, b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")).partition(
            b"\r\n\r\n"
        )
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in head
        assert json.loads(body)["error"]["code"] == "server_busy"
        assert service.num_active_prompts == 32
        for client in busy:
            client.close()
        until(lambda: service.num_active_prompts == 0)
        assert httpx.get(f"{served.url}/health", timeout=PATIENCE).status_code == 200


@pytest.mark.slow
def test_a_header_must_come_in_time_and_a_connection_at_rest_has_more(model: Decoder, connected: Clients) -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with serving(make_service(model, ServeOptions(client_timeout=1.5), EngineOptions())) as served:
        resting = connected(served, whole)
        is_well(resting)
        again = connected(served, whole)
        is_well(again)
        again.sendall(HALF_HEAD)
        late = [connected(served, b""), connected(served, HALF_HEAD), again]
        uploading = connected(served, body_of(1000, 100))
        assert [received(client) for client in late] == [b""] * 3
        assert received(uploading).startswith(b"HTTP/1.1 408 ")
        time.sleep(1)
        resting.sendall(whole)
        is_well(resting)


def test_bodies_that_are_held_back_give_way_to_others(model: Decoder, connected: Clients) -> None:
    limits = ServeOptions(max_body_bytes=200_000, max_inflight_bytes=300_000, client_timeout=PATIENT)
    service = make_service(model, limits, EngineOptions())
    with serving(service) as served:
        held = []
        for place in range(5):
            held.append(connected(served, body_of(200_000, 100_000)))
            wanted = 100_000 * min(place + 1, 3)
            until(lambda wanted=wanted: service.bodies.num_bytes == wanted)
        assert post(served, COMPLETIONS, ASKED).status_code == 200
        # That one needed room as well, so that three of five have given way to others.
        for client in held[:3]:
            found = client.recv(65536)
            assert found.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in found
        assert service.bodies.num_bytes == 200_000
        connected.close()
        until(lambda: service.bodies.num_bytes == 0)
    with pytest.raises(ConfigError, match="max_body"):
        ServeOptions(max_inflight_bytes=1000)


def test_a_full_server_does_not_wait_for_a_body(model: Decoder, connected: Clients) -> None:
    service = make_service(model, ServeOptions(max_requests=1, client_timeout=PATIENT), EngineOptions())
    with serving(service) as served:
        service.num_active_prompts += 1
        assert connected(served, (HEAD % 1000).encode()).recv(65536).startswith(b"HTTP/1.1 429 ")
        service.num_active_prompts -= 1


def test_clients_that_leave_and_clients_that_talk_nonsense_fill_no_log(
    model: Decoder, connected: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    service = make_service(model, ServeOptions(), EngineOptions())
    upgrade = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with serving(service) as served:
        leavers = [connected(served, body_of(1000, 100)) for _ in range(20)]
        until(lambda: service.bodies.num_bytes == 2000)
        for client in leavers:
            client.close()
        until(lambda: metric(served.url, answered(499)) == 20 if service.bodies.num_bytes == 0 else False)
        for _ in range(20):
            assert connected(served, upgrade).recv(65536).startswith(b"HTTP/1.1 200 ")
            assert received(connected(served, b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) <= 1, lines


def test_connections_and_their_queue_fit_into_the_files_that_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowed in (128, 1024, 4096, 100_000):
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, allowed=allowed: (allowed, allowed))
        most, backlog = connection_limits(ServeOptions())
        assert 32 <= most + connections._TURNS * backlog + connections._SPARE < allowed
        assert most == 4096 or allowed <= 4096
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (resource.RLIM_INFINITY,) * 2)
    assert connection_limits(ServeOptions(max_connections=7))[0] == 7


def test_the_soft_limit_of_open_files_becomes_the_hard_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: found.append(given))
    raise_file_limit()
    assert found == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_a_line_that_any_client_can_cause_is_not_written_again_at_once() -> None:
    lines = LogRateLimit(seconds=3600)

    def num_written(level: int, words: str) -> int:
        records = [logging.LogRecord("any", level, "", 0, words, (), None) for _ in range(1000)]
        return sum(bool(lines.filter(record)) for record in records)

    assert num_written(logging.ERROR, "socket.accept() out of system resource\nsocket: 7") == 1
    assert num_written(logging.ERROR, "socket.accept() out of system resource\nsocket: 8") == 0
    assert num_written(logging.WARNING, "Invalid HTTP request received.") == 1
    assert num_written(logging.ERROR, "Exception in ASGI application") == 1000
    assert LogRateLimit(seconds=0).filter(logging.LogRecord("any", logging.WARNING, "", 0, "words", (), None))


FEW_FILES = """
import resource, sys, time
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import make_service, serving, small_model
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
with serving(make_service(small_model(), ServeOptions(client_timeout=3600), EngineOptions())) as served:
    print(served.address[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_process_with_few_descriptors_answers_beside_silent_connections() -> None:
    command, root = [sys.executable, "-c", FEW_FILES], Path(__file__).parents[3]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=root, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            port = int(process.stdout.readline())
            silent = [socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) for _ in range(160)]
            url = f"http://127.0.0.1:{port}"
            assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
            time.sleep(1.5)
            assert httpx.get(f"{url}/health", timeout=PATIENCE).status_code == 200
            for client in silent:
                client.close()
            _, words = process.communicate("")
            assert len(words.splitlines()) <= 5, words[:2000]
        finally:
            process.kill()
