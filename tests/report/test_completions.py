"""The panel about completions shows the first answers of the latest rounds, whatever they say."""

import json
from pathlib import Path

from kitforge.report.completions import completions
from kitforge.report.metrics import read_run
from kitforge.report.page import write_report

EVIL = "<script>alert('x')</script>"


def write_run(folder: Path, rounds: dict[int, list[str]]) -> Path:
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text("task: grpo\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "reward": 0.5}) + "\n")
    for place, lines in rounds.items():
        (folder / "rollouts" / f"round_{place}.jsonl").write_text("\n".join(lines))
    return folder


def line(text: str = "fine", reward: float = 0.25, **further: object) -> str:
    return json.dumps({"prompt": "How? ", "completion": text, "reward": reward, "tokens": [1, 2], **further})


def test_a_row_has_the_prompt_the_completion_each_reward_and_the_advantage(tmp_path: Path) -> None:
    first = line("good", 0.75, reward_shaped=-0.5, rewards={"exact": 1.0, "short": -2.0}, advantage=1.5)
    second = line("bad", 0.125, reward_shaped=0.0625, rewards={"exact": 0.0}, advantage=None)
    panel = completions([read_run(write_run(tmp_path / "run", {4: [first, second]}))], ["run"])
    assert panel is not None and panel.title == "Completions"
    names = ["Prompt", "Completion", "reward", "reward_shaped", "rewards/exact", "rewards/short", "advantage"]
    places = [panel.html.index(f">{name}<") for name in names]
    assert places == sorted(places)
    for words in (">good<", ">bad<", "0.75", "1.5", "How?", "round_4.jsonl"):
        assert words in panel.html


def test_the_latest_rounds_are_shown_and_the_first_of_their_answers(tmp_path: Path) -> None:
    rounds = {number: [line(f"answer {number} {row}") for row in range(9)] for number in (2, 9, 10, 11)}
    panel = completions([read_run(write_run(tmp_path / "run", rounds))], ["run"])
    assert panel is not None
    assert [panel.html.count(f"answer {number} ") for number in rounds] == [0, 8, 8, 8]
    assert panel.html.index("batch 11") < panel.html.index("batch 10") < panel.html.index("batch 9<")


def test_texts_and_names_are_escaped_on_the_page(tmp_path: Path) -> None:
    evil = json.dumps({"prompt": EVIL, "completion": EVIL * 99, "reward": 1.0, "rewards": {EVIL: 1.0}})
    folder = write_run(tmp_path / "run", {0: [evil, "{torn"]})
    page = write_report([folder]).read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page and "more characters" in page
    runs = [read_run(folder), read_run(write_run(tmp_path / "other", {0: [line()]}))]
    panel = completions(runs, ["run", EVIL])
    assert panel is not None and EVIL not in panel.html


def test_without_kept_rounds_there_is_no_panel(tmp_path: Path) -> None:
    assert completions([read_run(write_run(tmp_path / "run", {}))], ["run"]) is None
