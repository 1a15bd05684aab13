"""Answers for people to read: prompt, answer, what it scored and how far it is from the reference."""

from __future__ import annotations

import json
from typing import Any, final

from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.files import write_text
from kitforge.kits.rlhf.rl import RLTask
from kitforge.kits.rlhf.rollouts import Trajectory
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

MOST = 8


@final
class ShownAnswers(Callback):
    """Writes samples/step_N.json after every evaluation, the same prompts each time."""

    def __init__(self, task: RLTask, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer

    def on_event(self, event: Event, run: RunContext) -> None:
        """After an evaluation."""
        if event.kind != "evaluate" or run.folder is None or run.world.rank > 0:
            return
        step = run.state.cursor.step
        # A prompt that comes twice is shown once, with its first answer.
        distinct: dict[tuple[int, ...], Trajectory] = {}
        for each in self._task.evaluated:
            distinct.setdefault(tuple(each.answer.prompt), each)
        samples = [self._sample(each) for each in list(distinct.values())[:MOST]]
        page = json.dumps({"step": step, "samples": samples}, ensure_ascii=False, indent=1)
        write_text(run.folder / "samples" / f"step_{step}.json", page)

    def _sample(self, trajectory: Trajectory) -> dict[str, Any]:
        answer = trajectory.answer
        end = "" if answer.has_ended else " \N{HORIZONTAL ELLIPSIS}"
        figures = {"reward": trajectory.reward}
        if (nats := trajectory.nats) is not None:
            figures["nats from the reference"] = round(nats, 4)
        text = self._tokenizer.decode(answer.spoken) + end
        return {"prompt": self._tokenizer.decode(answer.prompt), "text": text, "figures": figures}
