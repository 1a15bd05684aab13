"""The commands that put questions and files of prompts to a run, and a chat through a pipe."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pytest

from kitforge.api import load_model, load_tokenizer
from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.inference.score import score
from kitforge.kits.transformers.evaluation import load_task, number
from tests.small_run import write_run

CHOICES = [
    {"query": "Question: who speaks?\nAnswer:", "choices": ["ROMEO", "a play of lines"], "gold": 0},
    {"query": "line 7 of a", "choices": ["play", "x", "zebra"], "gold": 2},
    {"query": "little of it is", "choices": ["said aloud", "sad"], "gold": 0},
]
CONTEXTS = [{"context_options": ["ROMEO: line", "zzz"], "continuation": "12 of a play", "gold": 0}]
CONTINUATIONS = [{"context": "ROMEO: line", "continuation": "12"}]
NUMBERS = [{"question": "How many are 2 and 2?", "answer": "2 + 2 = 4\n#### 4"}]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


def command(verb: str, run: Path, *arguments: str) -> int:
    return cli.run([verb, f"checkpoint={run}", "device=cpu", "inference.max_new_tokens=6", *arguments])


def write(path: Path, questions: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def test_questions_are_measured_as_a_plain_loop_does(run: Path, tmp_path: Path, capsys: Capture) -> None:
    for name, questions in {"who": CHOICES, "where": CONTEXTS, "next": CONTINUATIONS}.items():
        write(tmp_path / f"{name}.jsonl", questions)
    with gzip.open(tmp_path / "sum.jsonl.gz", "wt") as file:
        file.write(json.dumps(NUMBERS[0]) + "\n")
    path = tmp_path / "who.jsonl"
    assert command("evaluate", run, f"tasks=[{path},where,next,sum]", f"data.tasks={tmp_path}") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: found[f"{name}/questions"] for name in ("who", "where", "next", "sum")} == {
        "who": 3,
        "where": 1,
        "next": 1,
        "sum": 1,
    }
    model, tokenizer = load_model(run, "cpu"), load_tokenizer(run)
    right = right_per_byte = 0
    for question in CHOICES:
        stem = tokenizer.encode(str(question["query"]))
        scores = []
        for choice in question["choices"]:
            (logprobs,) = score(model, [stem + tokenizer.encode(f" {choice}")], 512)
            scores.append(sum(logprobs[len(stem) - 1 :]))
        per_byte = [value / len(choice) for value, choice in zip(scores, question["choices"], strict=True)]
        right += scores.index(max(scores)) == question["gold"]
        right_per_byte += per_byte.index(max(per_byte)) == question["gold"]
    assert found["who/accuracy"] == right / 3
    assert found["who/accuracy_per_byte"] == right_per_byte / 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a question"),
        ('{"query": "a"}', "no form"),
        ('{"query": "a", "choices": ["b"], "gold": 1}', "no option 1"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "no text"),
        ('{"context": "a", "continuation": "b"}', "another form"),
    ],
)
def test_a_wrong_question_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path / "some.jsonl", CHOICES[:1])
    path.write_text(f"{path.read_text()}\n{line}\n")
    with pytest.raises(DataError, match=rf"some\.jsonl:3 .*{words}"):
        load_task(str(path))


def test_a_task_that_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "piqa.jsonl", CHOICES)
    with pytest.raises(ConfigError, match="piqa"):
        load_task("piqua", str(tmp_path))
    with pytest.raises(ConfigError, match=r"data\.tasks=FOLDER"):
        load_task("piqa")


def test_the_number_of_an_answer() -> None:
    assert number("3 and 4 are 7\n#### 1,234.5 euros, not 9") == 1234.5
    assert number("first 3, then -7.") == -7
    assert number("none") is None


def test_a_file_of_prompts_is_answered_in_order(run: Path, tmp_path: Path, capsys: Capture) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": "ROMEO:", "id": 7}, {"messages": messages}])
    target = tmp_path / "answers.jsonl"
    assert command("generate", run, f"data.eval={prompts}", f"output={target}") == 0
    first, second = map(json.loads, target.read_text().splitlines())
    assert first["id"] == 7 and second["messages"] == messages
    capsys.readouterr()
    assert command("generate", run, "prompt=ROMEO:") == 0
    assert f"ROMEO:{first['generated_text']}" == capsys.readouterr().out.removesuffix("\n")
    with pytest.raises(ConfigError, match="answers already"):
        command("generate", run, f"data.eval={prompts}", f"output={target}")


def test_a_chat_through_a_pipe(run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def talk(*lines: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert command("chat", run) == 0
        return capsys.readouterr().out

    once = talk("hello")
    assert once.endswith("\n")
    assert talk("hello", "/reset", "", "hello", "/quit", "hello") == once * 2
    # A text that the model has no room for ends nothing.
    assert talk("x" * 5000, "hello") == once
