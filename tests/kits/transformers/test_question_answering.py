"""The task `question_answering`: spans, windows over long passages, no answer, and SQuAD's metrics."""

import collections
import json
import random
import re
import string
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from kitforge.api import load_model, pipeline, save_model
from kitforge.data.text.answers import PassageQuestion, Windows, answer_scores
from kitforge.data.tokenizers.loading import ByteTokenizer, load_tokenizer
from kitforge.foundation.errors import ModelError
from kitforge.kits.registry import recorded_task
from kitforge.kits.transformers.build import TASKS
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.kits.transformers.test_masked_lm import BERT, byte_pairs, word_pieces
from tests.tiny import published
from tests.trainer import tiny

KIT: Any = TASKS["question_answering"]
OPTIONS = SHORT | {
    "model": BERT,
    "data.batch_size": 7,
    "data.sequence_length": 40,
    "data.stride": 8,
    "trainer.max_steps": 4,
}


def rows(count: int = 40, seed: int = 5, longest: int = 9) -> list[dict[str, Any]]:
    """Which word stands behind a name? Of some passages none does."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        words = [draw.choice(tiny.WORDS) for _ in range(draw.randint(2, longest))]
        name, answer, at = (
            draw.choice(["Ann", "Bob"]),
            draw.choice(["red", "blue", "green"]),
            draw.randrange(len(words)),
        )
        words[at:at] = [] if number % 4 == 3 else [name, answer]
        context = " ".join(words)
        start = len(" ".join(words[: at + 1])) + 1
        answers = [] if number % 4 == 3 else [{"text": answer, "answer_start": start}]
        found.append({"id": str(number), "question": f"{name}?", "context": context, "answers": answers})
    return found


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows)
begin, run = RUNS.begin, RUNS.run


def official(predicted: str, answers: list[str]) -> tuple[float, float]:
    """By the definitions of SQuAD's evaluation, version 2.0."""

    def normal(text: str) -> str:
        text = "".join(each for each in text.lower() if each not in set(string.punctuation))
        return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text).split())

    def f1(gold: str) -> float:
        wanted, own = normal(gold).split(), normal(predicted).split()
        if len(wanted) == 0 or len(own) == 0:
            return float(wanted == own)
        same = sum((collections.Counter(wanted) & collections.Counter(own)).values())
        if same == 0:
            return 0.0
        precision, recall = same / len(own), same / len(wanted)
        return 2 * precision * recall / (precision + recall)

    golds = [each for each in answers if normal(each)] or [""]
    return max(float(normal(each) == normal(predicted)) for each in golds), max(map(f1, golds))


def test_scores_are_those_of_squads_definition_on_drawn_texts() -> None:
    draw = random.Random(3)
    parts = ["the", "a", "An", "sun", "Sun", "moon.", "the-moon", "1,000", "café", "»x«", "", "  ", "?", "theme"]
    for _ in range(3000):
        predicted = " ".join(draw.choice(parts) for _ in range(draw.randint(0, 4)))
        answers = [" ".join(draw.choice(parts) for _ in range(draw.randint(0, 4))) for _ in range(draw.randint(0, 3))]
        assert answer_scores(predicted, answers) == pytest.approx(official(predicted, answers)), (predicted, answers)


@pytest.mark.parametrize("make", [None, word_pieces, byte_pairs])
def test_windows_cover_a_passage_and_an_answer_lies_where_its_text_does(make: Any, tmp_path: Path) -> None:
    fast = None if make is None else make(tmp_path)
    tokenizer = ByteTokenizer() if make is None else load_tokenizer(tmp_path)
    for row in rows(30, longest=25):
        answers = tuple((each["text"], each["answer_start"]) for each in row["answers"])
        question = PassageQuestion(question=row["question"], context=row["context"], answers=answers)
        found = Windows(tokenizer, 36, 8).of(question, "here")
        assert all(len(each.tokens) <= 36 for each in found)
        read = [each.spans for each in found]
        whole = [span for span in read[0]]
        for one, other in zip(read, read[1:], strict=False):
            assert one[-8:] == other[:8]
            whole += other[8:]
        tokens, spans = tokenizer.encode_offsets(row["context"])
        assert whole == [span for span in spans if span[0] < span[1]] or make is byte_pairs
        if fast is not None and len(found) == 1:
            assert found[0].tokens == fast(row["question"], row["context"])["input_ids"]
        held = [each for each in found if each.target[0] >= 0]
        for each in held:
            first, last = (each.spans[index - each.passage[0]] for index in each.target)
            assert row["context"][first[0] : last[1]].strip() == answers[0][0]
        assert bool(held) is bool(answers)


def brute_force(model: Any, tokenizer: Any, question: str, context: str, data: Any) -> tuple[list[Any], float]:
    """All spans of all windows, each window alone, and the smallest log-probability of no answer."""
    asked = PassageQuestion(question=question, context=context, answers=())
    best: dict[tuple[int, int], float] = {}
    nulls = []
    for window in Windows(tokenizer, data.sequence_length, data.stride).of(asked, "here"):
        tokens, (first, stop) = torch.tensor([window.tokens]), window.passage
        with torch.no_grad():
            logits = model.logits_at(tokens, torch.tensor([len(window.tokens)]), torch.tensor([first])).double()
        null = len(window.tokens) - 1 if model.backbone.geometry.is_causal else 0
        own = [*range(first, stop), null]
        scores = logits[own].log_softmax(0)
        nulls.append(float(scores[-1].sum()))
        for start in range(stop - first):
            for end in range(start, min(start + data.max_answer_tokens, stop - first)):
                span = window.spans[start][0], window.spans[end][1]
                value = float(scores[start, 0] + scores[end, 1])
                best[span] = max(value, best.get(span, value))
    return sorted(((value, *span) for span, value in best.items()), reverse=True), min(nulls)


@pytest.mark.parametrize("model", [BERT, tiny.LLAMA])
def test_answers_are_the_likeliest_spans_of_all_windows(model: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path, {"model": model, "data.max_answer_tokens": 5, "trainer.max_steps": 30})
    answer = pipeline("question_answering", model=tmp_path)
    network: Any = load_model(tmp_path)
    for row in rows(6, 9, longest=30):
        spans, null = brute_force(network, ByteTokenizer(), row["question"], row["context"], answer._data)
        found = answer(row["question"], row["context"], top_k=4)
        assert [(each["start"], each["end"]) for each in found] == [span[1:] for span in spans[:4]]
        for one, other in zip(found, spans, strict=False):
            assert one["score"] == pytest.approx(np.exp(other[0]), rel=1e-4)
            assert one["answer"] == row["context"][one["start"] : one["end"]]
        best = answer({"question": row["question"], "context": row["context"]}, handle_impossible_answer=True)
        assert best["answer"] == ("" if null > spans[0][0] else row["context"][spans[0][1] : spans[0][2]])
    assert [answer(row["question"], row["context"]) for row in rows(3)] == answer(rows(3))
    if model is tiny.LLAMA:
        with pytest.raises(ModelError, match="only an encoder is exported"):
            save_model(tmp_path, tmp_path / "folder")


def test_the_metrics_are_those_of_each_question_alone() -> None:
    choices = {"trainer.micro_batch_size": 3, "data.batch_size": 5, "trainer.max_steps": 20, "data.sequence_length": 30}
    held = rows(15, 7, longest=14)
    assembly, _ = run(None, choices, eval_dataset=held)
    found, data = assembly.loop.evaluate(), assembly.options.data
    scores = []
    for row in held:
        model = assembly.loop.model.eval()
        spans, null = brute_force(model, ByteTokenizer(), row["question"], row["context"], data)
        predicted = "" if null > spans[0][0] else row["context"][spans[0][1] : spans[0][2]]
        scores.append(official(predicted, [each["text"] for each in row["answers"]]))
    assert len(assembly.loop.task._rows.eval) > 15
    assert found["eval/exact_match"] == pytest.approx(100 * np.mean([each[0] for each in scores]))
    assert found["eval/f1"] == pytest.approx(100 * np.mean([each[1] for each in scores]))


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_folders_of_transformers_are_read_and_written_with_equal_logits(kind: str, tmp_path: Path) -> None:
    fast = (word_pieces if kind == "Bert" else byte_pairs)(tmp_path / "theirs")
    options = {"vocab_size": len(fast), "max_position_embeddings": 70, "pad_token_id": fast.pad_token_id}
    options["type_vocab_size"] = 2 if kind == "Bert" else 1
    theirs = published(tmp_path / "theirs", f"{kind}ForQuestionAnswering", **options)
    assert recorded_task(tmp_path / "theirs") == "question_answering"
    ours = cast(Any, load_model(tmp_path / "theirs"))
    tokenizer, row = load_tokenizer(tmp_path / "theirs"), rows()[0]
    asked = PassageQuestion(question=row["question"], context=row["context"], answers=())
    (window,) = Windows(tokenizer, 64, 8).of(asked, "here")
    given = fast(row["question"], row["context"], return_tensors="pt", return_token_type_ids=kind == "Bert")
    assert given["input_ids"].tolist() == [window.tokens]
    assert kind == "Roberta" or given["token_type_ids"].unique().tolist() == [0, 1]
    with torch.no_grad():
        wanted = theirs(**given)
        sizes = torch.tensor([len(window.tokens)])
        found = ours.logits_at(torch.tensor([window.tokens]), sizes, torch.tensor([window.passage[0]]))
    assert torch.allclose(found, torch.stack([wanted.start_logits[0], wanted.end_logits[0]], 1), atol=1e-5)
    choices = {"model": {}, "checkpoint": str(tmp_path / "theirs"), "trainer.max_steps": 2, "data.sequence_length": 60}
    # Training goes on with the head that is there.
    start = begin(None, choices, processor=None).loop.model
    assert torch.equal(start.score.weight, ours.score.weight)
    run(tmp_path / "run", choices, processor=None)
    save_model(tmp_path / "run", tmp_path / "ours")
    again, notes = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not notes["missing_keys"] and not notes["unexpected_keys"]
    with torch.no_grad():
        wanted, trained = again.eval()(**given), cast(Any, load_model(tmp_path / "run"))
        found = trained.logits_at(torch.tensor([window.tokens]), sizes, torch.tensor([window.passage[0]]))
    assert torch.allclose(found[:, 0], wanted.start_logits[0], atol=1e-5)


def squad(folder: Path) -> Path:
    """The rows as SQuAD's JSON, two questions to a paragraph's article."""
    paragraphs = [
        {"context": row["context"], "qas": [{"id": row["id"], "question": row["question"], "answers": row["answers"],
                                             "is_impossible": not row["answers"]}]}
        for row in rows()
    ]  # fmt: skip
    data = [{"title": str(start), "paragraphs": paragraphs[start : start + 2]} for start in range(0, 40, 2)]
    (folder / "squad.json").write_text(json.dumps({"version": "v2.0", "data": data}))
    return folder / "squad.json"


def test_squads_json_and_rows_of_datasets_are_the_same_questions(tmp_path: Path) -> None:
    lists = [
        row | {"answers": {key: [each[key] for each in row["answers"]] for key in ("text", "answer_start")}}
        for row in rows()
    ]
    plain = [row | {"answers": [each["text"] for each in row["answers"]]} for row in rows()]
    found = [begin(None, train_dataset=each).loop.task._rows.fingerprint for each in (rows(), squad(tmp_path), lists)]
    assert len({str(each) for each in found}) == 1
    assert len(begin(None, train_dataset=plain).loop.task._rows.train) == len(begin(None).loop.task._rows.train)
