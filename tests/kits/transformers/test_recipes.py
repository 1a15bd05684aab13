"""Recipes of encoders on public data sets, from files in these sets' formats; tokenizers that tasks of rows train."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from kitforge.cli.main import run as run_command
from kitforge.data.source import open_source
from kitforge.data.tokenizers.loading import TokenizerConfig, load_tokenizer, make_tokenizer
from kitforge.kits.registry import kit_of
from tests.kits.transformers.task_runs import TaskRuns
from tests.kits.transformers.test_adapters import base
from tests.kits.transformers.test_masked_lm import BERT
from tests.trainer import tiny

TRAINED = {"tokenizer.name": "sentencepiece", "tokenizer.vocab_size": 300}
SMALL = [
    "model.dim=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "tokenizer.vocab_size=300",
    "data.cache=cache",
    "data.batch_size=8",
]


def squad(questions: list[dict[str, Any]]) -> dict[str, Any]:
    """Questions of two articles in SQuAD's JSON."""
    paragraphs = [
        {
            "context": each["context"],
            "qas": [{"id": f"unread {number}", "question": each["question"], "answers": each["answers"]}],
        }
        for number, each in enumerate(questions)
    ]
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": part} for part in (paragraphs, paragraphs[:2])]}


def sentences(count: int, seed: int = 1) -> list[str]:
    draw = random.Random(seed)
    return [f"{tiny.sentence(draw, 5).strip()} {number}" for number in range(count)]


def questions(texts: list[str]) -> list[dict[str, Any]]:
    """The number in a text; every fifth has none."""
    return [
        {
            "question": "Which number?",
            "context": text,
            "answers": [{"text": str(n), "answer_start": text.rindex(str(n))}],
        }
        if n % 5
        else {"question": "Who?", "context": text, "answers": []}
        for n, text in enumerate(texts)
    ]


def write_multi30k() -> list[str]:
    lines = [f"{text}\t{text[::-1]}" for text in sentences(60)]
    Path("data.tsv").write_text("en\tde\n" + "\n".join([*lines, "Das\tDas"]) + "\n", encoding="utf-8")
    return ["data.train=data.tsv", *SMALL]


def write_wikitext() -> list[str]:
    text = "\n".join(f" \n = {text} = \n \n {text} <unk> @-@ {text} .\n" for text in sentences(60))
    Path("wiki.train.txt").write_text(text, encoding="utf-8")
    return ["data.train=wiki.train.txt", *SMALL]


def write_squad() -> list[str]:
    Path("train-v2.0.json").write_text(json.dumps(squad(questions(sentences(40)))), encoding="utf-8")
    Path("dev-v2.0.json").write_text(json.dumps(squad(questions(sentences(8, seed=2)))), encoding="utf-8")
    base(Path("weights"))
    sizes = ["lora.rank=2", "data.sequence_length=100", "data.stride=10", "trainer.epochs=1"]
    return ["data.train=train-v2.0.json", "data.eval=dev-v2.0.json", "checkpoint=weights", *sizes]


RECIPES = {
    "multi30k_retrieval": (write_multi30k, "eval/recall@1"),
    "wikitext_masked_lm": (write_wikitext, "eval/accuracy"),
    "squad": (write_squad, "eval/f1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_from_the_files_of_its_set(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write, metric = RECIPES[name]
    short = ["trainer.max_steps=2", "trainer.eval_every=2", "trainer.progress=false", "output_dir=run", "device=cpu"]
    run_command(["train", f"recipe={name}", *write(), *short])
    evaluated = tiny.records(tmp_path / "run", "eval")[-1]
    assert 0 <= evaluated[metric] <= 100
    capsys.readouterr()


def texts_of(task: str, rows: list[dict[str, Any]]) -> list[str]:
    """What each task reads of a row, by hand."""
    parts = {
        "embedding": lambda row: [row["anchor"], row["positive"], *row.get("negative", [])],
        "text_classification": lambda row: [row["text"]],
        "token_classification": lambda row: row["tokens"],
        "question_answering": lambda row: [row["context"], row["question"]],
    }
    return list(itertools.chain.from_iterable(map(parts[task], rows)))


def drawn_rows(task: str, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    texts = sentences(40, seed)
    if task == "embedding":
        return [
            {"anchor": text, "positive": f"{text} {draw.choice('xyz')}"}
            | ({"negative": ["no", "never"]} if n % 3 else {})
            for n, text in enumerate(texts)
        ]
    if task == "text_classification":
        return [{"text": text, "label": draw.choice(["unread", "other"])} for text in texts]
    if task == "token_classification":
        return [{"tokens": (words := text.split()), "tags": [draw.choice(["A", "B"]) for _ in words]} for text in texts]
    return questions(texts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("task", ["embedding", "text_classification", "token_classification", "question_answering"])
def test_a_task_of_rows_trains_its_tokenizer_on_their_texts_alone(task: str, seed: int, tmp_path: Path) -> None:
    rows = drawn_rows(task, seed)
    given = [squad(rows)] if task == "question_answering" and seed == 4 else rows
    seen = [*rows, *rows[:2]] if given is not rows else rows
    runs = TaskRuns(
        kit=kit_of(task), options={"model": BERT, "device": "cpu", **TRAINED}, rows=lambda: given, inputs={}
    )
    folder, cache = tmp_path / "run", tmp_path / "cache"
    short = {"data.cache": str(cache), "data.sequence_length": 100, "trainer.max_steps": 1, "trainer.progress": False}
    stride = {"data.stride": 8} if task == "question_answering" else {}
    runs.ended(folder, short | stride)
    wanted = make_tokenizer(
        TokenizerConfig(name="sentencepiece", vocab_size=300), open_source(iter(texts_of(task, seen))), tmp_path / "own"
    )
    assert load_tokenizer(folder / "tokenizer").fingerprint == wanted.fingerprint
