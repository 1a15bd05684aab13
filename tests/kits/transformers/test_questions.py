"""The commands that put questions and files of prompts to a run, and a chat through a pipe."""

import gzip
import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kitforge.api import load_model, load_processor
from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, DataError, DependencyError
from kitforge.inference.choice_scoring import ChoiceBatch, ChoiceScore
from kitforge.inference.logprobs import token_logprobs
from kitforge.kits.transformers import evaluation, harness
from kitforge.kits.transformers.evaluation import Evaluator
from kitforge.kits.transformers.questions import final_number, load_task
from tests.kits.transformers.task_runs import write_rows
from tests.small_run import TEXT, write_run

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


def test_every_form_of_questions_is_measured(run: Path, tmp_path: Path, capsys: Capture) -> None:
    for name, questions in {"who": CHOICES, "where": CONTEXTS, "next": CONTINUATIONS}.items():
        write_rows(tmp_path / f"{name}.jsonl", questions)
    with gzip.open(tmp_path / "sum.jsonl.gz", "wt") as file:
        file.write(json.dumps(NUMBERS[0]) + "\n")
    path = tmp_path / "who.jsonl"
    assert command("evaluate", run, f"tasks=[{path},where,next,sum]", f"data.tasks={tmp_path}") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [found[f"{name}/questions"] for name in ("who", "where", "next", "sum")] == [3, 1, 1, 1]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a question"),
        ('{"query": "a"}', "no form"),
        ('{"query": "a", "choices": ["b"], "gold": 1}', "no option 1"),
        ('{"query": "a", "choices": ["b", ""], "gold": 0}', "not text"),
        ('{"context": "a", "continuation": "b"}', "another form"),
        ('{"query": "a \\ud800", "choices": ["b"], "gold": 0}', "half of a surrogate pair"),
        ('{"query": "a", "choices": ["b", "\\udfff"], "gold": 0}', "half of a surrogate pair"),
        ('{"query": "a", "choices": [], "gold": 0}', "not text"),
        ('{"query": "", "choices": ["b"], "gold": 1}', "no option 1"),
    ],
)
def test_a_wrong_question_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = write_rows(tmp_path / "some.jsonl", CHOICES[:1])
    path.write_text(f"{path.read_text()}\n{line}\n")
    with pytest.raises(DataError, match=rf"some\.jsonl:3 .*{words}"):
        load_task(path)


def test_bytes_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"(?s)some\.jsonl:2 is not JSON in UTF-8.*0xff"):
        load_task(tmp_path / "some.jsonl")
    (tmp_path / "sum.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    with pytest.raises(DataError, match=r"cannot read .*sum\.jsonl\.gz"):
        load_task(tmp_path / "sum.jsonl.gz")
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert load_task(tmp_path / "marked.jsonl").form == "text"


@pytest.mark.parametrize("line", ['{"context": "a", "continuation": ""}', '{"text": ""}'])
def test_an_empty_question_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "some.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(DataError, match=r"some\.jsonl:2 has an empty"):
        load_task(tmp_path / "some.jsonl")


def plain(run: Path, pairs: list[tuple[list[int], list[int]]]) -> list[float]:
    """The log-probability of each second part after its first, one at a time."""
    model = load_model(run, "cpu")
    found = [token_logprobs(model, [[*stem, *branch]], 512)[0][len(stem) - 1 :] for stem, branch in pairs]
    return [sum(each) for each in found]


def logged(run: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "evaluation" / f"{task}.jsonl").read_text().splitlines()]


def test_white_space_that_ends_a_context_is_read(run: Path, tmp_path: Path, capsys: Capture) -> None:
    queries = ["who\n", "who \n\n", "who", "", "  "]
    path = write_rows(tmp_path / "space.jsonl", [{"query": each, "choices": ["ROMEO"], "gold": 0} for each in queries])
    assert command("evaluate", run, f"tasks=[{path}]") == 0
    end = [load_processor(run).eos_id]
    pairs = [(b"who", b"\n ROMEO"), (b"who", b" \n\n ROMEO"), (b"who", b" ROMEO"), (end, b" ROMEO"), (end, b"   ROMEO")]
    wanted = plain(run, [(list(stem), list(branch)) for stem, branch in pairs])
    rows = logged(run, "space")
    assert [row["scores"][0] for row in rows] == pytest.approx(wanted, abs=1e-4)
    assert [(row["task"], row["file"], row["line"], row["prediction"], row["gold"]) for row in rows] == [
        ("space", str(path), line, 0, 0) for line in range(1, 6)
    ]


def test_choices_are_weighed_by_bytes_and_not_by_letters(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By letters the first has -3, the second -2; by bytes the first has -1, the second -2.
    def fixed(_model: object, trees: list[ChoiceBatch], _max_tokens: int) -> list[list[ChoiceScore]]:
        return [[ChoiceScore(logprob=value, greedy=()) for value in (-6.0, -4.0)] for _ in trees]

    monkeypatch.setattr(evaluation, "choice_logprobs", fixed)
    path = write_rows(tmp_path / "bytes.jsonl", [{"query": "a", "choices": ["三三", "ab"], "gold": 0}])
    assert command("evaluate", run, f"tasks=[{path}]") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["bytes/accuracy"], found["bytes/accuracy_per_byte"]) == (0.0, 1.0)
    assert logged(run, "bytes")[0]["prediction_per_byte"] == 0


@pytest.mark.slow
def test_a_limit_takes_the_first_questions_and_errors_follow_from_them(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    questions = [{"query": "a", "choices": ["b", "b"], "gold": gold} for gold in (0, 1, 0, 0, 1)]
    path, target = write_rows(tmp_path / "some.jsonl", [*questions, {"broken": True}]), tmp_path / "out" / "rows.jsonl"
    assert command("evaluate", run, f"tasks=[{path}]", "limit=5", f"output={target}") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["some/questions"] == 5
    # Two choices alike: the first is taken, which is right three times in five.
    assert found["some/accuracy"] == 0.6
    assert found["some/accuracy_stderr"] == pytest.approx(math.sqrt(5 * 0.6 * 0.4 / 4 / 5))
    assert [json.loads(line)["gold"] for line in target.read_text().splitlines()] == [0, 1, 0, 0, 1]
    assert command("evaluate", run, f"tasks=[{path}]", "limit=1") == 0
    assert "some/accuracy_stderr" not in json.loads(capsys.readouterr().out.splitlines()[-1])
    with pytest.raises(ConfigError, match="file exists"):
        command("evaluate", run, f"tasks=[{path}]", "limit=5", f"output={target}")
    with pytest.raises(ConfigError, match="limit"):
        command("evaluate", run, f"tasks=[{path}]", "limit=0")
    with pytest.raises(ConfigError, match="different names"):
        command("evaluate", run, f"tasks=[{path},{path}]", "limit=5")


@pytest.mark.slow
@pytest.mark.parametrize("excess", [0, 1])
@pytest.mark.parametrize("form", ["choices", "number"])
def test_what_does_not_fit_is_named_or_cut_on_the_left(
    run: Path, tmp_path: Path, capsys: Capture, form: str, excess: int
) -> None:
    limit = load_model(run, "cpu").geometry.max_length
    if form == "choices":
        # The last token is predicted and takes up no position.
        question = {"query": (TEXT * 2)[: limit + 1 - 4 + excess].replace(" ", "-"), "choices": ["abc", "a"], "gold": 0}
    else:
        room = limit - 6 - len("Question: \nAnswer:")
        question = {"question": "x" * (room + excess), "answer": "#### 4"}
    path = write_rows(tmp_path / "long.jsonl", [CHOICES[0] if form == "choices" else NUMBERS[0], question])
    if not excess:
        assert command("evaluate", run, f"tasks=[{path}]") == 0
        return
    with pytest.raises(DataError, match=r"long\.jsonl:2"):
        command("evaluate", run, f"tasks=[{path}]")
    assert command("evaluate", run, f"tasks=[{path}]", "data.on_too_long=cut_left") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["long/questions"], found["long/cut_questions"]) == (2, 1)
    if form == "choices":
        stem = list(str(question["query"]).encode())
        wanted = plain(run, [(stem[1:], list(b" abc")), (stem, list(b" a"))])
        assert logged(run, "long")[1]["scores"] == pytest.approx(wanted, abs=1e-4)
    long = {"query": "x", "choices": ["y" * limit], "gold": 0}
    with pytest.raises(DataError, match=r"long\.jsonl:1 is longer"):
        command("evaluate", run, f"tasks=[{write_rows(path, [long])}]", "data.on_too_long=cut_left")


def test_windows_predict_each_token_once_after_as_many_as_fit() -> None:
    tokens = list(range(10, 21))
    assert evaluation._windows([1], tokens, 4) == [
        ([1], [10, 11, 12, 13]),
        ([13], [14, 15, 16, 17]),
        ([16, 17], [18, 19, 20]),
    ]
    assert evaluation._windows([1, 2], tokens[:5], 4) == [([1, 2], [10, 11, 12]), ([10, 11, 12], [13, 14])]


def test_texts_are_measured_in_windows_that_predict_every_token_once(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    limit, end = load_model(run, "cpu").geometry.max_length, load_processor(run).eos_id
    texts = ["ROMEO: line 1 ", "für three words"]
    texts.append((TEXT * 2)[: 2 * limit + 5])
    path = write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    assert command("evaluate", run, f"tasks=[{path}]") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    first, second, tokens = (list(text.encode()) for text in texts)
    cuts = [(limit - 1, limit, 2 * limit), (2 * limit + 4 - limit, 2 * limit, 2 * limit + 5)]
    pairs = [([end], first), ([end], second), ([end], tokens[:limit])]
    pairs += [(tokens[begin:start], tokens[start:stop]) for begin, start, stop in cuts]
    scores = plain(run, pairs)
    wanted = [scores[0], scores[1], sum(scores[2:])]
    rows = logged(run, "texts")
    assert [row["logprob"] for row in rows] == pytest.approx(wanted, rel=1e-5)
    assert [row["words"] for row in rows[:2]] == [4, 3] and rows[1]["bytes"] == 16
    size = sum(len(text.encode()) for text in texts)
    assert found["texts/bits_per_byte"] == pytest.approx(-sum(wanted) / size / math.log(2), rel=1e-5)
    assert found["texts/byte_perplexity"] == pytest.approx(2 ** found["texts/bits_per_byte"])


def test_rows_of_a_step_lie_apart_and_a_foreign_model_gets_none(run: Path, tmp_path: Path, capsys: Capture) -> None:
    path = write_rows(tmp_path / "who.jsonl", CHOICES)
    step = next((run / "checkpoints").glob("step_*"))
    assert command("evaluate", step, f"tasks=[{path}]") == 0
    assert (run / "evaluation" / step.name / "who.jsonl").is_file()
    assert cli.run(["export", f"checkpoint={run}", f"output_dir={tmp_path / 'foreign'}"]) == 0
    before = sorted((tmp_path / "foreign").iterdir())
    assert command("evaluate", tmp_path / "foreign", f"tasks=[{path}]") == 0
    assert sorted((tmp_path / "foreign").iterdir()) == before


def test_a_task_that_is_not_there_is_told_with_the_nearest(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "piqa.jsonl", CHOICES)
    with pytest.raises(ConfigError, match="no such task"):
        command("evaluate", run, "tasks=[piqua.jsonl]")
    # A name without a file is one of lm-evaluation-harness, which need not be installed for files.
    for name in ("lm_eval", "lm_eval.tasks"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(DependencyError, match=r"'piqua', which has no file(.|\n)*kitforge\[evaluation\]"):
        command("evaluate", run, "tasks=[piqua]", f"data.tasks={tmp_path}")
    named = SimpleNamespace(TaskManager=lambda **_: SimpleNamespace(all_tasks=["mmlu"]))
    monkeypatch.setattr(harness, "_import", lambda *_: named)
    with pytest.raises(ConfigError, match="did you mean 'piqa'"):
        command("evaluate", run, "tasks=[piqua]", f"data.tasks={tmp_path}")
    with pytest.raises(ConfigError, match="apply_chat_template"):
        command("evaluate", run, "tasks=[piqa]", f"data.tasks={tmp_path}", "apply_chat_template=true")


def test_the_number_of_an_answer() -> None:
    assert final_number("3 and 4 are 7\n#### 1,234.5 euros, not 9") == 1234.5
    assert final_number("first 3, then -7.") == -7
    assert final_number("none") is None


def test_a_number_is_right_where_it_is_the_gold_one(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["It is 4.", "3 or 5", "a play of lines", "#### 4 of 5"]
    monkeypatch.setattr(Evaluator, "generate", lambda evaluation, prompts: said)
    write_rows(tmp_path / "sum.jsonl", NUMBERS * 4)
    assert command("evaluate", run, "tasks=[sum]", f"data.tasks={tmp_path}") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sum/accuracy"] == 0.5


@pytest.mark.slow
def test_a_file_of_prompts_is_answered_in_order(run: Path, tmp_path: Path, capsys: Capture) -> None:
    messages = [{"role": "user", "content": "hi"}]
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "ROMEO:", "id": 7}, {"messages": messages}])
    target = tmp_path / "answers.jsonl"
    assert command("generate", run, f"data.eval={prompts}", f"output={target}") == 0
    first, second = map(json.loads, target.read_text().splitlines())
    assert first["id"] == 7 and second["messages"] == messages
    capsys.readouterr()
    assert command("generate", run, "prompt=ROMEO:") == 0
    assert f"ROMEO:{first['generated_text']}" == capsys.readouterr().out.removesuffix("\n")
    with pytest.raises(ConfigError, match="file exists"):
        command("generate", run, f"data.eval={prompts}", f"output={target}")


@pytest.mark.slow
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
