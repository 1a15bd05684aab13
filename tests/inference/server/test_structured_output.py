"""Structured output over HTTP: in OpenAI's words and in vLLM's, beside requests without it."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.errors import DataError
from kitforge.inference.grammar import Grammar, GrammarCompiler
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, serving, until
from tests.patience import PATIENCE

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello"},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "gone": {"const": None}, "age": {"enum": [1, None]}},
    "required": ["name", "gone", "age"],
    "additionalProperties": False,
}


def asked(served: Served, path: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"temperature": 1.5, "max_tokens": 90, "seed": 5, **PROMPTS[path], **fields}
    answer = served.post(path, body)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found if status == 200 else found["error"]


def texts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The text of each choice, and how it ended."""
    return [
        (each["text"] if "text" in each else each["message"]["content"], each["finish_reason"])
        for each in answer["choices"]
    ]


def by_schema(schema: Any, **others: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **others}}}


WAYS: dict[str, tuple[dict[str, Any], Any]] = {
    "response_format": (by_schema(PERSON, strict=True, description="a person"), None),
    "json": ({"structured_outputs": {"json": PERSON}}, None),
    "regex": ({"structured_outputs": {"regex": r"\d{3}-[ab]"}}, r"[0-9]{3}-[ab]"),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, "ab|ac"),
}


@pytest.mark.parametrize("path", PROMPTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_choice_is_what_was_asked_for(served: Served, path: str, way: str) -> None:
    fields, pattern = WAYS[way]
    found = texts(asked(served, path, n=3, **fields))
    assert len(found) == 3 and {end for _, end in found} == {"stop"}
    for text, _ in found:
        if pattern is None:
            value = json.loads(text)
            assert list(value) == ["name", "gone", "age"] and value["gone"] is None and value["age"] in (1, None)
        else:
            assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "fields", [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}]
)
def test_an_object_that_does_not_end_has_reached_its_length(served: Served, fields: dict[str, Any]) -> None:
    [(text, end)] = texts(asked(served, CHAT, max_tokens=5, logit_bias={"125": -100}, **fields))
    assert text.startswith("{") and end == "length"


def test_a_stream_has_the_same_text(served: Served) -> None:
    whole = texts(asked(served, CHAT, **WAYS["json"][0]))[0][0]
    body = {"temperature": 1.5, "max_tokens": 90, "seed": 5, **PROMPTS[CHAT], **WAYS["json"][0], "stream": True}
    with httpx.stream("POST", served.url + CHAT, json=body, timeout=PATIENCE) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces) == whole and len([piece for piece in pieces if piece]) > 1


def test_a_request_without_a_structure_keeps_its_bits_beside_others(served: Served) -> None:
    wanted = asked(served, CHAT, logprobs=True)["choices"]
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(asked(served, CHAT, logprobs=True)["choices"]))]
    threads += [
        threading.Thread(target=asked, args=(served, CHAT), kwargs=WAYS["json"][0] | {"n": 3}) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [wanted]


def test_alternatives_are_those_that_are_allowed_in_strict_json(served: Served) -> None:
    answer = asked(served, CHAT, logprobs=True, top_logprobs=5, structured_outputs={"choice": ["yes", "no"]})
    [first, *later] = answer["choices"][0]["logprobs"]["content"]
    assert {each["token"] for each in first["top_logprobs"]} == {"y", "n"}
    assert all(len(each["top_logprobs"]) == 1 and each["logprob"] == 0 for each in later[:-1])


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"121": -100, "110": -100}}, {"min_tokens": 80}, {"top_k": 1, "logit_bias": {"65": 100}}],
    ids=str,
)
def test_a_structure_comes_before_other_wishes(served: Served, fields: dict[str, Any]) -> None:
    [(text, end)] = texts(asked(served, CHAT, structured_outputs={"choice": ["yes", "no"]}, **fields))
    assert text in ("yes", "no") and end == "stop"


def test_a_text_that_its_grammar_cannot_continue_is_an_error_of_the_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_self: Grammar, _drafts: object) -> None:
        raise DataError("the grammar of a text cannot be followed", got="no token")

    monkeypatch.setattr(Grammar, "masks", failing)
    error = asked(served, CHAT, 400, structured_outputs={"regex": "a"})
    assert error["code"] == "grammar_failed" and "cannot be followed" in error["message"]
    assert asked(served, CHAT)["choices"]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A compiler that waits: an event when it has begun, and one that lets it go on."""
    begun, goes_on, compiled = threading.Event(), threading.Event(), GrammarCompiler.compile

    def waiting(self: GrammarCompiler, *given: Any, **named: Any) -> Grammar:
        begun.set()
        goes_on.wait(PATIENCE)
        return compiled(self, *given, **named)

    monkeypatch.setattr(GrammarCompiler, "compile", waiting)
    yield begun, goes_on
    goes_on.set()


def test_streams_go_on_while_a_schema_is_compiled(
    model: Decoder, held: tuple[threading.Event, threading.Event]
) -> None:
    begun, goes_on = held
    answers: list[Any] = []
    with serving(make_service(model, ServeOptions(), EngineOptions())) as served:
        # More than asyncio has threads, in which other bodies are read.
        slow = [
            threading.Thread(target=lambda: answers.append(texts(asked(served, CHAT, **WAYS["json"][0]))))
            for _ in range(min(32, (os.cpu_count() or 1) + 4) + 1)
        ]
        for each in slow:
            each.start()
        assert begun.wait(PATIENCE)
        until(lambda: served.service._compilers._work_queue.qsize() == len(slow) - 2)
        body = {**PROMPTS[CHAT], "max_tokens": 20, "stream": True}
        with httpx.stream("POST", served.url + CHAT, json=body, timeout=PATIENCE) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert lines[-1] == "data: [DONE]" and not answers
        goes_on.set()
        for each in slow:
            each.join()
    assert all(json.loads(answer[0][0])["gone"] is None for answer in answers) and len(answers) == len(slow)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "a schema of 1 MiB": by_schema({"enum": ["x" * 1000 + str(number) for number in range(1030)]}),
    "more than 1 MiB": by_schema({"enum": ["x" * 1000 + str(number) for number in range(1050)]}),
    "many properties": by_schema({"type": "object", "properties": {f"p{number}": {} for number in range(2000)}}),
    "a long choice": {"structured_outputs": {"regex": "(a?){500}a{500}"}},
    "nested arrays": by_schema(nested(25)),
    "a bomb": {"structured_outputs": {"regex": "((a{1,300}){1,300}){1,300}b"}},
    "another bomb": {"structured_outputs": {"regex": "(.*a){40}.*x.{200}"}},
    "a loop": {"structured_outputs": {"grammar": 'start: start start | "a" | '}},
    "many ways": {"structured_outputs": {"grammar": 'start: a a a a a a\na: "x"* a? | b\nb: "x"* a'}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_structure_is_refused_or_obeyed_and_hurts_no_other(served: Served, name: str) -> None:
    wanted = texts(asked(served, CHAT))
    body = {**PROMPTS[CHAT], "max_tokens": 8, **HOSTILE[name]}
    answer = served.post(CHAT, body)
    assert answer.status_code in (200, 400, 413, 500) and answer.json()
    assert texts(asked(served, CHAT)) == wanted


@pytest.mark.slow
def test_hostile_structures_cost_the_streams_beside_them_no_token(served: Served) -> None:
    """24 streams, again and again as long as any of those is compiled or written."""

    async def among(client: httpx.AsyncClient) -> list[int]:
        async def stream(seed: int) -> list[Any]:
            body = {**PROMPTS[CHAT], "seed": seed, "max_tokens": 20, "logprobs": True, "stream": True}
            async with client.stream("POST", CHAT, json=body) as answer:
                lines = [line async for line in answer.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
            return [token for each in choices for token in each["logprobs"]["content"]]

        alone = [await stream(seed) for seed in range(24)]
        bodies = [{**PROMPTS[CHAT], "max_tokens": 40, **each} for each in HOSTILE.values()]
        hostile = asyncio.gather(*(client.post(CHAT, json=body) for body in bodies))
        rounds = 0
        while not hostile.done() or not rounds:
            assert await asyncio.gather(*map(stream, range(24))) == alone
            rounds += 1
        return [answer.status_code for answer in await hostile]

    async def run() -> list[int]:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE) as client:
            return await among(client)

    found = dict(zip(HOSTILE, asyncio.run(run()), strict=True))
    assert found.pop("more than 1 MiB") == 413
    assert {*found.values()} <= {200, 400, 500} and found["a schema of 1 MiB"] == found["another bomb"] == 200


ODD_VALUES: list[dict[str, Any]] = [
    {"enum": [{"a": None, "b": [None, {"c": None}]}]},
    {"const": {"a": {"b": None}}},
    {"type": "object", "properties": {"const": {"enum": [[{"a": None}]]}}, "required": ["const"]},
]


@pytest.mark.parametrize("schema", ODD_VALUES, ids=str)
def test_null_is_a_value_within_those_of_a_schema(served: Served, schema: dict[str, Any]) -> None:
    closed = schema | ({"additionalProperties": False} if "properties" in schema else {})
    [(text, end)] = texts(asked(served, CHAT, **by_schema(closed)))
    jsonschema.validate(json.loads(text), schema)
    assert end == "stop"


def test_a_schema_that_is_nested_too_deeply_is_refused(served: Served) -> None:
    body = json.dumps({**PROMPTS[CHAT], **by_schema({})}).replace(
        '"schema": {}', '"schema": ' + '{"items": ' * 5000 + "{}" + "}" * 5000
    )
    answer = httpx.post(served.url + CHAT, content=body, headers={"Content-Type": "application/json"}, timeout=PATIENCE)
    assert answer.status_code == 400 and "nested" in answer.json()["error"]["message"]
