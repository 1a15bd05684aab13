"""A command that writes leaves what others wrote as it was, and goes on writing over its own output."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from kitforge.api import load_model, load_processor, save_model
from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.describe import describe_table
from kitforge.kits.recommender.schema import read_schema
from tests.small_run import ARGUMENTS, TEXT, WITHOUT_MODEL

NO_MODEL = [f"{name}={value}" for name, value in WITHOUT_MODEL.items()]
# A user's own files, by the names that commands write.
THEIRS = (
    "config.yaml", "config.json", "notes.txt", "model.gguf", "model.json", "answers.jsonl", "scores.csv",
    "metrics.jsonl", "report.html", "comparison.html", "index.html", "latest",
)  # fmt: skip
COMMANDS = {
    "train": ["train", *ARGUMENTS, "data.train=corpus.txt", "output_dir=theirs"],
    "train below": ["train", *ARGUMENTS, "data.train=corpus.txt", "output_dir=theirs", "resume=auto"],
    "finetune": ["finetune", *NO_MODEL, "checkpoint=BARD", "data.train=corpus.txt", "output_dir=theirs"],
    "export": ["export", "checkpoint=BARD", "output_dir=theirs"],
    "export a file": ["export", "checkpoint=BARD", "output_dir=theirs/model.gguf", "format=gguf"],
    "export a file into a folder": ["export", "checkpoint=BARD", "output_dir=theirs", "format=gguf"],
    "export a program": ["export", "checkpoint=BARD", "output_dir=theirs", "format=torch_export"],
    "export a description": ["export", "checkpoint=CLICKS", "output=theirs/model.pt2", "format=torch_export"],
    "generate": ["generate", "checkpoint=BARD", "data.eval=prompts.jsonl", "output=theirs/answers.jsonl"],
    "predict": ["predict", "checkpoint=BARD", "data.eval=prompts.jsonl", "output=theirs/answers.jsonl"],
    "resume a prediction": ["predict", "checkpoint=BARD", "data.eval=prompts.jsonl", "output=theirs/more.jsonl"],
    "score": ["predict", "checkpoint=CLICKS", "data.eval=clicks.csv", "output=theirs/scores.csv"],
    "inspect": ["inspect", "clicks.csv", "output=theirs/config.yaml"],
    "report": ["report", "theirs"],
    "compare": ["report", "theirs", "BARD"],
    "demo": ["demo", "theirs"],
    "verify": ["verify", "output_dir=theirs"],
}


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a table whose schema leaves out a column of ids."""
    folder = tmp_path_factory.mktemp("clicks")
    rows = "".join(f"{number:032x},{'abc'[number % 3]},{number % 3 % 2}\n" for number in range(90))
    (folder / "clicks.csv").write_text(f"id,shop,label\n{rows}")
    places = [f"data.train={folder / 'clicks.csv'}", f"output_dir={folder / 'run'}", f"data.cache={folder / 'cache'}"]
    limits = ["trainer.max_steps=2", "trainer.progress=false", "device=cpu", "data.num_workers=1"]
    cli.run(["train", "task=recommendation", "model=wide_deep", *places, *limits])
    return folder / "run"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clicks: Path) -> Path:
    """A folder with the inputs of the commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KITFORGE_CACHE", str(tmp_path / "cache"))
    Path("corpus.txt").write_text(TEXT)
    Path("prompts.jsonl").write_text('{"prompt": "ROMEO:"}\n')
    shutil.copy(clicks.parent / "clicks.csv", "clicks.csv")
    return tmp_path


def run(arguments: list[str], bard: Path, clicks: Path) -> int:
    return cli.run([each.replace("BARD", str(bard)).replace("CLICKS", str(clicks)) for each in arguments])


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_into_a_folder_or_over_a_file_of_others(
    name: str, here: Path, small_run: Path, clicks: Path
) -> None:
    Path("theirs").mkdir()
    for each in THEIRS:
        (Path("theirs") / each).write_text("mine")
    if name == "resume a prediction":
        Path("theirs/more.jsonl.part").write_text("mine")
    before = {path: path.read_bytes() for path in Path("theirs").rglob("*")}
    with pytest.raises(KitforgeError):
        run(COMMANDS[name], small_run, clicks)
    assert {path: path.read_bytes() for path in Path("theirs").rglob("*")} == before
    assert not Path("latest").exists()


def test_an_own_output_is_written_over_and_only_what_was_written_is_named(
    here: Path, small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export = ["export", f"checkpoint={small_run}", "output_dir=out"]
    assert cli.run(export) == 0
    Path("out/notes.txt").write_text("mine")
    capsys.readouterr()
    assert cli.run(export) == 0
    told = capsys.readouterr().out
    assert "config.json" in told and "model.safetensors" in told and "notes.txt" not in told
    assert Path("out/notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="not written by export"):
        cli.run([*export[:2], f"output_dir={small_run}"])


def test_save_model_writes_over_what_it_made_and_not_over_the_work_of_others(here: Path, small_run: Path) -> None:
    save_model(small_run, "mine")
    save_model(small_run, "mine")
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text("theirs")
    Path("model.gguf").write_text("theirs")
    for name in ("theirs", "model.gguf"):
        with pytest.raises(ConfigError, match="overwrite=True"):
            save_model(small_run, name)
    assert Path("theirs/config.json").read_text() == Path("model.gguf").read_text() == "theirs"
    save_model(small_run, "theirs", overwrite=True)
    assert Path("theirs/model.safetensors").exists()


def test_a_file_that_was_changed_since_is_not_written_over_unasked(here: Path, clicks: Path) -> None:
    score = ["predict", f"checkpoint={clicks}", "data.eval=clicks.csv", "output=scores.csv"]
    assert cli.run(score) == cli.run(score) == 0
    first = Path("scores.csv").read_text()
    Path("scores.csv").write_text("mine")
    with pytest.raises(ConfigError, match="overwrite=true"):
        cli.run(score)
    assert Path("scores.csv").read_text() == "mine"
    assert cli.run([*score, "overwrite=true"]) == 0
    assert Path("scores.csv").read_text() == first


def test_a_run_that_ended_before_its_first_checkpoint_begins_again_in_its_folder(here: Path) -> None:
    assert cli.run(COMMANDS["train"]) == 0
    shutil.rmtree("theirs/checkpoints")
    assert cli.run(COMMANDS["train"]) == 0


def test_a_log_in_the_folder_of_a_run_is_in_nobodys_way(here: Path) -> None:
    Path("theirs").mkdir()
    Path("theirs/log.txt").write_text("mine")
    assert cli.run(COMMANDS["train"]) == 0
    assert Path("theirs/log.txt").read_text() == "mine"


def test_a_file_called_latest_beside_a_run_stays(here: Path) -> None:
    Path("latest").write_text("mine")
    assert cli.run(COMMANDS["train"]) == 0
    assert Path("latest").read_text() == "mine"


def test_the_server_takes_the_rows_of_the_training_file(clicks: Path) -> None:
    options = TASKS["recommendation"].read_options({"task": "recommendation", "checkpoint": str(clicks)})
    kit: Any = TASKS["recommendation"]
    service = kit.open_service(load_model(clicks, "cpu"), load_processor(clicks), "run", options)
    row = {"id": "0" * 32, "shop": "a", "label": 1}
    assert service.row_reader.read({"rows": [row]}) is not None


def test_the_proposed_schema_is_written_and_read(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"same,{row % 7},{row % 2}" for row in range(60)]
    Path("table.csv").write_text("\n".join(["site,item,click", *lines]))
    assert cli.run(["inspect", "table.csv", "output=schema.yaml"]) == 0
    assert "wrote schema.yaml" in capsys.readouterr().out
    first = Path("schema.yaml").read_text()
    assert cli.run(["inspect", "data.train=table.csv", "output=schema.yaml", "overwrite=true"]) == 0
    assert Path("schema.yaml").read_text() == first
    assert cli.run(["config", "task=recommendation", "data.train=table.csv", "data.schema=schema.yaml"]) == 0
    schema = read_schema("schema.yaml")
    assert schema == describe_table("table.csv").schema and "site" in schema.left_out
    with pytest.raises(ConfigError, match="no schema to write"):
        cli.run(["inspect", "data.train=corpus.txt", "task=sft", "output=other.yaml"])
