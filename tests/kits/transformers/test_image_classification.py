"""The task `image_classification`: folders, zips, rows, augmentation, exact sums, ranks, and what peers make of it."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from kitforge.api import load_model, pipeline, save_model
from kitforge.core.nn.lora import initial_down
from kitforge.core.nn.vision import VisionTransformer
from kitforge.data.images.labelled import find_images
from kitforge.data.images.pixels import decode
from kitforge.foundation.errors import DataError
from kitforge.kits.transformers.build import TASKS
from kitforge.kits.transformers.image_classification import augmented
from tests.kits.transformers.task_runs import SHORT, TaskRuns
from tests.trainer import tiny

KIT: Any = TASKS["image_classification"]
VIT = {"family": "vit", "dim": 32, "num_layers": 2, "num_heads": 2, "image_size": 16, "patch_size": 4, "mlp_dim": 48}
COLOURS = {"blue": (20, 30, 220), "green": (10, 200, 40), "red": (230, 20, 10)}
OPTIONS = SHORT | {"model": VIT, "data.batch_size": 5, "trainer.max_steps": 6, "optimizer.learning_rate": 2e-3}
del OPTIONS["data.eval_fraction"]


def picture(colour: str, number: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """Noise around a colour."""
    noise = np.random.default_rng(number).integers(-40, 40, (*size[::-1], 3))
    return Image.fromarray((np.array(COLOURS[colour]) + noise).clip(0, 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def rows(count: int = 24) -> list[dict[str, Any]]:
    names = list(COLOURS)
    return [{"image": picture(names[number % 3], number), "label": names[number % 3]} for number in range(count)]


def write(folder: Path, count: int = 12) -> Path:
    """A folder with train/LABEL/NUMBER.png and test/LABEL/NUMBER.jpg."""
    for number, row in enumerate(rows(count)):
        for split, suffix in (("train", "png"), ("test", "jpg")):
            path = folder / split / row["label"] / f"{number:03}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(path)
    return folder


RUNS = TaskRuns(kit=KIT, options=OPTIONS, rows=rows, inputs={})
begin, finish, run = RUNS.begin, tiny.finish, RUNS.ended


def test_it_learns_colours_from_a_zip_and_says_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "pictures", 24)
    with zipfile.ZipFile(tmp_path / "pictures.zip", "w") as file:
        for path in sorted(folder.rglob("*.*")):
            file.write(path, path.relative_to(tmp_path).as_posix())
    choices = {"trainer.max_steps": 40, "trainer.epochs": 20}
    assembly = begin(tmp_path / "run", choices, train_dataset=str(tmp_path / "pictures.zip"))
    assert (len(assembly.loop.task._rows.train), len(assembly.loop.task._rows.eval)) == (24, 24)
    found = finish(assembly)
    assert found["eval/accuracy"] > 0.95 and found["eval/f1"] > 0.95
    classify = pipeline("image_classification", model=tmp_path / "run")
    for given in (picture("red", 99), np.array(picture("red", 99)), str(folder / "test" / "red" / "002.jpg")):
        best, *others = classify(given)
        assert (best["label"], len(others)) == ("red", 2)
    many = classify([picture("green", 50, (30, 20)), picture("blue", 51)], top_k=1)
    assert [each[0]["label"] for each in many] == ["green", "blue"]


def test_augmentation_is_a_function_of_the_sample() -> None:
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    whole = augmented(images, ("flip", "crop"), 0, 3, range(6))
    assert torch.equal(augmented(images[4:], ("flip", "crop"), 0, 3, [4, 5]), whole[4:])
    assert not torch.equal(augmented(images, ("flip", "crop"), 0, 4, range(6)), whole)
    assert torch.equal(augmented(images, (), 0, 3, range(6)), images)
    flipped = augmented(images, ("flip",), 0, 3, range(6))
    pairs = [(torch.equal(one, own), torch.equal(one, own.flip(-1))) for one, own in zip(flipped, images, strict=True)]
    assert all(any(pair) for pair in pairs) and {pair[1] for pair in pairs} == {True, False}
    # A crop moves by at most two pixels over black.
    white = torch.full((200, 1, 16, 16), 255, dtype=torch.uint8)
    moved = augmented(white, ("crop",), 0, 0, range(200))
    assert bool((moved[:, :, 2:14, 2:14] == 255).all())
    assert {int((each[0, :, 8] == 0).sum()) for each in moved} == {0, 1, 2}


def test_an_evaluation_sees_images_as_they_are() -> None:
    loop = begin(None, eval_dataset=rows(9)).loop
    assert loop.evaluate() == loop.evaluate()


def test_transformers_gives_the_same_logits_for_a_picture(tmp_path: Path) -> None:
    run(tmp_path / "run", {"model": VIT | {"image_mean": [0.4, 0.5, 0.6]}})
    save_model(tmp_path / "run", tmp_path / "folder")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "folder").eval()
    processor = transformers.ViTImageProcessor.from_pretrained(tmp_path / "folder")
    ours = cast(VisionTransformer, load_model(tmp_path / "folder"))
    assert cast(Any, ours.config).image_mean == (0.4, 0.5, 0.6)
    classify = pipeline("image_classification", model=tmp_path / "folder")
    with torch.no_grad():
        wanted = theirs(**processor(picture("red", 7), return_tensors="pt")).logits.softmax(-1)[0]
    for each in classify(picture("red", 7)):
        assert each["score"] == pytest.approx(float(wanted[theirs.config.label2id[each["label"]]]), abs=1e-5)


@pytest.mark.slow
def test_a_published_model_goes_on_with_its_labels_or_with_new_ones(tmp_path: Path) -> None:
    run(tmp_path / "run")
    save_model(tmp_path / "run", tmp_path / "folder")
    before = cast(VisionTransformer, load_model(tmp_path / "folder"))
    still = {"model": {}, "checkpoint": str(tmp_path / "folder")}
    same = begin(None, still).loop.model
    assert torch.equal(same.classifier.weight, before.classifier.weight)
    others = [row | {"label": f"{row['label']}ish"} for row in rows()]
    others.append({"image": picture("red", 1), "label": "pinkish"})
    other = begin(None, still, train_dataset=others).loop.model
    assert torch.equal(other.position, before.position)
    assert not torch.equal(other.classifier.weight, before.classifier.weight) and bool(other.classifier.weight.any())
    given = begin(None, {"model": {}}, model=before, train_dataset=others).loop.model
    assert given.config.labels == ("blueish", "greenish", "pinkish", "redish")
    assert torch.equal(given.position, before.position)
    names = datasets.ClassLabel(names=["dog", "cat"])
    features = datasets.Features({"image": datasets.Value("binary"), "label": names})
    dataset = datasets.Dataset.from_list(
        [{"image": png(row["image"]), "label": at % 2} for at, row in enumerate(rows(8))], features=features
    )
    named = begin(None, still, train_dataset=dataset).loop.model
    assert named.config.labels == ("dog", "cat")
    assert not torch.equal(named.classifier.weight, before.classifier.weight)


def test_where_images_are_found(tmp_path: Path) -> None:
    data = write(tmp_path / "pictures", 6)
    assert [each.label for each in find_images(data)] == ["blue", "blue", "green", "green", "red", "red"]
    assert [": test" in str(each.location) for each in find_images(data, "eval")] == [True] * 6
    # Labels without splits above them.
    assert len(find_images(data / "train")) == len(find_images(data / "train", "eval")) == 6
    buffer = io.BytesIO()
    picture("red", 0).save(buffer, format="PNG")
    lines = [{"file": "pictures/train/red/002.png", "class": 1}, {"file": "pictures/test/red/002.jpg", "class": 0.0}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = find_images(tmp_path / "rows.jsonl", image="file", label="class")
    assert [each.label for each in found] == [1, 0]
    assert decode(found[0], 8, 3).shape == (3, 8, 8)
    assert decode(find_images([{"image": buffer.getvalue()}])[0], 16, 1).shape == (1, 16, 16)
    (tmp_path / "runs" / "nothing").mkdir(parents=True)
    with pytest.raises(DataError, match="no images"):
        find_images(tmp_path / "runs")
    picture("red", 0).save(tmp_path / "runs" / "alone.png")
    with pytest.raises(DataError, match="has no label"):
        find_images(tmp_path / "runs")
    (tmp_path / "broken.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="cannot be read as a zip"):
        find_images(tmp_path / "broken.zip")
    with pytest.raises(DataError, match="has no column 'image'"):
        find_images([{"picture": 1}])


def test_images_that_do_not_decode_are_named_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = write(tmp_path / "pictures", 9)
    broken = data / "train" / "red" / "002.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(DataError, match=r"train/red/002.png cannot be read as an image"):
        begin(None, train_dataset=str(data))
    skipped = begin(None, {"data.on_invalid": "skip"}, train_dataset=str(data)).loop.task._rows
    assert (len(skipped.train), len(skipped.eval)) == (8, 9) and "8 images: 1 more cannot be decoded" in caplog.text


def test_an_adapter_beside_the_classifier_of_new_labels_has_initial_factors() -> None:
    given = begin(None, {"trainer.max_steps": 1}).loop.model
    renamed = [row | {"label": f"very {row['label']}"} for row in rows()]
    model = begin(
        None, {"lora.rank": 2, "lora.target_modules": ["query"]}, model=given, train_dataset=renamed
    ).loop.model
    factors = {name: each for name, each in model.named_parameters() if ".adapters." in name}
    for name, factor in factors.items():
        path, _, kind = name.partition(".adapters.default.")
        wanted = initial_down(0, "default", path, factor.shape) if kind == "down" else torch.zeros(factor.shape)
        assert torch.equal(factor, wanted)
    assert len(factors) == 4
