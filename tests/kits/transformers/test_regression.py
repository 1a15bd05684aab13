"""Heads that give numbers: trained by the mean squared error, as in transformers, with one output and with several."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kitforge import pipeline
from kitforge.api import save_model
from kitforge.data.images.labelled import ImageEntry
from kitforge.data.labels import number_names, numbers_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.types import Cursor
from kitforge.kits.transformers.rows import label_probabilities
from tests.kits.served import served
from tests.kits.transformers import test_classification as texts
from tests.kits.transformers import test_image_classification as images
from tests.tiny import published

ONE = [{"text": f"text {number} {'x' * (number % 5)}", "label": number % 5 / 2 - 0.3} for number in range(18)]
TWO = [{**row, "label": [row["label"], number % 3]} for number, row in enumerate(ONE)]


def classifier(folder: Path, num_labels: int, kind: str | None) -> Any:
    """A classifier of texts as transformers writes it, over bytes."""
    options = {"vocab_size": 258, "num_labels": num_labels, "max_position_embeddings": 64, "pad_token_id": 257}
    ByteTokenizer().save(folder)
    return published(folder, "LlamaForSequenceClassification", problem_type=kind, **options)


def their_loss(theirs: Any, rows: list[dict[str, Any]]) -> torch.Tensor:
    losses = []
    for row in rows:
        labels = row["label"] if isinstance(row["label"], list) else [row["label"]]
        tokens = torch.tensor([ByteTokenizer().encode_prompt(row["text"])])
        losses.append(theirs(tokens, labels=torch.tensor([labels], dtype=torch.float32)).loss)
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("rows", "kind"), [(ONE, "regression"), (ONE, None), (TWO, "regression")], ids=["one", "one unsaid", "two"]
)
def test_the_loss_and_the_first_step_are_those_of_transformers(
    rows: list[dict[str, Any]], kind: str | None, tmp_path: Path
) -> None:
    theirs = classifier(tmp_path / "folder", 2 if rows is TWO else 1, kind)
    choices = {
        "checkpoint": str(tmp_path / "folder"),
        "model": {},
        "data.eval_fraction": 0.0,
        "data.batch_size": 18,
        "data.shuffle": False,
        "trainer.micro_batch_size": 5,
        "trainer.max_steps": 1,
    }
    assembly = texts.begin(tmp_path / "run", choices, train_dataset=rows, eval_dataset=rows[:7])
    found = assembly.loop.evaluate()
    with torch.no_grad():
        wanted = float(their_loss(theirs, rows[:7]))
    assert found["eval/loss"] == found["eval/mse"] == pytest.approx(wanted, rel=1e-4)
    task, model = assembly.loop.task, assembly.loop.model
    step = next(iter(task.steps(model, Cursor())))
    model.zero_grad()
    sum(task.loss(model, each)["loss"] for each in step).backward()
    their_loss(theirs, rows).backward()
    assert torch.allclose(model.score.weight.grad / len(rows), theirs.score.weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("rows", [ONE, TWO], ids=["one", "two"])
def test_a_run_of_numbers_is_exported_and_read_by_transformers(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    texts.run(tmp_path / "run", {"problem_type": "regression", "trainer.max_steps": 3}, train_dataset=rows)
    save_model(tmp_path / "run", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    names = ["LABEL_0", "LABEL_1"][: 2 if rows is TWO else 1]
    assert config["problem_type"] == "regression" and list(config["id2label"].values()) == names
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder").eval()
    with torch.no_grad():
        wanted = theirs(torch.tensor([ByteTokenizer().encode_prompt("text 3")])).logits[0].tolist()
    for source in (tmp_path / "run", tmp_path / "folder"):
        (found,) = pipeline("text_classification", model=source)(["text 3"], top_k=None)
        scores = {each["label"]: each["score"] for each in found}
        assert [scores[name] for name in names] == pytest.approx(wanted, abs=1e-5)
        (row,) = pipeline("text_classification", model=source).predictions(["text 3"])
        assert row == ({"scores": scores} if rows is TWO else {"score": scores["LABEL_0"]})
    found = texts.begin(None, {"checkpoint": str(tmp_path / "folder"), "model": {}}, train_dataset=rows)
    assert set(found.loop.evaluate()) == {"eval/loss", "eval/mse", "eval/pearson"}


def test_the_correlation_is_that_of_the_definition(tmp_path: Path) -> None:
    choices = {"problem_type": "regression", "data.eval_fraction": 0.0}
    found = []
    for size in (1, 7):
        assembly = texts.begin(None, {**choices, "data.batch_size": size}, train_dataset=TWO, eval_dataset=TWO)
        found.append(assembly.loop.evaluate())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    model = assembly.loop.model
    with torch.no_grad():
        rows = [model(torch.tensor([ByteTokenizer().encode_prompt(row["text"])]))[0] for row in TWO]
    said, wanted = torch.stack(rows).double(), torch.tensor([row["label"] for row in TWO], dtype=torch.float64)
    pearson = [float(torch.corrcoef(torch.stack([said[:, each], wanted[:, each]]))[0, 1]) for each in (0, 1)]
    assert found[0]["eval/pearson"] == pytest.approx(sum(pearson) / 2, abs=1e-5)


def test_numbers_may_be_spelt_as_texts_and_what_is_none_is_named() -> None:
    assert numbers_of("1.5", None, "row 1") == [1.5]
    assert numbers_of(["1", 2, 0.5], ("a", "b", "c"), "row 1") == [1.0, 2.0, 0.5]
    for wrong in ("good", True, None, float("nan"), "inf", [1, "x"], []):
        with pytest.raises(DataError, match="row 7 is not a row of numbers"):
            numbers_of(wrong, None, "row 7")
    with pytest.raises(DataError, match=r"(?s)row 7 has another count of numbers.*labels="):
        numbers_of([1.0, 2.0], ("a",), "row 7")
    assert number_names([("row 1", [1, 2])], ()) == ("LABEL_0", "LABEL_1")
    assert number_names([("row 1", 3)], ("stars",)) == ("stars",)


def test_fractions_without_the_option_name_it() -> None:
    with pytest.raises(DataError, match="problem_type=regression"):
        texts.begin(None, train_dataset=ONE)


def test_whole_numbers_are_numbers_with_the_option(tmp_path: Path) -> None:
    given = [{**row, "label": number % 4} for number, row in enumerate(ONE)]
    choices = {"problem_type": "regression", "labels": ["stars"], "trainer.max_steps": 1}
    model = texts.run(tmp_path / "run", choices, train_dataset=given).loop.model
    assert model.labels == ("stars",) and model.score.weight.shape[0] == 1


def test_a_single_label_that_excludes_nothing_has_the_score_of_transformers() -> None:
    logits = torch.tensor([[0.3]])
    assert torch.equal(label_probabilities(logits, "single_label_classification"), logits.sigmoid())
    assert torch.equal(label_probabilities(logits, "regression"), logits)


def image_rows() -> list[dict[str, Any]]:
    return [{**row, "label": number / 7 - 0.5} for number, row in enumerate(images.rows())]


@pytest.mark.parametrize("kind", ["regression", None])
def test_images_learn_the_numbers_of_a_published_folder(kind: str | None, tmp_path: Path) -> None:
    options = {"image_size": 16, "patch_size": 8, "num_labels": 1, "problem_type": kind}
    theirs = published(tmp_path / "folder", "ViTForImageClassification", **options)
    rows = image_rows()
    choices = {"checkpoint": str(tmp_path / "folder"), "model": {}, "data.eval_fraction": 0.0}
    assembly = images.begin(tmp_path / "run", choices, train_dataset=rows, eval_dataset=rows[:4])
    found = assembly.loop.evaluate()
    losses = []
    for row in rows[:4]:
        entry = assembly.processor([ImageEntry(location="row", label=None, read=lambda image=row["image"]: image)])
        with torch.no_grad():
            losses.append(float((theirs(entry).logits[0, 0] - row["label"]) ** 2))
    assert found["eval/mse"] == pytest.approx(sum(losses) / 4, rel=1e-3)


def test_images_learn_numbers_from_the_start(tmp_path: Path) -> None:
    assembly = images.begin(
        tmp_path, {"model": {**images.VIT, "problem_type": "regression"}}, train_dataset=image_rows()
    )
    assert assembly.loop.model.config.labels == ("LABEL_0",)
    with pytest.raises(DataError, match="problem_type=regression"):
        images.begin(tmp_path, train_dataset=image_rows())


PAIRS = [("where is Oslo", "in Norway"), ("where is Oslo", "x" * 40), ("a", "b"), ("\u00e9", "c" * 9)] * 9


def pair_tokenizer(folder: Path) -> None:
    """Bytes between tokens that tell where a text begins, where the other does, and where both end."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.id_to_token(256)
    pair, single = f"{end} $A {end} {end} $B {end}", f"{end} $A"
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=[(end, 256)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "kitforge_tokenizer.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("has_template", [False, True])
def test_a_cross_encoder_scores_pairs_as_in_transformers(has_template: bool, tmp_path: Path) -> None:
    theirs = classifier(tmp_path, 1, None)
    if has_template:
        pair_tokenizer(tmp_path)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = []
    for first, second in PAIRS:
        tokens = read(first, second, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected.append(float(theirs(tokens).logits.sigmoid()))
    firsts, seconds = map(list, zip(*PAIRS, strict=True))
    with served(tmp_path, "task=text_classification") as client:
        reply = client.post("/score", json={"queries": firsts, "documents": seconds}).json()
        assert [each["score"] for each in reply["data"]] == pytest.approx(expected, abs=1e-6)
        for words, body in {
            "does not fit into the model": {"text_1": "a", "text_2": "x" * 70},
            "scores pairs of texts": {"messages": [{"role": "user", "content": "a"}]},
        }.items():
            reply = client.post("/score", json=body)
            assert reply.status_code == 400 and words in reply.json()["error"]["message"]


def test_a_classifier_of_several_labels_is_not_served(tmp_path: Path) -> None:
    classifier(tmp_path, 2, "regression")
    with pytest.raises(ConfigError, match="one label"), served(tmp_path):
        pass
