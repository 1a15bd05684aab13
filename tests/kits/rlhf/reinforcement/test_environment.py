"""A policy that talks with a calculator: what it wrote is learnt as it wrote it, and nothing else is."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from kitforge.data.chat.template import template_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.foundation.types import MicroBatch
from kitforge.inference.engine import Engine
from kitforge.kits.rlhf.reinforcement.experience import environment_metrics
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout, target_logprobs
from kitforge.kits.rlhf.reinforcement.rollout_log import read_rollouts
from kitforge.kits.rlhf.roles.value_head import policy_of
from tests.kits.rlhf import runs
from tests.patience import PATIENCE
from tests.trainer import tiny

ROWS = [{"prompt": f"{n}+{n % 3}= ", "numbers": [n, n % 3]} for n in range(12)]
CHOICES = {
    "rl.prompts_per_rollout": 4,
    "rollout.max_new_tokens": 6,
    "rollout.max_turns": 3,
    "data.sequence_length": 64,
    "kl.coef": 0.0,
    "rl.whiten_advantages": False,
    "rl.gamma": 1.0,
    "rl.gae_lambda": 1.0,
}


class Calculator:
    """Says whether a digit of the sum was said, and what the sum is; the second answer is the last one."""

    played: list[Calculator] = []

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.told: list[str] = []
        Calculator.played.append(self)

    def reset(self, row: Mapping[str, Any]) -> str:
        self.sum = sum(row["numbers"])
        self.told.append("go: ")
        return self.told[-1]

    def step(self, response: str) -> tuple[str, float, bool]:
        self.heard.append(response)
        self.told.append(f" no, {self.sum};")
        return self.told[-1], len(self.heard) + len(response) / 8, len(self.heard) == 2


def talkative(dtype: torch.dtype = torch.float64, strength: float = 3) -> nn.Module:
    """A network that often ends an answer, so that there are further turns."""
    model = runs.network(dtype)
    cast(Any, model).output.data[ByteTokenizer.eos_id] += strength * cast(Any, model).norm.weight.data
    return model


def first(
    stage: str = "ppo", environment: Any = Calculator, **choices: Any
) -> tuple[nn.Module, MicroBatch, list[Rollout]]:
    """Network, first micro-batch and its answers, in the order in which they were drawn."""
    Calculator.played = []
    roles = {"environment": environment}
    assembly = runs.begin(stage, None, CHOICES | choices, model=talkative(), train_dataset=ROWS, roles=roles)
    task, model, (batch, *_) = runs.opened(assembly)
    return model, batch, runs.collected(task)


def test_what_the_environment_said_is_in_the_text_and_not_in_the_loss() -> None:
    _, batch, answers = first()
    byte = ByteTokenizer()
    assert max(len(each.heard) for each in Calculator.played) == 2
    for answer, game in zip(answers, Calculator.played, strict=True):
        tokens, learnt = answer.completion.tokens, answer.completion.loss_mask
        # Whether the last reply was needed or not, those before each answer are there, in their order.
        said = byte.encode("".join(game.told[: len(game.heard)]))
        assert [token for token, own in zip(tokens, learnt, strict=True) if not own] == said
        own = [token for token, is_own in zip(tokens, learnt, strict=True) if is_own]
        assert byte.decode([token for token in own if token != byte.eos_id]) == "".join(game.heard)
        assert len(own) == len(answer.logprobs) == len(cast(tuple[float, ...], answer.score))
    wanted = [
        (-100,) * (len(each.completion.prompt) - 1)
        + tuple(t if own else -100 for t, own in zip(each.completion.tokens, each.completion.loss_mask, strict=True))
        for each in answers
    ]
    found = sorted(tuple(row.tolist()) for row in batch["targets"])
    width = batch["targets"].shape[1]
    assert found == sorted(each + (-100,) * (width - len(each)) for each in wanted)


def test_probabilities_of_all_turns_are_those_of_the_trainer_and_tokens_are_those_that_were_written() -> None:
    model, batch, answers = first()
    with torch.no_grad():
        found, _ = target_logprobs(policy_of(model), batch["tokens"], batch["targets"], 1.0)
    assert float((found - batch["old_logprobs"]).abs().max()) < 1e-10
    # Bytes that are no UTF-8, which a text in between would have changed.
    assert any("\ufffd" in ByteTokenizer().decode(each.completion.tokens) for each in answers)


def test_each_turn_earns_its_own_reward() -> None:
    _, _, answers = first()
    for answer, game in zip(answers, Calculator.played, strict=True):
        wanted = [place + len(heard) / 8 for place, heard in enumerate(game.heard, start=1)]
        assert [each for each in cast(tuple[float, ...], answer.score) if each] == wanted
        assert answer.reward == pytest.approx(sum(wanted))
        # The last token that the policy wrote in each turn.
        turns = [len(list(run)) for own, run in itertools.groupby(answer.completion.loss_mask) if own]
        ends = [place - 1 for place in itertools.accumulate(turns)]
        assert [place for place, each in enumerate(cast(tuple[float, ...], answer.score)) if each] == ends
    with_two = next(each for each, game in zip(answers, Calculator.played, strict=True) if len(game.heard) == 2)
    assert with_two.completion.is_finished or len(with_two.logprobs) > 6


def test_an_episode_that_is_cut_in_its_last_turn_has_not_ended() -> None:
    _, _, answers = first(**{"rl.prompts_per_rollout": 9})
    over = [answer for answer, game in zip(answers, Calculator.played, strict=True) if len(game.heard) == 2]
    is_cut = [answer.completion.tokens[-1] != ByteTokenizer.eos_id for answer in over]
    assert [answer.completion.is_finished for answer in over] == [not each for each in is_cut]
    assert any(is_cut)


@pytest.mark.slow
def test_an_interrupted_run_of_episodes_goes_on_bit_for_bit_and_keeps_them(tmp_path: Path) -> None:
    choices = CHOICES | {"trainer.checkpoint_every": 1, "trainer.max_steps": 4, "rl.num_minibatches": 2}
    given: dict[str, Any] = {"train_dataset": ROWS, "roles": {"environment": Calculator}}

    def begin(folder: Path, **more: Any) -> Any:
        return runs.begin(
            "grpo", folder, choices | {"trainer.save_total_limit": 9} | more, model=talkative(torch.float32), **given
        )

    whole = begin(tmp_path / "whole")
    runs.finish(whole)
    assert read_rollouts(tmp_path / "whole", 1) == runs.collected(whole.loop.task)
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "killed", 1)
    runs.finish(begin(folder, resume="auto"))
    tiny.assert_same(folder, tmp_path / "whole")


class Endless(Calculator):
    def reset(self, row: Mapping[str, Any]) -> str:
        return "x" * 99


class Vague(Calculator):
    def step(self, response: str) -> tuple[str, float, bool]:
        return "", float("nan"), False


def test_what_an_environment_may_not_do_is_told() -> None:
    with pytest.raises(TrainingError, match="no room for a completion"):
        first(environment=Endless)
    with pytest.raises(TrainingError, match="an invalid reward"):
        first(environment=Vague)
    with pytest.raises(ConfigError, match="environment computes the rewards"):
        first(**{"rl.missing_eos_penalty": 1.0})
    with pytest.raises(ConfigError, match="environment"):
        first(environment=Calculator())
    with pytest.raises(ConfigError, match="two roles compute rewards"):
        runs.begin("ppo", None, CHOICES, roles={"environment": Calculator, "reward": runs.letters})


CHATS = [{"prompt": [{"role": "user", "content": f"{n}+1?"}], "sum": n + 1} for n in range(12)]
TALKING = {"data.sequence_length": 128}
STRENGTH = 1


class Chat:
    """Answers with a message, which the template of no tokenizer writes."""

    played: list[Chat] = []

    def __init__(self) -> None:
        self.heard: list[str] = []
        Chat.played.append(self)

    def reset(self, row: Mapping[str, Any]) -> str:
        return ""

    def step(self, response: str) -> tuple[Any, float, bool]:
        self.heard.append(response)
        return [{"role": "tool", "content": "4"}, {"role": "user", "content": "so?"}], len(response) / 8, False


def chat(environment: Any = Chat, rows: list[dict[str, Any]] = CHATS, **choices: Any) -> list[Rollout]:
    """The answers of the first round."""
    Chat.played = []
    given: dict[str, Any] = {"train_dataset": rows, "roles": {"environment": environment}}
    assembly = runs.begin("grpo", None, CHOICES | TALKING | choices, model=talkative(strength=STRENGTH), **given)
    return runs.collected(runs.opened(assembly)[0])


def test_messages_of_an_environment_are_what_the_template_writes_after_the_reply() -> None:
    byte, template = ByteTokenizer(), template_of(ByteTokenizer())
    answers = chat()
    assert max(len(each.heard) for each in Chat.played) == 3
    told = template.continuation([], "", cast(Any, Chat().step(""))[0], has_end=True)
    assert byte.decode(told) == "\n\nTool: 4\n\nHuman: so?\n\nAssistant: "
    for answer in answers:
        tokens, learnt = answer.completion.tokens, answer.completion.loss_mask
        own = [token for token, is_own in zip(tokens, learnt, strict=True) if is_own]
        heard = [token for token, is_own in zip(tokens, learnt, strict=True) if not is_own]
        assert heard == told * (len(answer.turn_rewards) - 1)
        assert len(own) == len(answer.logprobs)
        # What the policy drew and the ends of its turns are there as they were.
        assert own.count(byte.eos_id) >= len(answer.turn_rewards) - 1


def test_a_reply_that_the_prompt_begins_is_gone_on_with_and_heard_as_one() -> None:
    byte, begun = ByteTokenizer(), {"role": "assistant", "content": "Well"}
    answers = chat(rows=[{**row, "prompt": [*row["prompt"], begun]} for row in CHATS])
    for answer in answers:
        assert byte.decode(answer.completion.prompt).endswith("\n\nAssistant: Well")
        assert byte.eos_id not in answer.completion.prompt
    assert max(len(each.heard) for each in Chat.played) == 3


class Slow(Chat):
    """Those that begin first end last."""

    def step(self, response: str) -> tuple[Any, float, bool]:
        time.sleep(0.001 * (len(response) * 7 % 5))
        return super().step(response)


class Async(Chat):
    async def step(self, response: str) -> tuple[Any, float, bool]:  # type: ignore[override]
        await asyncio.sleep(0.001 * (len(response) * 7 % 5))
        return Chat.step(self, response)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [Slow, Async])
def test_answers_do_not_depend_on_which_step_ends_first(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, prompts = Engine.submit, []

    def recorded(self: Engine, prompt: Any, *rest: Any, **options: Any) -> int:
        prompts.append(tuple(prompt))
        return submit(self, prompt, *rest, **options)

    monkeypatch.setattr(Engine, "submit", recorded)
    wanted = chat(Chat, **{"environment.max_workers": 1})
    in_order = prompts.copy()
    for workers in (1, 8):
        prompts.clear()
        # Tuples of floats: equal is equal to the last bit, which other batch mates may change.
        assert chat(environment, **{"environment.max_workers": workers}) == wanted
        assert prompts == in_order


class Meeting(Chat):
    """A step ends only once as many others have begun."""

    barrier = threading.Barrier(4)

    def step(self, response: str) -> tuple[Any, float, bool]:
        self.barrier.wait(PATIENCE)
        return "", 1.0, True


def test_steps_of_a_round_overlap() -> None:
    answers = chat(Meeting, **{"rl.num_generations": 4, "environment.max_workers": 4})
    assert [each.failure for each in answers] == [None] * 16


class Failing(Chat):
    """Fails where the policy says something of an odd length."""

    def step(self, response: str) -> tuple[Any, float, bool]:
        if len(response) % 2:
            raise ConnectionError("the server of tools is gone")
        return "", 1.0, True


class Hanging(Failing):
    def step(self, response: str) -> tuple[Any, float, bool]:
        if len(response) % 2:
            Hanging.is_over.wait(PATIENCE)
        return "", 1.0, True

    is_over = threading.Event()


class HangingAsync(Failing):
    async def step(self, response: str) -> tuple[Any, float, bool]:  # type: ignore[override]
        if len(response) % 2:
            await asyncio.sleep(60)
        return "", 1.0, True


@pytest.mark.slow
@pytest.mark.parametrize("environment", [Failing, Hanging, HangingAsync])
def test_a_step_that_fails_has_the_reward_of_on_error_and_is_counted(
    environment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    choices = {"environment.on_error": -0.5, "environment.timeout": 0.2, "environment.max_workers": 1}
    if environment is Failing:
        choices["environment.timeout"] = 60.0
    Hanging.is_over.clear()
    answers = chat(environment, **choices)
    Hanging.is_over.set()
    failed = [each for each in answers if each.failure is not None]
    assert 0 < len(failed) < len(answers)
    assert {each.reward for each in failed} == {-0.5}
    assert {each.reward for each in answers if each.failure is None} == {1.0}
    assert not any(each.completion.is_finished for each in failed)
    figures = environment_metrics(answers)
    is_error = environment is Failing
    assert figures["environment/errors"] == len(failed) * is_error
    assert figures["environment/timeouts"] == len(failed) * (not is_error)
    assert figures["environment/turns"] == 1.0
    reason = "the server of tools is gone" if is_error else "more than environment.timeout=0.2 seconds"
    assert f"{environment.__name__}.step" in caplog.text
    assert reason in caplog.text


def test_failures_stand_in_metrics_and_rollouts(tmp_path: Path) -> None:
    choices = CHOICES | TALKING | {"trainer.max_steps": 1, "trainer.eval_first": True}
    given: dict[str, Any] = {"train_dataset": CHATS, "roles": {"environment": Failing}}
    run = runs.begin("grpo", tmp_path / "run", choices, model=talkative(strength=STRENGTH), **given)
    metrics = runs.finish(run)
    answers = read_rollouts(tmp_path / "run", 0)
    assert metrics["environment/errors"] == sum(each.failure is not None for each in answers) > 0
    assert metrics["eval/environment/timeouts"] == 0
    assert answers == runs.collected(run.loop.task)


def test_a_failing_step_may_end_the_run() -> None:
    with pytest.raises(TrainingError, match=r"Failing\.step failed\n.*server of tools is gone"):
        chat(Failing, **{"environment.on_error": "raise"})
    broken = type("Broken", (Chat,), {"step": lambda self, response: 1 / 0})
    with pytest.raises(TrainingError, match=r"all \d+ steps of an environment failed\n.*Broken\.step: ZeroDivision"):
        chat(broken)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (None, "did not return three values"),
        ((" x", 1.0), "did not return three values"),
        ((None, 1.0, False), "an invalid observation"),
        (([{"role": "user"}], 1.0, False), "an invalid observation"),
        (("", None, False), "an invalid reward"),
        (("", "1.0", False), "an invalid reward"),
        (("", 1.0, None), "an invalid end of episode"),
    ],
)
def test_what_a_step_may_not_give_names_the_class(given: Any, problem: str) -> None:
    odd = type("Odd", (Chat,), {"step": lambda self, response: given})
    with pytest.raises(TrainingError, match=rf"Odd\.step .*{problem}"):
        chat(odd)


def test_messages_need_a_conversation() -> None:
    with pytest.raises(TrainingError, match=r"Chat\.step returned messages, but the episode is plain text"):
        chat(Chat, ROWS)


@pytest.mark.parametrize("environment", [None, Chat])
def test_a_stop_string_ends_an_answer_that_keeps_it_and_its_probabilities(environment: Any) -> None:
    roles = {"reward": runs.letters} if environment is None else {"environment": environment}

    def drawn(**choices: Any) -> tuple[nn.Module, MicroBatch, list[Rollout]]:
        given = CHOICES | TALKING | choices | {"rl.num_generations": 4}
        assembly = runs.begin("grpo", None, given, model=runs.network(torch.float64), train_dataset=CHATS, roles=roles)
        task, model, (batch, *_) = runs.opened(assembly)
        return model, batch, runs.collected(task)

    byte, (_, _, plain) = ByteTokenizer(), drawn()
    # One of two tokens, of which the first alone stops nothing.
    texts = (byte.decode(each.completion.tokens[1:3]) for each in plain)
    pair = next(each for each in texts if len(each) == 2 and each.isascii())
    stop = (pair, *(each for each in "2yqg&}" if each not in pair))
    model, batch, stopped = drawn(**{"rollout.stop": stop})
    assert any(each.completion.is_stopped or len(each.turn_rewards) > 1 for each in stopped)
    for free, cut in zip(plain, stopped, strict=True):
        bytes_of_turn = bytes(token if token < 256 else 255 for token in free.completion.tokens[:6])
        ends = [bytes_of_turn.find(each.encode()) + len(each) for each in stop if each.encode() in bytes_of_turn]
        first_turn = min(ends, default=6)
        own = cut.completion.tokens[:first_turn]
        # The same tokens with the same probabilities, up to the stop string and with it.
        assert own == free.completion.tokens[:first_turn]
        assert cut.logprobs[: len(own)] == pytest.approx(free.logprobs[: len(own)], abs=1e-12)
        if environment is None:
            assert cut.completion.tokens == own
            assert cut.completion.is_stopped == bool(ends)
            assert cut.completion.text_tokens == (
                own if cut.completion.is_stopped or not cut.completion.is_finished else own[:-1]
            )
            assert cut.completion.is_finished or not cut.completion.is_stopped
        elif len(cut.turn_rewards) > 1 and ends:
            # The end of the reply, which the policy did not draw, is what it is told.
            assert cut.completion.tokens[first_turn] == byte.eos_id
            assert not cut.completion.loss_mask[first_turn]
    with torch.no_grad():
        found, _ = target_logprobs(policy_of(model), batch["tokens"], batch["targets"], 1.0)
    assert float((found - batch["old_logprobs"]).abs().max()) < 1e-10
