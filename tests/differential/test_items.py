"""/v1/responses: a drawn reply, cut anywhere, is what OpenAI's client makes of its events and what a chat says, and a
drawn conversation of items is that of a chat."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kitforge.data.chat.tool_calls import HERMES, LLAMA, MISTRAL, QWEN_CODER, CallFormat, ReplyReader
from kitforge.data.text.continuation import ReplyMarks
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.item_format import ItemFormat
from kitforge.inference.server.item_requests import read_items
from kitforge.inference.server.service import EncodedPrompt
from kitforge.inference.text_engine import TextDelta
from tests.differential.drawn import drawn
from tests.inference.server.scripted import without_ids

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
FORMATS = [HERMES, QWEN_CODER, LLAMA, MISTRAL]
TOOLS: dict[str, dict[str, Any]] = {"add": {"properties": {"a": {"type": "integer"}}}, "now": {}}
# What the type of an item of another API gets, and words of the refusal.
REFUSED = {
    "item_reference": ("type", "responses are not kept, so none can be referred to"),
    "web_search_call": ("type", "tools of a host are not there"),
    "computer_call": ("type", "tools of a host are not there"),
}


class Handle:
    """A request whose deltas are known."""

    def __init__(self, prompt: EncodedPrompt, deltas: list[TextDelta]) -> None:
        self.prompts = [prompt]
        self.given = deltas

    async def deltas(self) -> AsyncIterator[tuple[int, TextDelta]]:
        for each in self.given:
            yield 0, each

    def usage(self) -> dict[str, Any]:
        made = sum(len(each.tokens) for each in self.given)
        counts = {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made}
        return counts | {"prompt_tokens_details": {"cached_tokens": 0}}


def delta(text: str, reason: Any) -> TextDelta:
    return TextDelta(
        request=0, sample=0, text=text, tokens=[1], logprobs=[0.0], top_logprobs=[[]], offsets=[0],
        hit_stop_string=False, finish_reason=reason, prompt_logprobs=None,
    )  # fmt: skip


async def streamed(form: ItemFormat, handle: Any) -> list[dict[str, Any]]:
    pieces = [each async for each in form.events(handle, has_usage=False, is_continuous=False)]
    return [json.loads(each.partition(b"\ndata: ")[2]) for each in pieces]


def calls_of(kind: CallFormat) -> list[str]:
    first, middle, behind, _, last = kind.writes
    arguments = ['{"a": 1}', '{"s": "ü}\\"🎉", "b": [{}]}', "{}", '{"a": ']
    if kind == QWEN_CODER:
        arguments = ["<parameter=a>\n1\n</parameter>\n", "", "<parameter=a>"]
    begin = "" if kind.is_bare else kind.marks[0]
    return [begin + first + name + middle + each + behind + last for name in (*TOOLS, "f") for each in arguments]


@st.composite
def replies(draw: st.DrawFn) -> tuple[CallFormat | None, ReplyMarks, list[str]]:
    """A format of calls, what the prompt has begun, and a reply in pieces."""
    kind = draw(st.sampled_from([None, *FORMATS]))
    marks = ReplyMarks(thought=("<think>", "</think>"), is_thinking=draw(st.booleans()))
    marks = draw(st.sampled_from([ReplyMarks(), marks]))
    words = ["So.", "\n", " ", "夜", "<", "{", "<think>", "</think>\n\n", '{"name": "now"}', "\ufffd"]
    words += [] if kind is None else [*calls_of(kind), *filter(None, kind.marks)]
    text = "".join(draw(st.lists(st.sampled_from(words), max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return kind, marks, [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@drawn(60, whole=4000)
@given(replies(), st.sampled_from(["stop", "length"]))
def test_a_reply_is_what_openais_client_makes_of_its_events_and_what_a_chat_says(
    drawn_reply: tuple[CallFormat | None, ReplyMarks, list[str]], reason: str
) -> None:
    kind, marks, pieces = drawn_reply
    prompt = EncodedPrompt(tokens=[1], marks=marks, calls=kind, tools=TOOLS if kind else {})
    handle: Any = Handle(prompt, [delta(each, None) for each in pieces[:-1]] + [delta(pieces[-1], reason)])
    echo = read_items(b'{"input": "a"}')[0].echo(SamplingOptions())
    whole = ItemFormat("tiny", echo).response_body(handle, [handle.given])
    events = asyncio.run(streamed(ItemFormat("tiny", echo), handle))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    state: Any = ResponseStreamState(input_tools=[], text_format=omit)
    known = [EVENTS.validate_python(each) for each in events]
    for each in known:
        state.handle_event(each)
    Response.model_validate(whole)
    joined = [(each.type, getattr(each, "arguments", "")) for each in state._output_items.values()]
    assert joined == [(each["type"], each.get("arguments", "")) for each in whole["output"]]
    # As the chat has it, joined by kinds.
    reader, said, calls = ReplyReader(marks, kind, prompt.tools), {"content": "", "reasoning": ""}, list[list[str]]()
    for part in [*reader.push("".join(pieces)), *reader.push("", is_last=True)]:
        if part.kind == "call":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[part.call][1] += part.text
        else:
            said[part.kind] += part.text
    texts = {"message": "content", "reasoning": "reasoning"}
    found = {name: "" for name in said}
    for item in whole["output"]:
        if item["type"] in texts:
            found[texts[item["type"]]] += item["content"][0]["text"]
    assert found == said
    assert [[each["name"], each["arguments"]] for each in whole["output"] if each["type"] == "function_call"] == calls


TEXT = st.sampled_from(["", "a", "Why?", "夜\n", "<tool_call>", '{"a": 1}'])
CALL = st.tuples(TEXT, st.sampled_from(["add", "now"]), st.sampled_from(["{}", '{"a": 1}', "{"]))
TURN = st.tuples(st.none() | TEXT, TEXT, st.lists(CALL, max_size=2))
SPOKEN = st.tuples(st.sampled_from(["user", "system", "developer"]), TEXT)


def parts(kind: str, text: str, *, is_list: bool) -> Any:
    return [{"type": kind, "text": each} for each in (text[:1], text[1:])] if is_list else text


@drawn(60, whole=4000)
@given(st.lists(st.tuples(SPOKEN, TURN), min_size=1, max_size=4), st.booleans(), st.none() | TEXT)
def test_items_are_the_messages_that_they_were_written_from(
    turns: list[Any], is_list: bool, instructions: str | None
) -> None:
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    items: list[dict[str, Any]] = []
    for (role, text), (thought, answer, calls) in turns:
        messages.append({"role": "system" if role == "developer" else role, "content": text})
        items.append({"role": role, "content": parts("input_text", text, is_list=is_list)})
        reply: dict[str, Any] = {"role": "assistant", "content": answer}
        if thought is not None:
            reply["reasoning"] = thought
            items.append(
                {"type": "reasoning", "summary": [], "content": parts("reasoning_text", thought, is_list=True)}
            )
        items.append({"role": "assistant", "content": parts("output_text", answer, is_list=is_list), "type": "message"})
        named = [
            {"call_id": f"{place}{each[0]}", "name": each[1], "arguments": each[2]} for place, each in enumerate(calls)
        ]
        items += [{"type": "function_call", **each} for each in named]
        if named:
            functions = [{"name": each["name"], "arguments": each["arguments"]} for each in named]
            reply["tool_calls"] = [
                {"id": each["call_id"], "type": "function", "function": function}
                for each, function in zip(named, functions, strict=True)
            ]
        messages.append(reply)
        results = [{"role": "tool", "tool_call_id": each["call_id"], "content": "7"} for each in named]
        messages += results
        items += [{"type": "function_call_output", "call_id": each["tool_call_id"], "output": "7"} for each in results]
    body = {"input": items} | ({} if instructions is None else {"instructions": instructions})
    found = [each.model_dump(exclude_none=True) for each in read_items(json.dumps(body).encode())[1].messages]
    assert [each | {"role": "system"} if each["role"] == "developer" else each for each in found] == messages


@pytest.mark.parametrize("kind", REFUSED)
def test_what_the_types_have_and_the_server_does_not_is_told(kind: str) -> None:
    with pytest.raises(ApiError, match=r"input\[0\].type(?s:.*)function_call_output"):
        read_items(json.dumps({"input": [{"type": kind, "id": "x"}]}).encode())
