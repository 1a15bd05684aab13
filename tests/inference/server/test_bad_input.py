"""What is wrong is refused in OpenAI's shape, with words that help, and nothing is left behind."""

import json
import socket

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import ConfigError
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, metric, serving, until
from tests.patience import PATIENCE

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
A = {"role": "user", "content": "a"}
# What is asked, the status, and words of the answer.
WRONG: dict[str, tuple[str, object, int, str]] = {
    "a prompt longer than the model": (COMPLETIONS, {"prompt": "x" * 500}, 400, "500 prompt tokens"),
    "a prompt and an answer longer than the model": (COMPLETIONS, {"prompt": "a", "max_tokens": 128}, 400, "128"),
    "an empty prompt": (COMPLETIONS, {"prompt": ""}, 400, "empty"),
    "an empty prompt among others": (COMPLETIONS, {"prompt": ["a", ""]}, 400, "empty"),
    "no prompts": (COMPLETIONS, {"prompt": []}, 400, "a length of at least 1"),
    "a prompt that is none": (COMPLETIONS, {"prompt": {"a": 1}}, 400, "text, [text, ...], [token, ...] or"),
    "no prompt at all": (COMPLETIONS, {}, 400, "prompt"),
    "max_tokens 0": (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    "an unknown parameter": (COMPLETIONS, {"prompt": "a", "temperatur": 1}, 400, "did you mean 'temperature'"),
    "tools that the template leaves out": (
        CHAT,
        {"messages": [A], "tools": [{"type": "function", "function": {"name": "f"}}]},
        400,
        "ignores tools",
    ),
    "a choice of tools that are not there": (
        CHAT,
        {
            "messages": [A],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
            },
        },
        400,
        "there is no tool 'g' to call",
    ),
    "a choice of no tools": (
        CHAT,
        {"messages": [A], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        400,
        "'tool_choice.allowed_tools.tools' has an invalid value",
    ),
    "a number as text": (COMPLETIONS, {"prompt": "a", "temperature": "1"}, 400, "a number"),
    "a number out of range": (COMPLETIONS, {"prompt": "a", "top_p": 1.5}, 400, "at most 1"),
    "an unknown token": (COMPLETIONS, {"prompt": [1, 99999]}, 400, "unknown token"),
    "a bias on an unknown token": (
        COMPLETIONS,
        {"prompt": "a", "logit_bias": {"99999": 1}},
        400,
        "logit_bias has an unknown token",
    ),
    "too many answers": (COMPLETIONS, {"prompt": ["a"] * 20, "n": 20}, 400, "choices"),
    "an unknown model": (COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
    "no messages": (CHAT, {"messages": []}, 400, "a length of at least 1"),
    "an unknown speaker": (CHAT, {"messages": [{"role": "king", "content": "a"}]}, 400, "role"),
    "an empty stop string": (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop"),
    "a list in the place of a body": (COMPLETIONS, [1], 400, "object"),
}
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


def refusal(response: httpx.Response) -> str:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_cannot_be_is_refused(served: Served, name: str, stream: bool) -> None:
    path, body, status, words = WRONG[name]
    asked = {**body, "stream": True} if stream and isinstance(body, dict) else body
    response = post(served, path, json.dumps(asked).encode())
    assert (response.status_code, words in refusal(response)) == (status, True), response.text
    until(lambda: served.service.num_active == 0)


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_read_is_refused(served: Served, name: str) -> None:
    content, status, words = BROKEN[name]
    response = post(served, COMPLETIONS, content)
    assert (response.status_code, words in refusal(response)) == (status, True), response.text


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
