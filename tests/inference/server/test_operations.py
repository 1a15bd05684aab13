"""What those who run a server see of it: ids, a log, numbers; and what it does where a request leaves the choice."""

import json
import logging
import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from kitforge.core.checkpoint.shard_writer import package_version
from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server import serve as serve_module
from kitforge.inference.server.metrics import BatchMetrics, Metrics, ServerMetrics
from kitforge.inference.server.middleware import ACCESS_LOG
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.text_engine import InferenceOptions
from tests.inference.server.conftest import Served, make_service, metric, serving
from tests.patience import PATIENCE

DOCS = Path(__file__).parents[3] / "docs"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("given", ["a-1.b_2:3", "x" * 128])
def test_a_request_keeps_the_id_that_its_client_gave_it(served: Served, given: str) -> None:
    assert httpx.get(f"{served.url}/health", headers={"X-Request-Id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "two words", "x" * 129, "a\x7fb", "é"])
def test_a_request_gets_an_id_where_its_own_is_none(served: Served, given: str) -> None:
    raw = {"X-Request-Id": given.encode()} if given.isprintable() else {}
    found = [httpx.get(f"{served.url}/v1/nothing", headers=raw).headers["x-request-id"] for _ in range(2)]
    assert found[0] != found[1] and all(len(each) == 32 and each.isalnum() for each in found)


def test_a_mistake_of_ours_is_told_with_the_id_of_its_request(
    model: Decoder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service(model, ServeOptions(), EngineOptions())

    def broken(_prompt: object, *, add_special_tokens: bool | None) -> list[int]:
        raise RuntimeError("boom")

    monkeypatch.setattr(service, "encode", broken)
    with serving(service) as served:
        answer = httpx.post(
            served.url + COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine"}, timeout=PATIENCE
        )
        assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
        assert answer.json()["error"]["code"] == "internal_error" and "boom" not in answer.text
        assert metric(served.url, f'kitforge_requests_total{{path="{COMPLETIONS}",status="500"}}') == 1
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "mine" in record.getMessage() and "boom" in str(record.exc_info)


def test_a_line_of_the_access_log_says_who_asked_what_and_for_how_much(
    model: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOG)
    with serving(make_service(model, ServeOptions(access_log=True), EngineOptions())) as served:
        body = {"prompt": "abc", "max_tokens": 5, "n": 2, "stream": True}
        httpx.post(served.url + COMPLETIONS, json=body, headers={"X-Request-Id": "mine"}, timeout=PATIENCE)
        with socket.create_connection(served.address, timeout=PATIENCE) as client:
            client.sendall(b"GET /a%0Ab%1B[2J%20c HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            while client.recv(65536):
                pass
    first, second = [record.getMessage() for record in caplog.records if record.name == ACCESS_LOG]
    name, client_name, method, path, status, *rest = first.split()
    assert (name, method, path, status) == ("mine", "POST", COMPLETIONS, "200") and client_name.startswith("127.0.0.1:")
    assert rest[:2] == ["prompt_tokens=3", "completion_tokens=10"] and float(rest[2].removeprefix("seconds=")) > 0
    assert second.split()[3:5] == ["/a%0Ab%1B%5B2J%20c", "404"]


def test_nothing_is_logged_of_requests_unless_wanted(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS_LOG)
    served.ask(COMPLETIONS, prompt="a", max_tokens=1)
    assert [record for record in caplog.records if record.name == ACCESS_LOG] == []


@pytest.mark.slow
@pytest.mark.parametrize("speculation", [0, 4])
def test_metrics_count_tokens_and_the_time_between_them(model: Decoder, speculation: int) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(prompt_lookup_tokens=speculation))
    with serving(service) as served:
        answer = served.ask(COMPLETIONS, prompt=["abab" * 8, "b"], max_tokens=24, logprobs=0, temperature=0)
        made = sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
        # A step that gives several tokens counts each of them.
        assert answer["usage"]["completion_tokens"] == made
        assert metric(served.url, "kitforge_generated_tokens_total") == made
        assert metric(served.url, "kitforge_prompt_tokens_total") == 33
        num_between = metric(served.url, "kitforge_inter_token_latency_seconds_count")
        assert made - 2 * (speculation + 1) <= num_between <= made - 2
        assert 0 < metric(served.url, "kitforge_inter_token_latency_seconds_sum") < PATIENCE
        assert metric(served.url, "kitforge_queue_time_seconds_count") == 2
        assert metric(served.url, "kitforge_first_token_seconds_count") == 1
        for name in ("kv_cache_usage", "running", "waiting"):
            assert metric(served.url, f"kitforge_engine_{name}") == 0
        assert "_created" not in httpx.get(f"{served.url}/metrics").text


def test_the_use_of_the_cache_is_a_share_of_its_blocks() -> None:
    text, _ = Metrics().text({"blocks": 8, "blocks_used": 2})
    assert b"kitforge_engine_kv_cache_usage 0.25\n" in text
    assert b"kv_cache_usage" not in Metrics().text({"blocks": 0, "blocks_used": 0})[0]


@pytest.mark.slow
def test_metrics_count_what_the_prefix_cache_saves(model: Decoder) -> None:
    with serving(make_service(model, ServeOptions(), EngineOptions(block_size=4))) as served:
        for expected in (0, 20):
            served.ask(COMPLETIONS, prompt="x" * 22, max_tokens=1)
            assert metric(served.url, "kitforge_prefix_cache_hits_total") == expected
        assert metric(served.url, "kitforge_prefix_cache_queries_total") == 44


@pytest.mark.slow
def test_requests_without_a_seed_differ_between_servers_and_those_with_one_do_not(model: Decoder) -> None:
    asked = {"prompt": "a", "max_tokens": 24, "temperature": 2.0}
    found: dict[str, list[object]] = {"seeded": [], "unseeded": []}
    for _ in range(2):
        with serving(make_service(model, ServeOptions(), EngineOptions())) as served:
            found["unseeded"].append(served.ask(COMPLETIONS, **asked)["choices"])
            found["seeded"].append(served.ask(COMPLETIONS, **asked, seed=0)["choices"])
    assert found["seeded"][0] == found["seeded"][1]
    assert found["unseeded"][0] != found["unseeded"][1]


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("POST", "/chat/completions", 404, ["got:      POST /chat/completions", "did you mean /v1/chat/completions?"]),
        ("GET", "/" + "<" * 500, 404, ["/v1/models, ", "see /docs"]),
        ("GET", CHAT, 405, [f"got:      GET {CHAT}", "expected: POST"]),
        ("PATCH", "/health", 405, ["got:      PATCH /health", "expected: GET"]),
    ],
)
def test_a_request_that_no_route_takes_is_told_which_does(
    served: Served, method: str, path: str, status: int, words: list[str]
) -> None:
    answer = httpx.request(method, served.url + path)
    message = answer.json()["error"]["message"]
    assert answer.status_code == status and all(each in message for each in words) and len(message) < 900


def test_the_routes_are_listed_without_a_script_and_the_version_is_told(model: Decoder) -> None:
    with serving(make_service(model, ServeOptions(token="secret"), EngineOptions())) as served:
        docs = httpx.get(f"{served.url}/docs")
        assert docs.status_code == 200 and "default-src 'none'" in docs.headers["content-security-policy"]
        assert "<code>/v1/chat/completions</code>" in docs.text and "<script" not in docs.text
        assert not re.findall(r"(?:src|href)=[\"'](?!data:,|/openapi.json)", docs.text)
        assert httpx.get(f"{served.url}/version").status_code == 401
        found = httpx.get(f"{served.url}/version", headers={"Authorization": "Bearer secret"})
        assert found.json() == {"version": package_version()}


def test_usage_tells_which_tokens_the_prefix_cache_had(model: Decoder) -> None:
    with serving(make_service(model, ServeOptions(), EngineOptions(block_size=4))) as served:
        for expected in (0, 40):
            usage = served.ask(COMPLETIONS, prompt=["x" * 22, "y" * 22], max_tokens=1)["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": expected}


def test_a_server_is_ready_once_it_is_warm(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(model, ServeOptions(), EngineOptions())
    done: list[object] = []
    generate = service.worker._text_engine.engine.generate

    def warm(prompts: list[list[int]], options: InferenceOptions) -> object:
        done.append(len(prompts))
        return generate(prompts, options)

    monkeypatch.setattr(service.worker._text_engine.engine, "generate", warm)
    server = SimpleNamespace(run=lambda sockets: [each.close() for each in sockets])
    monkeypatch.setattr(serve_module, "build_server", lambda *_: server)
    handler = signal.getsignal(signal.SIGTERM)
    serve_module.serve(service, None, 0, lambda _address: done.append("ready"))
    assert done == [1, 3, "ready"]
    # A process that is forked later, or this one, would not end by the signal.
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_warm_server_has_read_the_tokens_for_grammars(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(model, ServeOptions(), EngineOptions())
    service.warm_up()
    monkeypatch.delattr(type(service.tokenizer), "token_bytes")
    assert service._grammars.compile("json_schema", {"type": "array"}).masks([]).any()


def test_the_smallest_cache_is_warmed_too(model: Decoder) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(kv_cache_bytes=1024, block_size=2))
    assert service.max_model_len == 2
    service.warm_up()


def length_of(answer: dict[str, object]) -> tuple[int, bool]:
    """Tokens of prompt and answer together, and whether the model ended it."""
    usage, choices = json.loads(json.dumps([answer["usage"], answer["choices"]]))
    return usage["total_tokens"], choices[0]["finish_reason"] == "stop"


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 20_000], ids=["roomy", "small"])
def test_a_chat_without_a_limit_goes_on_as_long_as_there_is_room(model: Decoder, memory: int | None) -> None:
    service = make_service(model, ServeOptions(), EngineOptions(kv_cache_bytes=memory, block_size=4))
    room = min(model.geometry.max_length, service.worker._text_engine.engine.num_slots)
    assert (room < model.geometry.max_length) == (memory is not None)
    with serving(service) as served:
        # The model is kept from ending it.
        ends = {str(token): -100 for token in service.tokenizer.eos_ids}
        assert length_of(served.ask(CHAT, messages=HELLO, logit_bias=ends)) == (room, False)
        assert served.ask(COMPLETIONS, prompt="a", logit_bias=ends)["usage"]["completion_tokens"] == 16


def test_a_chat_without_a_limit_keeps_to_that_of_the_server(model: Decoder) -> None:
    with serving(make_service(model, ServeOptions(max_new_tokens=5), EngineOptions())) as served:
        assert served.ask(CHAT, messages=HELLO)["usage"]["completion_tokens"] <= 5


@pytest.mark.parametrize(("metrics", "page"), [(Metrics(), "serving.md"), (BatchMetrics(), "recommender.md")])
def test_every_metric_has_the_name_that_the_docs_give_it(metrics: ServerMetrics, page: str) -> None:
    exposed = set(re.findall(r"^# TYPE (\w+)", metrics.rendered()[0].decode(), re.MULTILINE))
    of_every_server = {"kitforge_requests_total", "kitforge_request_seconds", "kitforge_cancelled_total"}
    named = set(re.findall(r"`(kitforge_(?!engine)[a-z_]*[a-z])[`{]", (DOCS / page).read_text()))
    assert named | of_every_server == exposed
