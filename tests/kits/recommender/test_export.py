"""A run as a program of torch.export: probabilities of the pipeline, in a process that knows nothing of Kitforge."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from kitforge.api import load_model, load_processor, pipeline
from kitforge.cli import main as cli
from kitforge.data.cache_folder import default_root
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import NamedColumns
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.recommender.build import TASKS
from kitforge.trainer.run_folder import train
from tests.differential.drawn import WHOLE
from tests.kits.recommender.runs import FAMILIES, ready, run

KIT = TASKS["recommendation"]

# For every folder, what its program gives for the rows in it.
PROGRAM = """
import sys, torch
for folder in sys.argv[1:]:
    program = torch.export.load(f"{folder}/model.pt2").module()
    torch.save([program(inputs) for inputs in torch.load(f"{folder}/inputs.pt")], f"{folder}/outputs.pt")
assert not any(name.startswith("kitforge") for name in sys.modules)
"""
SCHEMA: dict[str, Any] = {
    "label": {"name": "click"},
    "numeric": {"price": {"indicator": True}},
    "bucketed": {"age": {"edges": [20.0, 40.0]}},
    "categorical": {"user": {"kind": "integer", "num_buckets": 50}, "item": {"kind": "text", "encoding": "vocabulary"}},
    "bags": {"tags": {"kind": "text", "num_buckets": 40}},
    "sequences": {"history": {"kind": "text", "encoding": "vocabulary", "table": "item", "max_length": 4}},
    "crosses": {"user_age": {"of": ["user", "age"], "num_buckets": 30}},
}
SCHEMA["categorical"]["item"]["table"] = "item"


def row(number: int) -> dict[str, Any]:
    return {
        "click": number % 3 % 2,
        "price": None if number % 5 == 0 else number / 7,
        "age": number % 60,
        "user": number % 11,
        "item": f"i{number % 7}",
        "tags": [f"t{place}" for place in range(number % 4)],
        "history": [f"i{place}" for place in range(number % 6)],
    }


# Ids that training never saw, and cells that are empty.
STRANGE = [
    {**row(3), "user": 10**12, "item": "new", "tags": ["new", "t1"], "history": ["new"] * 6},
    {"click": None, "price": None, "age": None, "user": None, "item": None, "tags": None, "history": None},
]


def trained(folder: Path, family: str, **choices: Any) -> Path:
    model = {name: value for name, value in FAMILIES[family].items() if name not in ("model.user", "model.item")}
    given = {**model, **choices, "data.schema": SCHEMA, "trainer.max_steps": 3, "data.batch_size": 40}
    assembly, _ = ready(folder, family, given, [row(number) for number in range(120)])
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    assembly.loop.model.tables.close()  # type: ignore[operator, union-attr]
    return folder


def batch_of(folder: Path, rows: list[dict[str, Any]]) -> Any:
    encoder = load_processor(folder)
    layout = encoder.schema.layout(with_label=False)
    table = load_table(open_table(rows), layout, default_root(), BadRows())
    return encoder.encode(NamedColumns(table.rows(torch.arange(len(rows)).numpy()), layout))


def program_inputs(batch: Any, features: list[str]) -> dict[str, torch.Tensor]:
    """The inputs of a program for encoded rows."""
    inputs = {"dense": batch.dense}
    for name in features:
        if name in batch.ids:
            inputs[f"ids.{name}"] = batch.ids[name]
        elif name in batch.bags:
            inputs[f"bags.{name}.ids"] = batch.bags[name].ids
            inputs[f"bags.{name}.lengths"] = batch.bags[name].offsets.diff()
        else:
            inputs[f"sequences.{name}.ids"] = batch.sequences[name].ids
            inputs[f"sequences.{name}.lengths"] = batch.sequences[name].lengths
    return inputs


TOWERS = {"model.user": ["user", "tags", "history", "price"], "model.item": ["item"]}
# Of networks between the tables and the answer the gate has the one that reshapes most.
DENSE = ("deepfm", "dcn_v2", "dlrm") if WHOLE else ("dlrm",)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ("wide_deep", *DENSE, "din")},
    **({"pooled": ("wide_deep", {"tables.pooling": "mean"})} if WHOLE else {}),
    "two_tower": ("two_tower", TOWERS),
}
GIVEN = [[row(number) for number in range(9)] + STRANGE, [row(5)], [STRANGE[1]]]


def features(name: str, folder: Path) -> list[str]:
    """The features that a program takes, in the order of its inputs."""
    if name == "two_tower":
        return ["user", "tags", "history"]
    lookups = str(load_model(folder / "run", "cpu").requests.lookups)
    return [each for each in ("age", "user", "item", "tags", "history", "user_age") if each in lookups]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every case with its program, and what the program gave in a process of its own, one for all of them."""
    made = {name: tmp_path_factory.mktemp(name) for name in CASES}
    for name, folder in made.items():
        family, choices = CASES[name]
        trained(folder / "run", family, **choices)
        words = [f"checkpoint={folder / 'run'}", "format=torch_export", f"output={folder / 'model.pt2'}"]
        assert cli.run(["export", *words]) == 0
        own = features(name, folder)
        torch.save([program_inputs(batch_of(folder / "run", rows), own) for rows in GIVEN], folder / "inputs.pt")
    subprocess.run([sys.executable, "-c", PROGRAM, *map(str, made.values())], check=True, cwd=folder)
    return made


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("name", [name for name in CASES if name != "two_tower"])
def test_a_program_gives_the_probabilities_of_the_run(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    score = pipeline("recommendation", model=folder / "run")
    for rows, scores in zip(GIVEN, torch.load(folder / "outputs.pt"), strict=True):
        assert scores.tolist() == pytest.approx([each["score"] for each in score(rows)], rel=2e-6)
    described = json.loads((folder / "model.json").read_text())
    assert (described["family"], described["step"]) == (CASES[name][0], 3)
    inputs = {each["name"]: each for each in described["inputs"]}
    assert set(inputs) == set(program_inputs(batch_of(folder / "run", GIVEN[0]), features(name, folder)))
    assert [each["name"] for each in inputs["dense"]["holds"]] == ["price", "price is missing"]
    assert inputs["bags.tags.ids"]["encoding"]["num_buckets"] == 40


@pytest.mark.slow
def test_a_program_with_a_bag_becomes_one_of_onnx(folders: dict[str, Path], tmp_path: Path) -> None:
    program = torch.export.load(folders["wide_deep"] / "model.pt2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, (), str(tmp_path / "model.onnx"), dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"))
    known, outputs = torch.load(folders["wide_deep"] / "inputs.pt"), torch.load(folders["wide_deep"] / "outputs.pt")
    for inputs, scores in zip(known, outputs, strict=True):
        found = session.run(None, {f"inputs_{name.replace('.', '_')}": value.numpy() for name, value in inputs.items()})
        assert found[0] == pytest.approx(scores.numpy(), rel=2e-6)


@pytest.mark.slow
def test_the_tower_of_users_is_exported(folders: dict[str, Path]) -> None:
    run = folders["two_tower"] / "run"
    opened = KIT.open_pipeline(load_model(run, "cpu"), load_processor(run), KIT.read_options({}))
    for rows, found in zip(GIVEN, torch.load(folders["two_tower"] / "outputs.pt"), strict=True):
        vectors, _ = opened.queries(batch_of(run, rows))  # type: ignore[attr-defined]
        assert found.numpy() == pytest.approx(vectors, abs=2e-6)


@pytest.mark.slow
def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "run", "sasrec", {"trainer.max_steps": 1})
    words = ["export", f"checkpoint={tmp_path / 'run'}", "format=torch_export"]
    with pytest.raises(ModelError, match="sasrec"):
        cli.run([*words, f"output={tmp_path / 'model.pt2'}"])
    with pytest.raises(ConfigError, match=r"a file \.pt2"):
        cli.run([*words, f"output={tmp_path / 'model.onnx'}"])
    with pytest.raises(ConfigError, match=r"output=model\.pt2"):
        cli.run(words)
    assert not list(tmp_path.glob("model*"))
