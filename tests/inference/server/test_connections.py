"""Clients that keep silent, hold back or flood cost the other clients nothing, and fill no log."""

import logging
import resource
import socket
from collections.abc import Iterator

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server import options
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.serve import LogRateLimit, raise_file_limit
from tests.inference.server.conftest import Served, make_service, metric, serving, until
from tests.inference.server.test_bad_input import COMPLETIONS, answered, post, raw_request
from tests.patience import PATIENCE

ASKED = b'{"prompt": "a", "max_tokens": 2}'
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


def body_of(size: int, sent: int) -> bytes:
    """The beginning of a request with a body of `size` bytes, of which `sent` come."""
    return (HEAD % size).encode() + b'{"prompt": "' + b"x" * (sent - 12)


def test_a_request_of_one_connection_too_many_is_refused_and_the_others_go_on(
    model: Decoder, connected: Clients
) -> None:
    limits = ServeOptions(max_connections=2, client_timeout=PATIENT)
    service = make_service(model, limits, EngineOptions(max_num_seqs=1))
    with serving(service) as served:
        asked = {"prompt": ["a"] * 16, "max_tokens": 120, "stream": True}
        busy = [raw_request(served, asked) for _ in range(2)]
        until(lambda: service.num_active == 32)
        health = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        assert received(connected(served, health)).startswith(b"HTTP/1.1 503 ")
        assert service.num_active == 32
        for client in busy:
            client.close()
        until(lambda: service.num_active == 0)
        assert httpx.get(f"{served.url}/health", timeout=PATIENCE).status_code == 200


def test_a_body_must_come_in_time(model: Decoder, connected: Clients) -> None:
    service = make_service(model, ServeOptions(client_timeout=0.2), EngineOptions())
    with serving(service) as served:
        # Its connection is closed, since the rest of the body may never come.
        assert received(connected(served, body_of(1000, 100))).startswith(b"HTTP/1.1 408 ")
        assert service.num_body_bytes == 0


def test_a_body_for_which_there_is_no_room_is_refused(
    model: Decoder, connected: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "INFLIGHT_BODIES", 1)
    limits = ServeOptions(max_body_bytes=300_000, client_timeout=PATIENT)
    service = make_service(model, limits, EngineOptions())
    with serving(service) as served:
        for count in range(1, 4):
            connected(served, body_of(200_000, 100_000))
            until(lambda count=count: service.num_body_bytes == 100_000 * count)
        found = connected(served, body_of(200_000, 100)).recv(65536)
        assert found.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in found
        connected.close()
        until(lambda: service.num_body_bytes == 0)
        assert post(served, COMPLETIONS, ASKED).status_code == 200


def test_a_full_server_does_not_wait_for_a_body(model: Decoder, connected: Clients) -> None:
    service = make_service(model, ServeOptions(max_requests=1, client_timeout=PATIENT), EngineOptions())
    with serving(service) as served:
        service.num_active += 1
        assert connected(served, (HEAD % 1000).encode()).recv(65536).startswith(b"HTTP/1.1 429 ")
        service.num_active -= 1


def test_clients_that_leave_and_clients_that_talk_nonsense_fill_no_log(
    model: Decoder, connected: Clients, capsys: pytest.CaptureFixture[str]
) -> None:
    service = make_service(model, ServeOptions(), EngineOptions())
    upgrade = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with serving(service) as served:
        leavers = [connected(served, body_of(1000, 100)) for _ in range(20)]
        until(lambda: service.num_body_bytes == 2000)
        for client in leavers:
            client.close()
        until(lambda: metric(served.url, answered(499)) == 20 if service.num_body_bytes == 0 else False)
        for _ in range(20):
            assert connected(served, upgrade).recv(65536).startswith(b"HTTP/1.1 200 ")
            assert received(connected(served, b"\x16\x03\x01\r\n\r\n")).startswith(b"HTTP/1.1 400 ")
    lines = capsys.readouterr().err.splitlines()
    # Each kind of line once in a minute.
    assert len(lines) <= 3, lines


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
    assert num_written(logging.ERROR, "ASGI callable returned without completing response.") == 1
    assert num_written(logging.ERROR, "Exception in ASGI application") == 1000
    assert LogRateLimit(seconds=0).filter(logging.LogRecord("any", logging.WARNING, "", 0, "words", (), None))
