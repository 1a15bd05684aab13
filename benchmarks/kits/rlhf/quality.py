"""What the stages learn from real data: dialogues with preferences, and word problems with known answers.

python -m benchmarks.kits.rlhf.quality DATA [PART ...] [--seeds 0 1 2]      # parts: dialogues gsm8k svamp

Small networks from nothing, through the public face alone. DATA holds hh_rlhf, gsm8k and svamp. The table goes to
quality.md: the mean over the seeds, and what each of them gave.
"""

import datetime
import gzip
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_section
from kitforge import Run, Trainer
from kitforge.foundation.device import describe

TABLE = Path(__file__).with_suffix(".md")
# Longer dialogues are left out: half of them. They have fewer tokens than LONGEST.
CHARACTERS, LONGEST = 1000, 1024
COMMON: dict[str, Any] = {
    "device": "cpu",
    "data.sequence_length": LONGEST,
    "data.on_invalid": "skip",
    "data.batch_size": 32,
    "trainer.micro_batch_size": 8,
    "trainer.progress": False,
    "optimizer.learning_rate": 1e-3,
}
SHAPE = {"model.dim": 64, "model.num_layers": 2, "model.num_heads": 2, "model.max_length": LONGEST}
VOCABULARY = {"tokenizer": "sentencepiece", "tokenizer.vocab_size": 2048}
# Of a smoke run: what replaces the options that a part gives.
SMALLER: dict[str, Any] = {}
SMOKE = {
    "SMALLER": {
        **{"tokenizer.vocab_size": 300, "data.batch_size": 4, "trainer.max_steps": 1, "trainer.eval_batches": 1},
        **{
            "rl.prompts_per_rollout": 2,
            "rl.num_generations": 2,
            "rollout.max_new_tokens": 2,
            "trainer.micro_batch_size": 2,
        },
    },
    **{"data": None, "seeds": [0]},
}
Row = tuple[str, float, str]  # what was measured, what came out, what it is to be compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a part reads and writes, and the seed of its runs."""

    data: Path
    folder: str
    seed: int


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The lines of a packed jsonl file."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def trained(
    task: str, model: Any, place: Place, data: tuple[Any, Any], choices: dict[str, Any], **roles: Any
) -> tuple[dict[str, float], Run]:
    """The metrics of the evaluation rows before the first step, and the run."""
    options = COMMON | choices
    options |= {name: value for name, value in SMALLER.items() if name in options}
    options |= {"output_dir": f"{place.folder}/{task}", "seed": place.seed}
    learner = Trainer(task, model, *data, roles=roles, options=options)
    before = learner.evaluate() if roles else {}
    return before, learner.train()


def dialogues(place: Place) -> Iterator[Row]:
    """Demonstrations, preferences, rewards; each from the one before."""
    files = (rows_of(place.data / "hh_rlhf" / f"helpful_{part}.jsonl.gz") for part in ("train", "test"))
    train, test = ([row for row in rows if max(map(len, row.values())) <= CHARACTERS] for rows in files)
    choices = SHAPE | VOCABULARY | {"data.columns.messages": "chosen", "trainer.max_steps": 150}
    _, policy = trained("sft", "gpt2_tiny", place, (train, test), choices | {"trainer.eval_batches": 8})
    yield "sft, loss of held-out replies, nats a token", policy.metrics["eval/loss"], ""
    tranches = {"data.columns.source": "tranche", "trainer.epochs": 1}
    _, judge = trained("reward", policy, place, (train, test), tranches)
    accuracy, longer = judge.metrics["eval/rewards/accuracy"], longer_wins(test)
    error = (accuracy * (1 - accuracy) / len(test)) ** 0.5
    beside = f"standard error {error:.3f}; the longer reply wins: {longer:.3f} of the same pairs, 0.563 of all 891"
    yield f"reward, accuracy on {len(test)} held-out pairs", accuracy, beside
    rounds = {
        "rl.prompts_per_rollout": 32,
        "rl.epochs": 2,
        "rollout.max_new_tokens": 32,
        "kl.controller": "adaptive",
        "kl.coef": 0.1,
        "kl.horizon": 1000,
        "trainer.max_steps": 80,
        "trainer.eval_batches": 8,
        "optimizer.learning_rate": 5e-4,
    }
    before, learner = trained("ppo", policy, place, (train, test), rounds, reward=judge)
    yield from learnt("ppo", before, learner.metrics, "the target is 6")


def longer_wins(pairs: list[dict[str, Any]]) -> float:
    """The accuracy of preferring what is longer; half for a tie."""
    lengths = [(len(row["chosen"]), len(row["rejected"])) for row in pairs]
    return sum((chosen > rejected) + (chosen == rejected) / 2 for chosen, rejected in lengths) / len(pairs)


def learnt(task: str, before: dict[str, float], after: dict[str, float], beside: str) -> Iterator[Row]:
    """What rewards have changed."""
    yield f"{task}, mean reward of answers to held-out prompts, before", before["eval/reward"], ""
    yield f"{task}, the same after", after["eval/reward"], ""
    yield f"{task}, KL from the initial policy, nats per completion", after["eval/kl"], beside


def problems(name: str, train: list[dict[str, Any]], test: list[dict[str, Any]], place: Place) -> Iterator[Row]:
    """Worked answers, then answers of its own that are checked."""
    choices = SHAPE | VOCABULARY | {"trainer.max_steps": 150}
    _, policy = trained("sft", "gpt2_tiny", place, (train, test[:200]), choices)
    yield f"{name}: sft, loss of held-out answers, nats a token", policy.metrics["eval/loss"], ""
    rounds = {
        "rl.prompts_per_rollout": 8,
        "rl.num_generations": 4,
        "rollout.max_new_tokens": 64,
        "trainer.max_steps": 6,
        "trainer.eval_batches": 8,
        "optimizer.learning_rate": 1e-4,
    }
    before, learner = trained("grpo", policy, place, (train, test), rounds, reward="gsm8k")
    yield from learnt(f"{name}: grpo", before, learner.metrics, "")


def gsm8k(place: Place) -> Iterator[Row]:
    """Problems of several steps; the answer stands behind "####"."""
    train, test = (rows_of(place.data / "gsm8k" / f"{part}.jsonl.gz") for part in ("train", "test"))
    for row in (*train, *test):
        row |= {"prompt": f"{row['question']}\n", "completion": row["answer"]}
    yield from problems("gsm8k", train, test, place)


def svamp(place: Place) -> Iterator[Row]:
    """Problems of one step; the answer is a number, written behind its equation."""
    rows = [
        {
            "prompt": f"{row['Body']}. {row['Question']}\n",
            "completion": f"{row['Equation']} = {row['Answer']:g}",
            "answer": f"{row['Answer']:g}",
        }
        for row in rows_of(place.data / "svamp" / "svamp.jsonl.gz")
    ]
    yield from problems("svamp", rows[:-100], rows[-100:], place)


PARTS: dict[str, Callable[[Place], Iterator[Row]]] = {"dialogues": dialogues, "gsm8k": gsm8k, "svamp": svamp}


def write_sample(data: Path) -> None:
    """A few rows in every file that the parts read."""
    dialogue = "\n\nHuman: How is the sea today?\n\nAssistant: "
    pairs = [
        {"chosen": f"{dialogue}It is calm and {n}.", "rejected": f"{dialogue}No {n}.", "tranche": "a"}
        for n in range(12)
    ]
    for part in ("train", "test"):
        write_rows(data / "hh_rlhf" / f"helpful_{part}.jsonl.gz", pairs)
        problems = [
            {"question": f"What is {n} and 1?", "answer": f"It is {n} and one.\n#### {n + 1}"} for n in range(12)
        ]
        write_rows(data / "gsm8k" / f"{part}.jsonl.gz", problems)
    told = [
        {"Body": f"Ann has {n} shells", "Question": "How many?", "Equation": f"{n}", "Answer": float(n)}
        for n in range(120)
    ]
    write_rows(data / "svamp" / "svamp.jsonl.gz", told)


def write_rows(file: Path, rows: list[dict[str, Any]]) -> None:
    """A packed jsonl file."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))


def section(part: str, data: Path, seeds: list[int]) -> str:
    """A part of the page."""
    begun = time.process_time()
    found: dict[str, list[float]] = {}
    beside: dict[str, list[str]] = {}
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            for what, number, other in PARTS[part](Place(data=data, folder=folder, seed=seed)):
                found.setdefault(what, []).append(number)
                beside.setdefault(what, []).append(other)
                sys.stdout.write(f"{part}, seed {seed}: {what}: {number:.3f} {other}\n")
                sys.stdout.flush()
    seconds = time.process_time() - begun
    told = ", ".join(map(str, seeds))
    lines = [part, "", f"| | mean | seeds {told} | reference |", "|---|---:|---:|---|"]
    for what, numbers in found.items():
        each = ", ".join(f"{number:.3f}" for number in numbers)
        lines.append(f"| {what} | {statistics.mean(numbers):.3f} | {each} | {beside[what][0]} |")
    lines += ["", f"{datetime.date.today()}, {describe(torch.device('cpu'))}, {seconds:.0f} CPU seconds in all."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """A section for each part."""
    parser = CommandLine(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("parts", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    chosen = parser.parse(SMOKE, globals())
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as sample:
        if is_smoke():
            write_sample(Path(sample))
        for part in chosen.parts or PARTS:
            write_section(TABLE, "Results on real data", section(part, chosen.data or Path(sample), chosen.seeds))


if __name__ == "__main__":
    main()
