"""Plain Python functions as tools: their schemas, the calls of them, and a round in which a policy makes some."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from kitforge.data.template import template_of
from kitforge.data.tokenizer import HuggingFaceTokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.rlhf.reinforcement.experience import environment_metrics
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.reinforcement.tool_environment import (
    FunctionTools,
    ToolCall,
    ToolEnvironment,
    function_schema,
    parse_tool_calls,
)
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from tests.data.chat_cases import CHATML, HEADERS, MERGING, THINKING, save_tokenizer
from tests.kits.rlhf import runs
from tests.trainer import tiny


def add(a: int, b: float = 2.0) -> float:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second one,
            which may be left out.

    Returns:
        Their sum.
    """
    return a + b


async def search(query: str, where: Literal["web", "files"], limits: list[int] | None = None) -> dict[str, Any]:
    """Search for words.

    Args:
        query: The words.
        where: What is searched.
        limits: How many of each.
    """
    await asyncio.sleep(0)
    return {"query": query, "where": where, "limits": limits}


def untold(a: int) -> int:
    """Says nothing of its argument."""
    return a


@pytest.mark.parametrize("function", [add, search])
def test_the_schema_is_that_of_transformers(function: Any) -> None:
    transformers = pytest.importorskip("transformers")
    assert function_schema(function) == transformers.utils.get_json_schema(function)


def test_a_function_that_says_too_little_is_refused() -> None:
    with pytest.raises(ConfigError, match="argument 'a' of the tool 'untold' is not documented"):
        function_schema(untold)
    with pytest.raises(ConfigError, match="has no docstring"):
        function_schema(lambda: 1)
    with pytest.raises(ConfigError, match="unique names"):
        FunctionTools([add, add])


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scored(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([add, search], max_turns=2)

    def reward(self, response: str) -> float:
        return float(response == self.row["answer"])


def test_calls_are_run_and_answered() -> None:
    episode = Scored()
    assert episode.reset({"answer": "7"}) == ""
    told = {"role": "tool", "name": "add", "content": "5.0"}
    assert episode.step(f"let me see {call('add', a=3)} {call('add', a=1, b=4)}") == (
        [told, {**told, "content": "5"}],
        0.0,
        False,
    )
    assert episode.step("7") == ("", 1.0, True)
    assert episode.step('{"name": "add", "parameters": {"a": 3}}') == ([told], 0.0, True)
    (message,), _, _ = asyncio.run(Scored().step(call("search", query="ü", where="web")))
    assert message["content"] == '{"query": "ü", "where": "web", "limits": null}'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{not JSON}</tool_call>", "not JSON"),
        ('<tool_call>{"name": "add"', "not JSON"),
        ('<tool_call>{"tool": "add"}</tool_call>', "not of the form"),
        ('<tool_call>["add"]</tool_call>', "not of the form"),
        ('{"name": "add", "parameters": 3}', "not of the form"),
        (call("ad", a=1), "did you mean 'add'"),
        (call("add", c=1), "unknown argument 'c'; missing argument 'a'"),
        (call("add", a="1"), "argument 'a': expected integer"),
        (call("add", a=True), "argument 'a': expected integer"),
        (call("search", query="a", where="here"), "expected one of"),
        (call("search", query="a", where="web", limits=["x"]), "expected integer"),
    ],
)
def test_a_call_that_cannot_be_run_is_told_so(text: str, problem: str) -> None:
    messages, reward, is_over = FunctionTools([add, search]).step(text)
    assert (len(messages), reward, is_over) == (1, 0.0, False)
    assert problem in json.loads(messages[0]["content"])["error"]


def test_a_reply_without_a_call_calls_nothing() -> None:
    assert parse_tool_calls("the sum is {a}") == []
    assert parse_tool_calls('{"sum": 4}') == []


CALLS = [call("add", a=1), call("add", a=3, b=4) + "\n" + call("ad", a=1), "It is <5>."]
THOUGHTS = ["<think>\nwell\n</think>\n\n" + each for each in CALLS]
NAMED = ['{"name": "add", "parameters": {"a": 1}}', '{"name": "add", "parameters": {"a": "1"}}']


@pytest.mark.parametrize(
    ("source", "replies"),
    [(MERGING, CALLS), (MERGING, THOUGHTS), (THINKING, THOUGHTS), (HEADERS, NAMED), (HEADERS, CALLS)],
)
def test_turns_with_tools_are_fed_the_tokens_of_the_whole_conversation(
    tmp_path: Path, source: str, replies: list[str]
) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    end = tokenizer.special_tokens["<|im_end|>"]
    tokenizer.eos_ids = (end,)
    template, episode = template_of(tokenizer), FunctionTools([add])
    talk: list[dict[str, Any]] = [{"role": "user", "content": "What is 1+2 and 3+4?"}]
    fed = template.tokens(talk, opens_reply=True, tools=episode.schemas)
    for reply in replies:
        told, _, is_over = episode.step(reply)
        messages = [{"role": "user", "content": "sure?"}] if is_over else told
        if is_over and "<think>" in reply:
            with pytest.raises(DataError, match="rewrites earlier turns"):
                template.continuation(talk, reply, messages, has_end=True, tools=episode.schemas)
            break
        fed += [*tokenizer.encode(reply), end]
        fed += template.continuation(talk, reply, messages, has_end=True, tools=episode.schemas)
        talk += [{"role": "assistant", "content": reply}, *messages]
    assert fed == template.tokens(talk, opens_reply=True, tools=episode.schemas)
    assert (episode.num_tool_calls, episode.num_tool_results) == ((3, 2) if len(replies) == 3 else (2, 1))


def test_what_opens_a_reply_and_is_left_out_later_is_told(tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", MERGING))
    tokenizer.eos_ids = (tokenizer.special_tokens["<|im_end|>"],)
    asked, told = [{"role": "user", "content": "1+2?"}], [{"role": "tool", "content": "3"}]
    with pytest.raises(DataError, match=r"(?s)<think>\\n\\n</think>.*opens the reply.*enable_thinking=false"):
        template_of(tokenizer).continuation(
            asked, CALLS[0], told, has_end=True, chat_template_kwargs={"enable_thinking": False}
        )


PROMPTS = [{"prompt": [{"role": "user", "content": f"{n}+1?"}], "answer": str(n + 1)} for n in range(8)]
CHOICES: dict[str, Any] = {
    "rl.prompts_per_rollout": 2,
    "rl.num_generations": 2,
    "rollout.max_new_tokens": 6,
    "rollout.max_turns": 3,
    "data.sequence_length": 900,
    "kl.coef": 0.0,
}


def begin(tmp_path: Path, template: str, roles: dict[str, Any], rows: Any = None) -> PolicyGradientTask:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "tokenizer", "bytes", template))
    tokenizer.eos_id = tokenizer.special_tokens["<|im_end|>"]
    tokenizer.eos_ids = (tokenizer.eos_id,)
    family = {**tiny.LLAMA, "vocab_size": tokenizer.vocab_size, "max_length": 1024}
    model = build(config_of(family), device=torch.device("cpu"), seed=3)
    # It often ends a turn.
    cast(Any, model).output.data[tokenizer.eos_id] += 2 * cast(Any, model).norm.weight.data
    assembly = runs.begin(
        "grpo", None, CHOICES, model=model, processor=tokenizer, train_dataset=rows or PROMPTS, roles=roles
    )
    task = cast(PolicyGradientTask, assembly.loop.task)
    runs.first_step(task, assembly.loop.model)
    return task


def of_tokens(*, completion_tokens: list[list[int]]) -> list[list[float]]:
    return [[float(token) for token in tokens] for tokens in completion_tokens]


@pytest.mark.parametrize("is_environment", [False, True])
def test_a_policy_that_calls_a_tool_is_told_its_result(
    tmp_path: Path, is_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An untrained policy says anything, which is taken for a call.
    monkeypatch.setattr(
        "kitforge.kits.rlhf.reinforcement.tool_environment.parse_tool_calls",
        lambda text: [ToolCall(name="add", arguments={"a": 1})],
    )
    roles = {"environment": Scored} if is_environment else {"tools": [add, search], "reward": of_tokens}
    # The template is given the tools with every message too.
    task = begin(
        tmp_path, THINKING.replace("</tool_response><", "</tool_response>' ~ (tools or [])|length ~ '<"), roles
    )
    assert task.collected is not None
    tokenizer, schemas = HuggingFaceTokenizer(tmp_path / "tokenizer"), [function_schema(add), function_schema(search)]
    told = "<|im_start|>user\n<tool_response>3.0</tool_response>2<|im_end|>\n<|im_start|>assistant\n"
    heard = []
    # Every turn makes a call.
    figures = environment_metrics(task.collected[1])
    assert figures["tools/call_frequency"] == figures["environment/turns"] > 1
    assert figures["tools/failure_frequency"] == 0
    for each in task.collected[1]:
        prompts = [template_of(tokenizer).tokens(row["prompt"], opens_reply=True, tools=schemas) for row in PROMPTS]
        assert list(each.completion.prompt) in prompts
        heard += [
            token for token, own in zip(each.completion.tokens, each.completion.loss_mask, strict=True) if not own
        ]
        # Rewards of tokens are those of the policy's own.
        assert isinstance(each.score, tuple)
        own = [token for token, is_own in zip(each.completion.tokens, each.completion.loss_mask, strict=True) if is_own]
        assert is_environment or each.score[:-1] == tuple(map(float, own))[:-1]
        assert len(each.score) == len(own)
    special = {number: text for text, number in tokenizer.special_tokens.items()}
    text = "".join(special.get(token, tokenizer.decode([token])) for token in heard)
    assert text.replace("\n" + told, "") == ""
    assert told in text


def test_failed_calls_are_counted_whoever_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(a: int) -> int:
        """Raises.

        Args:
            a: Nothing.
        """
        raise ConnectionError("gone")

    # One call that is answered, or one that no tool takes and one that raises.
    def parsed(text: str) -> list[ToolCall]:
        failing = [ToolCall(name="ad"), ToolCall(name="broken", arguments={"a": 1})]
        return failing if len(text) % 2 else [ToolCall(name="add", arguments={"a": 1})]

    monkeypatch.setattr("kitforge.kits.rlhf.reinforcement.tool_environment.parse_tool_calls", parsed)
    task = begin(tmp_path, THINKING, {"tools": [add, broken], "reward": of_tokens})
    assert task.collected is not None
    answers = task.collected[1]
    num_failed = sum(each.failure is not None for each in answers)
    assert num_failed > 0
    for each in answers:
        assert each.num_tool_failures == 2 * (each.failure is not None)
        assert each.num_tool_calls == len(each.turn_rewards) + (each.failure is not None)
        assert Rollout.from_dict(json.loads(json.dumps(each.to_dict()))) == replace(
            each, completion=replace(each.completion, columns={})
        )
    num_calls = sum(len(each.turn_rewards) for each in answers) + num_failed
    figures = environment_metrics(answers)
    assert figures["tools/call_frequency"] == num_calls / len(answers)
    assert figures["tools/failure_frequency"] == 2 * num_failed / num_calls


def test_tools_need_a_template_that_writes_them_and_something_that_scores(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not render tools"):
        begin(tmp_path, CHATML, {"tools": [add], "reward": runs.letters})
    with pytest.raises(ConfigError, match="tools need prompts of messages"):
        begin(tmp_path, THINKING, {"tools": [add], "reward": runs.letters}, [{"prompt": "a"}, {"prompt": "b"}])
    with pytest.raises(ConfigError, match="has no reward"):
        begin(tmp_path, THINKING, {"tools": [add]})
    with pytest.raises(ConfigError, match="roles tools and environment are both given"):
        begin(tmp_path, THINKING, {"tools": [add], "environment": Scored})
