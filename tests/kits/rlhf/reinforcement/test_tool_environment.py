"""Plain Python functions as tools: their schemas, the calls of them, and a round in which a policy makes some."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import transformers

from kitforge.data.chat.template import template_of
from kitforge.data.chat.tool_calls import HERMES
from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.kit import RunAssembly
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.environment_classes import environment_runner_of
from kitforge.kits.rlhf.reinforcement.experience import environment_metrics
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.reinforcement.tool_environment import (
    FunctionTools,
    ToolCall,
    ToolEnvironment,
    function_schema,
    parse_tool_calls,
)
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.rewards import scorer_of
from tests.data.chat.cases import HEADERS, MERGING, THINKING, save_tokenizer
from tests.kits.rlhf import runs
from tests.tiny import built
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


ANSWERS_IN_JSON = [
    '{"name": "Alice", "age": 5}',
    '{"name": "Alice"}',
    '{"name": null, "age": 5}',
    '{"people": [{"name": "Alice"}]}',
    '{"name": "Alice"} is the answer.',
]


@pytest.mark.parametrize("has_marks", [False, True])
@pytest.mark.parametrize("text", ANSWERS_IN_JSON)
def test_an_answer_in_json_is_no_call(text: str, has_marks: bool) -> None:
    episode = Scored()
    episode.reset({"answer": text})
    episode.calls = HERMES if has_marks else None
    assert episode.step(text) == ("", 1.0, True)


@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_arguments_are_found_below_either_word(key: str) -> None:
    text = json.dumps({"name": "add", key: {"a": 3}})
    for said in (text, f"<|python_tag|>{text}", f"<tool_call>{text}</tool_call>"):
        assert FunctionTools([add]).step(said)[0] == [{"role": "tool", "name": "add", "content": "5.0"}]
    (message,) = FunctionTools([add]).step(json.dumps({"name": "add", key: {}}))[0]
    assert "missing argument 'a'" in message["content"]
    # Where calls have marks, JSON without them is an answer, whatever it holds.
    episode = Scored()
    episode.reset({"answer": text})
    episode.calls = HERMES
    assert episode.step(text) == ("", 1.0, True)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize(
    "form", ['<tool_call>{{"name": "add", "arguments": {}</tool_call>', '{{"name": "add", "parameters": {}']
)
def test_a_call_that_is_nested_without_end_is_an_invalid_call(form: str, opening: str) -> None:
    messages, _, is_over = FunctionTools([add]).step(form.format(opening * 100_000))
    assert "not JSON" in messages[0]["content"] and not is_over


@pytest.mark.parametrize(("source", "has_marks"), [(THINKING, True), (HEADERS, False)])
def test_a_run_asks_its_template_whether_calls_have_marks(source: str, has_marks: bool, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path, "bytes", source))
    options = cast(RLOptions, TASKS["grpo"].read_options({"environment": {"max_consecutive_errors": 7}}))
    for roles in ({"tools": [add]}, {"environment": Scored}):
        runner = environment_runner_of(roles, options, tokenizer, EventLoop())
        assert runner is not None
        made = cast(ToolEnvironment, runner.make())
        assert (made.calls is HERMES, made.max_consecutive_errors) == (has_marks, 7)


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


def assembled(
    tmp_path: Path, template: str, roles: dict[str, Any], rows: Any = None, stage: str = "grpo", **choices: Any
) -> RunAssembly[Any, Any]:
    tokenizer = HuggingFaceTokenizer(save_tokenizer(tmp_path / "tokenizer", "bytes", template))
    tokenizer.eos_id = tokenizer.special_tokens["<|im_end|>"]
    tokenizer.eos_ids = (tokenizer.eos_id,)
    model = built(tiny.LLAMA, tokenizer.vocab_size, max_length=1024)
    # It often ends a turn.
    model.output.data[tokenizer.eos_id] += 2 * model.norm.weight.data
    inputs = {"model": model, "processor": tokenizer, "train_dataset": rows or PROMPTS, "roles": roles}
    return runs.begin(stage, tmp_path / "run", CHOICES | choices, **inputs)


PARSER = "kitforge.kits.rlhf.reinforcement.tool_environment.parse_tool_calls"


def begin(*of_a_run: Any, **choices: Any) -> list[Rollout]:
    """The completions of the first round of a run."""
    return runs.collected(runs.opened(assembled(*of_a_run, **choices))[0])


def of_tokens(*, completion_tokens: list[list[int]]) -> list[list[float]]:
    return [[float(token) for token in tokens] for tokens in completion_tokens]


@pytest.mark.parametrize("is_environment", [False, True])
def test_a_policy_that_calls_a_tool_is_told_its_result(
    tmp_path: Path, is_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An untrained policy says anything, which is taken for a call.
    monkeypatch.setattr(PARSER, lambda *_: [ToolCall(name="add", arguments={"a": 1})])
    roles = {"environment": Scored} if is_environment else {"tools": [add, search], "reward": of_tokens}
    # The template is given the tools with every message too.
    answers = begin(
        tmp_path, THINKING.replace("</tool_response><", "</tool_response>' ~ (tools or [])|length ~ '<"), roles
    )
    tokenizer, schemas = HuggingFaceTokenizer(tmp_path / "tokenizer"), [function_schema(add), function_schema(search)]
    wanted = "<|im_start|>user\n<tool_response>3.0</tool_response>2<|im_end|>\n<|im_start|>assistant\n"
    heard = []
    # Every turn makes a call.
    figures = environment_metrics(answers)
    assert figures["tools/call_frequency"] == figures["environment/turns"] > 1
    assert figures["tools/failure_frequency"] == 0
    for each in answers:
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
    assert text.replace("\n" + wanted, "") == ""
    assert wanted in text


def broken(a: int) -> int:
    raise ConnectionError("gone")


async def later_broken(a: int) -> int:
    await asyncio.sleep(0)
    raise ConnectionError("gone")


def endless(a: int) -> list[Any]:
    """Returns what no JSON holds."""
    found: list[Any] = []
    found.append(found)
    return found


for tool in (broken, later_broken, endless):
    tool.__doc__ = "Fails.\n\nArgs:\n    a: Nothing.\n"


def told(result: Any) -> Any:
    messages, reward, is_over = asyncio.run(cast(Any, result)) if asyncio.iscoroutine(result) else result
    assert (reward, is_over) == (0.0, False)
    return [json.loads(each["content"]) for each in messages]


@pytest.mark.parametrize("tool", [broken, later_broken])
def test_a_tool_that_raises_is_told_to_the_policy_until_it_did_so_too_often(tool: Any) -> None:
    episode, failing, error = FunctionTools([add, tool]), call(tool.__name__, a=1), {"error": "ConnectionError: gone"}
    assert told(episode.step(failing)) == [error]
    assert told(episode.step(f"{failing} {failing}")) == [error, error]
    # A call that is answered begins the count anew; one that cannot be run does not count.
    assert told(episode.step(f"{call('add', a=1)}")) == [3.0]
    assert told(episode.step(f"{failing} {call('ad')} {failing} {failing}"))[::2] == [error, error]
    assert (episode.num_tool_calls, episode.num_tool_results, episode.num_tool_errors) == (8, 1, 6)
    with pytest.raises(ConnectionError, match="gone"):
        told(episode.step(failing))


def test_a_result_without_a_json_form_is_an_error_of_its_tool() -> None:
    (found,) = told(FunctionTools([endless]).step(call("endless", a=1)))
    assert "Circular" in found["error"]


@pytest.mark.parametrize(("most", "num_told"), [(0, 0), (1, 1), (9, 3)])
def test_errors_of_tools_are_counted_and_end_an_episode_after_some_in_a_row(
    most: int, num_told: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A call that no tool takes and one that raises in each turn; or an answer.
    failing = [ToolCall(name="ad"), ToolCall(name="broken", arguments={"a": 1})]
    monkeypatch.setattr(PARSER, lambda text, *_: failing if len(text) % 5 else [])
    roles = {"tools": [add, broken], "reward": of_tokens}
    answers = begin(tmp_path, THINKING, roles, **{"environment.max_consecutive_errors": most})
    assert any(each.failure is not None for each in answers) == (num_told < 3)
    for each in answers:
        has_failed = each.failure is not None
        assert each.num_tool_errors <= num_told + has_failed and each.num_tool_failures == 2 * each.num_tool_errors
        assert not has_failed or each.num_tool_errors == num_told + 1
        said = json.dumps(each.completion.observations)
        assert said.count("ConnectionError: gone") == min(each.num_tool_errors, len(each.turn_rewards) - 1)
        assert Rollout.from_dict(json.loads(json.dumps(each.to_dict()))) == replace(
            each, completion=replace(each.completion, columns={})
        )
    num_errors = sum(each.num_tool_errors for each in answers)
    figures = environment_metrics(answers)
    num_calls = sum(each.num_tool_calls or 0 for each in answers)
    assert num_errors > 0 and num_calls == 2 * num_errors
    assert (figures["tools/failure_frequency"], figures["tools/error_frequency"]) == (1.0, 0.5)


def test_rewards_get_the_last_reply_the_turns_and_the_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str], list[dict[str, Any]]]] = []

    def reward(*, completions: list[str], turns: list[Any], messages: list[Any]) -> list[float]:
        seen.extend(zip(completions, turns, messages, strict=True))
        return [float(len(each) % 7) for each in completions]

    def parsed(text: str, *_: Any) -> list[ToolCall]:
        return [ToolCall(name="add", arguments={"a": len(text)})] if len(text) % 4 else []

    monkeypatch.setattr(PARSER, parsed)
    answers = begin(tmp_path, THINKING, {"tools": [add], "reward": reward})
    assert {len(turns) for _, turns, _ in seen} >= {1, 3} and len(seen) == len(answers)
    for (last, turns, messages), each in zip(seen, answers, strict=True):
        assert each.reward == len(last) % 7 and turns[-1] == last
        prompt, *talk = messages
        assert prompt["role"] == "user" and prompt["content"].endswith("+1?")
        assert [each["content"] for each in talk[::2]] == turns
        assert {each["role"] for each in talk[::2]} == {"assistant"}
        assert talk[1::2] == [{"role": "tool", "name": "add", "content": str(len(text) + 2.0)} for text in turns[:-1]]
        assert sum(each.completion.turn_lengths) == sum(each.completion.loss_mask) == len(each.logprobs)


def test_a_check_of_the_answer_is_not_met_by_what_a_tool_said() -> None:
    tokenizer = ByteTokenizer()
    call_tokens, said, reply = (tuple(tokenizer.encode(text)) for text in ("add 2 3", " 5 ", "6"))
    end = (tokenizer.eos_id,)
    answer = PromptCompletion(
        prompt=tuple(tokenizer.encode("2+3?")),
        tokens=(*call_tokens, *end, *said, *reply, *end),
        is_finished=True,
        columns={"answer": "5"},
        loss_mask=(True,) * (len(call_tokens) + 1) + (False,) * len(said) + (True,) * 2,
        turn_lengths=(len(call_tokens) + 1, 2),
        observations=("", " 5 "),
    )
    scorer = scorer_of({"exact": "exact", "number": "gsm8k"}, tokenizer)
    for text, wanted in (("6", 0.0), ("5", 1.0)):
        tokens = (*answer.tokens[:-2], *tokenizer.encode(text), *end)
        (found,) = scorer.checked_rewards([replace(answer, tokens=tokens)])
        assert found.rewards == {"exact": wanted, "number": wanted}
    assert answer.messages(tokenizer) == [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "add 2 3"},
        {"role": "user", "content": " 5 "},
        {"role": "assistant", "content": "6"},
    ]


def test_a_distillation_with_tools_needs_no_reward(tmp_path: Path) -> None:
    teacher = runs.network(family={**tiny.LLAMA, "max_length": 1024}, padding=600)
    answers = begin(tmp_path, THINKING, {"tools": [add], "teacher": teacher}, stage="distill")
    assert {each.reward for each in answers} == {0.0}
