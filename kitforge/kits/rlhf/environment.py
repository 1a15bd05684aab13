"""Answers of several turns: a policy talks with something that replies, gives rewards and knows when it is over.

Tokens that the policy wrote go back to it, and into training, as they are; only what the environment says is encoded,
and none of that is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, final, runtime_checkable

import numpy as np

from kitforge.data.chat_datasets import PromptExample
from kitforge.data.template import Message, template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation import seed as seeds
from kitforge.foundation.errors import DataError, TrainingError
from kitforge.foundation.log import logger
from kitforge.inference.engine import Engine, Output
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.rlhf.config import EnvironmentOptions
from kitforge.kits.rlhf.rewards import PromptCompletion
from kitforge.kits.rlhf.rollout_batch import Rollout
from kitforge.kits.rlhf.step_pool import Job, StepPool
from kitforge.kits.rlhf.stop_strings import StoppingEngine

# What the policy is told: text that follows its own as it is, or messages that the chat template writes.
Reply: TypeAlias = str | Sequence[Message]
# What the policy is told, what its turn was worth, and whether the episode is over.
Step: TypeAlias = tuple[Reply, float, bool]

_log = logger(__name__)


class Environment(Protocol):
    """One episode: a tool, a game, a user that is played. A new object is made for each answer to a prompt. Methods run
    in threads, those of one object one after the other."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin the episode of a prompt's row; returns what follows the prompt before the policy speaks, often ""."""
        ...

    def step(self, response: str) -> Step | Awaitable[Step]:
        """Take what the policy said; returns what it is told, what that was worth, and whether the episode is over."""
        ...


@runtime_checkable
class CountsToolCalls(Protocol):
    """An environment that calls tools, whose calls stand in the metrics tools/*."""

    num_tool_calls: int  # in the episode so far
    num_tool_results: int  # calls that a tool answered; the others failed


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """An answer that is being written."""

    number: int  # of the prompt
    sample: int
    prompt: PromptExample
    environment: Environment
    conversation: list[Message] | None = None  # up to the present reply; None where it is not one of messages
    opening: str = ""  # with which the present reply begins, before the policy speaks
    tokens: list[int] = field(default_factory=list)  # after the prompt
    loss_mask: list[bool] = field(default_factory=list)  # which of them the policy wrote
    log_probs: list[float] = field(default_factory=list)  # of those
    rewards: list[float] = field(default_factory=list)  # of those
    turn_tokens: list[int] = field(default_factory=list)  # in this turn
    turn_rewards: list[float] = field(default_factory=list)
    failure: str | None = None  # what went wrong in its last step
    has_timed_out: bool = False
    is_finished: bool = False
    is_stopped: bool = False  # a stop string, and no end token, ended the last turn

    def append_observation(self, tokens: Sequence[int]) -> None:
        """What the environment says."""
        self.tokens += tokens
        self.loss_mask += [False] * len(tokens)

    def append_action(self, output: Output) -> None:
        """What the policy says."""
        self.tokens += output.tokens
        self.loss_mask += [True] * len(output.tokens)
        self.log_probs += output.logprobs
        self.rewards += [0.0] * len(output.tokens)
        self.turn_tokens += output.tokens

    def rollout(self, has_rewards: bool) -> Rollout:
        """The whole of it, each turn's reward on the turn's last token; without rewards, unless a step failed, the
        score is left to others."""
        answer = PromptCompletion(
            prompt=self.prompt.tokens,
            tokens=tuple(self.tokens),
            loss_mask=tuple(self.loss_mask),
            is_finished=self.is_finished,
            is_stopped=self.is_stopped,
            columns=self.prompt.columns,
        )
        tools = self.environment if isinstance(self.environment, CountsToolCalls) else None
        return Rollout(
            completion=answer,
            prompt_index=self.number,
            num_tool_calls=None if tools is None else tools.num_tool_calls,
            num_tool_failures=0 if tools is None else tools.num_tool_calls - tools.num_tool_results,
            logprobs=tuple(self.log_probs),
            score=tuple(self.rewards) if has_rewards else None if self.failure is None else self.rewards[-1],
            turn_rewards=tuple(self.turn_rewards),
            failure=self.failure,
            has_timed_out=self.has_timed_out,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRunner:
    """Where episodes are played: what makes an environment, for how many turns, and how long a whole text may be.

    All episodes take a turn, then all take the next one. Steps run in threads while the engine still draws the turns of
    others, and which of them ends first changes nothing: neither the order of the requests nor which of them share a
    forward pass.
    """

    make: Callable[[], Environment]
    tokenizer: Tokenizer
    max_turns: int
    max_tokens: int
    options: EnvironmentOptions
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas that the chat template was given with the prompts
    has_rewards: bool = True  # the environment gives them, and not the role `reward`

    def run(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, PromptExample]],
        options: InferenceOptions,
        num_samples: int,
        name: str,
    ) -> list[Rollout]:
        """`num_samples` episodes of each of the numbered prompts, in their order. Noise is keyed by `name`, prompt,
        sample and turn."""
        pool = StepPool(self.options.max_workers, self.options.timeout)
        episodes = [
            Episode(number=number, sample=sample, prompt=prompt, environment=self.make())
            for number, prompt in prompts
            for sample in range(num_samples)
        ]
        self._reset_all(episodes, pool)
        live, num_turns = episodes, 0
        while live:
            jobs = self._run_turn(engine, live, options, name, num_turns, pool)
            pool.wait(job for job, _ in jobs.values())
            live = [each for each in live if each in jobs and self._finish_turn(each, *jobs[each])]
            num_turns += 1
        self._log_failures(episodes)
        return [episode.rollout(self.has_rewards) for episode in episodes]

    def _reset_all(self, episodes: Sequence[Episode], pool: StepPool) -> None:
        jobs = [pool.submit(partial(each.environment.reset, each.prompt.columns)) for each in episodes]
        pool.wait(jobs)
        for episode, job in zip(episodes, jobs, strict=True):
            name = f"{type(episode.environment).__name__}.reset"
            if job.has_timed_out or job.error is not None:
                raise TrainingError(f"{name} failed", got=self._failure_text(job)) from job.error
            if not isinstance(job.result, str):
                raise TrainingError(f"{name} gave something that is no text", got=repr(job.result), expected='often ""')
            episode.conversation = None if episode.prompt.messages is None else list(episode.prompt.messages)
            episode.opening = job.result
            episode.append_observation(self.tokenizer.encode(job.result))
            if self._tokens_left(episode) < 1:
                raise TrainingError(
                    f"{name} leaves no room for an answer",
                    got=f"{len(episode.prompt.tokens) + len(episode.tokens)} tokens before the first answer",
                    expected=f"fewer than data.sequence_length={self.max_tokens}",
                )

    def _run_turn(
        self,
        engine: Engine,
        episodes: Sequence[Episode],
        options: InferenceOptions,
        name: str,
        number: int,
        pool: StepPool,
    ) -> dict[Episode, tuple[Job, bool]]:
        """Let the policy speak in each episode, and begin the environment's step as soon as it has; with whether the
        policy came to an end. Where the policy diverged, nothing was said."""
        live: dict[int, Episode] = {}
        for episode in episodes:
            key = seeds.key(name, episode.number, episode.sample, number)
            chosen = replace(options, max_new_tokens=min(options.max_new_tokens, self._tokens_left(episode)))
            live[engine.submit([*episode.prompt.tokens, *episode.tokens], chosen, key=key)] = episode
        stopping = StoppingEngine(engine, self.tokenizer, options.stop)
        jobs: dict[Episode, tuple[Job, bool]] = {}
        while engine.has_work:
            for output in stopping.step():
                episode = live[output.request]
                episode.append_action(output)
                if output.finish_reason is None or not episode.turn_tokens:
                    continue
                is_whole = output.finish_reason == "stop"
                episode.is_stopped = stopping.is_stopped(output)
                has_end = is_whole and not episode.is_stopped
                text = self.tokenizer.decode(episode.turn_tokens[:-1] if has_end else episode.turn_tokens)
                jobs[episode] = pool.submit(partial(episode.environment.step, text)), is_whole
            pool.check()
        return jobs

    def _tokens_left(self, episode: Episode) -> int:
        return self.max_tokens - len(episode.prompt.tokens) - len(episode.tokens)

    def _finish_turn(self, episode: Episode, job: Job, has_stopped: bool) -> bool:
        """Take the environment's answer to a turn. The episode is over where it says so or fails, after the last turn,
        where the turn was cut off, and where its answer leaves no room for another."""
        said, episode.turn_tokens = episode.turn_tokens, []
        if job.has_timed_out or job.error is not None:
            observation, reward, is_over = self._failed_step(episode, job)
        else:
            observation, reward, is_over = self._validated_step(episode.environment, job.result)
            episode.is_finished = is_over and has_stopped
        episode.rewards[-1] = reward
        episode.turn_rewards.append(reward)
        if is_over or not has_stopped or len(episode.turn_rewards) == self.max_turns:
            return False
        tokens = self._encode_observation(episode, said, observation)
        if len(tokens) >= self._tokens_left(episode):
            return False
        episode.append_observation(tokens)
        return True

    def _failed_step(self, episode: Episode, job: Job) -> Step:
        """What a step is worth that raised or took too long; it is the last one."""
        failure = f"{type(episode.environment).__name__}.step: {self._failure_text(job)}"
        if self.options.on_error == "raise":
            raise TrainingError(
                f"{type(episode.environment).__name__}.step failed",
                got=self._failure_text(job),
                fix="mend it, or add environment.on_error=0 to give such an answer the reward 0 and to count it",
            ) from job.error
        episode.failure, episode.has_timed_out = failure, job.has_timed_out
        return "", float(self.options.on_error), True

    def _failure_text(self, job: Job) -> str:
        too_long = f"more than environment.timeout={self.options.timeout} seconds"
        return too_long if job.has_timed_out else repr(job.error)

    def _validated_step(self, environment: Environment, result: Any) -> Step:
        """What a step gave, if that is what it should be."""
        name = f"{type(environment).__name__}.step"
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise TrainingError(
                f"{name} gave the wrong number of values",
                got=repr(result),
                expected="what the policy is told, a reward, and whether the episode is over",
            )
        observation, reward, is_over = result
        is_chat = isinstance(observation, (list, tuple)) and all(_is_message(each) for each in observation)
        if not isinstance(observation, str) and not is_chat:
            raise TrainingError(
                f"{name} gave something that cannot be told",
                got=repr(observation),
                expected='text, often "", or a list of messages with role and content',
            )
        try:
            number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise TrainingError(f"{name} gave a reward that is no number", got=repr(reward), expected="a finite number")
        if not isinstance(is_over, (bool, np.bool_)):
            raise TrainingError(
                f"{name} does not say whether the episode is over", got=repr(is_over), expected="True or False"
            )
        return observation, number, bool(is_over)

    def _encode_observation(self, episode: Episode, turn_tokens: Sequence[int], observation: Reply) -> list[int]:
        """What the environment says as tokens. Messages are what the chat template writes after the policy's reply."""
        if isinstance(observation, str):
            if episode.is_stopped:
                # The reply has no end yet: this is a part of it.
                episode.opening += self.tokenizer.decode(turn_tokens) + observation
            else:
                episode.conversation = None
            return self.tokenizer.encode(observation)
        name = f"{type(episode.environment).__name__}.step"
        if episode.conversation is None:
            raise TrainingError(
                f"{name} gave messages where there is no conversation",
                got="a prompt that is text, or text that was told before",
                expected="a prompt that is a list of messages, and messages in every turn",
            )
        has_end = not episode.is_stopped
        reply = episode.opening + self.tokenizer.decode(turn_tokens[:-1] if has_end else turn_tokens)
        try:
            tokens = template_of(self.tokenizer).continuation(
                episode.conversation, reply, observation, has_end=has_end, **episode.prompt.inputs
            )
        except DataError as error:
            raise TrainingError(f"{name} gave messages that cannot be told", got=str(error)) from error
        episode.conversation += [{"role": "assistant", "content": reply}, *observation]
        episode.opening = ""
        return tokens

    def _log_failures(self, episodes: Sequence[Episode]) -> None:
        """Log the failures of a round. Raises TrainingError where every one of several steps failed."""
        failures = [each.failure for each in episodes if each.failure is not None]
        num_steps = sum(len(each.turn_rewards) for each in episodes)
        if not failures:
            return
        if len(failures) == num_steps > 1:
            raise TrainingError(f"all {num_steps} steps of an environment failed", got=failures[0])
        _log.warning(
            "%d of %d steps of the environment failed and score %s; the first: %s",
            len(failures),
            num_steps,
            self.options.on_error,
            failures[0],
        )


def _is_message(value: Any) -> bool:
    """Whether it is a message that a template can read; what its content may be is the template's matter."""
    return isinstance(value, Mapping) and isinstance(value.get("role"), str) and "content" in value
