"""Answers in records of the census (adult_income) as text: `task=question_answering` from random weights.

    python -m benchmarks.kits.transformers.question_answering TRAIN.csv

A passage lists some of a person's fields in any order, a question names one of them; a fifth of the passages lack it.
Writes question_answering.md.
"""

import csv
import datetime
import gzip
import platform
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result

FIELDS = ("workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country")
ROWS, HELD_OUT = 12_000, 500
OPTIONS: dict[str, Any] = {
    "model.num_layers": 3,
    "data.batch_size": 32,
    "data.sequence_length": 160,
    "data.stride": 32,
    "optimizer.learning_rate": 1e-3,
    "trainer.max_steps": 900,
    "trainer.eval_every": 300,
    "device": "cpu",
}
SMOKE = {
    "OPTIONS": OPTIONS | {"data.batch_size": 4, "trainer.max_steps": 2, "trainer.eval_every": None},
    "ROWS": 20,
    "HELD_OUT": 5,
    "file": None,
}


def records(name: str | None) -> list[dict[str, str]]:
    """The rows of the file, with the names of FIELDS."""
    if is_smoke():
        return [dict.fromkeys(FIELDS, "x") | {"sex": "yz"[number % 2]} for number in range(ROWS)]
    content = Path(str(name)).read_bytes()
    content = gzip.decompress(content) if str(name).endswith(".gz") else content
    return list(csv.DictReader(content.decode().splitlines()))[:ROWS]


def question(record: dict[str, str], draw: random.Random) -> dict[str, Any]:
    """A passage and a question."""
    chosen = draw.sample(FIELDS, 4)
    asked = draw.choice([each for each in FIELDS if each not in chosen]) if draw.random() < 0.2 else draw.choice(chosen)
    context, answers = "", list[dict[str, Any]]()
    for field in chosen:
        context += f"{field.replace('_', ' ')} is "
        if field == asked:
            answers.append({"text": record[field], "answer_start": len(context)})
        context += f"{record[field]}; "
    return {"question": asked.replace("_", " "), "context": context.strip(), "answers": answers}


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("file")
    arguments = parser.parse(SMOKE, globals())
    from kitforge import Trainer

    draw = random.Random(0)
    rows = [question(each, draw) for each in records(arguments.file)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer("question_answering", "bert_tiny", rows[HELD_OUT:], rows[:HELD_OUT], options=OPTIONS,
                          output_dir=f"{folder}/run")  # fmt: skip
        found = trainer.train().metrics
    nothing = 100.0 * sum(not row["answers"] for row in rows[:HELD_OUT]) / HELD_OUT
    lines = [
        "# Fields of census records",
        "",
        f"{datetime.date.today()}, {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}. "
        f"{OPTIONS['trainer.max_steps']} steps of {OPTIONS['data.batch_size']}, one seed, {HELD_OUT} held-out "
        "questions.",
        "",
        "| | exact match | F1 |",
        "|---|---|---|",
        f"| always no answer | {nothing:.1f} | {nothing:.1f} |",
        f"| `task=question_answering` | {found['eval/exact_match']:.1f} | {found['eval/f1']:.1f} |",
    ]
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
