"""/v1/responses: a reply comes as items, whole and in events, and goes back as the messages of a chat."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.data.chat.cases import THINKING
from tests.inference.server.conftest import serving
from tests.inference.server.scripted import chat_service, saying, without_ids
from tests.inference.server.test_tool_calls import ONE, TOOLS, TWO
from tests.patience import PATIENCE

THOUGHT = "<think>\nhm\n</think>\n\n"
FLAT = [{"type": "function", **each["function"]} for each in TOOLS]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Items:
    """A server whose model says what it is told to."""

    def __init__(self, url: str, service: Any, script: list[int]) -> None:
        self.url, self.service, self.script = url, service, script

    def says(self, text: str) -> None:
        self.script[:] = [*self.service.template.encode(text), self.service.tokenizer.eos_id]

    def post(self, path: str = "/v1/responses", **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json={"temperature": 0, **body}, timeout=PATIENCE)

    def whole(self, **body: Any) -> dict[str, Any]:
        response = self.post(**{"input": "2+2?", "tools": FLAT} | body)
        assert response.status_code == 200, response.text
        return response.json()

    def streamed(self, **body: Any) -> list[dict[str, Any]]:
        """The events, each of which has the name that its data has."""
        lines = self.post(**{"input": "2+2?", "tools": FLAT, "stream": True} | body).text.split("\n\n")[:-1]
        pairs = [line.removeprefix("event: ").split("\ndata: ") for line in lines]
        events = [json.loads(data) for _, data in pairs]
        assert [each["type"] for each in events] == [name for name, _ in pairs]
        return events

    def chat(self, **body: Any) -> list[int]:
        """The prompt that a chat has."""
        return httpx.post(f"{self.url}/tokenize", json=body, timeout=PATIENCE).json()["tokens"]


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Items]:
    script: list[int] = []
    service = chat_service(tmp_path_factory.mktemp("items"), THINKING)
    with contextlib.ExitStack() as stack:
        stack.enter_context(saying(lambda sequence: script))
        yield Items(stack.enter_context(serving(service)).url, service, script)


def kinds_of(response: dict[str, Any]) -> list[str]:
    return [each["type"] for each in response["output"]]


# What the events of a drawn reply say is in tests/differential/test_items.py.
REPLIES = {
    THOUGHT + TWO: ["reasoning", "message", "function_call", "function_call"],
    f"{ONE}\nand\n{ONE}": ["function_call", "message", "function_call"],
    "": ["message"],
}


@pytest.mark.parametrize("text", REPLIES)
def test_the_last_event_has_the_whole_response(items: Items, text: str) -> None:
    kinds = REPLIES[text]
    items.says(text)
    whole, events = items.whole(), items.streamed()
    assert kinds_of(whole) == kinds and whole["status"] == "completed"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert without_ids(events[-1]["response"]) | {"usage": 0} == without_ids(whole) | {"usage": 0}
    for place, item in enumerate(whole["output"]):
        pieces = [each["delta"] for each in events if "delta" in each and each["output_index"] == place]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(pieces) == said


def test_responses_and_events_are_those_of_openais_types(items: Items) -> None:
    items.says(THOUGHT + TWO)
    shapes = []
    for each in (items.whole(), *items.streamed()):
        known = Response.model_validate(each) if "type" not in each else EVENTS.validate_python(each)
        shapes.append(each.get("type", "response"))
        required = {name for name, field in type(known).model_fields.items() if field.is_required()}
        assert required <= each.keys()
    assert len({*shapes}) == 14, shapes


def test_a_reply_that_is_cut_off_is_incomplete(items: Items) -> None:
    items.says(THOUGHT + TWO)
    for size, last in ((3, "reasoning"), (20, "message"), (70, "function_call")):
        events = items.streamed(max_output_tokens=size)
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.incomplete" and kinds_of(response)[-1] == last
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [each["status"] for each in response["output"]][-1] == response["status"] == "incomplete"
        assert without_ids(items.whole(max_output_tokens=size)["output"]) == without_ids(response["output"])


def test_usage_counts_what_was_read_and_thought(items: Items) -> None:
    items.says(THOUGHT + "It is 4.")
    usage = items.whole(input="A question of many tokens" * 3)["usage"]
    again = items.streamed(input="A question of many tokens" * 3)[-1]["response"]["usage"]
    assert usage["input_tokens"] == again["input_tokens"] and usage["output_tokens"] == again["output_tokens"]
    assert again["input_tokens_details"]["cached_tokens"] > 0
    num_thought = usage["output_tokens_details"]["reasoning_tokens"]
    assert 0 < num_thought < usage["output_tokens"] == usage["total_tokens"] - usage["input_tokens"]
    items.says("It is 4.")
    assert items.whole()["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_response_goes_back_as_the_messages_of_a_chat(items: Items) -> None:
    items.says(THOUGHT + TWO)
    first = items.whole()
    calls = [each for each in first["output"] if each["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "4"} for each in calls]
    asked = {"role": "user", "content": "2+2?"}
    called = [
        {"id": each["call_id"], "function": {name: each[name] for name in ("name", "arguments")}} for each in calls
    ]
    said = {"role": "assistant", "reasoning": "hm", "content": "So.", "tool_calls": called}
    told = [{"role": "tool", "tool_call_id": each["call_id"], "content": "4"} for each in calls]
    items.says("4")
    prompts: list[list[int]] = []
    submit = items.service.worker.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items.service.worker, "submit", lambda job: (prompts.append(job.prompt), submit(job)))
        items.whole(input=[asked, *first["output"], *results], instructions="You add.")
    system = {"role": "system", "content": "You add."}
    assert prompts == [items.chat(messages=[system, asked, said, *told], tools=TOOLS)]


def test_a_format_and_a_choice_hold_as_in_a_chat(items: Items) -> None:
    items.says("Well, no.")
    schema = {"type": "object", "properties": {"z": {"const": 1}}, "required": ["z"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "z", "strict": True, "schema": schema}
    response = items.whole(text={"format": form}, tools=[])
    assert json.loads(response["output"][0]["content"][0]["text"]) == {"z": 1}
    assert response["text"]["format"] == {"description": None, **form}
    only = {"type": "function", "name": "now"}
    for choice in ("required", only, {"type": "allowed_tools", "mode": "required", "tools": [only]}):
        (call, *_) = items.whole(tool_choice=choice, parallel_tool_calls=False, max_output_tokens=200)["output"]
        assert items.whole(tool_choice=choice)["tool_choice"] == choice
        assert call["type"] == "function_call" and (choice == "required" or call["name"] == "now")


def test_a_response_that_fails_on_its_way_says_so(items: Items, monkeypatch: pytest.MonkeyPatch) -> None:
    items.says("It is 4.")
    step = items.service.worker._text_engine.step

    def diverged() -> list[Any]:
        deltas = step()
        broken = [replace(each, finish_reason="diverged") for each in deltas if each.tokens == items.script[3:4]]
        return broken or deltas

    monkeypatch.setattr(items.service.worker._text_engine, "step", diverged)
    assert items.post(input="2+2?").status_code == 500
    events = items.streamed()
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    last = EVENTS.validate_python(events[-1])
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")
    assert "not finite" in last.response.error.message


def test_openais_client_parses_and_streams(items: Items) -> None:
    items.says(THOUGHT + TWO)
    with openai.OpenAI(base_url=f"{items.url}/v1", api_key="unused", max_retries=0) as client:
        whole = client.responses.create(model="tiny", input="2+2?", tools=FLAT, temperature=0)
        with client.responses.stream(model="tiny", input="2+2?", tools=FLAT, temperature=0) as stream:
            final = [*stream][-1].response
        assert final.output_text == whole.output_text == "So."
        assert [each.type for each in final.output] == [each.type for each in whole.output]
