"""Answers of several turns: a policy talks with something that replies, gives rewards and knows when it is over.

Tokens that the policy wrote go back to it, and into training, as they are; only what the environment says is encoded,
and none of that is learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, final

from kitforge.data.dialogues import Prompt
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation import seed as seeds
from kitforge.foundation.errors import TrainingError
from kitforge.inference.engine import Engine, Output
from kitforge.inference.text import InferenceOptions
from kitforge.kits.rlhf.rollouts import Trajectory
from kitforge.kits.rlhf.scoring import Answer


class Environment(Protocol):
    """One episode: a tool, a game, a user that is played. A new object is made for each answer to a prompt."""

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin the episode of a prompt's row; returns what follows the prompt before the policy speaks, often ""."""
        ...

    def step(self, response: str) -> tuple[str, float, bool]:
        """Take what the policy said; returns what it is told, what that was worth, and whether the episode is over."""
        ...


@final
@dataclass(slots=True, kw_only=True)
class Episode:
    """An answer that is being written."""

    number: int  # of the prompt
    sample: int
    prompt: Prompt
    environment: Environment
    tokens: list[int] = field(default_factory=list)  # after the prompt
    learnt: list[bool] = field(default_factory=list)  # which of them the policy wrote
    log_probs: list[float] = field(default_factory=list)  # of those
    rewards: list[float] = field(default_factory=list)  # of those
    said: list[int] = field(default_factory=list)  # in this turn
    num_turns: int = 0
    has_ended: bool = False

    def hear(self, tokens: Sequence[int]) -> None:
        """What the environment says."""
        self.tokens += tokens
        self.learnt += [False] * len(tokens)

    def say(self, output: Output) -> None:
        """What the policy says."""
        self.tokens += output.tokens
        self.learnt += [True] * len(output.tokens)
        self.log_probs += output.logprobs
        self.rewards += [0.0] * len(output.tokens)
        self.said += output.tokens

    def trajectory(self) -> Trajectory:
        """The whole of it, each turn's reward on the turn's last token."""
        answer = Answer(
            prompt=self.prompt.tokens,
            tokens=tuple(self.tokens),
            learnt=tuple(self.learnt),
            has_ended=self.has_ended,
            columns=self.prompt.columns,
        )
        return Trajectory(
            answer=answer,
            prompt_index=self.number,
            log_probs=tuple(self.log_probs),
            score=tuple(self.rewards),
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Playground:
    """Where episodes are played: what makes an environment, for how many turns, and how long a whole text may be."""

    make: Callable[[], Environment]
    tokenizer: Tokenizer
    most_turns: int
    most_tokens: int

    def played(
        self,
        engine: Engine,
        prompts: Sequence[tuple[int, Prompt]],
        options: InferenceOptions,
        num_samples: int,
        name: str,
    ) -> list[Trajectory]:
        """`num_samples` episodes of each of the numbered prompts, in their order. Noise is keyed by `name`, prompt,
        sample and turn; an episode goes on as soon as it has been answered, whatever the others do."""
        episodes = [
            Episode(number=number, sample=sample, prompt=prompt, environment=self.make())
            for number, prompt in prompts
            for sample in range(num_samples)
        ]
        live: dict[int, Episode] = {}

        def speak(episode: Episode) -> None:
            key = seeds.key(name, episode.number, episode.sample, episode.num_turns)
            chosen = replace(options, max_new_tokens=min(options.max_new_tokens, self._room(episode)))
            live[engine.submit([*episode.prompt.tokens, *episode.tokens], chosen, key=key)] = episode

        for episode in episodes:
            self._begin(episode)
            speak(episode)
        while engine.has_work:
            for output in engine.step():
                episode = live[output.request]
                episode.say(output)
                # Nothing was said where the policy has diverged.
                has_spoken = output.finish_reason is not None and bool(episode.said)
                if has_spoken and self._goes_on(episode, output.finish_reason == "stop"):
                    speak(episode)
        return [episode.trajectory() for episode in episodes]

    def _begin(self, episode: Episode) -> None:
        episode.hear(self.tokenizer.encode(episode.environment.reset(episode.prompt.columns)))
        if self._room(episode) < 1:
            raise TrainingError(
                f"{type(episode.environment).__name__}.reset leaves no room for an answer",
                got=f"{len(episode.prompt.tokens) + len(episode.tokens)} tokens before the first answer",
                expected=f"fewer than data.sequence_length={self.most_tokens}",
            )

    def _room(self, episode: Episode) -> int:
        return self.most_tokens - len(episode.prompt.tokens) - len(episode.tokens)

    def _goes_on(self, episode: Episode, is_whole: bool) -> bool:
        """Let the environment answer a turn. The episode is over where it says so, after the last turn, where the turn
        was cut off, and where its answer leaves no room for another."""
        said, episode.said = episode.said[:-1] if is_whole else episode.said, []
        told, reward, is_over = self._stepped(episode.environment, self.tokenizer.decode(said))
        episode.rewards[-1] = reward
        episode.num_turns += 1
        episode.has_ended = is_over and is_whole
        if is_over or not is_whole or episode.num_turns == self.most_turns:
            return False
        tokens = self.tokenizer.encode(told)
        if len(tokens) >= self._room(episode):
            return False
        episode.hear(tokens)
        return True

    def _stepped(self, environment: Environment, response: str) -> tuple[str, float, bool]:
        told, reward, is_over = environment.step(response)
        if not math.isfinite(reward):
            raise TrainingError(
                f"{type(environment).__name__}.step gave a reward that is no number",
                got=reward,
                expected="a finite number",
            )
        return told, float(reward), bool(is_over)
