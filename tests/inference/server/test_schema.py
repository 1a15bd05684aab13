"""What the server says of itself holds for whatever is sent to it: bodies made from its own description, and spoilt."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from tests.differential.drawn import WHOLE
from tests.inference.server.conftest import Served, make_service, serving
from tests.patience import PATIENCE

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def made(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows."""
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return st.one_of([made(option) for option in several])
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema["type"]:
        case "object" if "properties" in schema:
            fields = {name: made(each) for name, each in schema["properties"].items()}
            required = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(required, optional=fields)
        case "object" if isinstance(schema["additionalProperties"], dict):
            return st.dictionaries(st.integers(0, 300).map(str), made(schema["additionalProperties"]), max_size=2)
        case "object":
            return st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
        case "array":
            most = min(3, schema.get("maxItems", 3))
            return st.lists(
                made(schema["items"]) if most else st.nothing(), min_size=schema.get("minItems", 0), max_size=most
            )
        case "integer":
            high = schema["exclusiveMaximum"] - 1 if "exclusiveMaximum" in schema else high
            return st.integers(low, high)
        case "number":
            return st.floats(low, high, allow_nan=False, allow_infinity=False)
        case kind:
            plain = {
                "string": st.text(min_size=schema.get("minLength", 0), max_size=8),
                "boolean": st.booleans(),
                "null": st.none(),
            }
            return plain[kind]


def check(client: httpx.Client, path: str, body: Any, documented: set[str]) -> int:
    answer = client.post(path, json=body)
    assert str(answer.status_code) in documented and answer.status_code != 500, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        *_, last = answer.text.strip().split("\n\n")
        assert last == "data: [DONE]"
    else:
        given = {"/tokenize": "tokens", "/detokenize": "prompt"}.get(path, "choices")
        assert (given if answer.status_code == 200 else "error") in answer.json()
    return answer.status_code


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_every_body_gets_an_answer_of_the_described_kind(model: Decoder, path: str) -> None:
    service = make_service(model, ServeOptions(max_new_tokens=3), EngineOptions())
    found: set[int] = set()
    with serving(service) as served, httpx.Client(base_url=served.url, timeout=PATIENCE) as client:
        described = client.get("/openapi.json").json()["paths"][path]["post"]
        schema = json.loads(json.dumps(described["requestBody"]["content"]["application/json"]["schema"]))
        # Another model's name would be all that is wrong with most bodies.
        kinds = schema.get("oneOf", [schema])
        for kind in kinds:
            del kind["properties"]["model"]
        documented = set(described["responses"])

        @settings(max_examples=400 if WHOLE else 15, suppress_health_check=list(HealthCheck))
        @given(made(schema), st.none() | st.tuples(st.sampled_from(sorted(kinds[0]["properties"])), JUNK))
        def ask(body: dict[str, Any], spoilt: tuple[str, Any] | None) -> None:
            found.add(check(client, path, body if spoilt is None else body | dict([spoilt]), documented))

        ask()
        # What is made at random may all be refused, for one of its many fields; the least that is asked for is not.
        least = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}], "tokens": [97]}
        for kind in kinds:
            found.add(check(client, path, {name: least[name] for name in kind["required"]}, documented))
        assert {200, 400} <= found
        assert service.num_active == 0


def test_the_description_says_who_may_ask_and_with_what_method(served: Served) -> None:
    found = httpx.get(f"{served.url}/openapi.json").json()
    assert found["components"]["securitySchemes"] == {"token": {"type": "http", "scheme": "bearer"}}
    assert {"token": []} in found["security"]
    for methods in found["paths"].values():
        assert all("405" in described["responses"] for described in methods.values())
    body = found["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "$ref" not in json.dumps(body)
    texts = next(each for each in body["properties"]["prompt"]["oneOf"] if each["type"] == "array")
    assert texts["minItems"] == 1
    (top_p,) = (each for each in body["properties"]["top_p"]["anyOf"] if each["type"] == "number")
    assert (top_p["minimum"], top_p["maximum"]) == (0, 1)
