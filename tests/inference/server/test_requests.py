"""What clients send: their own answers back, fields that say nothing, and fields that ask for what is not done."""

import json
from typing import Any

import httpx
import openai
import pytest

from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.requests import ChatRequest, CompletionRequest, read
from tests.inference.server.conftest import Served

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def refusal(kind: type[Any], body: dict[str, Any] | bytes) -> ApiError:
    with pytest.raises(ApiError) as told:
        read(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    return told.value


@pytest.mark.parametrize("dumps", [False, True], ids=["message", "model_dump"])
def test_a_chat_goes_on_with_the_message_that_it_was_sent(client: openai.OpenAI, dumps: bool) -> None:
    messages: list[Any] = [USER]
    for turn in range(3):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
        said = answer.choices[0].message
        messages += [said.model_dump() if dumps else said, {"role": "user", "content": str(turn)}]
    plain = [each if isinstance(each, dict) else each.model_dump() for each in messages]
    short = [{"role": each["role"], "content": each["content"]} for each in plain]
    whole, same = (client.chat.completions.create(model="tiny", messages=each, max_tokens=2) for each in (plain, short))
    assert whole.choices[0].message.content == same.choices[0].message.content
    assert whole.usage.prompt_tokens == same.usage.prompt_tokens


@pytest.mark.parametrize(
    "further",
    [
        {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None},
        {"tool_calls": [], "provider_specific_fields": {"refusal": None}, "images": [], "thinking_blocks": None},
        {"provider_specific_fields": {"citations": None, "note": "x"}, "reasoning_content": None, "name": None},
        {"whatever": None},
    ],
)
def test_messages_of_other_clients_come_back(further: dict[str, Any]) -> None:
    body = {"messages": [USER, {"role": "assistant", "content": "x", **further}, USER]}
    found = read(ChatRequest, json.dumps(body).encode())
    assert found.messages[1].to_template_message() == {"role": "assistant", "content": "x"}


def test_calls_of_tools_and_what_they_gave_reach_the_template() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"}
    body = {"messages": [USER, called, {"role": "tool", "tool_call_id": "1", "content": "7", "name": "f"}]}
    found = [message.to_template_message() for message in read(ChatRequest, json.dumps(body).encode()).messages]
    function = {"name": "f", "arguments": {"a": 1}}
    assert found[1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    assert found[2] == {"role": "tool", "content": "7", "name": "f", "tool_call_id": "1"}


def test_null_is_a_value_within_the_arguments_of_a_call_and_the_values_of_a_tool() -> None:
    given = {"a": None, "b": [{"c": None}]}
    parameters = {"properties": {"a": {"default": None, "enum": [None, given], "title": None}}}
    call = {"id": "1", "function": {"name": "f", "arguments": given}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, USER]
    found = read(ChatRequest, json.dumps({"messages": messages, "tools": [tool]}).encode())
    assert found.messages[1].to_template_message()["tool_calls"][0]["function"]["arguments"] == given
    (known,) = found.tools or ()
    assert known.function.parameters == {"properties": {"a": {"default": None, "enum": [None, given]}}}


NOTHING: dict[str, Any] = {
    "best_of": 1,
    "response_format": {"type": "text"},
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "user": "me",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "stop": None,
    "seed": None,
    "logit_bias": None,
    "top_k": -1,
    "min_p": 0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "ignore_eos": False,
    "min_tokens": 0,
    "priority": 0,
    "temperature": 0,
    "n": 1.0,
    "guided_json": None,
    "web_search_options": None,
}
ONLY = {
    "completions": {"prompt": "Hi", "echo": False, "suffix": None, "add_special_tokens": True},
    "chat/completions": {
        "messages": [USER],
        "tool_choice": "none",
        "tools": [TOOL],
        "reasoning_effort": "medium",
        "parallel_tool_calls": False,
        "logprobs": False,
        "top_logprobs": 0,
        "modalities": ["text"],
        "functions": None,
        "add_generation_prompt": True,
        "continue_final_message": False,
    },
}


@pytest.mark.parametrize("route", ONLY)
def test_what_asks_for_nothing_changes_nothing(served: Served, route: str) -> None:
    bare = {"prompt": "Hi"} if route == "completions" else {"messages": [USER]}
    texts = []
    for body in (bare, NOTHING | ONLY[route]):
        answer = httpx.post(f"{served.url}/v1/{route}", json={**body, "max_tokens": 6, "temperature": 0})
        assert answer.status_code == 200, answer.text
        texts.append([each.get("text", each.get("message")) for each in answer.json()["choices"]])
    assert texts[0] == texts[1]


def test_a_mark_of_caches_and_one_of_byte_order_change_nothing(served: Served) -> None:
    parts = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    texts = []
    for content, mark in (("Hi", b""), (parts, b"\xef\xbb\xbf")):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        url = f"{served.url}/v1/chat/completions"
        answer = httpx.post(url, content=mark + json.dumps(body).encode(), headers=headers)
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"])
    assert texts[0] == texts[1]


def test_each_event_of_a_stream_may_have_the_usage(client: openai.OpenAI) -> None:
    told: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(
        model="tiny", prompt="Hi", max_tokens=5, stream=True, stream_options=told, seed=1
    )
    used = [each.usage.completion_tokens if each.usage else None for each in stream]
    assert None not in used
    assert used == sorted(used) and used[0] < used[-1]


def test_padding_of_streams_may_be_declined(client: openai.OpenAI) -> None:
    told = {"include_usage": True, "include_obfuscation": False}
    events = list(client.completions.create(model="tiny", prompt="a", max_tokens=3, stream=True, stream_options=told))
    assert events[-1].usage.completion_tokens == 3


def test_no_probability_at_all_leaves_the_most_likely_token(client: openai.OpenAI) -> None:
    wishes = {"model": "tiny", "prompt": "a", "max_tokens": 8}
    found = client.completions.create(**wishes, top_p=0, temperature=1.5).choices[0].text
    assert found == client.completions.create(**wishes, temperature=0).choices[0].text


# A field, a value of it, and words of the refusal.
NOT_DONE: list[tuple[dict[str, Any], str]] = [
    ({"best_of": 3}, "best_of beyond n"),
    ({"store": True}, "false; nothing else is supported"),
    ({"response_format": {"type": "grammar"}}, '"json_schema"; nothing else'),
    ({"guided_regex": "a+"}, "use structured_outputs"),
    ({"grammar": "root ::= [0-9]"}, "use structured_outputs"),
    ({"json_schema": {"type": "object"}}, "use structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"max_new_tokens": 4}, "use max_tokens"),
    ({"repeat_penalty": 1.1}, "use repetition_penalty"),
    ({"temprature": 1}, "did you mean 'temperature'?"),
    ({"use_beam_search": True}, "false; nothing else"),
    ({"stream_options": {"include_usage": True}}, "stream=true"),
    ({"prompt_logprobs": 1, "stream": True}, "not supported in a stream"),
    ({"logit_bias": {"065": 1}}, "token ids as keys"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "at most 1024"),
    ({"logit_bias": {"65": 101}}, "at most 100"),
    ({"stop_token_ids": [-1]}, "at least 0"),
    ({"max_tokens": 1.5}, "a whole number"),
    ({"max_tokens": True}, "a whole number"),
    ({"n": 0}, "at least 1"),
    ({"a" * 5000: 1}, "unknown parameter"),
]


@pytest.mark.parametrize(("further", "words"), NOT_DONE, ids=lambda value: str(value)[:40])
def test_what_is_not_done_is_refused_with_words_that_help(further: dict[str, Any], words: str) -> None:
    for kind, body in ((CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": [USER]})):
        told = refusal(kind, body | further)
        assert told.status == 400 and words in str(told) and len(str(told)) < 400
        assert told.parameter is not None and told.parameter.startswith(next(iter(further))[:40])


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ({"tools": [CALL]}, "unknown parameter 'tools[0].id'"),
        ({"tools": [TOOL, TOOL]}, "two tools have the name 'f'"),
        ({"tools": [{"type": "function"}]}, "'tools[0].function' is missing"),
        ({"tool_choice": "required"}, "needs tools to choose from"),
        ({"tool_choice": "any", "tools": [TOOL]}, '"auto" or "required"; nothing else'),
        ({"tool_choice": 1, "tools": [TOOL]}, 'or {"type": "function", "function": {"name": ...}}'),
        ({"tool_choice": {"type": "function", "function": {"name": "ff"}}, "tools": [TOOL]}, "did you mean 'f'?"),
        ({"functions": [{}]}, "use tools"),
        ({"reasoning_effort": "low"}, "nothing else is supported"),
        ({"echo": True}, "nothing else is supported"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "'top_logprobs'"),
        ({"continue_final_message": True}, "last message of the assistant"),
        ({"max_tokens": 0}, "at least 1"),
        ({"messages": [{"role": "user"}]}, "'messages[0].content' is missing"),
        ({"messages": [{"role": "assistant"}]}, "'messages[0].content' is missing"),
        ({"messages": [USER, {**USER, "audio": {"id": "x"}}]}, "unknown parameter 'messages[1].audio'"),
        ({"messages": [{"role": "assistant", "content": "", "refusal": "no"}]}, "messages[0].refusal"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, '"text"'),
        ({"messages": [{"role": "king", "content": "x" * 9999}]}, '"assistant" or "tool"'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_chats_cannot_have_is_refused(further: dict[str, Any], words: str) -> None:
    told = refusal(ChatRequest, {"messages": [USER]} | further)
    assert words in str(told) and len(str(told)) < 400


LOGPROBS = [{"logprobs": each} for each in (6, -1, True)]


@pytest.mark.parametrize("further", [{"suffix": "x"}, {"max_tokens": 0}, {"echo": 1}, *LOGPROBS], ids=str)
def test_what_completions_cannot_have_is_refused(further: dict[str, Any]) -> None:
    assert refusal(CompletionRequest, {"prompt": "a"} | further).parameter == next(iter(further))


LARGE: dict[str, bytes] = {
    "tokens that end in a text": b'{"prompt": [' + b"1," * 500_000 + b'"a"]}',
    "many prompts": b'{"prompt": [' + b"[1]," * 250_000 + b"[1]]}",
    "many texts": b'{"prompt": [' + b'"",' * 300_000 + b'""]}',
    "many fields": json.dumps({"prompt": "a"} | {str(number): 1 for number in range(90_000)}).encode(),
    "a long name": json.dumps({"prompt": "a", "x" * 10**6: 1}).encode(),
    "a long value": json.dumps({"prompt": "a", "stop": {"x" * 10**6: 1}}).encode(),
    "a long number": b'{"prompt": "a", "seed": ' + b"9" * 10**6 + b"}",
    "nothing but depth": b'{"prompt": ' + b"[" * 10**6,
    "depth that ends": b'{"metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b', "prompt": [[]]}',
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_an_answer_to_a_large_mistake_is_small(name: str) -> None:
    assert len(str(refusal(CompletionRequest, LARGE[name]))) < 300


def test_lists_are_refused_by_their_length() -> None:
    for body in (
        {"messages": [{"role": "user", "content": ""}] * 30_000},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 3000}]},
        {"messages": [USER], "stop": ["a"] * 17},
        {"messages": [USER], "stop_token_ids": [1] * 2000},
    ):
        assert "at most" in str(refusal(ChatRequest, body))


def test_halves_of_surrogates_are_no_text() -> None:
    assert refusal(CompletionRequest, b'{"prompt": "\\ud800"}').code == "invalid_encoding"
    assert read(CompletionRequest, b'{"prompt": "\\ud83c\\udf19"}').prompt == "\U0001f319"
