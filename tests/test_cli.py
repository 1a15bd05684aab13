"""Every command does what its help says, and what is wrong is told in words, with nothing lost."""

import errno
import io
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kitforge.api import load_model, save_model
from kitforge.cli import main as cli
from kitforge.cli.console import print_error
from kitforge.cli.info import described_presets
from kitforge.cli.sweep import sweep_runs
from kitforge.cli.train import show_sample
from kitforge.composition import text_task_of
from kitforge.core.checkpoint.manifest import steps
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DependencyError,
    DeviceError,
    KitforgeError,
    ModelError,
)
from kitforge.foundation.log import console, log_to_terminal, sanitize, sanitizing_console, say
from kitforge.inference.server.service import Service
from kitforge.kits.registry import recorded_task, task_names
from kitforge.kits.transformers.config import TextGenerationOptions
from kitforge.preset_files import CONFIGS, presets
from kitforge.report.metrics import read_run
from tests.patience import PATIENCE
from tests.small_run import ARGUMENTS, OPTIONS, TEXT, WITHOUT_MODEL
from tests.warm.shell import CLIENT

ROOT = Path(__file__).parents[1]
NO_MODEL = [f"{name}={value}" for name, value in WITHOUT_MODEL.items()]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds a corpus and nothing else, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KITFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")
    Path("corpus.txt").write_text(TEXT)
    return tmp_path


def train(*arguments: str) -> int:
    return cli.run(["train", *ARGUMENTS, "data.train=corpus.txt", *arguments])


def started(*arguments: str, python: Sequence[str] = ()) -> subprocess.Popen[str]:
    """The command as a person starts it, in a process of its own; given the client of a warm one, in a copy of that."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *python, "-m", "kitforge", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_help_versions_and_lists_go_without_torch(here: Path) -> None:
    verbs = [["--help"], ["-h"], [], ["--version"], ["-v"], ["-V"], ["list"], ["models"], ["list", "--help"]]
    code = f"""
import sys
from kitforge.cli.main import run
assert not any(map(run, {verbs}))
print(*sorted({{"torch", "hydra", "omegaconf"}} & set(sys.modules)), sep=",")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    *_, loaded = done.stdout.splitlines()
    assert loaded == "" and done.stdout.count("kitforge VERB [option=value") == 3


@pytest.mark.slow
def test_the_list_has_the_networks_of_every_preset_and_every_task() -> None:
    counted = yaml.safe_load((CONFIGS / "presets.yaml").read_text(encoding="utf-8"))
    assert list(counted.items()) == list(described_presets().items())
    rows = [row for rows in counted.values() for row in rows]
    assert sorted(row["model"] for row in rows if isinstance(row, dict)) == sorted(presets())
    words = {word for title in counted for word in re.split(r"\W+", title)} | {
        row for row in rows if isinstance(row, str)
    }
    assert set(task_names()) <= words


# What goes well


def test_a_run_is_repeated_by_its_own_configuration(capsys: Capture) -> None:
    assert train("output_dir=runs/first") == 0
    record = Path("runs/first/config.yaml").read_text()
    for number, typed in enumerate((["runs/first/config.yaml"], ["--config", "runs/first/config.yaml"])):
        assert cli.run(["train", *typed, f"output_dir=runs/{number}"]) == 0
        assert Path(f"runs/{number}/config.yaml").read_text() == record.replace("runs/first", f"runs/{number}")
    capsys.readouterr()
    assert cli.run(["config", "--config=runs/first/config.yaml", "seed=3"]) == 0
    Path("again.yaml").write_text(capsys.readouterr().out)
    # The record's own folder is left alone.
    assert cli.run(["train", "again.yaml", "trainer.max_steps=1"]) == 0
    assert "seed: 3\n" in Path("runs/latest/config.yaml").read_text()
    assert Path("runs/first/config.yaml").read_text() == record
    with pytest.raises(ConfigError, match="--config needs a file"):
        cli.run(["train", "--config"])


@pytest.mark.parametrize(
    ("verb", "task", "short", "option"),
    [
        ("generate", "text_generation", "max_new_tokens", "inference.max_new_tokens"),
        ("chat", "text_generation", "temperature", "inference.temperature"),
        ("serve", "text_generation", "top_p", "inference.top_p"),
        ("train", "text_generation", "max_new_tokens", "inference.max_new_tokens"),
        ("train", "grpo", "max_new_tokens", "rollout.max_new_tokens"),
        ("finetune", "ppo", "temperature", "rollout.temperature"),
        ("evaluate", "grpo", "temperature", "rollout.temperature"),
    ],
)
def test_a_short_name_is_the_one_option_that_the_verb_reads(verb: str, task: str, short: str, option: str) -> None:
    [member] = sweep_runs(cli.COMMANDS[verb], [f"task={task}", "checkpoint=RUN", f"{short}=0.5"])
    section, _, name = option.partition(".")
    assert member.chosen.values[section] == {name: 0.5}


@pytest.mark.parametrize(
    ("verb", "argument", "words"),
    [
        ("serve", "max_new_tokens=4", "'inference.max_new_tokens' or 'serve.max_new_tokens'"),
        ("train", "task=sft inference.top_p=1", "name it with task=text_generation"),
        ("generate", "max_new_token=4", "did you mean 'inference.max_new_tokens'"),
        ("generate", "max_new_tokens=4 inference.max_new_tokens=5", "given twice"),
    ],
)
def test_a_short_name_of_several_options_or_of_none_names_them(verb: str, argument: str, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        sweep_runs(cli.COMMANDS[verb], argument.split())
    assert words in str(told.value)


@pytest.mark.parametrize("arguments", [["seed=3"], ["--fast"], ["one", "two"]])
def test_the_demo_takes_no_options(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # Were it taken for the folder of the demo, that would be refused as well, in other words.
    (tmp_path / arguments[0]).mkdir()
    with pytest.raises(ConfigError, match="takes no options"):
        cli.run(["demo", *arguments])


def test_a_replay_is_of_one_run(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path), str(tmp_path)]):
        with pytest.raises(ConfigError, match="needs one run and one step"):
            cli.run(["replay", *arguments, "step=1"])
    with pytest.raises(KitforgeError, match=r"(?s)no run in this folder"):
        cli.run(["replay", str(tmp_path), "step=1"])
    (tmp_path / "config.yaml").write_text("task: text_generation\n")
    with pytest.raises(KitforgeError, match=r"(?s)keeps no rollouts to replay.*got: +task=text_generation"):
        cli.run(["replay", str(tmp_path), "step=1"])


def test_a_run_tells_where_everything_lies_and_what_to_try_next(capsys: Capture) -> None:
    assert train("output_dir=runs/a", "trainer.eval_first=true", 'prompt=["ROMEO:"]') == 0
    shown = capsys.readouterr().out
    for words in ("ROMEO:", "before training  5.", "eval/loss", "runs/a/checkpoints", "runs/a/report.html"):
        assert words in shown
    assert 'kitforge generate checkpoint=runs/a prompt="' in shown
    assert {path.name for path in Path("runs/a").iterdir()} >= {"config.yaml", "metrics.jsonl", "report.html"}
    assert Path("runs/latest").resolve() == Path("runs/a").resolve()


@pytest.mark.slow
def test_what_to_try_next_can_be_pasted_into_a_shell(capsys: Capture) -> None:
    folder = "runs/die Läufe $1"
    assert train(f"output_dir={folder}") == 0
    steps = [line for line in capsys.readouterr().out.splitlines() if "checkpoint=" in line]
    assert steps
    assert all(f"checkpoint={folder}" in shlex.split(line) for line in steps)


def test_a_run_without_a_name_is_called_after_time_task_and_model() -> None:
    small = ["model.dim=32", "model.num_layers=1", *NO_MODEL]
    cli.run(["train", "model=gpt2_tiny", *small, "data.train=corpus.txt", "trainer.max_steps=1"])
    (folder,) = (path for path in Path("runs").iterdir() if not path.is_symlink())
    assert folder.name.endswith("-text_generation-gpt2_tiny")


def test_the_sample_that_is_shown_is_the_newest(small_run: Path, capsys: Capture) -> None:
    for step, text in ((2, "old"), (10, "new"), (9, "older")):
        page = {"step": step, "samples": [{"prompt": "ROMEO:", "text": text}]}
        Path("run/samples").mkdir(parents=True, exist_ok=True)
        Path(f"run/samples/step_{step}.json").write_text(json.dumps(page))
    shutil.copy(small_run / "metrics.jsonl", "run")
    show_sample(read_run(Path("run")))
    assert capsys.readouterr().out.strip() == "ROMEO:new"


def test_what_a_model_writes_cannot_command_a_terminal() -> None:
    assert sanitize("a\x1b[2Jb\x07\r\n\té你") == "a\ufffd[2Jb\ufffd\ufffd\n\té你"


ATTACK = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202e"


@pytest.mark.parametrize("way", ["say", "error", "unexpected error", "table", "warning"])
def test_names_and_messages_of_strangers_cannot_command_a_terminal(way: str, capsys: Capture) -> None:
    if way == "say":
        say(f"a run called {ATTACK}")
    elif way == "table":
        table = Table(title=ATTACK)
        table.add_row(ATTACK)
        console.print(table)
    elif way == "warning":
        log_to_terminal()
        logging.lastResort.handle(logging.makeLogRecord({"msg": "the folder %s is damaged", "args": (ATTACK,)}))
    else:
        error = ModelError("unknown", got=ATTACK) if way == "error" else ValueError(ATTACK)
        print_error(type(error), error, None)
    written = capsys.readouterr()
    text = written.out + written.err
    assert "PWNED" in text
    assert not set("\x1b\x07\x9b\u202e") & set(text)


def test_colours_of_our_own_still_reach_a_terminal() -> None:
    written = io.StringIO()
    terminal = sanitizing_console(Console(file=written, force_terminal=True, color_system="standard"))
    terminal.print(f"[bold red]error:[/] {ATTACK}", highlight=False)
    assert written.getvalue() == "\x1b[1;31merror:\x1b[0m " + sanitize(ATTACK.replace("\x07", "")) + "\n"


def test_a_sweep_makes_a_run_of_each_member(capsys: Capture) -> None:
    assert train("-m", "optimizer.learning_rate=0.1,0.2", "trainer.max_steps=1") == 0
    folders = [path for path in Path("runs").iterdir() if not path.is_symlink()]
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert sorted(config["optimizer"]["learning_rate"] for config in configs) == [0.1, 0.2]
    told = capsys.readouterr().out
    assert "1 of 2: optimizer.learning_rate=0.1\n" in told
    rows = re.findall(r"^optimizer.learning_rate=(\S+)  best validation loss (\S+) at step 1(  <- best)?$", told, re.M)
    assert [row[0] for row in rows] == ["0.1", "0.2"]
    assert [bool(row[2]) for row in rows] == [float(row[1]) == min(float(one[1]) for one in rows) for row in rows]
    page = Path(told.rpartition("comparison  ")[2].strip()).read_text()
    assert "learning rate 0.1</button>" in page and "learning rate 0.2</button>" in page


def test_a_sweep_goes_on_after_a_member_that_fails(capsys: Capture) -> None:
    assert train("-m", "data.train=missing.txt,corpus.txt", "trainer.max_steps=1") == 1
    assert "missing.txt does not exist" in capsys.readouterr().err
    assert len([path for path in Path("runs").iterdir() if not path.is_symlink()]) == 1


@pytest.mark.slow
def test_a_sweep_into_one_folder_is_refused_and_into_one_each_is_not() -> None:
    with pytest.raises(ConfigError, match="needs its own folder"):
        train("-m", "seed=1,2", "output_dir=runs/a")
    assert train("-m", "seed=1,2", "output_dir=runs/seed-${seed}", "trainer.max_steps=1") == 0
    assert Path("runs/seed-1/report.html").exists()
    assert Path("runs/seed-2/report.html").exists()


def test_a_checkpoint_knows_which_task_it_was_trained_for(small_run: Path) -> None:
    step = next((small_run / "checkpoints").glob("step_*"))
    assert recorded_task(small_run) == recorded_task(step) == "text_generation"
    assert recorded_task(Path("nowhere")) is None
    shutil.copytree(small_run, "other")
    Path("other/config.yaml").write_text("task: of_another_version\n")
    assert recorded_task("other") is None


def test_a_run_goes_on_where_it_stopped_also_through_the_link_to_the_latest(here: Path, small_run: Path) -> None:
    shutil.copytree(small_run, "runs/bard")
    Path("runs/latest").symlink_to("bard")
    shutil.copy(small_run.parents[1] / "corpus.txt", "corpus.txt")
    again = ["output_dir=runs/latest", "resume=auto", "trainer.max_steps=5", "trainer.allow_config_changes=true"]
    assert train(*again) == 0
    assert steps(here / "runs" / "bard" / "checkpoints")[-1] == 5
    assert os.readlink("runs/latest") == "bard"


def test_generation_continues_every_prompt(small_run: Path, capsys: Capture) -> None:
    assert cli.run(["generate", f"checkpoint={small_run}", "prompt=[ROMEO,JULIET]", "inference.max_new_tokens=1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("ROMEO")
    assert "\nJULIET" in shown


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ("schema=person.json", r'\{\s*"age"\s*:\s*7\s*\}\s*'),
        ("regex=[ab]{2},c", "[ab]{2},c"),
        ("choices=[yes,no]", "yes|no"),
    ],
)
def test_generation_continues_with_what_it_is_asked_for(
    small_run: Path, capsys: Capture, structure: str, pattern: str
) -> None:
    schema = {"type": "object", "properties": {"age": {"const": 7}}, "required": ["age"], "additionalProperties": False}
    Path("person.json").write_text(json.dumps(schema))
    asked = ["generate", f"checkpoint={small_run}", "prompt=ROMEO", "inference.max_new_tokens=90"]
    assert cli.run([*asked, structure]) == 0
    assert re.fullmatch(f"ROMEO({pattern})\n", capsys.readouterr().out)
    Path("prompts.jsonl").write_text('{"prompt": "ROMEO"}\n' * 2)
    assert cli.run([*asked[:2], asked[3], structure, "data.eval=prompts.jsonl", "output=answers.jsonl"]) == 0
    answers = [json.loads(line)["generated_text"] for line in Path("answers.jsonl").read_text().splitlines()]
    assert len(answers) == 2 and all(re.fullmatch(pattern, each) for each in answers)


def test_generation_takes_a_prompt_as_it_stands(small_run: Path, capsys: Capture) -> None:
    prompt = 'def f(x, y): return {"${a}": 你好}'
    cli.run(["generate", f"checkpoint={small_run}", f"prompt={prompt}", "inference.max_new_tokens=1"])
    assert capsys.readouterr().out.startswith(prompt)


def test_evaluation_ends_with_one_json_object(small_run: Path, capsys: Capture) -> None:
    cli.run(["evaluate", f"checkpoint={small_run}", "data.eval=corpus.txt", "data.batch_size=8", *NO_MODEL[:1]])
    line = capsys.readouterr().out.splitlines()[-1]
    assert set(json.loads(line)) == {"loss", "perplexity"}


def test_an_exported_run_has_the_same_logits_elsewhere(small_run: Path) -> None:
    assert cli.run(["export", f"checkpoint={small_run}", "output_dir=out"]) == 0
    tokens = torch.arange(40).reshape(2, 20) * 5
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained("out")(tokens).logits
        torch.testing.assert_close(load_model(small_run)(tokens), theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_an_export_tells_where_weights_are_not_those_of_training(small_run: Path, capsys: Capture) -> None:
    assert cli.run(["export", f"checkpoint={small_run}", "output_dir=half", "dtype=float16"]) == 0
    start = [*NO_MODEL, "data.train=corpus.txt", "trainer.max_steps=1", "output_dir=runs/a"]
    assert cli.run(["finetune", "checkpoint=half", *start]) == 0
    for dtype, is_told in (([], True), (["dtype=float16"], False), (["dtype=float32"], False)):
        capsys.readouterr()
        assert cli.run(["export", "checkpoint=runs/a", "output_dir=out", "overwrite=true", *dtype]) == 0
        assert ("weights in float16, as they were published" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("words", [["finetune", "checkpoint=out"], ["train", "model=out"]])
def test_training_starts_from_the_weights_of_a_folder(words: list[str], small_run: Path) -> None:
    cli.run(["export", f"checkpoint={small_run}", "output_dir=out"])
    still = ["trainer.max_steps=1", "optimizer.learning_rate=1e-12", "optimizer.weight_decay=0", "output_dir=runs/a"]
    assert cli.run([*words, *NO_MODEL, "data.train=corpus.txt", *still]) == 0
    before, after = load_model("out").state_dict(), load_model("runs/a").state_dict()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)


def test_a_vocabulary_is_trained_with_the_model() -> None:
    assert train("tokenizer=sentencepiece", "tokenizer.vocab_size=300", "output_dir=runs/a") == 0
    assert Path("runs/a/tokenizer/tokenizer.model").exists()
    assert cli.run(["generate", "checkpoint=runs/a", "prompt=ROMEO: line", "inference.max_new_tokens=2"]) == 0


@pytest.mark.slow
def test_a_preset_of_ones_own_trains_and_is_listed(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("configs/model").mkdir(parents=True)
    Path("configs/model/mine.yaml").write_text("family: gpt2\ndim: 32\nnum_layers: 1\nnum_heads: 2\nmax_length: 64\n")
    assert cli.run(["train", "model=mine", *NO_MODEL, "data.train=corpus.txt"]) == 0
    monkeypatch.setattr("kitforge.cli.info.presets", lambda group: {"mine": presets(group)["mine"]})
    cli.run(["list"])
    assert "mine" in capsys.readouterr().out


@pytest.mark.slow
def test_the_list_fits_eighty_columns_and_cuts_nothing(capsys: Capture) -> None:
    cli.run(["list"])
    shown = capsys.readouterr().out
    assert "text_generation" in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    for words in ("llama3_2_1b", "1.2 B", "quickstart", "muon"):
        assert words in shown


@pytest.mark.slow
def test_the_list_names_every_task_once_with_its_models_or_with_whose_models_it_takes(capsys: Capture) -> None:
    cli.run(["list"])
    tables, borrowers = capsys.readouterr().out.split("tasks that start from the models of text_generation:")
    words = borrowers.replace(",", " ").split()
    assert all((f"task {task}" in tables) != (task in words) for task in task_names())


def test_a_policy_of_any_stage_is_served_and_what_only_scores_writes_no_text(tmp_path: Path) -> None:
    for task in ("ppo", "reward", "recommendation", "token_classification"):
        (tmp_path / task).mkdir()
        (tmp_path / task / "config.yaml").write_text(f"task: {task}\n")
    assert text_task_of("ppo", {}) == "text_generation"
    [member] = sweep_runs(cli.COMMANDS["serve"], [f"checkpoint={tmp_path / 'ppo'}", "port=8000"])
    assert member.chosen.values["port"] == 8000
    for verb, task in (("serve", "token_classification"), ("generate", "recommendation"), ("chat", "reward")):
        with pytest.raises(ConfigError, match=f"a run of {task} writes no text from a prompt"):
            cli.run([verb, f"checkpoint={tmp_path / task}"])


@pytest.mark.slow
def test_the_doctor_names_the_machine_and_what_each_extra_lacks(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _: ["rich", "hydra-core; extra == 'a'", "nope; extra == 'b'"]
    )
    cli.run(["doctor"])
    shown = capsys.readouterr().out
    for words in (
        "torch",
        "GFLOP/s",
        "numba",
        "python",
        "hydra-core 1.",
        "nope not installed: pip install 'kitforge[b]'",
    ):
        assert words in shown


def test_the_configuration_that_is_printed_is_accepted_again(capsys: Capture) -> None:
    cli.run(["config", "recipe=quickstart", "model=gpt2_tiny", "trainer.max_steps=7"])
    tree = yaml.safe_load(capsys.readouterr().out)
    options = from_dict(TextGenerationOptions, tree)
    assert (options.trainer.max_steps, options.model["family"], options.prompt) == (7, "gpt2", ["def ", "import "])


def test_a_report_is_drawn_of_one_run_and_of_several(small_run: Path, capsys: Capture) -> None:
    shutil.copytree(small_run, "runs/one")
    shutil.copytree(small_run, "runs/two")
    cli.run(["report", "runs/one"])
    cli.run(["report", "runs/one", "runs/two"])
    assert "runs/one/report.html" in capsys.readouterr().out.splitlines()[0]
    assert Path("runs/one/comparison.html").exists()


def test_help_names_every_command_and_every_option(capsys: Capture) -> None:
    cli.run([])
    verbs = capsys.readouterr().out
    assert all(f"  {verb} " in verbs for verb in cli.COMMANDS)
    assert max(map(len, verbs.splitlines())) <= 80
    cli.run(["train", "--help"])
    options = capsys.readouterr().out
    assert "kitforge train model=llama_tiny data.train=corpus.txt" in options
    for words in ("trainer.max_steps=null", "optimizer steps", "data.batch_size=8", "muon", "model.dim=128"):
        assert words in options


README_VERBS = re.findall(r"^\| `kitforge (\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)


def test_the_readme_lists_every_command() -> None:
    assert sorted(README_VERBS) == sorted(cli.COMMANDS)


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("verb", README_VERBS)
def test_help_of_a_command_tells_its_purpose_and_an_example_and_runs_nothing(
    verb: str, flag: str, capsys: Capture
) -> None:
    assert cli.run([verb, flag]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"kitforge {verb}")
    assert lines[1].strip() == cli.COMMANDS[verb].purpose
    assert any(line.startswith(f"  kitforge {verb}") for line in lines[2:])
    assert [path.name for path in Path().iterdir()] == ["corpus.txt"]


# These have tests of their own: a run of RLHF, minutes of training, a process that goes on, a download.
def test_a_served_gguf_file_is_named_without_its_ending(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = list[str]()
    monkeypatch.setattr("kitforge.cli.serve.answer", lambda service, *_: names.append(service.name))
    save_model(small_run, tmp_path / "mine.gguf")
    assert cli.run(["serve", f"checkpoint={tmp_path / 'mine.gguf'}", "device=cpu"]) == 0
    assert names == ["mine"]


def test_serve_answers_with_the_model_of_the_run(
    small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = list[int]()

    def answer(service: Service, app: object, port: int, told: Callable[[str], None]) -> None:
        assert isinstance(service, Service) and callable(app)
        ports.append(port)
        told("http://here")

    monkeypatch.setattr("kitforge.cli.serve.answer", answer)
    assert cli.run(["serve", f"checkpoint={small_run}", "port=8123", "device=cpu"]) == 0
    assert ports == [8123]
    out = capsys.readouterr().out
    assert f"{small_run.name} answers at http://here" in out and "pages    http://here/, http://here/docs\n" in out
    words = [
        "routes   /health, ",
        "/v1/chat/completions",
        "token    none needed",
        "weights  float32",
        "sampling temperature 1,",
    ]
    assert [each for each in words if each not in out] == []


# An export to ONNX takes seconds: tests/kits/transformers/test_programs.py runs this one; tests/report/test_profile.py
# that of a profile.
EXAMPLES = sorted(set(README_VERBS) - {"replay", "demo", "serve", "models", "export", "profile"})


@pytest.mark.slow
@pytest.mark.parametrize("verb", EXAMPLES)
def test_the_example_of_a_command_runs(
    verb: str, small_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    Path("clicks.csv").write_text("user,item,label\n" + "".join(f"{n % 7},{n % 5},{n % 2}\n" for n in range(60)))
    Path("prompts.jsonl").write_text('{"prompt": "ROMEO:"}\n')
    Path("runs").mkdir()
    Path("runs/latest").symlink_to(small_run, target_is_directory=True)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    given = {
        "RUN": "runs/latest",
        "FILE": "corpus.txt",
        "IN": "prompts.jsonl",
        "OUT": "out.jsonl",
        "FOLDER": "exported",
    }
    words = shlex.split(re.sub(r"\b[A-Z]+\b(?!:)", lambda found: given[found[0]], cli.COMMANDS[verb].example))[1:]
    # All contracts of all kits are checked in tests/verify.
    words += ["--only", "damage"] if verb == "verify" else []
    tiny = {"train": OPTIONS, "finetune": WITHOUT_MODEL}.get(verb, {})
    short = [f"{name}={value}" for name, value in tiny.items()]
    assert cli.run([*words, *short]) == 0, capsys.readouterr()


# What does not


def corrupt(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:-100])


def unsupported(_run: Path) -> str:
    Path("mamba").mkdir()
    Path("mamba/config.json").write_text(json.dumps({"model_type": "mamba", "hidden_size": 8}))
    save_file({"weight": torch.zeros(2)}, "mamba/model.safetensors")
    return "mamba"


def truncated(run: Path) -> str:
    cli.run(["export", f"checkpoint={run}", "output_dir=cut"])
    corrupt("cut/model.safetensors")
    return "cut"


def pickled(run: Path) -> str:
    cli.run(["export", f"checkpoint={run}", "output_dir=pickled"])
    Path("pickled/model.safetensors").rename("pickled/pytorch_model.bin")
    return "pickled"


def lacking(run: Path) -> str:
    cli.run(["export", f"checkpoint={run}", "output_dir=lacking"])
    save_file({"model.norm.weight": torch.ones(32)}, "lacking/model.safetensors")
    return "lacking"


def damaged(run: Path) -> str:
    shutil.copytree(run, "damaged")
    for weights in Path("damaged").rglob("model-*.safetensors"):
        corrupt(str(weights))
    return "damaged"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (unsupported, ["mamba", "llama"]),
        (truncated, ["cut/model.safetensors", "whole"]),
        (pickled, ["pytorch_model.bin", "safetensors"]),
        (lacking, ["missing"]),
        (damaged, ["checkpoint"]),
        (lambda _run: "nowhere", ["nowhere", "no such folder"]),
    ],
)
def test_weights_that_cannot_be_read_are_refused(
    make: Callable[[Path], str], words: list[str], small_run: Path
) -> None:
    folder = make(small_run)
    with pytest.raises(KitforgeError) as told:
        cli.run(["finetune", f"checkpoint={folder}", *NO_MODEL, "data.train=corpus.txt"])
    assert all(word in str(told.value).lower() or word in str(told.value) for word in words)
    assert not Path("runs").exists()


BAD_FILES = {
    "empty.txt": b"",
    "short.txt": b"hi there",
    "latin.txt": b"caf\xe9 " * 99,
    "broken.jsonl": b'{"text": "a"}\n{"text":\n',
    "other.jsonl": b'{"txt": "a b c"}\n' * 99,
}


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("corpse.txt", ["does not exist", "did you mean corpus.txt?"]),
        ("empty.txt", ["is empty"]),
        ("short.txt", ["shorter than one row", "9 tokens", "data.sequence_length"]),
        ("latin.txt", ["not UTF-8", "offset 3", "data.encoding_errors=replace"]),
        ("broken.jsonl", ["broken.jsonl:2", "not JSON"]),
        ("other.jsonl", ["no column 'text'", "did you mean 'txt'?"]),
        ("void", ["holds no readable files"]),
        ("*.csv", ["no file matches"]),
        ("null", ["nothing to train on", "data.train"]),
    ],
)
def test_data_that_cannot_be_read_is_told_by_name(named: str, words: list[str]) -> None:
    Path("void").mkdir()
    for name, content in BAD_FILES.items():
        Path(name).write_bytes(content)
    with pytest.raises((DataError, ConfigError)) as told:
        train(f"data.train={named}")
    assert all(word in str(told.value) for word in words)
    assert not Path("runs").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_data_that_may_not_be_read_is_told() -> None:
    Path("corpus.txt").chmod(0)
    with pytest.raises(DataError, match=r"corpus\.txt"):
        train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("trainer.max_steps=-3", ["-3", "at least 1"]),
        ("trainer.max_steps=ten", ["'ten'", "a whole number"]),
        ("trainer.max_steps=1.5", ["1.5", "a whole number"]),
        ("trainer.max_steps=[1,", ["'[1,'", "a whole number"]),
        ("data.batch_size=true", ["True", "a whole number"]),
        ("optimizer.learning_rate=-1", ["-1", "above 0"]),
        ("optimizer.learning_rate=nan", ["nan"]),
        ("optimizer.betas=0.9", ["a list"]),
        ("data.shuffle=maybe", ["'maybe'", "true or false"]),
        ("data.eval_fraction=1.0", ["below 1"]),
        ("precision=fp31", ["did you mean 'fp32'?"]),
        ("model.vocab_size=100", ["100", "tokenizer's 258"]),
        ("data.sequence_length=4096", ["4096", "max_length=512"]),
        ("model.num_heads=3", ["a divisor of model.dim=32"]),
        ("model.dmi=3", ["model.dmi", "dim"]),
        ("parallel.tensor=5", ["parallel.tensor=5 does not divide model.num_heads", "to be one of 1, 2"]),
        (
            "parallel.tensor=2 data.sequence_length=33",
            ["33", "a multiple of parallel.tensor=2", "sequence_parallel=false"],
        ),
        ("parallel.pipeline=2", ["2 is more stages than model.num_layers=1", "parallel.shard"]),
        (
            "model.num_layers=3 parallel.pipeline=2 parallel.schedule=zero_bubble_v",
            ["2 stages on each rank (zero_bubble_v) is more stages than model.num_layers=3", "parallel.schedule=1f1b"],
        ),
        ("parallel.context_by=keys", ["heads with parallel.context=1", "parallel.context=2"]),
        ("parallel.schedule=zero_bubble", ["zero_bubble", "1f1b with parallel.pipeline=1", "parallel.pipeline=2"]),
        ("parallel.pipeline=2 parallel.schedule=zerobubble", ["did you mean 'zero_bubble'?"]),
        (
            "parallel.pipeline=2 parallel.stages_per_rank=3",
            [
                "parallel.stages_per_rank",
                "2, the default, with parallel.schedule=1f1b",
                "parallel.schedule=interleaved",
            ],
        ),
        (
            "parallel.pipeline=2 parallel.schedule=interleaved parallel.stages_per_rank=1",
            ["parallel.stages_per_rank", "2 or more", "parallel.schedule=1f1b"],
        ),
        (
            "parallel.pipeline=2 parallel.shard=2 parallel.schedule=zero_bubble",
            ["parallel.zero_stage", "1 or 2 with parallel.schedule=zero_bubble", "parallel.zero_stage=2"],
        ),
        (
            "parallel.pipeline=2 parallel.schedule=zero_bubble_v compile_level=O2",
            ["compile_level", "O0 or O1 with parallel.schedule=zero_bubble_v", "interleaved"],
        ),
        ("parallel.pipeline=2 parallel.schedule=zero_bubble precision=fp8", ["precision", "fp32, bf16 or fp16"]),
        ("parallel.data=0", ["parallel.data", "at least 1"]),
        ("trainer.max_steps=1,2", ["1, 2", "-m"]),
        ("tokenizer=nope", ["unknown tokenizer", "sentencepiece"]),
        ("tokenizer=sentencepiece tokenizer.vocab_size=999999", ["999999", "tokenizer.vocab_size"]),
        ("resume=auto", ["output_dir"]),
        ("output_dir=corpus.txt/x", ["corpus.txt is a file"]),
        ("prompt=[1,2]", ["a list of texts"]),
        ("schedule.warmup_steps=100", ["100", "3 steps"]),
        ("--model llama_tiny", ["unknown flag '--model'", "name=value: model=llama_tiny"]),
        ("--lr=0.1", ["unknown flag", "name=value: lr=0.1"]),
        ("--bf16 seed=1", ["unknown flag", "name=value: bf16=VALUE"]),
    ],
)
def test_an_option_that_cannot_be_says_what_could(argument: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as told:
        train(*argument.split())
    assert all(word in str(told.value) for word in words), str(told.value)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train", "data.train=~x"],
        ["train", "data.train=corpus.txt", "data.eval=~x"],
        ["train", "data.train=corpus.txt", "output_dir=~x"],
        ["train", "data.train=corpus.txt", "data.cache=~x"],
        ["train", "data.train=corpus.txt", "model=~x"],
        ["train", "data.train=corpus.txt", "resume=~x"],
        ["train", "recipe=~x.yaml"],
        ["train", "task=recommendation", "data.train=~x.csv"],
        ["train", "task=image_classification", "data.train=~x"],
        ["evaluate", "checkpoint=~x", "data.eval=corpus.txt"],
        ["inspect", "corpus.txt", "output=~x"],
    ],
)
def test_a_path_of_an_unknown_user_is_told_and_no_run_begins(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)begins with a user.*~x.*expected:.*do:.*/~x"):
        cli.run(words)
    assert not Path("runs").exists()


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="there is no file system without folders")
def test_a_folder_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/proc/run", "corpus.txt/run", f"runs/{'x' * 300}"):
        with pytest.raises(ConfigError, match=r"(?s)got:.*expected:.*do:.*output_dir"):
            train(f"output_dir={folder}")
    monkeypatch.setattr(Path, "mkdir", no_room)
    with pytest.raises(ConfigError, match=r"(?s)got:.*No space left.*expected:.*do:.*output_dir"):
        train("output_dir=runs/a")


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"(?s)tpu.*do:.*leave device out.*'cuda'"):
        train("device=tpu")


def test_a_package_that_is_not_here_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match=r"kitforge\[tracking\]"):
        train("trainer.wandb=project")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["unknown command", "did you mean 'train'?"]),
        (["generate", "prompt=x"], ["got:      prompt=x", "do:       add checkpoint=RUN"]),
        (["generate", "checkpoint=RUN"], ["got:      checkpoint=", "do:       add prompt="]),
        (["export", "checkpoint=RUN"], ["got:      checkpoint=", "do:       add output_dir=FOLDER"]),
        (["evaluate", "checkpoint=corpse"], ["no such folder", "got:      corpse", "do:       check the name"]),
        (["predict", "checkpoint=nope", "data.eval=corpus.txt"], ["no such folder", "got:      nope"]),
        (["models", "fetch", "qwen"], ["expected: smollm2", "need no fetch: checkpoint=OWNER/NAME"]),
        (["train", "corpus"], ["expected: name=value"]),
        (["generate", "checkpoint=RUN", "prompt="], ["empty"]),
        (["generate", "checkpoint=RUN", "prompt=x", "regex=("], ["this regex cannot be enforced", "unclosed"]),
        (["generate", "checkpoint=RUN", "prompt=x", "schema=corpus.txt"], ["this schema cannot be enforced"]),
        (["generate", "checkpoint=RUN", "prompt=x", "schema=nope.json"], ["nope.json"]),
        (["generate", "checkpoint=RUN", "prompt=x", "inference.max_new_tokens=5000"], ["5001", "max_length=512"]),
        (["generate", "checkpoint=llama_tiny", "prompt=x"], ["without weights"]),
        (["evaluate", "checkpoint=RUN"], ["data.eval"]),
        (["evaluate", "data.eval=corpus.txt"], ["checkpoint=RUN"]),
        (["evaluate", "checkpoint=RUN", "data.eval=corpus.txt", "data.sequence_length=999"], ["999", "max_length=512"]),
        (["finetune", "data.train=corpus.txt"], ["checkpoint=FOLDER"]),
        (["report"], ["kitforge report"]),
        (["report", "nowhere"], ["nowhere"]),
        (["list", "model=x"], ["takes no options"]),
    ],
)
def test_a_command_that_lacks_something_says_what(arguments: list[str], words: list[str], small_run: Path) -> None:
    with pytest.raises(KitforgeError) as told:
        cli.run([argument.replace("RUN", str(small_run)) for argument in arguments])
    assert all(word in str(told.value) for word in words), str(told.value)


def test_the_folder_of_another_run_is_left_alone(small_run: Path) -> None:
    shutil.copytree(small_run, "runs/bard")
    before = {path: path.read_bytes() for path in Path("runs/bard").rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="another run"):
        train("output_dir=runs/bard")
    assert {path: path.read_bytes() for path in Path("runs/bard").rglob("*") if path.is_file()} == before


def test_a_run_to_resume_from_must_exist() -> None:
    with pytest.raises(CheckpointError, match="runs/none"):
        train("resume=runs/none")


def test_a_preset_is_no_checkpoint() -> None:
    with pytest.raises(ModelError, match="without weights"):
        cli.run(["finetune", "checkpoint=llama_tiny", "data.train=corpus.txt"])


# As a person meets it


@pytest.mark.slow
def test_a_mistake_is_told_without_a_traceback() -> None:
    process = started("train", "trainer.max_step=3")
    output, told = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (1, "")
    assert told == "error: unknown option 'trainer.max_step'\n  do:       did you mean 'trainer.max_steps'?\n"


@pytest.mark.slow
def test_a_traceback_is_there_for_the_asking(warm: Path) -> None:
    process = started("train", "trainer.max_step=3", "--traceback", python=["-S", "-E", str(CLIENT), str(warm)])
    assert "Traceback" in process.communicate(timeout=PATIENCE)[1]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "runs/a"), ["runs/a: No space left on device", "free some space"]),
        (PermissionError(13, "Permission denied", "runs/a"), ["runs/a: Permission denied"]),
        (ZeroDivisionError("by [zero]"), ["ZeroDivisionError: by [zero]", "--traceback"]),
    ],
)
def test_what_nobody_foresaw_is_told_in_a_line(error: Exception, words: list[str], capsys: Capture) -> None:
    print_error(type(error), error, None)
    told = capsys.readouterr().err
    assert all(word in told for word in words)
    assert "Traceback" not in told


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_reported_and_goes_on(small_run: Path) -> None:
    arguments = [*ARGUMENTS, "data.train=corpus.txt", "output_dir=runs/a", "trainer.max_steps=100000"]
    process = started("train", *arguments)
    metrics = Path("runs/a/metrics.jsonl")
    deadline = time.monotonic() + PATIENCE
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, told
    assert "output_dir=runs/a resume=auto" in output
    assert "Traceback" not in told
    assert Path("runs/a/report.html").exists()
    stopped = steps(Path("runs/a/checkpoints").absolute())[-1]
    again = ["resume=auto", f"trainer.max_steps={stopped + 2}", "trainer.allow_config_changes=true"]
    assert cli.run(["train", *arguments, *again]) == 0


@pytest.mark.slow
def test_a_reader_that_leaves_early_is_not_an_error(warm: Path) -> None:
    with started("config", python=["-S", "-E", str(CLIENT), str(warm)]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
