"""An image reaches a network as transformers' processor prepares it, or is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from kitforge import pipeline
from kitforge.api import save_model
from kitforge.foundation.errors import DataError, ModelError
from tests.tiny import published

SIZE = 24
FACTOR = {"do_rescale": True, "rescale_factor": 1 / 127.5}
PREPARED: dict[str, dict[str, Any]] = {
    "plain": {},
    "nearest": {"resample": 0},
    "lanczos": {"resample": 1},
    "bicubic": {"resample": 3},
    "box": {"resample": 4},
    "hamming": {"resample": 5},
    "not_normalized": {"do_normalize": False},
    "another_factor": FACTOR,
    "not_rescaled": {"do_rescale": False, "image_mean": [120.0] * 3, "image_std": [60.0] * 3},
    "raw": {"do_rescale": False, "do_normalize": False},
    "imagenet": {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "cropped": {"size": {"height": 32, "width": 40}, "do_center_crop": True, "crop_size": SIZE},
    "shortest_edge": {
        "size": {"shortest_edge": 31},
        "do_center_crop": True,
        "crop_size": {"height": SIZE, "width": SIZE},
    },
    "padded": {"size": {"height": 17, "width": 20}, "do_center_crop": True, "crop_size": SIZE},
    "not_resized_but_cropped": {"do_resize": False, "do_center_crop": True, "crop_size": SIZE},
    "old_names": {"feature_extractor_type": "ViTFeatureExtractor", "size": SIZE, "image_processor_type": None},
    "not_converted": {"do_convert_rgb": True},
    "by_default": dict.fromkeys(("resample", "do_resize", "do_rescale", "rescale_factor", "do_normalize")),
    "deit_by_default": {"image_processor_type": "DeiTImageProcessor", "crop_size": SIZE}
    | dict.fromkeys(("size", "resample", "do_center_crop")),
}
REFUSED: list[dict[str, Any]] = [
    {"do_pad": True},
    {"image_processor_type": "CLIPImageProcessor"},
    {"crop_pct": 0.9},
    {"do_flip_channel_order": True},
    {"size": {"height": SIZE + 8, "width": SIZE + 8}},
    {"size": {"shortest_edge": SIZE, "longest_edge": 99}},
    {"size": {"shortest_edge": SIZE}},
    {"resample": 9},
    {"image_std": [0.5]},
    {"do_resize": "no"},
]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, labels = tmp_path_factory.mktemp("vit"), {0: "a", 1: "b", 2: "c"}
    published(folder, "ViTForImageClassification", image_size=SIZE, patch_size=8, id2label=labels)
    return folder


def with_processor(network: Path, folder: Path, change: dict[str, Any]) -> Path:
    for path in network.iterdir():
        (folder / path.name).symlink_to(path)
    values = transformers.ViTImageProcessor(size={"height": SIZE, "width": SIZE}).to_dict() | change
    text = json.dumps({name: value for name, value in values.items() if value is not None}, default=int)
    (folder / "preprocessor_config.json").write_text(text)
    return folder


def picture(width: int = 37, height: int = 51) -> Image.Image:
    chance = np.random.default_rng(3)
    coarse = Image.fromarray(chance.integers(0, 256, (7, 6, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def theirs(folder: Path, image: Any) -> dict[str, float]:
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        pixels = processor(transformers.image_utils.load_image(image), return_tensors="pt").pixel_values
        scores = model(pixels).logits.softmax(-1)[0]
    return {model.config.id2label[number]: float(score) for number, score in enumerate(scores)}


def ours(folder: Path, image: Any) -> dict[str, float]:
    return {each["label"]: each["score"] for each in pipeline("image_classification", model=folder)(image, top_k=None)}


@pytest.mark.parametrize("name", PREPARED)
@pytest.mark.parametrize("size", [(37, 51), (50, 30)])
def test_every_preparation_is_that_of_transformers(
    name: str, size: tuple[int, int], network: Path, tmp_path: Path
) -> None:
    folder = with_processor(network, tmp_path, PREPARED[name])
    wanted = theirs(folder, picture(*size))
    assert ours(folder, picture(*size)) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("name", ["another_factor", "shortest_edge", "bicubic", "not_resized_but_cropped"])
def test_an_export_prepares_images_alike(name: str, network: Path, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    folder = with_processor(network, tmp_path / "first", PREPARED[name])
    save_model(folder, tmp_path / "second")
    wanted = theirs(folder, picture())
    assert theirs(tmp_path / "second", picture()) == pytest.approx(wanted, abs=1e-4)
    assert ours(tmp_path / "second", picture()) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("change", REFUSED, ids=[next(iter(each)) for each in REFUSED])
def test_another_preparation_is_refused(change: dict[str, Any], network: Path, tmp_path: Path) -> None:
    folder = with_processor(network, tmp_path, change)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        ours(folder, picture())


def test_an_image_that_is_not_resized_has_the_size_of_the_network(network: Path, tmp_path: Path) -> None:
    folder = with_processor(network, tmp_path, {"do_resize": False})
    image = picture(SIZE, SIZE)
    assert ours(folder, image) == pytest.approx(theirs(folder, image), abs=1e-4)
    with pytest.raises(DataError, match=r"image 0.*\n.*37 x 51"):
        ours(folder, picture())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_upright(orientation: int, network: Path, tmp_path: Path) -> None:
    folder, path = with_processor(network, tmp_path, {}), tmp_path / "photo.jpg"
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(path, exif=exif, quality=95)
    wanted = theirs(folder, str(path))
    assert ours(folder, str(path)) == pytest.approx(wanted, abs=1e-4)
    assert ours(folder, path.read_bytes()) == pytest.approx(wanted, abs=1e-4)
    with Image.open(path) as opened:
        assert ours(folder, opened) == pytest.approx(wanted, abs=1e-4)


def test_sixteen_bits_are_those_of_eight(network: Path, tmp_path: Path) -> None:
    folder, path = with_processor(network, tmp_path, {}), tmp_path / "deep.png"
    gray = picture().convert("L")
    Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(path)
    with Image.open(path) as opened:
        assert opened.mode.startswith("I")
    wanted = ours(folder, gray)
    assert ours(folder, path) == pytest.approx(wanted, abs=1e-6)
    assert ours(folder, path.read_bytes()) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("kind", [np.uint8, np.int64, np.float32])
def test_an_array_of_bytes_is_an_image_in_any_type(kind: Any, network: Path, tmp_path: Path) -> None:
    folder = with_processor(network, tmp_path, {})
    array = np.asarray(picture()).astype(kind)
    assert ours(folder, array) == pytest.approx(ours(folder, picture()), abs=1e-6)


@pytest.mark.parametrize("scale", [1 / 255, 1 / 510, -1.0, 257.0])
def test_an_array_of_other_numbers_is_refused(scale: float, network: Path, tmp_path: Path) -> None:
    folder = with_processor(network, tmp_path, {})
    with pytest.raises(DataError, match="(?s)image 0.*float32.*bytes from 0 to 255"):
        ours(folder, (np.asarray(picture()) * scale).astype(np.float32))
