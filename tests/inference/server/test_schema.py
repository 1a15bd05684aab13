"""What the server says of itself holds for whatever is sent to it: bodies made from its own description, and spoilt."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import make_service, serving

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def made(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows."""
    if "anyOf" in schema:
        return st.one_of([made(option) for option in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema["type"]:
        case "object" if "properties" in schema:
            fields = {name: made(each) for name, each in schema["properties"].items()}
            required = {name: fields.pop(name) for name in schema["required"]}
            return st.fixed_dictionaries(required, optional=fields)
        case "object":
            return st.dictionaries(st.text("0123456789", max_size=3), made(schema["additionalProperties"]), max_size=2)
        case "array":
            return st.lists(made(schema["items"]), max_size=3)
        case "integer":
            return st.integers(low, high)
        case "number":
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        case kind:
            plain = {"string": st.text(max_size=8), "boolean": st.booleans(), "null": st.none()}
            return plain[kind]


def check(client: httpx.Client, path: str, body: Any, documented: set[str]) -> int:
    answer = client.post(path, json=body)
    assert str(answer.status_code) in documented and answer.status_code != 500, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last = answer.text.strip().split("\n\n")
        assert last == "data: [DONE]"
    else:
        assert ("choices" if answer.status_code == 200 else "error") in answer.json()
    return answer.status_code


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_body_gets_an_answer_of_the_described_kind(model: Decoder, path: str) -> None:
    service = make_service(model, ServeOptions(max_new_tokens=3), EngineOptions())
    found: set[int] = set()
    with serving(service) as served, httpx.Client(base_url=served.url, timeout=20) as client:
        described = client.get("/openapi.json").json()["paths"][path]["post"]
        schema = json.loads(json.dumps(described["requestBody"]["content"]["application/json"]["schema"]))
        # Another model's name would be all that is wrong with most bodies.
        del schema["properties"]["model"]
        documented = set(described["responses"])

        @settings(
            max_examples=30, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        @given(made(schema), st.none() | st.tuples(st.sampled_from(sorted(schema["properties"])), JUNK))
        def ask(body: dict[str, Any], spoilt: tuple[str, Any] | None) -> None:
            found.add(check(client, path, body if spoilt is None else body | dict([spoilt]), documented))

        ask()
        # What is made at random may all be refused, for one of its many fields; the least that is asked for is not.
        least = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}]}
        found.add(check(client, path, {name: least[name] for name in schema["required"]}, documented))
        assert {200, 400} <= found
        assert service.num_live == 0
