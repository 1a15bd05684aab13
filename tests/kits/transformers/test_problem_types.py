"""Several labels a row: sigmoid, binary cross entropy and folders, as transformers has them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional

from kitforge import pipeline
from kitforge.api import load_model, save_model
from kitforge.data.labels import index_of, multi_hot, names_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import DataError, ModelError
from tests.kits.transformers import test_classification as texts
from tests.kits.transformers import test_image_classification as images
from tests.tiny import published
from tests.tokenizer_folders import write_kind
from tests.trainer import tiny

KINDS = {
    None: lambda logits: logits.softmax(-1),
    "single_label_classification": lambda logits: logits.softmax(-1),
    "multi_label_classification": lambda logits: logits.sigmoid(),
    "regression": lambda logits: logits,
}
LISTS = [["good"], [], ["bad", "fair"], ["bad"], ["good", "bad", "fair"], ["fair"]]
ROWS = [{"text": f"text {number}", "label": label} for number, label in enumerate(LISTS * 3)]


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of several labels a row, exported."""
    home = tmp_path_factory.mktemp("run")
    texts.run(home / "run", {"trainer.max_steps": 4}, train_dataset=ROWS)
    save_model(home / "run", home / "folder")
    return home / "folder"


def set_kind(folder: Path, kind: str | None) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"problem_type": kind}))


def copied(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_gets_the_scores_of_transformers(kind: str | None, text_folder: Path, tmp_path: Path) -> None:
    folder = copied(text_folder, tmp_path / "folder")
    set_kind(folder, kind)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        tokens = torch.tensor([ByteTokenizer().encode_prompt("moon good")])
        wanted = KINDS[kind](theirs(tokens).logits[0])
    (found,) = pipeline("text_classification", model=folder)(["moon good"], top_k=None)
    names = theirs.config.id2label
    assert {each["label"]: each["score"] for each in found} == pytest.approx(
        {names[number]: float(score) for number, score in enumerate(wanted)}, abs=1e-5
    )


@pytest.mark.parametrize("pad_id", [None, 1, 5])
def test_the_token_that_classifies_a_text_is_that_of_transformers(pad_id: int | None, tmp_path: Path) -> None:
    write_kind("both ends", tmp_path)
    page = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(page | {"pad_token": "</s>"}))
    options = {"vocab_size": 300, "pad_token_id": pad_id, "num_labels": 3, "max_position_embeddings": 64}
    theirs = published(tmp_path, "LlamaForSequenceClassification", **options)
    tokenize, classify = transformers.AutoTokenizer.from_pretrained(tmp_path), pipeline("text_classification", tmp_path)
    for text in ("ugly", "Beautiful is better", "x"):
        tokens = tokenize(text, return_tensors="pt").input_ids
        assert tokens[0, -1] == 1
        with torch.no_grad():
            wanted = theirs(tokens).logits[0].softmax(-1)
        (found,) = classify([text], top_k=None)
        scores = {each["label"]: each["score"] for each in found}
        assert [scores[f"LABEL_{number}"] for number in range(3)] == pytest.approx(wanted.tolist(), abs=1e-5)


def test_the_loss_and_accuracy_of_several_labels_are_those_of_transformers(text_folder: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(text_folder).eval()
    names, rows, losses, right = ("bad", "fair", "good"), [], [], []
    for number, row in enumerate(ROWS[:6]):
        tokens = torch.tensor([ByteTokenizer().encode_prompt(row["text"])])
        with torch.no_grad():
            predicted = theirs(tokens).logits[0] > 0
            # Two of the rows have the labels that are predicted, the others one more or one fewer.
            labels = predicted.logical_xor(torch.arange(3) == (number % 3 or 3))
            losses.append(float(theirs(tokens, labels=labels[None].float()).loss))
        right.append(bool((labels == predicted).all()))
        rows.append(row | {"label": [name for name, has in zip(names, labels, strict=True) if has]})
    choices = {"checkpoint": str(text_folder), "model": {}, "data.eval_fraction": 0.0, "labels": list(names)}
    choices |= {"trainer.micro_batch_size": 4, "data.batch_size": 6, "trainer.max_steps": 1}
    found = texts.begin(None, choices, train_dataset=rows, eval_dataset=rows).loop.evaluate()
    assert found["eval/loss"] == pytest.approx(sum(losses) / 6, rel=1e-4)
    assert found["eval/accuracy"] == pytest.approx(sum(right) / 6)
    texts.run(tmp_path, choices, train_dataset=rows)
    (step,) = tiny.records(tmp_path, "train")
    assert (step["loss"], step["accuracy"]) == pytest.approx((sum(losses) / 6, sum(right) / 6), rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_gets_the_scores_of_transformers(kind: Any, tmp_path: Path) -> None:
    options = {"image_size": 16, "patch_size": 8, "id2label": {0: "a", 1: "b"}, "problem_type": kind}
    theirs = published(tmp_path, "ViTForImageClassification", **options)
    picture = images.picture("red", 1)
    found = pipeline("image_classification", model=tmp_path)(picture, top_k=None)
    pixels = (torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        wanted = KINDS[kind](theirs(pixels.unsqueeze(0)).logits[0])
    assert {each["label"]: each["score"] for each in found} == pytest.approx(
        {"ab"[number]: float(score) for number, score in enumerate(wanted)}, abs=1e-4
    )
    save_model(tmp_path, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text()).get("problem_type")
    assert written == (None if kind == "single_label_classification" else kind)


def test_images_learn_several_labels(tmp_path: Path) -> None:
    given = [{**row, "label": [row["label"], "any"]} for row in images.rows()]
    assembly = images.begin(tmp_path, {"data.eval_fraction": 0.0}, train_dataset=given, eval_dataset=given[:4])
    model = assembly.loop.model
    found = assembly.loop.evaluate()
    names = model.config.labels
    assert names == ("any", "blue", "green", "red")
    losses = []
    for row in given[:4]:
        pixels = (torch.from_numpy(np.array(row["image"])).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        target = torch.tensor([[float(name in row["label"]) for name in names]])
        with torch.no_grad():
            losses.append(float(functional.binary_cross_entropy_with_logits(model.logits(pixels[None]), target)))
    assert found["eval/loss"] == pytest.approx(sum(losses) / 4, rel=1e-4)
    images.finish(assembly)
    scores = pipeline("image_classification", model=tmp_path)(images.picture("red", 1), top_k=None)
    assert all(0 < each["score"] < 1 for each in scores)
    assert load_model(tmp_path).config.problem_type == "multi_label_classification"


def test_a_list_is_of_names_or_of_zeros_and_ones() -> None:
    index = index_of(("bad", "fair", "good"))
    assert multi_hot(["good", "bad"], index, "row 1") == [1, 0, 1]
    assert multi_hot([0, 1, 1], index, "row 1") == [0, 1, 1]
    assert multi_hot([0.0, 1.0, 0.0], index, "row 1") == [0, 1, 0]
    assert multi_hot([2], index, "row 1") == [0, 0, 1]
    assert multi_hot([], index, "row 1") == [0, 0, 0]
    assert names_of([[0, 1, 1], [1, 0, 0]]) == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert names_of([["b"], ["a", "b"], []]) == ("a", "b")
    with pytest.raises(DataError, match=r"row 7 has an unknown label\n.*god"):
        multi_hot(["god"], index, "row 7")


def test_what_cannot_be_is_refused(text_folder: Path, tmp_path: Path) -> None:
    folder = copied(text_folder, tmp_path / "folder")
    set_kind(folder, "of_tomorrow")
    with pytest.raises(ModelError, match=r"problem_type\n.*of_tomorrow"):
        pipeline("text_classification", model=folder)
    set_kind(folder, "regression")
    with pytest.raises(DataError, match="not a row of numbers"):
        texts.begin(None, {"checkpoint": str(folder), "model": {}}, train_dataset=texts.rows())
    set_kind(folder, "single_label_classification")
    with pytest.raises(DataError, match="not a labelled text"):
        texts.begin(None, {"checkpoint": str(folder), "model": {}}, train_dataset=ROWS)
