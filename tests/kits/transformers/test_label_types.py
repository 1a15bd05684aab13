"""Labels that are predicted have the type of those that were learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from kitforge.api import Trainer, pipeline, save_model
from kitforge.cli.main import run as run_command
from tests.small_run import OPTIONS as SMALL

OPTIONS: dict[str, Any] = {
    "data.batch_size": 4,
    "data.eval_fraction": 0.25,
    "trainer.max_steps": 1,
    "trainer.progress": False,
    "device": "cpu",
}
SIZES = {name: value for name, value in SMALL.items() if name.startswith("model.")}
TEXTS = OPTIONS | SIZES | {"data.sequence_length": 48}
PAIRS = [(0, 1), ("0", "1"), (False, True), ("bad", "good"), ("1", 2)]


def is_typed(label: object, pair: tuple[Any, Any]) -> bool:
    """Whether it is one of the pair, `is` for booleans, which equal numbers; types that differ are all texts."""
    kinds = set(map(type, pair))
    return (type(label), label) in [(type(each), each) for each in (pair if len(kinds) == 1 else map(str, pair))]


@pytest.mark.parametrize("pair", PAIRS, ids=repr)
def test_a_text_has_the_label_of_a_row(pair: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{"text": f"{number} moons", "label": pair[number % 2]} for number in range(8)]
    trainer = Trainer("text_classification", "llama_tiny", rows, output_dir=tmp_path / "run", options=TEXTS)
    trainer.train()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = [f"data.eval={tmp_path / 'rows.jsonl'}", f"output={tmp_path / 'found.jsonl'}", "trainer.progress=false"]
    assert run_command(["predict", f"checkpoint={tmp_path / 'run'}", *places]) == 0
    found = [json.loads(line)["predicted_label"] for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    said = [each["label"] for each in pipeline("text_classification", tmp_path / "run")([row["text"] for row in rows])]
    assert found == said and all(is_typed(each, pair) for each in (*found, *said, trainer.predict("moon")[0]["label"]))
    # A folder of Hugging Face has texts for labels, and the rows are those of its labels all the same.
    save_model(tmp_path / "run", tmp_path / "folder")
    config = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert config["id2label"] == {"0": str(pair[0]), "1": str(pair[1])}
    again = Trainer("text_classification", tmp_path / "folder", rows, options=OPTIONS | {"data.sequence_length": 48})
    assert "eval/loss" in again.evaluate()


@pytest.mark.parametrize("pair", PAIRS[:2], ids=repr)
def test_a_word_has_the_tag_of_a_row(pair: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{"tokens": ["a", "b"], "ner_tags": [pair[number % 2], pair[0]]} for number in range(8)]
    run = Trainer("token_classification", "llama_tiny", rows, output_dir=tmp_path / "run", options=TEXTS).train()
    label: Any = pipeline("token_classification", run.folder)
    (row,) = label.predictions([["a", "b"]])
    assert all(is_typed(each, pair) for each in row["predicted_tags"])
    for strategy in ("none", "simple"):
        found = label("a b", aggregation_strategy=strategy)
        assert found and all(is_typed(each.get("entity", each.get("entity_group")), pair) for each in found)


@pytest.mark.parametrize("pair", PAIRS[:3], ids=repr)
def test_an_image_has_the_label_of_a_row(pair: tuple[Any, Any], tmp_path: Path) -> None:
    rows = [{"image": Image.new("RGB", (16, 16), (number, 0, 0)), "label": pair[number % 2]} for number in range(8)]
    run = Trainer("image_classification", "vit_tiny", rows, output_dir=tmp_path / "run", options=OPTIONS).train()
    said = pipeline("image_classification", run.folder)(rows[0]["image"])
    assert len(said) == 2 and all(is_typed(each["label"], pair) for each in said)
    save_model(run.folder, tmp_path / "folder")
    again = pipeline("image_classification", tmp_path / "folder")(rows[0]["image"])
    assert again[0]["label"] == str(said[0]["label"]) and again[0]["score"] == pytest.approx(said[0]["score"])
