"""Multi-turn rollouts with environments, which return observations, rewards and the end of the episode.

Tokens of the policy are kept unchanged in the context and in training. Only observations are encoded; they are not in
the loss mask.
"""

import inspect
import json
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from kitforge.data.chat.datasets import PromptExample
from kitforge.data.chat.template import BegunMessage, ChatTemplate, Message, template_of
from kitforge.data.text.continuation import Detokenizer, ReplyMarks, decode_continuation, encode_continuation
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation import seed as seeds
from kitforge.foundation.errors import DataError, TrainingError
from kitforge.foundation.log import logger
from kitforge.inference.engine import Engine, Output
from kitforge.inference.text_engine import InferenceOptions, TextDelta, TextEngine
from kitforge.kits.rlhf.config import EnvironmentOptions
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.roles.prompt_completion import Observation, PromptCompletion


@dataclass(slots=True, eq=False)
class Job:
    """One call with its result or its error; neither after a time-out."""

    call: Callable[[], Any]
    result: Any = None
    error: BaseException | None = None
    is_done: bool = False
    has_timed_out: bool = False
    started: float = math.inf  # by the monotonic clock
    awaited: Future[Any] | None = field(default=None, repr=False)  # of an async call


class StepPool:
    """Runs calls, plain or async, in up to `max_workers` daemon threads; `timeout` in seconds per call, None: no limit.

    Python cannot stop a thread: a timed-out call keeps its thread, and a new one replaces it. An async call is
    cancelled. All async calls run in `loop`.
    """

    def __init__(self, max_workers: int, timeout: float | None, loop: EventLoop) -> None:
        self._max_workers = max_workers
        self._timeout = timeout
        self._loop = loop
        self._pending: deque[Job] = deque()
        self._running: set[Job] = set()
        self._changed = threading.Condition()

    def submit(self, call: Callable[[], Any]) -> Job:
        """Queue a call."""
        job = Job(call)
        with self._changed:
            self._pending.append(job)
            self._start_thread()
        return job

    def check(self) -> None:
        """Time out overdue calls."""
        with self._changed:
            self._drop_overdue()

    def wait(self, jobs: Iterable[Job]) -> None:
        """Wait until all of these calls are done or timed out."""
        with self._changed:
            for job in jobs:
                while not job.is_done:
                    self._drop_overdue()
                    if not job.is_done:
                        self._changed.wait(self._time_left())

    def _start_thread(self) -> None:
        """Start a thread if calls wait and the limit allows it."""
        if self._pending and len(self._running) < self._max_workers:
            job = self._take()
            threading.Thread(target=self._work, args=(job,), name="environment", daemon=True).start()

    def _take(self) -> Job:
        job = self._pending.popleft()
        job.started = time.monotonic()
        self._running.add(job)
        return job

    def _work(self, job: Job) -> None:
        """Run queued calls until there are none, or until this thread was replaced."""
        while True:
            result, error = self._run(job)
            with self._changed:
                if job.has_timed_out:
                    return
                job.result, job.error, job.is_done = result, error, True
                self._running.remove(job)
                self._changed.notify_all()
                if not self._pending:
                    return
                job = self._take()

    def _run(self, job: Job) -> tuple[Any, BaseException | None]:
        try:
            with torch.no_grad():
                result = job.call()
            if inspect.isawaitable(result):
                job.awaited = self._loop.submit(result)
                result = job.awaited.result()
        except BaseException as error:  # noqa: BLE001 (an environment is foreign code, and may even call sys.exit)
            return None, error
        return result, None

    def _drop_overdue(self) -> None:
        if self._timeout is None:
            return
        overdue = [job for job in self._running if time.monotonic() - job.started >= self._timeout]
        for job in overdue:
            job.has_timed_out = job.is_done = True
            self._running.remove(job)
            if job.awaited is not None:
                job.awaited.cancel()
            self._start_thread()

    def _time_left(self) -> float | None:
        """Seconds until the next time-out."""
        if self._timeout is None or not self._running:
            return None
        return max(min(job.started for job in self._running) + self._timeout - time.monotonic(), 0.0)


# An observation: text, or messages that the chat template renders.
Reply: TypeAlias = str | Sequence[Message]
# Observation, reward of the turn, and whether the episode is over.
Step: TypeAlias = tuple[Reply, float, bool]

_log = logger(__name__)


class PromptEnd(str):
    """An observation of `reset` that belongs to the last message of the prompt."""


class Environment(Protocol):
    """One episode, such as a tool, a game or a simulated user. There is one object per completion. Methods run in
    threads, those of one object in sequence."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Start an episode for the row of a prompt. Returns text after the prompt and before the policy, often ""."""

    def step(self, completion: str) -> Step | Awaitable[Step]:
        """Take the text of the policy. Returns the observation, the reward and whether the episode is over."""


@runtime_checkable
class CountsToolCalls(Protocol):
    """An environment with tools; their calls are logged as metrics tools/*."""

    num_tool_calls: int  # in the episode so far
    num_tool_results: int  # calls that returned a result; the others failed


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """An episode in progress."""

    number: int  # of the prompt
    sample: int
    prompt: PromptExample
    environment: Environment
    conversation: list[Message] | None = None  # messages before the current reply; None for plain text
    opening: str = ""  # text of the current reply that precedes the policy's tokens
    tokens: list[int] = field(default_factory=list)  # after the prompt
    loss_mask: list[bool] = field(default_factory=list)  # True for tokens of the policy
    log_probs: list[float] = field(default_factory=list)  # per token of the policy
    rewards: list[float] = field(default_factory=list)  # per token of the policy
    turn_tokens: list[int] = field(default_factory=list)  # tokens of the policy in this turn
    turn_rewards: list[float] = field(default_factory=list)
    turn_lengths: list[int] = field(default_factory=list)  # tokens of the policy by turn
    observations: list[Observation] = field(default_factory=list)  # before each turn
    is_turn_ended: bool = False  # the last turn is whole, and the episode might go on
    failure: str | None = None  # error of the last step
    has_timed_out: bool = False
    is_finished: bool = False
    is_stopped: bool = False  # the last turn ended with a stop string, without an EOS token

    def append_observation(self, said: Reply, tokens: Sequence[int]) -> None:
        """Append an observation and its tokens."""
        # Messages are kept as the JSON values that a rollout file holds.
        self.observations.append(said if isinstance(said, str) else json.loads(json.dumps(said, default=str)))
        self.tokens += tokens
        self.loss_mask += [False] * len(tokens)

    def append_action(self, output: Output | TextDelta) -> None:
        """Append tokens of the policy."""
        self.tokens += output.tokens
        self.loss_mask += [True] * len(output.tokens)
        self.log_probs += output.logprobs
        self.rewards += [0.0] * len(output.tokens)
        self.turn_tokens += output.tokens

    def rollout(self, has_rewards: bool) -> Rollout:
        """The episode as a rollout; each turn's reward is on the last token of the turn. Without `has_rewards` the
        score is None, to be filled in by the reward role, unless a step failed."""
        completion = PromptCompletion(
            prompt=self.prompt.tokens,
            tokens=tuple(self.tokens),
            loss_mask=tuple(self.loss_mask),
            is_finished=self.is_finished,
            is_stopped=self.is_stopped,
            columns={**self.prompt.columns, **getattr(self.environment, "reward_columns", {})},
            prompt_messages=self.prompt.messages,
            turn_lengths=tuple(self.turn_lengths),
            observations=tuple(self.observations[: len(self.turn_lengths)]),
            is_turn_ended=self.is_turn_ended,
        )
        tools = self.environment if isinstance(self.environment, CountsToolCalls) else None
        return Rollout(
            completion=completion,
            prompt_index=self.number,
            num_tool_calls=None if tools is None else tools.num_tool_calls,
            num_tool_failures=0 if tools is None else tools.num_tool_calls - tools.num_tool_results,
            num_tool_errors=getattr(tools, "num_tool_errors", 0),
            logprobs=tuple(self.log_probs),
            score=tuple(self.rewards) if has_rewards else None if self.failure is None else self.rewards[-1],
            turn_rewards=tuple(self.turn_rewards),
            failure=self.failure,
            has_timed_out=self.has_timed_out,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentRunner:
    """Runs episodes of environments made by `make`, of at most `max_turns` turns and `max_tokens` tokens.

    All episodes advance turn by turn. Steps run in threads while the engine generates for other episodes. Their timing
    changes neither the order of requests nor their batches.
    """

    make: Callable[[], Environment]
    tokenizer: Tokenizer
    max_turns: int
    max_tokens: int
    options: EnvironmentOptions
    loop: EventLoop = field(default_factory=EventLoop)  # of async steps
    tools: Sequence[Mapping[str, Any]] | None = None  # JSON schemas rendered into the prompts
    marks: ReplyMarks = field(default_factory=ReplyMarks)  # of calls, whose special tokens are text of a turn
    has_rewards: bool = True  # rewards come from the environment instead of the role `reward`
    own_rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # of its class, beside that role

    def run(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, PromptExample]],
        options: InferenceOptions,
        num_samples: int,
        name: str,
    ) -> list[Rollout]:
        """`num_samples` episodes per numbered prompt, in order. Sampling noise is keyed by `name`, prompt, sample and
        turn."""
        pool = StepPool(self.options.max_workers, self.options.timeout, self.loop)
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
            name, said = f"{_name(episode)}.reset", job.result
            if job.has_timed_out or job.error is not None:
                raise TrainingError(f"{name} failed", got=self._failure_text(job)) from job.error
            if not isinstance(said, str):
                raise TrainingError(f"{name} returned a value that is not text", got=repr(said), expected="text")
            if isinstance(said, PromptEnd):
                episode.prompt, said = longer_prompt(episode.prompt, template_of(self.tokenizer), said), ""
            episode.conversation = None if episode.prompt.messages is None else list(episode.prompt.messages)
            episode.opening = said
            if episode.conversation and isinstance(episode.conversation[-1], BegunMessage):
                episode.opening = episode.conversation.pop()["content"] + said
            opening = encode_continuation(self.tokenizer, episode.prompt.tokens, said)
            episode.append_observation(said, opening)
            if self._tokens_left(episode) < 1:
                raise TrainingError(
                    f"{name} leaves no room for a completion",
                    got=f"{len(episode.prompt.tokens) + len(episode.tokens)} tokens before the first completion",
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
        """Generate one turn for each episode, and submit the environment's step as soon as a turn is complete. Returns
        the steps, and whether the turn ended with an EOS token or stop string. An episode is missing if the policy
        generated no token because it diverged."""
        live: dict[int, Episode] = {}
        texts = TextEngine(engine, self.tokenizer) if options.stop else engine
        for episode in episodes:
            key = seeds.key(name, episode.number, episode.sample, number)
            chosen = replace(options, max_new_tokens=min(options.max_new_tokens, self._tokens_left(episode)))
            prompt = [*episode.prompt.tokens, *episode.tokens]
            live[texts.submit(prompt, chosen, key=key)] = episode
        jobs: dict[Episode, tuple[Job, bool]] = {}
        while engine.has_work:
            for output in texts.step():
                if output.error is not None:
                    raise output.error
                episode = live[output.request]
                episode.append_action(output)
                if output.finish_reason is None or not episode.turn_tokens:
                    continue
                is_whole = output.finish_reason == "stop"
                episode.is_stopped = isinstance(output, TextDelta) and output.hit_stop_string
                has_end = is_whole and not episode.is_stopped
                text = self._turn_text(episode, episode.turn_tokens, has_end=has_end)
                jobs[episode] = pool.submit(partial(episode.environment.step, text)), is_whole
            pool.check()
        return jobs

    def _tokens_left(self, episode: Episode) -> int:
        return self.max_tokens - len(episode.prompt.tokens) - len(episode.tokens)

    def _turn_text(self, episode: Episode, turn_tokens: Sequence[int], *, has_end: bool) -> str:
        """The text of the last tokens of an episode, without their EOS token."""
        before = [*episode.prompt.tokens, *episode.tokens[: len(episode.tokens) - len(turn_tokens)]]
        own = turn_tokens[:-1] if has_end else turn_tokens
        if not self.marks.spelled:
            return decode_continuation(self.tokenizer, before, own)
        return Detokenizer(self.tokenizer, prompt=before, marks=self.marks).push(own, is_last=True)

    def _finish_turn(self, episode: Episode, job: Job, has_stopped: bool) -> bool:
        """Append the result of a step; returns whether the episode continues. It ends if the step says so or fails,
        after the last turn, after a truncated turn, or if the observation leaves no room for another turn."""
        said, episode.turn_tokens = episode.turn_tokens, []
        if job.has_timed_out or job.error is not None:
            observation, reward, is_over = self._failed_step(episode, job)
        else:
            observation, reward, is_over = self._validated_step(_name(episode), job.result)
            episode.is_finished = is_over and has_stopped
        episode.rewards[-1] = reward
        episode.turn_rewards.append(reward)
        episode.turn_lengths.append(len(said))
        episode.is_turn_ended = has_stopped and not is_over
        if is_over or not has_stopped or len(episode.turn_rewards) == self.max_turns:
            return False
        tokens = self._encode_observation(episode, said, observation)
        if len(tokens) >= self._tokens_left(episode):
            episode.is_turn_ended = False
            return False
        episode.append_observation(observation, tokens)
        return True

    def _failed_step(self, episode: Episode, job: Job) -> Step:
        """The result of a step that raised or timed out; it ends the episode."""
        failure = f"{_name(episode)}.step: {self._failure_text(job)}"
        if self.options.on_error == "raise":
            raise TrainingError(
                f"{_name(episode)}.step failed",
                got=self._failure_text(job),
                fix="correct it, or add environment.on_error=0: a failed step is counted and has the reward 0",
            ) from job.error
        episode.failure, episode.has_timed_out = failure, job.has_timed_out
        return "", float(self.options.on_error), True

    def _failure_text(self, job: Job) -> str:
        too_long = f"more than environment.timeout={self.options.timeout} seconds"
        return too_long if job.has_timed_out else repr(job.error)

    def _validated_step(self, environment: str, result: Any) -> Step:
        name = f"{environment}.step"
        if not isinstance(result, (tuple, list)) or len(result) != 3:
            raise TrainingError(
                f"{name} did not return three values",
                got=repr(result),
                expected="observation, reward, and whether the episode is over",
            )
        observation, reward, is_over = result
        # The template checks the content of a message.
        is_chat = isinstance(observation, (list, tuple)) and all(
            isinstance(each, Mapping) and isinstance(each.get("role"), str) and "content" in each
            for each in observation
        )
        if not isinstance(observation, str) and not is_chat:
            raise TrainingError(
                f"{name} returned an invalid observation",
                got=repr(observation),
                expected='text, often "", or a list of messages with role and content',
            )
        try:
            number = math.nan if isinstance(reward, (str, bytes)) else float(reward)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise TrainingError(f"{name} returned an invalid reward", got=repr(reward), expected="a finite number")
        if not isinstance(is_over, (bool, np.bool_)):
            raise TrainingError(
                f"{name} returned an invalid end of episode", got=repr(is_over), expected="True or False"
            )
        return observation, number, bool(is_over)

    def _encode_observation(self, episode: Episode, turn_tokens: Sequence[int], observation: Reply) -> list[int]:
        """The tokens of an observation. Messages are rendered by the chat template after the policy's reply."""
        if isinstance(observation, str):
            if episode.is_stopped:
                # The reply has no EOS token yet: the observation continues it.
                episode.opening += self._turn_text(episode, turn_tokens, has_end=False) + observation
            else:
                episode.conversation = None
            return encode_continuation(self.tokenizer, [*episode.prompt.tokens, *episode.tokens], observation)
        name = f"{_name(episode)}.step"
        if episode.conversation is None:
            raise TrainingError(
                f"{name} returned messages, but the episode is plain text",
                got="a prompt of plain text, or an earlier observation of plain text",
                expected="a prompt that is a list of messages, and messages in every turn",
            )
        has_end = not episode.is_stopped
        reply = episode.opening + self._turn_text(episode, turn_tokens, has_end=has_end)
        try:
            tokens = template_of(self.tokenizer).continuation(
                episode.conversation, reply, observation, has_end=has_end, **episode.prompt.inputs
            )
        except DataError as error:
            raise TrainingError(f"the chat template cannot render the messages of {name}", got=str(error)) from error
        episode.conversation += [{"role": "assistant", "content": reply}, *observation]
        episode.opening = ""
        return tokens

    def _log_failures(self, episodes: Sequence[Episode]) -> None:
        """Log the failed steps. Raises TrainingError if there are several steps and all failed."""
        failures = [each.failure for each in episodes if each.failure is not None]
        num_steps = sum(len(each.turn_rewards) for each in episodes)
        if not failures:
            return
        if len(failures) == num_steps > 1:
            raise TrainingError(f"all {num_steps} steps of an environment failed", got=failures[0])
        _log.warning(
            "%d of %d steps of the environment failed and get the reward %s; the first error: %s",
            len(failures),
            num_steps,
            self.options.on_error,
            failures[0],
        )


def _name(episode: Episode) -> str:
    """The class of an environment, as its author calls it."""
    return getattr(episode.environment, "name", type(episode.environment).__name__)


def longer_prompt(prompt: PromptExample, template: ChatTemplate, text: str) -> PromptExample:
    """The prompt with a text behind its last message."""
    if not text or not prompt.messages:
        return prompt
    *before, last = prompt.messages
    said = last["content"] or ""
    content = said + text if isinstance(said, str) else [*said, {"type": "text", "text": text}]
    longer = {**last, "content": content}
    messages = (*before, BegunMessage(longer) if isinstance(last, BegunMessage) else longer)
    return replace(prompt, messages=messages, tokens=tuple(template.prompt(messages, **prompt.inputs)))
