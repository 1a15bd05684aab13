"""What cannot be read is refused in OpenAI's shape, nothing is left behind, and nobody else is kept waiting."""

import json
import socket
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, metric, serving, until
from tests.patience import PATIENCE

COMPLETIONS = "/v1/completions"
# The bytes of a body, the status, and words of the answer.
BROKEN: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b'{"prompt": "a"', 400, "not JSON"),
    "nothing": (b"", 400, "not JSON"),
    "bad UTF-8": (b'{"prompt": "\xff"}', 400, "UTF-8"),
    "half a surrogate": (b'{"prompt": "\\ud800"}', 400, "UTF-8"),
    "a depth without end": (b"[" * 200_000, 400, "not JSON"),
    "no number": (b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    "a number without end": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "not JSON"),
    "an infinite number": (b'{"prompt": "a", "temperature": 1e999}', 400, "temperature"),
    "an oversized body": (b'{"prompt": "' + b"x" * 2_000_000 + b'"}', 413, "1048576"),
}


def post(served: Served, path: str, content: bytes, **headers: str) -> httpx.Response:
    given = {"Content-Type": "application/json"} | headers
    return httpx.post(served.url + path, content=content, headers=given, timeout=PATIENCE)


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_refused(served: Served, name: str) -> None:
    content, status, words = BROKEN[name]
    response = post(served, COMPLETIONS, content)
    assert response.headers["content-type"] == "application/json"
    assert (response.status_code, words in response.json()["error"]["message"]) == (status, True), response.text


def test_bodies_are_json_and_routes_are_known(served: Served) -> None:
    assert post(served, COMPLETIONS, b"prompt=a", **{"Content-Type": "text/plain"}).status_code == 415
    assert httpx.get(f"{served.url}/v1/nothing").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{served.url}/v1/completions").status_code == 405


@pytest.mark.slow
def test_a_name_of_somebody_else_is_not_ours(served: Served) -> None:
    assert httpx.get(f"{served.url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
    for name in ("evillocalhost", "evil.localhost:1", "localhost.evil", "127.0.0.1.evil.example", "[::2]:1", ""):
        assert httpx.get(f"{served.url}/v1/models", headers={"Host": name}).status_code == 403, name
    for name in ("localhost:1", "LOCALHOST", "Localhost.:1", "localhost.", "127.0.0.1", "[::1]:8000"):
        assert httpx.get(f"{served.url}/v1/models", headers={"Host": name}).status_code == 200, name


def test_a_server_for_others_needs_a_token() -> None:
    with pytest.raises(ConfigError, match=r"serve\.token"):
        ServeOptions(host="0.0.0.0")
    assert ServeOptions(host="0.0.0.0", token="secret").token == "secret"


@pytest.mark.slow
def test_a_token_is_asked_for(model: Decoder) -> None:
    with serving(make_service(model, ServeOptions(token="secret"), EngineOptions())) as guarded:
        body = b'{"prompt": "a", "max_tokens": 2}'
        for wrong in ({}, {"Authorization": "Bearer secre"}, {"Authorization": "secret"}):
            response = post(guarded, COMPLETIONS, body, **wrong)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
        assert post(guarded, COMPLETIONS, body, Authorization="Bearer secret").status_code == 200
        assert httpx.get(f"{guarded.url}/metrics").status_code == 401
        assert httpx.get(f"{guarded.url}/health").status_code == 200


def test_those_beyond_the_queue_are_told_to_come_again(model: Decoder) -> None:
    with serving(make_service(model, ServeOptions(max_requests=2), EngineOptions())) as small:
        response = post(small, COMPLETIONS, b'{"prompt": ["a", "b", "c"]}')
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert post(small, COMPLETIONS, b'{"prompt": ["a", "b"], "max_tokens": 2}').status_code == 200


def answered(status: int) -> str:
    return f'kitforge_requests_total{{path="{COMPLETIONS}",status="{status}"}}'


def raw_request(served: Served, body: dict[str, object], buffer: int | None = None) -> socket.socket:
    """A client that has asked and reads nothing; its system takes about `buffer` bytes for it."""
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    client = socket.socket()
    if buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect(served.address)
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return client


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_dies_with_its_client(model: Decoder, stream: bool) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(max_num_seqs=1))
    texts = service.worker._text_engine
    with serving(service) as served:
        client = raw_request(served, {"prompt": ["a"] * 32, "max_tokens": 120, "stream": stream})
        until(lambda: texts.engine.stats()["steps"] > 2)
        client.close()
        until(lambda: service.num_active == 0)
        until(lambda: not texts.has_work)
        # 32 answers of 120 tokens would take 3,840 steps, as one is generated at a time.
        assert texts.engine.stats()["steps"] < 3500
        assert metric(served.url, "kitforge_cancelled_total") == 1
        assert metric(served.url, answered(499)) == 1
        assert post(served, COMPLETIONS, b'{"prompt": "a", "max_tokens": 2}').status_code == 200
    assert texts.engine.stats()["blocks_used"] == 0


@pytest.mark.slow
def test_a_client_that_stops_reading_holds_nobody_up_and_is_given_up(model: Decoder) -> None:
    service = make_service(model, ServeOptions(client_timeout=1), EngineOptions(max_num_seqs=16))
    with serving(service) as served:
        # What the system keeps for a client that does not read; else it would take the whole answer.
        for listener in served.server.servers:
            listener.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        body = {"prompt": ["a"] * 8, "n": 4, "max_tokens": 120, "stream": True, "logprobs": 0}
        stalled = raw_request(served, body, buffer=2048)
        until(lambda: service.worker._text_engine.engine.stats()["steps"] > 2)
        for _ in range(5):
            response = post(served, COMPLETIONS, b'{"prompt": "a", "max_tokens": 2, "temperature": 0}')
            assert response.status_code == 200
        until(lambda: service.num_active == 0)
        stalled.close()
        until(lambda: not served.server.server_state.connections)
        assert metric(served.url, answered(499)) == 1


def test_what_is_under_way_is_finished_when_the_server_stops(model: Decoder) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(max_num_seqs=1))
    with serving(service) as served:
        client = raw_request(served, {"prompt": ["a"] * 4, "max_tokens": 30, "stream": True})
        until(lambda: service.worker._text_engine.engine.stats()["steps"] > 2)
        served.server.should_exit = True
        client.settimeout(20)
        received = b""
        while chunk := client.recv(65536):
            received += chunk
        assert b"data: [DONE]" in received
        client.close()


def seconds(act: Callable[[], object]) -> float:
    since = time.perf_counter()
    act()
    return time.perf_counter() - since


@pytest.mark.slow
def test_the_largest_bias_of_one_costs_the_others_little(model: Decoder) -> None:
    """Six thousand spellings of a few tokens used to be added one by one for every token, in everybody's step."""
    service = make_service(model, ServeOptions(), EngineOptions())
    zeros = {f"{token:0{width}d}": 0.01 for token in range(1000) for width in range(4, 10)}
    victim = json.dumps({"prompt": "a", "max_tokens": 30}).encode()
    bias = {str(token): 0.01 for token in range(258)}
    asked = {"prompt": "a", "max_tokens": 120, "temperature": 1, "logit_bias": bias, "stream": True}
    heavy = json.dumps(asked).encode()
    with serving(service) as served:
        assert served.post(COMPLETIONS, {"prompt": "a", "logit_bias": zeros}).status_code == 400
        post(served, COMPLETIONS, victim)
        alone = seconds(lambda: post(served, COMPLETIONS, victim))
        is_over = threading.Event()
        thread = threading.Thread(target=lambda: [post(served, COMPLETIONS, heavy) for _ in iter(is_over.is_set, True)])
        thread.start()
        until(lambda: service.num_active)
        took = seconds(lambda: post(served, COMPLETIONS, victim))
        is_over.set()
        thread.join()
    assert took < 5 * alone + 1


LARGE = {
    "tokens": b'{"prompt": [' + b"1," * 500_000 + b'"a"]}',
    "prompts": b'{"prompt": [' + b"[1]," * 250_000 + b'["a"]]}',
    "messages": json.dumps({"messages": [{"role": "user", "content": ""}] * 30_000}).encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_is_understood_beside_the_loop(served: Served, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Told by the thread that does it, as a clock depends on who else is there."""
    from kitforge.inference.server import requests

    threads: list[str] = []
    fields_of = requests.fields_of
    monkeypatch.setattr(
        requests, "fields_of", lambda body: (threads.append(threading.current_thread().name), fields_of(body))[1]
    )
    path = "/v1/chat/completions" if name == "messages" else "/v1/completions"
    answer = post(served, path, LARGE[name])
    assert answer.status_code == 400 and len(answer.content) < 500
    assert threads and all(thread.startswith("asyncio_") for thread in threads)


def test_mistakes_are_not_sent_back_whole(served: Served) -> None:
    for body in (
        {"prompt": "a", "x" * 900_000: 1},
        {"prompt": "a", "model": "x" * 900_000},
        {"prompt": "a", "stop": {"x" * 900_000: 1}},
        {"prompt": "a", "seed": "x" * 900_000},
        {"prompt": {"x": ["y"] * 200_000}},
    ):
        answer = served.post(COMPLETIONS, body)
        assert 400 <= answer.status_code < 500 and len(answer.content) < 1000, answer.text[:300]


def test_tokens_that_were_guessed_are_counted_one_by_one(model: Decoder) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(prompt_lookup_tokens=4))
    with serving(service) as served:
        body = {"prompt": "ababababab", "max_tokens": 40, "logit_bias": {"97": 100, "98": 99.9}}
        answer = served.post(COMPLETIONS, body).json()
        assert answer["usage"]["completion_tokens"] == 40 == len(answer["choices"][0]["text"])
    assert service.worker._text_engine.engine.stats()["steps"] < 40
