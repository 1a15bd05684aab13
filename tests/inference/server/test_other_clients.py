"""What one client sends keeps nobody else waiting."""

import json
import threading
import time
from collections.abc import Callable

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, serving, until
from tests.patience import PATIENCE

BYTES = 258


def post(served: Served, content: bytes, path: str = "/v1/completions") -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(served.url + path, content=content, headers=headers, timeout=PATIENCE)


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
    bias = {str(token): 0.01 for token in range(BYTES)}
    heavy = json.dumps(
        {"prompt": "a", "max_tokens": 120, "temperature": 1, "logit_bias": bias, "stream": True}
    ).encode()
    with serving(service) as served:
        assert post(served, json.dumps({"prompt": "a", "logit_bias": zeros}).encode()).status_code == 400
        post(served, victim)
        alone = seconds(lambda: post(served, victim))
        is_over = threading.Event()
        thread = threading.Thread(target=lambda: [post(served, heavy) for _ in iter(is_over.is_set, True)])
        thread.start()
        until(lambda: service.num_active)
        took = seconds(lambda: post(served, victim))
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
    answer = post(served, LARGE[name], path)
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
        answer = post(served, json.dumps(body).encode())
        assert 400 <= answer.status_code < 500 and len(answer.content) < 1000, answer.text[:300]


def test_nothing_more_is_made_for_a_client_that_has_left(model: Decoder) -> None:
    """Far fewer steps than the answer would have taken."""
    service = make_service(model, ServeOptions(), EngineOptions(max_num_seqs=1))
    engine = service.worker._text_engine.engine
    body = {"prompt": ["a"] * 16, "max_tokens": 120, "temperature": 1, "stream": True}
    with serving(service) as served:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            next(answer.iter_raw())
        until(lambda: not service.worker._text_engine.has_work)
        assert engine.stats()["steps"] < 16 * 120 / 2
        assert service.num_active == 0 and engine.stats()["blocks_used"] == 0


def test_tokens_that_were_guessed_are_counted_one_by_one(model: Decoder) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(prompt_lookup_tokens=4))
    with serving(service) as served:
        body = {"prompt": "ababababab", "max_tokens": 40, "logit_bias": {"97": 100, "98": 99.9}}
        answer = post(served, json.dumps(body).encode()).json()
        assert answer["usage"]["completion_tokens"] == 40 == len(answer["choices"][0]["text"])
    assert service.worker._text_engine.engine.stats()["steps"] < 40
