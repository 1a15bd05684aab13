"""What every task over rows promises: the doors of the command line give one answer, an adapter learns alone, padding
is never read, and rows that cannot be used are named. Contracts of training are rows of tests/verify."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitforge.api import load_model, pipeline, save_model
from kitforge.cli.main import run as run_command
from kitforge.data.text.answers import answer_scores
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError
from kitforge.foundation.types import Cursor
from kitforge.models import loading
from kitforge.models.catalog import config_of
from tests.kits.transformers import test_adapters as adapters
from tests.kits.transformers import test_classification as texts
from tests.kits.transformers import test_embedding as embedding
from tests.kits.transformers import test_encoder_classification as encoders
from tests.kits.transformers import test_image_classification as images
from tests.kits.transformers import test_masked_lm as masks
from tests.kits.transformers import test_question_answering as questions
from tests.kits.transformers import test_regression as numbers
from tests.kits.transformers import test_seq2seq as seq2seq
from tests.kits.transformers import test_token_classification as tagging
from tests.kits.transformers.task_runs import TaskRuns, write_rows
from tests.trainer import tiny

Row = dict[str, Any]
RUNS: dict[str, TaskRuns] = {
    "text_classification": texts.RUNS,
    "text_classification by an encoder": encoders.RUNS,
    "token_classification": tagging.RUNS,
    "image_classification": images.RUNS,
    "translation": seq2seq.RUNS,
    "question_answering": questions.RUNS,
    "masked_lm": masks.RUNS,
    "embedding": embedding.RUNS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """A task on the command line: its rows, and what `evaluate` and `predict` say of the run."""

    options: Sequence[str]
    write: Callable[[Path], Path]
    metrics: set[str]
    # The column that `predict` adds, and its values by the pipeline.
    column: str
    values: Callable[[Any], Any]
    # A metric as the mean over the lines that `predict` wrote.
    figure: tuple[str, Callable[[Row], float]] | None = None
    # A metric of training, and how far it moves at least.
    learns: tuple[str, float] | None = None
    task: str = "text_classification"


def rows_in(rows: list[Row]) -> Callable[[Path], Path]:
    return lambda folder: write_rows(folder / "rows.jsonl", rows)


SMALL = ["model.dim=32", "model.num_layers=2", "model.mlp_dim=48", "model.num_heads=2"]
SHORT = ["trainer.max_steps=2", "data.sequence_length=64"]
FEW_TOKENS = ["inference.max_new_tokens=4", "data.eval_texts=2", "trainer.max_steps=2"]
LANGUAGES = [{"en": row["source"], "de": row["target"]} for row in seq2seq.rows()]
QUESTIONS = questions.rows(160, longest=4)
DOORS = {
    "texts": Door(
        options=["model=llama_tiny", *SHORT],
        write=rows_in(texts.rows()),
        metrics={"loss", "accuracy", "f1"},
        column="predicted_label",
        values=lambda classify: [each["label"] for each in classify([row["text"] for row in texts.rows()])],
    ),
    "texts by an encoder": Door(
        options=[
            "model=bert_tiny",
            *SMALL,
            "trainer.max_steps=120",
            "trainer.epochs=20",
            "optimizer.learning_rate=2e-3",
        ],
        write=rows_in(texts.rows()),
        metrics={"loss", "accuracy", "f1"},
        column="predicted_label",
        values=lambda classify: [each["label"] for each in classify([row["text"] for row in texts.rows()])],
        figure=("accuracy", lambda row: row["label"] == row["predicted_label"]),
        learns=("eval/accuracy", 0.4),
    ),
    "numbers": Door(
        options=["model=llama_tiny", "problem_type=regression", *SHORT],
        write=rows_in(numbers.TWO),
        metrics={"loss", "mse", "pearson"},
        column="scores",
        values=lambda score: [
            {each["label"]: each["score"] for each in found}
            for found in score([row["text"] for row in numbers.TWO], top_k=None)
        ],
    ),
    "words": Door(
        task="token_classification",
        options=["model=llama_tiny", *SHORT],
        write=rows_in(tagging.rows()),
        metrics={"loss", "accuracy", "precision", "recall", "f1"},
        column="predicted_tags",
        values=lambda tag: [
            each["predicted_tags"] for each in tag.predictions(row["tokens"] for row in tagging.rows())
        ],
    ),
    "images": Door(
        task="image_classification",
        options=["model=vit_tiny", "trainer.max_steps=2", "data.batch_size=4"],
        write=lambda folder: images.write(folder / "pictures"),
        metrics={"loss", "accuracy", "f1"},
        column="label",
        values=lambda _: [row["label"] for row in sorted(images.rows(12), key=lambda row: row["label"])],
        figure=("accuracy", lambda row: row["label"] == row["predicted_label"]),
    ),
    "translation": Door(
        task="translation",
        options=["model=t5_tiny", "data.source=en", "data.target=de", "data.prefix=translate:", *FEW_TOKENS],
        write=rows_in(LANGUAGES),
        metrics={"loss", "bleu", "chrf"},
        column="predicted_de",
        # Columns, prefix and limits are those of the run.
        values=lambda write: [each["translation_text"] for each in write([row["en"] for row in LANGUAGES])],
    ),
    "summarization": Door(
        task="summarization",
        options=["model=t5_tiny", *FEW_TOKENS],
        write=rows_in(seq2seq.rows(9)),
        metrics={"loss", "rouge1", "rouge2", "rougeL"},
        column="predicted_target",
        values=lambda write: [each["summary_text"] for each in write([row["source"] for row in seq2seq.rows(9)])],
    ),
    "questions": Door(
        task="question_answering",
        options=["model=llama_tiny", *SMALL, "model.num_kv_heads=2", "trainer.max_steps=120"]
        + ["optimizer.learning_rate=5e-3", "data.sequence_length=64", "data.stride=8"],
        write=rows_in(QUESTIONS),
        metrics={"loss", "accuracy", "exact_match", "f1"},
        column="predicted_answer",
        values=lambda answer: [each["answer"] for each in answer(QUESTIONS, handle_impossible_answer=True)],
        figure=("f1", lambda row: 100 * answer_scores(row["predicted_answer"], [e["text"] for e in row["answers"]])[1]),
        learns=("eval/f1", 20.0),
    ),
    "vectors": Door(
        task="embedding",
        options=["model=llama_tiny", *SMALL, "model.num_kv_heads=2", "trainer.max_steps=40"]
        + ["optimizer.learning_rate=3e-3", "data.eval_fraction=0.3"],
        write=rows_in(embedding.rows(60)),
        metrics={"loss", "recall@1", "recall@10", "mrr@10", "ndcg@10"},
        column="embedding",
        values=lambda embed: embed([row["anchor"] for row in embedding.rows(60)]).tolist(),
        learns=("eval/ndcg@10", 0.1),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DOORS)
def test_the_command_line_trains_evaluates_and_predicts_a_file(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    door, target = DOORS[name], tmp_path / "found.jsonl"
    path, folder = door.write(tmp_path), tmp_path / "run"
    words = [f"task={door.task}", f"data.train={path}", f"output_dir={folder}", "trainer.progress=false", "device=cpu"]
    assert run_command(["train", *words, "trainer.eval_first=true", *door.options]) == 0
    if door.learns is not None:
        metric, least = door.learns
        first, *_, last = (line[metric] for line in tiny.records(folder, "eval"))
        assert last > first + least
    chosen = [f"checkpoint={folder}", f"data.eval={path}"]
    capsys.readouterr()
    assert run_command(["evaluate", *chosen]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == door.metrics
    assert run_command(["predict", *chosen, f"output={target}"]) == 0
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    if path.is_file():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert [{name: line[name] for name in row} for line, row in zip(lines, rows, strict=True)] == rows
    for line, value in zip(lines, door.values(pipeline(door.task, model=folder)), strict=True):
        assert line[door.column] == pytest.approx(value, abs=1e-6)
    if door.figure is not None:
        metric, figure = door.figure
        assert np.mean([figure(line) for line in lines]) == pytest.approx(found[metric])
    with pytest.raises(ConfigError, match="file exists"):
        run_command(["predict", *chosen, f"output={target}"])


def encoder(folder: Path) -> Path:
    """The folder of an encoder without its head."""
    model = loading.build(config_of({"vocab_size": 259, **masks.BERT}), device=torch.device("cpu"), seed=3)
    save_model(model, folder, ByteTokenizer())
    return folder


def vision(folder: Path) -> Path:
    images.run(folder / "run")
    save_model(folder / "run", folder / "folder")
    return folder / "folder"


HEAD = {"score.weight", "score.bias"}
# What a run begins with, what learns beside the adapter, and what PEFT reads of it.
ADAPTED: dict[str, tuple[Callable[[Path], Path], set[str], tuple[str | None, list[str] | None]]] = {
    "text_classification": (adapters.base, {"score.weight"}, ("SEQ_CLS", ["score"])),
    "token_classification": (adapters.base, HEAD, ("TOKEN_CLS", ["score"])),
    "question_answering": (adapters.base, HEAD, ("TOKEN_CLS", ["score"])),
    "embedding": (adapters.base, set(), ("CAUSAL_LM", None)),
    "masked_lm": (encoder, set(), (None, None)),
    "translation": (seq2seq.base, set(), ("SEQ_2_SEQ_LM", None)),
    "image_classification": (vision, {"classifier.weight", "classifier.bias"}, (None, None)),
}
KINDS = [("text_classification", "dora"), ("text_classification", "qlora"), ("translation", "qlora")]
KINDS += [("image_classification", "dora"), ("image_classification", "qlora")]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind"), [*((task, "lora") for task in ADAPTED), *KINDS])
def test_an_adapter_and_the_head_learn_and_the_run_is_read_back(task: str, kind: str, tmp_path: Path) -> None:
    start, head, (peft_task, saved) = ADAPTED[task]
    choices = {"model": {}, "checkpoint": str(start(tmp_path / "base")), "trainer.max_steps": 3}
    choices |= {"lora.rank": 4, "lora.kind": kind, "trainer.micro_batch_size": 3}
    assembly, _ = RUNS[task].run(tmp_path / "run", choices, processor=None)
    model, work = assembly.loop.model.eval(), assembly.loop.task
    learns = {name for name, each in model.named_parameters() if each.requires_grad}
    assert {name for name in learns if ".adapters." not in name} == head < learns
    batch = next(iter(work.steps(model, Cursor())))[0]
    again: Any = load_model(tmp_path / "run", task=task)
    with torch.no_grad():
        wanted, found = (float(work.loss(each.eval(), batch)["loss"]) for each in (model, again))
    assert found == pytest.approx(wanted, rel=1e-5)
    if peft_task is not None:
        page = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
        assert (page["task_type"], page["modules_to_save"]) == (peft_task, saved)


# The tokens of a micro-batch, and the lengths of its rows.
PADDED = dict.fromkeys(RUNS, ("tokens", "sizes")) | dict.fromkeys(("masked_lm", "embedding"), ("tokens", "lengths"))
PADDED["translation"] = ("sources", "lengths")
del PADDED["image_classification"]


@pytest.mark.parametrize("task", PADDED)
def test_padding_is_never_read(task: str) -> None:
    loop, (tokens, lengths) = RUNS[task].begin(None).loop, PADDED[task]
    model = loop.model.double().eval()
    batch = next(iter(loop.task.steps(model, Cursor())))[0]
    is_padding = torch.arange(batch[tokens].shape[1]) >= batch[lengths][:, None]
    assert is_padding.any()
    with torch.no_grad():
        losses = [
            loop.task.loss(model, batch | {tokens: torch.where(is_padding, other, batch[tokens])})["loss"]
            for other in (257, 7)
        ]
    assert torch.equal(*losses)


CLASSES, TAGS = {"labels": list(texts.LABELS)}, {"labels": list(tagging.LABELS)}
ELSEWHERE = [{"text": "x", "answer_start": 1}]
# Options, a row behind those of the task, and what is said of it.
BAD: dict[str, list[tuple[dict[str, Any], Row, str]]] = {
    "text_classification": [
        ({}, {"text": "a"}, "has no column 'label'"),
        ({}, {"label": 1}, "has no column 'text'"),
        ({}, {"text": " ", "label": 1}, "row 61.*not a labelled text"),
        ({}, {"text": "a", "label": [1]}, "not a labelled text"),
        (CLASSES, {"text": "a", "label": "god"}, "row 61.*(?s:unknown label.*good)"),
        ({}, {"text": "a" * 49, "label": "bad"}, "row 61.*too long"),
    ],
    "token_classification": [
        ({}, {"tokens": ["a"]}, "has no column 'ner_tags'"),
        ({}, {"tokens": ["Ann"], "tag": ["O"]}, r"(?s)data\.tags=NAME; did you mean 'tag'"),
        ({}, {"tokens": [], "ner_tags": []}, "row 41.*has no words"),
        ({}, {"tokens": "a b", "ner_tags": ["O", "O"]}, "row 41.*has no words"),
        ({}, {"tokens": [" "], "ner_tags": ["O"]}, "row 41.*has no words"),
        ({}, {"tokens": ["a", "b"], "ner_tags": ["O"]}, "row 41.*(?s:other tags.*1 tags)"),
        (TAGS, {"tokens": ["a"], "ner_tags": ["B-LOK"]}, "row 41.*(?s:unknown.*B-LOC)"),
        (TAGS, {"tokens": ["a"], "ner_tags": [4]}, "row 41.*unknown label"),
        ({}, {"tokens": ["a" * 65], "ner_tags": ["O"]}, "row 41.*too long"),
    ],
    "translation": [
        ({}, {"source": "a"}, "has no column 'target'"),
        ({}, {"target": "a"}, "has no column 'source'"),
        ({}, {"source": "a", "target": " "}, "row 41.*not a pair"),
        ({}, {"source": "a" * 49, "target": "b"}, "source of .*row 41.*too long"),
        ({}, {"source": "a", "target": "b" * 40}, "target of .*row 41.*too long"),
    ],
    "question_answering": [
        ({}, {"question": "a", "answers": []}, "row 41.*no column 'context'"),
        ({}, {"question": " ", "context": "a", "answers": []}, "row 41.*is not a question"),
        ({}, {"question": "a", "context": "xy", "answers": ELSEWHERE}, "does not occur"),
        ({}, {"question": "a", "context": "xyz", "answers": ["w"]}, "row 41.*does not occur"),
        ({}, {"question": "a" * 38, "context": "xyz", "answers": []}, "row 41.*does not fit into a window"),
    ],
    "embedding": [
        ({}, {"anchor": "a"}, "row 43.*no column 'positive'"),
        ({}, {"anchor": "a", "positive": " "}, "row 43.*is not a pair"),
        ({}, {"anchor": "a", "positive": 3}, "row 43.*holds no text"),
        ({}, {"anchor": "a", "positive": "a"}, "row 43.*compares a text with itself"),
        ({}, {"anchor": "a", "positive": "b", "negative": ["c", "b"]}, "row 43.*with itself"),
        ({"data.negative": "worse"}, {"anchor": "a", "positive": "b"}, "no column 'worse'"),
        ({}, {"anchor": "a", "positive": "b" * 65}, "row 43.*too long"),
    ],
    "masked_lm": [({}, {"txt": "a"}, "no column 'text'")],
}


@pytest.mark.parametrize(("task", "choices", "row", "words"), [(task, *each) for task in BAD for each in BAD[task]])
def test_a_row_that_cannot_be_used_is_named(task: str, choices: dict[str, Any], row: Row, words: str) -> None:
    with pytest.raises(DataError, match=words):
        RUNS[task].begin(None, choices, train_dataset=[*RUNS[task].rows(), row])


RED, OTHER = {"image": images.picture("red", 0), "label": "red"}, {"model": torch.nn.Linear(2, 2)}
# What a task is not begun with, options or inputs, and what is said of it: the name of the option, where nothing else.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str | None]] = [
    ("text_classification", {}, {"train_dataset": None}, "nothing|no labelled rows"),
    ("text_classification", {}, {"train_dataset": [{"text": "a", "label": 1}]}, "one label only"),
    ("text_classification", {"labels": ["one"]}, {}, "two or more"),
    ("image_classification", {}, {"train_dataset": None}, "there are no images"),
    ("image_classification", {}, {"train_dataset": [RED]}, "one label only"),
    ("image_classification", {"labels": ["red", "blue"]}, {"train_dataset": [RED | {"label": "rod"}]}, "mean 'red'"),
    ("image_classification", {"model": tiny.LLAMA}, {}, "task=text_generation"),
    ("image_classification", {}, OTHER, "reads no images"),
    ("translation", {"model": tiny.LLAMA}, {}, "task=text_generation"),
    ("translation", {}, {"train_dataset": None}, "there are no pairs"),
    ("translation", {"parallel.tensor": 2}, {}, "sequence_parallel"),
    ("masked_lm", {"data.mask_fraction": 1.0}, {}, None),
    ("masked_lm", {"data.sequence_length": 2}, {}, None),
    ("masked_lm", {"model": masks.BERT | {"vocab_size": 258}}, {}, "vocab_size"),
    ("masked_lm", {"model": tiny.LLAMA}, {}, "(?s)another kind.*text_generation"),
    ("masked_lm", {}, OTHER, "learns no masked tokens"),
    ("question_answering", {"labels": ["a", "b"]}, {}, None),
    ("question_answering", {"problem_type": "regression"}, {}, None),
    ("question_answering", {"data.stride": 0}, {}, None),
    ("question_answering", {"data.stride": 40}, {}, "does not fit into a window"),
    ("embedding", {"temperature": 0.0}, {}, None),
    ("embedding", {"sizes": [0]}, {}, None),
    ("embedding", {"sizes": [64]}, {}, None),
    ("embedding", {"pooling": "max"}, {}, None),
    ("embedding", {}, OTHER, "embeds no texts"),
]


@pytest.mark.parametrize(("task", "choices", "given", "words"), REFUSED)
def test_what_a_task_cannot_begin_with_is_refused(
    task: str, choices: dict[str, Any], given: dict[str, Any], words: str | None
) -> None:
    with pytest.raises(KitforgeError, match=words or next(iter(choices))):
        RUNS[task].begin(None, choices, **given)


# A row that is too long and one that cannot be used, and the length of the longest row that is left.
LEFT: dict[str, tuple[list[Row], int]] = {
    "text_classification": ([{"text": "a" * 60, "label": "bad"}, {"text": "no label"}], 48),
    "token_classification": ([{"tokens": ["a" * 60, "bcdef"], "ner_tags": ["O", "O"]}, {"tokens": ["x"]}], 64),
    "embedding": ([{"anchor": "a", "positive": "b" * 65}, {"anchor": "x"}], 2 * 64),
    "translation": ([{"source": "a" * 60, "target": "b" * 60}, {"source": "no target"}], 48),
    "question_answering": ([BAD["question_answering"][1][1]], 40),
}


@pytest.mark.parametrize("task", LEFT)
def test_rows_can_be_skipped_or_cut_instead(task: str, caplog: pytest.LogCaptureFixture) -> None:
    extra, longest = LEFT[task]
    choices = {"data.on_invalid": "skip", "data.eval_fraction": 0.0}
    choices |= {"data.on_too_long": "cut_right"} if len(extra) > 1 else {}
    rows = RUNS[task].rows()
    data = RUNS[task].begin(None, choices, train_dataset=[*rows, *extra]).loop.task._rows
    assert re.search("1 more (rows )?were skipped", caplog.text) and ("1 were cut" in caplog.text) == (len(extra) > 1)
    assert int(data.train.lengths.max()) == longest
    if len(extra) == 1:
        assert data.fingerprint == RUNS[task].begin(None, choices).loop.task._rows.fingerprint
    else:
        assert len(data.train) == len(rows) + 1
