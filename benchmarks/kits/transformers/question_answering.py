"""The last word of a story, found in the story (LAMBADA): LoRA on SmolLM2-135M by `task=question_answering`.

    kitforge models fetch smollm2
    python -m benchmarks.kits.transformers.question_answering lambada_openai.jsonl.gz --seeds 0 1 2

The question is the last sentence without its last word, the passage what stands before, and the answer that word, where
the passage has it. Every fifth story is held out. Beside it answers that need no training: the first word, the last
name, and the sentence nearest to the question by tf-idf. Writes question_answering.md.
"""

import datetime
import gzip
import json
import re
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, is_smoke, write_result
from benchmarks.kits.transformers.small_model import write_small_model
from kitforge import Trainer
from kitforge.data.text.answers import answer_scores
from kitforge.foundation.device import describe

OPTIONS: dict[str, Any] = {
    "precision": "bf16",
    "lora.rank": 16,
    "lora.target_modules": ["query", "key", "value", "out", "gate", "up", "down"],
    "data.batch_size": 16,
    "data.stride": 64,
    "optimizer.learning_rate": 5e-4,
    "trainer.epochs": 2,
    "trainer.checkpoint_every": None,
    "device": "cpu",
}
SMOKE = {
    "OPTIONS": OPTIONS | {"lora.rank": 2, "trainer.epochs": 1, "data.sequence_length": 128, "data.stride": 16},
    "file": None,
    "seeds": [0],
}
Row = dict[str, Any]


def rows_of(name: str | None) -> list[Row]:
    """Rows in SQuAD's format."""
    if is_smoke():
        told = [{"context": f"Ann {n} met Bob. He said to", "continuation": "Ann"} for n in range(10)]
    else:
        lines = gzip.decompress(Path(str(name)).read_bytes()).decode().splitlines()
        told = [json.loads(line) for line in lines]
    found = []
    for row in told:
        *before, question = re.split(r"(?<=[.!?\"”])\s+", row["context"].strip())
        passage, answer = " ".join(before), row["continuation"].strip()
        places = [each.start() for each in re.finditer(rf"\b{re.escape(answer)}\b", passage)]
        if places:
            # The last place, which is nearest to the question.
            answers = [{"text": answer, "answer_start": places[-1]}]
            found.append({"question": question, "context": passage, "answers": answers})
    return found


def score(rows: list[Row], answer: Callable[[Row], str]) -> list[float]:
    """Exact match and F1 of answers, 0 to 100."""
    scores = torch.tensor(
        [answer_scores(answer(row), [each["text"] for each in row["answers"]]) for row in rows], dtype=torch.float64
    )
    found: list[float] = (100 * scores.mean(0)).tolist()
    return found


def last_name(row: Row) -> str:
    """The last word of a passage with a capital within a sentence."""
    found = re.findall(r"(?<=[a-z,] )[A-Z][a-z]+", row["context"])
    return found[-1] if found else row["context"].split()[-1]


def nearest_sentence(row: Row) -> str:
    """The sentence of a passage that is nearest to its question by tf-idf."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    sentences = [each for each in re.split(r"(?<=[.!?])\s+", row["context"]) if each.strip()]
    vectors = TfidfVectorizer(token_pattern=r"\w+").fit_transform([*sentences, row["question"]])
    return str(sentences[int((vectors[:-1] @ vectors[-1].T).toarray().argmax())])


def train(rows: list[Row], held: list[Row], seed: int) -> dict[str, float]:
    """The metrics of a run, and its minutes."""
    with tempfile.TemporaryDirectory() as folder:
        base = write_small_model(Path(folder)) if is_smoke() else "smollm2"
        options = {**OPTIONS, "seed": seed}
        run = Trainer("question_answering", base, rows, held, options=options, output_dir=f"{folder}/run").train()
        lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [line for line in lines if line["kind"] == "train"][-1]["time/seconds"]
    return run.metrics | {"minutes": seconds / 60}


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    arguments = parser.parse(SMOKE, globals())
    rows = rows_of(arguments.file)
    own, held = [row for number, row in enumerate(rows) if number % 5], rows[::5]
    median = round(statistics.median(len(row["answers"][0]["text"].split()) for row in own))
    found = [train(own, held, seed) for seed in arguments.seeds]
    lines = [
        "# The last word of a story, in the story",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, torch {torch.__version__}. LAMBADA where the "
        f"passage holds the word: {len(own)} stories, {OPTIONS['trainer.epochs']} passes, {len(held)} others held out. "
        f"LoRA of rank {OPTIONS['lora.rank']} on all linear layers of SmolLM2-135M, {OPTIONS['precision']}.",
        "",
        "| | exact match | F1 | minutes |",
        "|---|---:|---:|---:|",
    ]
    trivial: dict[str, Callable[[Row], str]] = {
        f"the first {median} word(s)": lambda row: " ".join(row["context"].split()[:median]),
        "the last name": last_name,
        "the nearest sentence by tf-idf": nearest_sentence,
    }
    lines += ["| {} | {:.1f} | {:.1f} | |".format(name, *score(held, each)) for name, each in trivial.items()]
    lines += [
        f"| `task=question_answering`, seed {seed} | {each['eval/exact_match']:.1f} | {each['eval/f1']:.1f} "
        f"| {each['minutes']:.0f} |"
        for seed, each in zip(arguments.seeds, found, strict=True)
    ]
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
