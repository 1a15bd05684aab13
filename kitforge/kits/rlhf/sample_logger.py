"""Answers for people to read: prompt, answer, what it scored and how far it is from the reference."""

from __future__ import annotations

import json
from typing import Any, final

from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.files import write_text
from kitforge.kits.rlhf.ppo import PolicyGradientTask
from kitforge.kits.rlhf.rollout_batch import Rollout
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

MAX_SAMPLES = 8


@final
class SampleLogger(Callback):
    """Writes samples/step_N.json after every evaluation, the same prompts each time."""

    def __init__(self, task: PolicyGradientTask, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer

    def on_event(self, event: Event, run: RunContext) -> None:
        """After an evaluation."""
        if event.kind != "evaluate" or run.folder is None or run.world.rank > 0:
            return
        step = run.state.cursor.step
        # A prompt that comes twice is shown once, with its first answer.
        distinct: dict[tuple[int, ...], Rollout] = {}
        for each in self._task.eval_rollouts:
            distinct.setdefault(tuple(each.completion.prompt), each)
        samples = [self._sample(each) for each in list(distinct.values())[:MAX_SAMPLES]]
        page = json.dumps({"step": step, "samples": samples}, ensure_ascii=False, indent=1)
        write_text(run.folder / "samples" / f"step_{step}.json", page)

    def _sample(self, trajectory: Rollout) -> dict[str, Any]:
        answer = trajectory.completion
        end = "" if answer.is_finished else " \N{HORIZONTAL ELLIPSIS}"
        figures = {"reward": trajectory.reward}
        if (kl := trajectory.kl) is not None:
            figures["kl"] = round(kl, 4)
        text = self._tokenizer.decode(answer.text_tokens) + end
        return {"prompt": self._tokenizer.decode(answer.prompt), "text": text, "figures": figures}
