"""What agent libraries do with a server, in a process of the environment that has them; no module of ours is imported.

Reads a JSON object of the server's address, the page's blocks and the clients that are asked for, and writes one of
each client's error, null without.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel

ASKED = "How warm is it in Oslo and Bergen?"
KEY = {"api_key": "unused"}


class Weather(BaseModel):
    city: str
    celsius: int


class Wind(BaseModel):
    """What is asked of a model that talks of something else, short enough for random weights."""

    kind: Literal["calm", "storm"]
    is_cold: bool


def warmth(city: str) -> int:
    """The temperature in a city."""
    return {"Oslo": 7, "Bergen": 9}[city]


def wind(kind: Literal["calm", "storm"]) -> str:
    """Tell what the wind is like."""
    return kind


ANSWER = Weather(city="Oslo", celsius=7)
CALLS = [("warmth", {"city": "Oslo"}), ("warmth", {"city": "Bergen"})]


def same(found: Any, expected: Any) -> None:
    assert found == expected, f"{found!r} is not {expected!r}"


def openai(url: str) -> None:
    """Parsed by pydantic; calls whole and streamed, and a conversation of them."""
    from openai import OpenAI, pydantic_function_tool

    class Warmth(BaseModel):
        city: Literal["Oslo", "Bergen"]

    client = OpenAI(base_url=url, max_retries=0, **KEY)
    # By default the client asks for base64.
    embedded: list[Any] = [
        client.embeddings.create(model="tiny", input=["Oslo", "Bergen"], **form).data
        for form in ({}, {"encoding_format": "float"})
    ]
    same([each.embedding for each in embedded[0]], [each.embedding for each in embedded[1]])
    same(round(sum(number**2 for number in embedded[0][1].embedding), 5), 1)
    tools = [pydantic_function_tool(Warmth, name="warmth")]
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    wishes: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": tools}
    message = client.chat.completions.parse(messages=messages, **wishes).choices[0].message
    same([(each.function.name, each.function.parsed_arguments) for each in message.tool_calls], [
        ("warmth", Warmth(city="Oslo")), ("warmth", Warmth(city="Bergen")),
    ])  # fmt: skip
    with client.chat.completions.stream(messages=messages, **wishes) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        same([(each.name, json.loads(each.arguments)) for each in done], CALLS)
        final = stream.get_final_completion().choices[0]
    same((final.finish_reason, final.message.content, final.message.reasoning), ("tool_calls", None, "hm"))
    for said in (message, final.message):
        results = [{"role": "tool", "tool_call_id": each.id, "content": "7"} for each in said.tool_calls]
        answer = client.chat.completions.parse(messages=[*messages, said, *results], response_format=Weather, **wishes)
        same(answer.choices[0].message.parsed, ANSWER)
        talk = [*messages, said, *results, answer.choices[0].message, *messages]
        same(len(client.chat.completions.parse(messages=talk, **wishes).choices[0].message.tool_calls), 2)
    babble: list[Any] = [{"role": "user", "content": "Babble."}]
    forced = client.chat.completions.parse(messages=babble, **wishes, tool_choice="required", parallel_tool_calls=False)
    assert isinstance(forced.choices[0].message.tool_calls[0].function.parsed_arguments, Warmth)
    with client.chat.completions.stream(model="tiny", messages=babble, response_format=Wind, seed=1) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Wind)


def responses(url: str) -> None:
    """The Responses API of OpenAI's client: created, parsed and streamed, and a conversation of calls."""
    from openai import OpenAI, pydantic_function_tool

    class Warmth(BaseModel):
        city: Literal["Oslo", "Bergen"]

    client = OpenAI(base_url=url, max_retries=0, **KEY)
    function = pydantic_function_tool(Warmth, name="warmth")["function"]
    tools: list[Any] = [{"type": "function", **function}]
    wishes: dict[str, Any] = {"model": "tiny", "temperature": 0, "tools": tools}
    made = client.responses.create(input=ASKED, **wishes)
    parsed = client.responses.parse(input=ASKED, text_format=Weather, **wishes)
    with client.responses.stream(input=ASKED, text_format=Weather, **wishes) as stream:
        done = [each for each in stream if each.type == "response.function_call_arguments.done"]
        final = stream.get_final_response()
    same([json.loads(each.arguments) for each in done], [{"city": "Oslo"}, {"city": "Bergen"}])
    for response in (made, parsed, final):
        same([each.type for each in response.output], ["reasoning", "function_call", "function_call"])
        same(response.output[0].content[0].text, "hm")
        calls = response.output[1:]
        same([(each.name, json.loads(each.arguments)) for each in calls], CALLS)
        results = [{"type": "function_call_output", "call_id": each.call_id, "output": "7"} for each in calls]
        talk: list[Any] = [{"role": "user", "content": ASKED}, *response.output, *results]
        answer = client.responses.parse(input=talk, text_format=Weather, **wishes)
        same(answer.output_parsed, ANSWER)
        talk += [*answer.output, {"role": "user", "content": ASKED}]
        same([each.type for each in client.responses.create(input=talk, **wishes).output[1:]], ["function_call"] * 2)
    with client.responses.stream(model="tiny", input="Babble.", text_format=Wind, extra_body={"seed": 1}) as stream:
        pieces = "".join(each.delta for each in stream if each.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Wind) and pieces == final.output_text


def langchain(url: str) -> None:
    """Bound tools, chosen and required; structured outputs of both kinds; streams."""
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="tiny", base_url=url, temperature=0, max_retries=0, **KEY)
    able, bound = (model.bind_tools([warmth], tool_choice=choice) for choice in (None, "any"))
    messages: list[Any] = [HumanMessage(ASKED)]
    for chosen in (able, bound):
        pieces = list(chosen.stream(messages))
        joined = pieces[0]
        for piece in pieces[1:]:
            joined += piece
        assert len(pieces) > 5
        for said in (chosen.invoke(messages), joined):
            same([(each["name"], each["args"]) for each in said.tool_calls], CALLS)
            results = [ToolMessage(str(warmth(**each["args"])), tool_call_id=each["id"]) for each in said.tool_calls]
            same(json.loads(able.invoke([*messages, said, *results]).content), ANSWER.model_dump())
    for method in ("json_schema", "function_calling"):
        same(model.with_structured_output(Weather, method=method).invoke(ASKED), ANSWER)
        same(list(model.with_structured_output(Weather, method=method).stream(ASKED))[-1], ANSWER)
        assert isinstance(model.with_structured_output(Wind, method=method).invoke("Babble."), Wind)
    assert "city" in model.with_structured_output(None, method="json_mode").invoke(ASKED)
    same(model.bind_tools([wind], tool_choice="any", parallel_tool_calls=False).invoke("Babble.").tool_calls[0]["name"],
         "wind")  # fmt: skip


def pydantic_ai(url: str) -> None:
    """A tool, then an output that is a call of a tool or has a schema; a stream, and a conversation that goes on."""
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=url, **KEY))

    async def streamed(agent: Any) -> None:
        async with agent.run_stream(ASKED) as run:
            same(await run.get_output(), ANSWER)

    for output in (Weather, NativeOutput(Weather)):
        told: list[str] = []
        agent = Agent(model, output_type=output, retries=0)

        @agent.tool_plain(name="warmth")
        def told_warmth(city: str) -> int:
            told.append(city)  # noqa: B023
            return warmth(city)

        first = agent.run_sync(ASKED)
        same((first.output, sorted(told)), (ANSWER, ["Bergen", "Oslo"]))
        same(agent.run_sync(ASKED, message_history=first.all_messages()).output, ANSWER)
        asyncio.run(streamed(agent))
        assert isinstance(
            Agent(model, output_type=Wind if output is Weather else NativeOutput(Wind)).run_sync("Babble.").output, Wind
        )


def litellm(url: str) -> None:
    """Calls whole and streamed, sent back as they came; a structured answer."""
    from litellm import completion, stream_chunk_builder

    function = {"name": "warmth", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    for provider in ("openai/tiny", "hosted_vllm/tiny"):
        asks: dict[str, Any] = {"model": provider, "base_url": url, "temperature": 0, **KEY}
        tools: dict[str, Any] = {"tools": [{"type": "function", "function": function}], "tool_choice": "auto"}
        whole = completion(messages=messages, **asks, **tools)
        streamed = stream_chunk_builder(list(completion(messages=messages, stream=True, **asks, **tools)))
        for answer in (whole, streamed):
            said = answer.choices[0].message
            calls = [(each.function.name, json.loads(each.function.arguments)) for each in said.tool_calls]
            same((answer.choices[0].finish_reason, calls), ("tool_calls", CALLS))
            same(said.reasoning_content, "hm")
            results = [{"role": "tool", "tool_call_id": each.id, "content": "7"} for each in said.tool_calls]
            talk = [*messages, said.model_dump(), *results]
            further = completion(messages=talk, response_format=Weather, **asks, **tools)
            same(Weather.model_validate_json(further.choices[0].message.content), ANSWER)
        babble = completion(messages=[{"role": "user", "content": "Babble."}], response_format=Wind, **asks)
        assert Wind.model_validate_json(babble.choices[0].message.content)


def agents(url: str) -> None:
    """A tool, then an answer of an output type while the tools are still there, whole and streamed."""
    asyncio.run(agents_talk(url))


async def agents_talk(url: str) -> None:
    from agents import AsyncOpenAI, OpenAIChatCompletionsModel, OpenAIResponsesModel

    client = AsyncOpenAI(base_url=url, max_retries=0, **KEY)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        await agents_talk_by(kind("tiny", client))


async def agents_talk_by(model: Any) -> None:
    from agents import Agent, ModelSettings, Runner, function_tool

    told: list[str] = []

    @function_tool(name_override="warmth")
    def told_warmth(city: str) -> int:
        told.append(city)
        return warmth(city)

    for settings in (ModelSettings(), ModelSettings(tool_choice="required", parallel_tool_calls=True)):
        agent = Agent(name="a", model=model, tools=[told_warmth], output_type=Weather, model_settings=settings)
        first = await Runner.run(agent, ASKED)
        same((first.final_output, sorted(told)), (ANSWER, ["Bergen", "Oslo"]))
        talk = [*first.to_input_list(), {"role": "user", "content": ASKED}]
        same((await Runner.run(agent, talk)).final_output, ANSWER)
        run = Runner.run_streamed(agent, ASKED)
        items = [event.item.type async for event in run.stream_events() if event.type == "run_item_stream_event"]
        same(
            [each for each in items if each.startswith("tool_call")],
            ["tool_call_item"] * 2 + ["tool_call_output_item"] * 2,
        )
        same((run.final_output, sorted(told)), (ANSWER, ["Bergen"] * 3 + ["Oslo"] * 3))
        told.clear()
    plain = Agent(name="a", model=model, output_type=Wind)
    assert isinstance((await Runner.run(plain, "Babble.")).final_output, Wind)


CLIENTS: dict[str, Callable[[str], None]] = {
    each.__name__: each for each in (openai, responses, langchain, pydantic_ai, litellm, agents)
}


def main() -> None:
    given = json.load(sys.stdin)
    shared, *blocks = given["blocks"]
    errors: dict[str, str | None] = {}
    for (name, act), block in zip(CLIENTS.items(), blocks, strict=True):
        if name not in given["clients"]:
            continue
        said: list[Any] = []
        try:
            exec(shared + block, {"print": said.append, "__name__": "__main__"})
            assert all(said) and str(said[-1]).startswith(("city='Oslo' celsius=7", '{"city": "Oslo"')), said
            act(given["url"])
            errors[name] = None
        except Exception:  # noqa: BLE001 - what went wrong with one client keeps no other from being tried
            errors[name] = traceback.format_exc()
    sys.stdout.write("\n" + json.dumps(errors))


if __name__ == "__main__":
    main()
