"""`kitforge demo`: trains every kit on synthetic or local data, and links the reports on one page."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from kitforge.api import Trainer
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say
from kitforge.report.index_page import Chapter, outcome, write_index
from kitforge.report.metrics import read_run
from kitforge.report.number_format import duration, number
from kitforge.trainer.run_folder import Run

PREFERRED, REJECTED = ("nice", "fine"), ("grim", "dull")
QUESTIONS = [f"How is the {topic}? " for topic in ("sea", "hill", "town", "wood")]
PAIRS = [
    {"prompt": question, "chosen": kind, "rejected": unkind}
    for question in QUESTIONS
    for kind in PREFERRED
    for unkind in REJECTED
]
RLHF_OPTIONS = {"trainer.max_steps": 60, "optimizer.learning_rate": 0.002}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """One training run of the demo. `base` (an earlier step or a preset) is the initial model, `reward_model` an
    earlier step."""

    name: str
    title: str
    description: str
    metric: str
    task: str
    base: str | None = None
    rows: Sequence[Mapping[str, str]] | None = None
    reward_model: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


PARTS = (
    DemoStep(
        name="text",
        title="A language model reads Python",
        description="A LLaMA with a million random parameters is trained on part of this Python's standard library.",
        metric="eval/loss",
        task="text_generation",
        options={"recipe": "quickstart", "trainer.max_steps": 150, "trainer.eval_every": 75},
    ),
    DemoStep(
        name="clicks",
        title="A recommender learns what is clicked",
        description="Wide & Deep with its embedding table, on a made-up click log whose best possible AUC is 0.852.",
        metric="eval/auc",
        task="recommendation",
        options={"trainer.max_steps": 150, "trainer.eval_every": 50},
    ),
    DemoStep(
        name="demonstrations",
        title="Alignment 1: demonstrations",
        description="A small LLaMA is shown answers to four questions, as many kind ones as unkind ones.",
        metric="eval/loss",
        task="sft",
        base="llama_tiny",
        rows=[{"prompt": question, "completion": word} for question in QUESTIONS for word in PREFERRED + REJECTED],
        options=RLHF_OPTIONS,
    ),
    DemoStep(
        name="preferences",
        title="Alignment 2: preferences",
        description="A reward model learns from pairs that people prefer the kind answers.",
        metric="eval/rewards/accuracy",
        task="reward",
        base="demonstrations",
        rows=PAIRS,
        options=RLHF_OPTIONS,
    ),
    DemoStep(
        name="rewards",
        title="Alignment 3: rewards",
        description="PPO moves the model of stage 1 towards answers that the model of stage 2 rewards.",
        metric="eval/reward",
        task="ppo",
        base="demonstrations",
        rows=[{"prompt": question} for question in QUESTIONS] * 8,
        reward_model="preferences",
        options={
            "rl.prompts_per_rollout": 32,
            "rl.epochs": 2,
            "rollout.max_new_tokens": 8,
            "rollout.keep_rollout_files": 20,
            "trainer.max_steps": 40,
            "optimizer.learning_rate": 3e-4,
        },
    ),
)


def demo(arguments: list[str]) -> int:
    """Train all steps in order, each in its own folder, and print a summary."""
    if len(arguments) > 1 or any("=" in argument or argument.startswith("-") for argument in arguments):
        raise ConfigError("kitforge demo takes no options", got=" ".join(arguments), expected="at most a new folder")
    folder = Path(arguments[0] if arguments else f"runs/{time.strftime('%Y%m%d-%H%M%S')}-demo")
    if folder.exists():
        raise ConfigError("the demo makes a folder of its own", got=f"{folder}, which exists", fix="name a new one")
    done: dict[str, Run] = {}
    for position, step in enumerate(PARTS, start=1):
        console.print(f"\n{position} of {len(PARTS)}: {step.title}", style="bold", highlight=False)
        done[step.name] = run = _trainer(step, done, folder / step.name).train()
        if run.was_interrupted:
            raise KeyboardInterrupt
    chapters = [
        Chapter(folder=done[part.name].folder, title=part.title, words=part.description, metric=part.metric)
        for part in PARTS
    ]
    page = write_index(folder / "index.html", "Three kits, one after the other", chapters)
    _print_summary(chapters, page)
    return 0


def _trainer(part: DemoStep, done: Mapping[str, Run], folder: Path) -> Trainer:
    return Trainer(
        part.task,
        None if part.base is None else done.get(part.base, part.base),
        part.rows,
        part.rows,
        roles=None if part.reward_model is None else {"reward": done[part.reward_model]},
        output_dir=folder,
        options={"trainer.eval_first": True, **part.options},
    )


def _print_summary(chapters: Sequence[Chapter], page: Path) -> None:
    """Print a table of results, the path of the page and further commands."""
    table = Table("", "measure", "before", "after", "time", title="Results", title_justify="left")
    for chapter in chapters:
        found = outcome(read_run(chapter.folder), chapter.metric)
        figures = (number(found.before), number(found.after), duration(found.seconds))
        table.add_row(chapter.title, found.metric, *figures)
    console.print()
    console.print(table)
    folder = page.parent
    say(
        f"open {page}\n\ntry next:\n"
        f'  kitforge generate checkpoint={folder / "text"} prompt="def "\n'
        f'  kitforge generate checkpoint={folder / "rewards"} prompt="How is the sea? "\n'
        f"  kitforge evaluate checkpoint={folder / 'clicks'} data.eval=click_log\n"
        "  kitforge train data.train=YOUR_TEXT.txt"
    )
