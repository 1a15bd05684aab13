"""Calls of tools and thoughts come as OpenAI's client joins them, whole and streamed, from a model that says them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.lib.streaming._deltas import accumulate_delta

from tests.data.chat.cases import CHATML, THINKING
from tests.inference.server.conftest import Served, serving
from tests.inference.server.scripted import chat_service, saying

ASKED = [{"role": "user", "content": "2+2? <tool_call>"}]
ADD = {
    "name": "add",
    "description": "Adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
TOOLS = [{"type": "function", "function": ADD}, {"type": "function", "function": {"name": "now"}}]
ONE = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "ü}\\"🎉"}}\n</tool_call>'
TWO = 'So.\n<tool_call>\n{"name": "now"}\n</tool_call>\n' + ONE
MISTRAL = (
    "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.name }}: {{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
MARKS = ["[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]


class Scripted:
    """A server whose model says what it is told to; its other tokens are those of random weights."""

    def __init__(self, served: Served, script: list[list[int]]) -> None:
        self.url = served.url
        self.service = served.service
        self.client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused", max_retries=0)
        self._script = script

    def says(self, *texts: str) -> None:
        tokenizer = self.service.tokenizer
        self._script[:] = [[*self.service.template.encode(text), tokenizer.eos_id] for text in texts]

    def whole(self, **wishes: Any) -> Any:
        asked = {"model": "tiny", "messages": ASKED, "tools": TOOLS, "temperature": 0} | wishes
        return self.client.chat.completions.create(**asked)

    def streamed(self, **wishes: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The message that the client joins of the deltas, and these."""
        joined: dict[str, Any] = {}
        deltas, reason = [], None
        for event in self.whole(stream=True, **wishes):
            delta = event.choices[0].delta.to_dict()
            assert reason is None
            reason = event.choices[0].finish_reason
            deltas.append(delta)
            joined = accumulate_delta(joined, delta)
        return joined | {"finish_reason": reason}, deltas


@pytest.fixture(scope="module")
def begin() -> Iterator[Any]:
    """Starts servers, one for each template."""
    script: list[list[int]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(saying(lambda sequence: script[sequence.sample % len(script)]))

        def start(folder: Path, source: str, special: list[str] | None = None) -> Scripted:
            served = Scripted(stack.enter_context(serving(chat_service(folder, source, special))), script)
            stack.callback(served.client.close)
            return served

        yield start


@pytest.fixture(scope="module")
def hermes(begin: Any, tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    return begin(tmp_path_factory.mktemp("hermes"), THINKING)


@pytest.fixture(scope="module")
def mistral(begin: Any, tmp_path_factory: pytest.TempPathFactory) -> Scripted:
    return begin(tmp_path_factory.mktemp("mistral"), MISTRAL, MARKS)


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(each.function.name, each.function.arguments) for each in message.tool_calls]


def test_calls_come_instead_of_content(hermes: Scripted) -> None:
    hermes.says(ONE)
    choice = hermes.whole().choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert calls_of(choice.message) == [("add", '{"a": 1, "s": "ü}\\"🎉"}')]
    assert choice.message.tool_calls[0].type == "function" and choice.message.tool_calls[0].id.startswith("call_")


@pytest.mark.parametrize("text", [ONE, TWO, "<think>\nhm\n</think>\n\n" + TWO, "It is 4.", '<tool_call>{"name": "a'])
def test_the_deltas_joined_are_the_whole_reply(hermes: Scripted, text: str) -> None:
    hermes.says(text)
    joined, _ = hermes.streamed()
    choice = hermes.whole().choices[0]
    message = choice.message.to_dict()
    for each in (*joined.get("tool_calls", ()), *message.get("tool_calls", ())):
        each.pop("index", None)
        assert each.pop("id")
    assert joined.pop("finish_reason") == choice.finish_reason
    assert joined == {name: value for name, value in message.items() if name != "refusal"}


def test_every_call_of_a_stream_has_its_own_index_and_its_id_and_name_once(hermes: Scripted) -> None:
    hermes.says(TWO)
    joined, deltas = hermes.streamed()
    pieces = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert [each["index"] for each in pieces if "id" in each] == [0, 1] == sorted({each["index"] for each in pieces})
    assert len({each["id"] for each in joined["tool_calls"]}) == 2
    assert [each["function"] for each in joined["tool_calls"]] == [
        {"name": "now", "arguments": "{}"},
        {"name": "add", "arguments": '{"a": 1, "s": "ü}\\"🎉"}'},
    ]
    # Arguments come as they are generated.
    assert len([each for each in pieces if each["index"] == 1]) > 5
    assert deltas[0]["role"] == "assistant" and all("role" not in each for each in deltas[1:])


@pytest.mark.parametrize(
    ("text", "further", "reason"),
    [
        (ONE, {"tool_choice": "required"}, "tool_calls"),
        (ONE, {"tool_choice": {"type": "function", "function": {"name": "add"}}}, "stop"),
        (ONE, {"max_tokens": 30}, "length"),
        (ONE[:-20], {}, "stop"),
        ("<tool_call>{add}</tool_call>", {}, "stop"),
        ("It is 4.", {}, "stop"),
    ],
)
def test_what_ends_a_reply_tells_whether_it_called(
    hermes: Scripted, text: str, further: dict[str, Any], reason: str
) -> None:
    hermes.says(text)
    assert hermes.whole(**further).choices[0].finish_reason == reason


def test_a_call_that_is_none_is_content_letter_for_letter(hermes: Scripted) -> None:
    text = 'So \n<tool_call>\n{"name": add}\n</tool_call> well '
    hermes.says(text)
    message = hermes.whole().choices[0].message
    assert (message.content, message.tool_calls) == (text, None)
    assert hermes.streamed()[0]["content"] == text


def test_tools_that_may_not_be_called_are_not_in_the_prompt(hermes: Scripted) -> None:
    hermes.says(ONE)
    plain, none = (hermes.whole(**each) for each in ({"tools": []}, {"tool_choice": "none"}))
    assert plain.usage.prompt_tokens == none.usage.prompt_tokens < hermes.whole().usage.prompt_tokens
    assert none.choices[0].message.content == ONE and none.choices[0].finish_reason == "stop"


def test_the_prompt_has_tools_as_models_know_them(hermes: Scripted) -> None:
    tools = [{"function": {"strict": True, **dict(reversed(ADD.items()))}, "type": "function"}]
    tokens = [
        httpx.post(f"{hermes.url}/tokenize", json={"messages": ASKED, "tools": each}).json()["tokens"]
        for each in (tools, TOOLS[:1])
    ]
    assert tokens[0] == tokens[1]
    assert tokens[0] == hermes.service.template.tokens(ASKED, opens_reply=True, tools=TOOLS[:1])


def test_a_template_without_tools_is_told(begin: Any, tmp_path: Path) -> None:
    with pytest.raises(openai.BadRequestError, match=r"(?s)ignores tools.*Hermes.*tool_choice"):
        begin(tmp_path, CHATML).whole()


def test_users_cannot_write_the_marks_of_calls(hermes: Scripted, mistral: Scripted) -> None:
    for served, mark in ((hermes, "<tool_call>"), (mistral, "[TOOL_CALLS]")):
        body = {"messages": [{"role": "user", "content": f"say {mark} {{}}"}], "tools": TOOLS}
        tokens = httpx.post(f"{served.url}/tokenize", json=body).json()["tokens"]
        (mark_id,) = served.service.template.encode(mark)
        assert mark_id not in tokens and mark in "".join(map(served.service.token_texts.text, tokens))
    # What is said of thoughts opens none.
    hermes.says("It is 4.")
    asked = [{"role": "user", "content": "what does <think> mean?"}]
    assert hermes.whole(messages=asked).choices[0].message.content == "It is 4."


def test_a_conversation_with_calls_goes_on_with_what_was_sent(hermes: Scripted, mistral: Scripted) -> None:
    for served, text in ((hermes, "<think>\nhm\n</think>\n\n" + ONE), (mistral, '[TOOL_CALLS]add[ARGS]{"a": 1}')):
        served.says(text)
        message = served.whole().choices[0].message
        (call,) = message.tool_calls
        talk = [*ASKED, message, {"role": "tool", "tool_call_id": call.id, "content": "4"}]
        served.says("It is 4.")
        assert served.whole(messages=talk).choices[0].message.content == "It is 4."
        body = {"messages": [*ASKED, message.to_dict(), talk[-1]], "tools": TOOLS}
        told = httpx.post(f"{served.url}/tokenize", json=body).json()
        # OpenAI's client sends what it parsed of a message back with it.
        sent = body["messages"][1]
        sent["parsed"], sent["tool_calls"][0]["function"]["parsed_arguments"] = {"z": 1}, {"a": 1}
        assert httpx.post(f"{served.url}/tokenize", json=body).json() == told
        prompt = httpx.post(f"{served.url}/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
        assert json.dumps(json.loads(call.function.arguments), ensure_ascii=False) in prompt
        # Mistral's template writes the name of what a result is of.
        assert ("hm" in prompt) if served is hermes else ("add: 4" in prompt)


def test_marks_that_are_special_tokens_are_read(mistral: Scripted) -> None:
    mistral.says('So.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}')
    choice = mistral.whole().choices[0]
    assert calls_of(choice.message) == [("add", '{"a": 1}'), ("now", "{}")] and choice.message.content == "So."
    assert {len(each.id) for each in choice.message.tool_calls} == {9}
    assert mistral.streamed()[0]["tool_calls"][1]["function"] == {"name": "now", "arguments": "{}"}
    # Without tools they have no text, as all special tokens.
    assert mistral.whole(tools=[]).choices[0].message.content == 'So.add{"a": 1}now{}'


OPENED = THINKING.replace("{% if enable_thinking is false %}", "{{ '<think>\\n' }}{% if enable_thinking is false %}")


@pytest.mark.parametrize("opens", [False, True])
def test_a_thought_is_split_by_what_the_prompt_has_begun(
    hermes: Scripted, begin: Any, tmp_path: Path, opens: bool
) -> None:
    served = begin(tmp_path, OPENED) if opens else hermes
    served.says(("" if opens else "<think>") + "\nhm, a\n</think>\n\nIt is 4.")
    message = served.whole(stop=["a", "\n"]).choices[0].message
    # Stop strings do not apply within a thought.
    assert (message.reasoning, message.content) == ("hm, a", "It is 4.") and message.reasoning_content == "hm, a"
    joined, _ = served.streamed(stop="a")
    assert (joined["reasoning"], joined["reasoning_content"], joined["content"]) == ("hm, a", "hm, a", "It is 4.")
    # Of a thought that is over in the prompt there is none, nor of one that never ends.
    served.says("<think>It</think> is 4.")
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    assert hermes.whole(extra_body=closed).choices[0].message.content == "<think>It</think> is 4."
    served.says("hm, " * 9)
    message = served.whole(max_tokens=5).choices[0].message
    assert message.content is None if opens else message.content.startswith("hm, ")
    assert ("reasoning" in message.to_dict()) == opens


def test_a_stop_string_ends_what_is_said_behind_a_thought(hermes: Scripted) -> None:
    hermes.says("<think>\nof 4\n</think>\n\nIt is 4.")
    choice = hermes.whole(stop="4").choices[0]
    assert (choice.message.reasoning, choice.message.content, choice.finish_reason) == ("of 4", "It is ", "stop")
    hermes.says("\n 2 and 4.")
    assert hermes.whole(stop="\n").choices[0].message.content == ""
    assert hermes.streamed(stop="4")[0]["content"] == "\n 2 and "


def test_choices_have_calls_of_their_own(hermes: Scripted) -> None:
    hermes.says(ONE, "It is 4.", TWO)
    answer = hermes.whole(n=3, temperature=1.0, seed=1)
    assert [each.finish_reason for each in answer.choices] == ["tool_calls", "stop", "tool_calls"]
    assert answer.choices[1].message.content == "It is 4." and len(answer.choices[2].message.tool_calls) == 2


def test_log_probabilities_come_with_calls(hermes: Scripted) -> None:
    hermes.says(ONE)
    plain, streamed = hermes.whole(logprobs=True), list(hermes.whole(logprobs=True, stream=True))
    found = [each.token for each in plain.choices[0].logprobs.content]
    assert bytes(b for each in plain.choices[0].logprobs.content for b in each.bytes).decode() == ONE
    pieces = [each.token for event in streamed for each in event.choices[0].logprobs.content]
    assert pieces == found


BABBLE = "Well, no."  # of a model that does not call by itself


def names_of(answer: Any) -> list[str]:
    return [each.function.name for each in answer.choices[0].message.tool_calls or ()]


@pytest.mark.parametrize("family", ["hermes", "mistral"])
def test_a_call_that_is_required_is_made_in_the_models_own_format(family: str, request: pytest.FixtureRequest) -> None:
    served: Scripted = request.getfixturevalue(family)
    served.says(BABBLE)
    required = served.whole(tool_choice="required", parallel_tool_calls=False, max_tokens=200, logprobs=True)
    (message,) = [each.message for each in required.choices]
    assert message.content is None and len(message.tool_calls) == 1
    text = "".join(bytes(each.bytes).decode("utf-8", "replace") for each in required.choices[0].logprobs.content)
    assert text.startswith("<tool_call>\n{" if family == "hermes" else ("add", "now"))
    named = {"type": "function", "function": {"name": "now"}}
    for name, stream in (("now", False), ("now", True)):
        wishes = {"tool_choice": named, "max_tokens": 200}
        if stream:
            assert [each["function"]["name"] for each in served.streamed(**wishes)[0]["tool_calls"]] == [name]
        else:
            assert names_of(served.whole(**wishes)) == [name]


@pytest.mark.parametrize(
    ("mode", "said", "called"), [("auto", ONE, ["now"]), ("auto", "So.", []), ("required", "So.", ["now"])]
)
def test_of_the_tools_in_the_prompt_only_those_that_are_allowed_are_called(
    hermes: Scripted, mode: str, said: str, called: list[str]
) -> None:
    hermes.says(said)
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]}
    found = hermes.whole(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, max_tokens=200)
    assert {*names_of(found)} == {*called} and found.choices[0].message.content == (None if called else said)
    assert found.usage.prompt_tokens == hermes.whole().usage.prompt_tokens


def test_strict_tools_hold_calls_to_their_schema_and_leave_content_alone(hermes: Scripted) -> None:
    strict = [{"type": "function", "function": {**ADD, "strict": True}}]
    hermes.says('So.\n<tool_call>\n{"name": "add", "arguments": {"a": "one"}}\n</tool_call>')
    plain, held = (hermes.whole(tools=each, max_tokens=60) for each in (TOOLS, strict))
    assert calls_of(plain.choices[0].message) == [("add", '{"a": "one"}')]
    (call,) = held.choices[0].message.tool_calls
    assert held.choices[0].message.content == "So." and call.function.arguments.startswith('{"a": ')
    assert not call.function.arguments.startswith('{"a": "')
    hermes.says(BABBLE)
    assert hermes.whole(tools=strict).choices[0].message.content == BABBLE


def test_parallel_calls_may_be_declined(hermes: Scripted) -> None:
    hermes.says(ONE + "\n" + ONE)
    assert names_of(hermes.whole()) == ["add", "add"]
    assert names_of(hermes.whole(parallel_tool_calls=False)) == ["add"]


@pytest.mark.parametrize("opens", [False, True])
def test_a_required_call_comes_behind_the_thought(hermes: Scripted, begin: Any, tmp_path: Path, opens: bool) -> None:
    served = begin(tmp_path, OPENED) if opens else hermes
    served.says(("" if opens else "<think>") + "\nhm </think>\n\n" + ONE)
    choice = served.whole(tool_choice="required").choices[0]
    assert choice.message.reasoning == "hm " and names_of(served.whole(tool_choice="required")) == ["add"]


@pytest.mark.parametrize("thinks", [False, True])
def test_with_a_structure_a_reply_is_a_call_or_the_answer(hermes: Scripted, thinks: bool) -> None:
    answer = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
    schema = {"name": "answer", "schema": {**answer, "additionalProperties": False}}
    structure: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": schema}}
    thought = "<think>\nhm\n</think>\n\n" if thinks else ""
    for text, names in ((ONE, ["add"]), ('{"z": 4}', [])):
        hermes.says(thought + text)
        found = hermes.whole(**structure)
        assert names_of(found) == names
        assert list(json.loads(hermes.whole(tools=[], max_tokens=200, **structure).choices[0].message.content)) == ["z"]
        assert found.choices[0].message.content == (None if names else '{"z": 4}')
        assert getattr(found.choices[0].message, "reasoning", None) == ("hm" if thinks else None)
    hermes.says(BABBLE)
    assert names_of(hermes.whole(tool_choice="required", max_tokens=200, **structure))


def test_a_schema_that_cannot_be_enforced_is_told(hermes: Scripted) -> None:
    odd = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"the tool 'f'(?s:.*)not") as told:
        hermes.whole(tools=[*TOOLS, odd], tool_choice="required")
    assert told.value.param == "tools" and "start:" not in told.value.message
