"""Files of rollouts: rollouts/round_N.jsonl for replay, samples/step_N.json for the report."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kitforge.core.checkpoint.manifest import steps
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import write_text
from kitforge.kits.rlhf.reinforcement.ppo import RolloutTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

FOLDER = "rollouts"
MOST_SHOWN = 16  # completions of a rollout batch in a tracker's table


class RolloutLog(Callback):
    """Writes rollouts/round_N.jsonl after the first update on a rollout batch, and logs its first completions as a
    table. Keeps the latest `num_kept` files, and as many after each kept checkpoint, for replay."""

    def __init__(self, task: RolloutTask, tokenizer: Tokenizer, num_kept: int, updates_per_rollout: int) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._num_kept = num_kept
        self._updates_per_rollout = updates_per_rollout
        self._written: int | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        found = self._task.collected
        if event.kind != "step" or run.folder is None or run.world.rank > 0 or found is None:
            return
        number, rollouts = found
        if number == self._written:
            return
        self._written = number
        self._show(rollouts, run)
        if self._num_kept == 0:
            return
        lines = zip(rollouts, self._task.completion_outcomes, strict=True)
        text = "".join(json.dumps(self._line(*each), ensure_ascii=False) + "\n" for each in lines)
        write_text(rollout_file(run.folder, number), text)
        first = [first_rollout(step, self._updates_per_rollout) for step in steps(run.folder / "checkpoints")]
        for kept in logged_rollouts(run.folder):
            if kept <= number - self._num_kept and not any(each <= kept < each + self._num_kept for each in first):
                rollout_file(run.folder, kept).unlink()

    def _show(self, rollouts: Sequence[Rollout], run: RunContext) -> None:
        shown = list(zip(rollouts[:MOST_SHOWN], self._task.completion_outcomes, strict=False))
        named = list(dict.fromkeys(name for each, _ in shown for name in each.rewards))
        others = list(shown[0][1])
        rows = [
            [
                self._tokenizer.decode(each.completion.prompt),
                each.completion.text(self._tokenizer),
                each.reward,
                *(each.rewards.get(name) for name in named),
                *(outcome[name] for name in others),
            ]
            for each, outcome in shown
        ]
        run.log_table(
            "completions", ["prompt", "completion", "reward", *(f"rewards/{n}" for n in named), *others], rows
        )

    def _line(self, rollout: Rollout, outcome: Mapping[str, float | None]) -> dict[str, Any]:
        """A line of the file: text and rewards for readers first, then the rollout itself."""
        completion = rollout.completion
        return {
            "prompt": self._tokenizer.decode(completion.prompt),
            "completion": completion.text(self._tokenizer),
            "reward": rollout.reward,
            **outcome,
            **({} if rollout.kl is None else {"kl": rollout.kl}),
            **rollout.to_dict(),
        }


def first_rollout(step: int, updates_per_rollout: int) -> int:
    """The first rollout batch that a run resumed from that step generates."""
    return -(-step // updates_per_rollout)


def logged_rollouts(run: Path) -> list[int]:
    """The numbers of the rollout files of a run."""
    return sorted(int(each.stem.removeprefix("round_")) for each in (run / FOLDER).glob("round_*.jsonl"))


def rollout_file(run: Path, number: int) -> Path:
    """The path of a rollout file."""
    return run / FOLDER / f"round_{number}.jsonl"


def read_rollouts(run: Path, number: int) -> list[Rollout]:
    """The rollouts of a file, bit for bit as trained on. Raises DataError."""
    path = rollout_file(run, number)
    if not path.is_file():
        kept = logged_rollouts(run)
        raise DataError(
            f"the rollouts of rollout batch {number} were not kept",
            got=f"rollout batches {', '.join(map(str, kept)) or 'none'} in {run / FOLDER}",
            fix="train with a larger rollout.keep_rollout_files",
        )
    found = []
    # `splitlines` would also split at line separators within text.
    with open(path, encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, start=1):
            try:
                found.append(Rollout.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path} line {line_number} is not a rollout", got=repr(error), fix="restore the file"
                ) from None
    return found


MAX_SAMPLES = 8


class SampleLogger(Callback):
    """Writes samples/step_N.json after every evaluation, the same prompts each time."""

    def __init__(self, task: RolloutTask, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind != "evaluate" or run.folder is None or run.world.rank > 0:
            return
        step = run.state.cursor.step
        # A repeated prompt is shown once, with its first completion.
        distinct: dict[tuple[int, ...], Rollout] = {}
        for each in self._task.eval_rollouts:
            distinct.setdefault(tuple(each.completion.prompt), each)
        samples = [self._sample(each) for each in list(distinct.values())[:MAX_SAMPLES]]
        page = json.dumps({"step": step, "samples": samples}, ensure_ascii=False, indent=1)
        write_text(run.folder / "samples" / f"step_{step}.json", page)

    def _sample(self, rollout: Rollout) -> dict[str, Any]:
        completion = rollout.completion
        end = "" if completion.is_finished else " \N{HORIZONTAL ELLIPSIS}"
        figures = {"reward": rollout.reward} if self._task.is_rewarded else {}
        if (kl := rollout.kl) is not None:
            figures["kl"] = round(kl, 4)
        text = completion.text(self._tokenizer) + end
        return {"prompt": self._tokenizer.decode(completion.prompt), "text": text, "figures": figures}
