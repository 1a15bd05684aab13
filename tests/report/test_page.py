"""The page as text: what it says, what it hides from a browser, how large it is."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitforge.foundation.errors import DataError
from kitforge.report.metrics import LoggedEvent, RunRecord, Sample, SampleSet, Series, read_run
from kitforge.report.page import render, run_labels, write_report
from kitforge.report.panels import Panel

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
_VOID = {"meta", "link", "img", "br"}


class _Elements(HTMLParser):
    """All elements and attributes of a page, and whether every element is closed in turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes.extend(attrs)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes.extend(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def record(**changes: object) -> RunRecord:
    empty = RunRecord(
        name="run", folder=Path("runs/run"), config_text="", train={}, eval={}, events=(), samples=(), problems=()
    )
    return replace(empty, **changes)


def loss(*values: float) -> dict[str, Series]:
    return {"loss": Series(steps=tuple(range(len(values))), values=values)}


def section(page: str, name: str) -> str:
    found = re.search(rf"<section><h2>{name}</h2>(.*?)</section>", page, re.DOTALL)
    assert found, f"no section {name}"
    return found[1]


def test_every_element_is_closed(write_run) -> None:
    runs = [read_run(write_run("one", num_steps=60)), read_run(write_run("two", num_steps=60, seed=2))]
    assert _Elements(render(runs)).open == []
    assert _Elements(render(runs[:1])).open == []


@pytest.mark.parametrize("num_runs", [1, 2])
def test_every_row_of_a_table_has_as_many_cells_as_its_head(num_runs: int, write_run) -> None:
    runs = [read_run(write_run(f"run {number}", num_steps=60, seed=number)) for number in range(num_runs)]
    for table in re.findall("<table>(.*?)</table>", render(runs), re.DOTALL):
        head, *rows = (len(re.findall("<t[hd][ >]", row)) for row in re.findall("<tr>(.*?)</tr>", table, re.DOTALL))
        assert set(rows) == {head}


def test_the_sections_of_one_run_and_of_two(write_run) -> None:
    runs = [read_run(write_run("one", num_steps=60)), read_run(write_run("two", num_steps=60, seed=2))]
    assert re.findall("<h2>(.*?)</h2>", render(runs[:1])) == ["Curves", "Samples", "Events", "Configuration"]
    both = re.findall("<h2>(.*?)</h2>", render(runs))
    assert both == ["Final numbers", "Curves", "Samples", "Events", "Differences of configuration"]


def test_charts_come_in_a_fixed_order_with_further_metrics_last(write_run) -> None:
    titles = re.findall(r"<figcaption><h3>([^<]*)", render([read_run(write_run(num_steps=60))]))
    first = ["Loss", "Learning rate", "Gradient norm", "Throughput", "Memory", "Step time"]
    assert [title.strip() for title in titles] == [*first, "Perplexity"]


def test_the_page_fetches_nothing(write_run) -> None:
    page = render([read_run(write_run(num_steps=60))])
    links = [value for name, value in _Elements(page).attributes if name in ("src", "href", "srcset", "action")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?:|fetch\(|XMLHttp", page)


def test_the_same_run_gives_the_same_page(write_run) -> None:
    folder = write_run(num_steps=60)
    assert render([read_run(folder)]) == render([read_run(folder)])


@pytest.mark.parametrize("num_runs", [1, 2])
def test_nothing_from_data_becomes_markup(num_runs) -> None:
    run = record(
        name=EVIL,
        config_text=f"name: {EVIL}\n",
        train={EVIL: Series(steps=(0, 1), values=(1.0, 2.0)), **loss(2.0, 1.0)},
        eval={f"eval/{EVIL}": Series(steps=(1,), values=(1.0,))},
        events=(LoggedEvent(step=1, name=EVIL, message=EVIL),) * 5,
        samples=(SampleSet(step=1, samples=(Sample(prompt=EVIL, text=EVIL + EVIL),)),),
        problems=(EVIL,),
    )
    harmless = replace(run, **{"name": "run", "config_text": "", "events": (), "samples": (), "problems": ()})
    runs = [run, replace(run, config_text=f"name: other{EVIL}\n")][:num_runs]
    elements = _Elements(render(runs))
    assert elements.names.count("script") == 1
    assert "img" not in elements.names
    assert not [name for name, _ in elements.attributes if name.startswith("on")]
    assert elements.open == []
    # The harmless run has the same parts of page around it, so that the count above is no accident.
    assert _Elements(render([harmless])).names.count("script") == 1


def test_the_markup_check_sees_a_planted_script() -> None:
    panel = Panel("Planted", "<script>alert(1)</script>")
    assert _Elements(render([record()], [panel])).names.count("script") == 2


@pytest.mark.slow
def test_ten_thousand_steps_stay_below_300_kilobytes(write_run) -> None:
    assert write_report([write_run(num_steps=10_000)]).stat().st_size < 300_000


def test_the_prompt_is_set_off_from_its_continuation() -> None:
    pair = Sample(prompt="ho ", text="ho ho")
    found = section(render([record(samples=(SampleSet(step=1, samples=(pair,)),))]), "Samples")
    assert "<mark>ho </mark>" in found
    assert "ho ho</blockquote>" in found


def test_the_first_samples_stand_beside_the_last_with_what_is_known_of_them() -> None:
    def samples(step: int, reward: float) -> SampleSet:
        words = [
            Sample(prompt=prompt, text=f"at {step}", figures={"reward": reward}) for prompt in ("ho ", f"new {step}")
        ]
        return SampleSet(step=step, samples=tuple(words))

    found = section(render([record(samples=(samples(9, 0.75), samples(5, 0.5), samples(0, -0.25)))]), "Samples")
    aside = found[: found.index("<details")]
    assert re.findall("<h3>(.*?)</h3>", aside) == ["Step 0", "Step 9"]
    # Only the prompt that came both times, its first answer on the left.
    assert re.findall("<mark>(.*?)</mark>.*?(at .)<footer>(.*?)</footer>", aside) == [
        ("ho ", "at 0", "reward -0.25"),
        ("ho ", "at 9", "reward 0.75"),
    ]
    assert "<details open>" not in found


def test_a_run_of_distillation_has_a_panel_of_its_divergence() -> None:
    names = ("loss", "distill/reverse_kl", "distill/reverse_kl/from_17", "distill/agreement", "entropy", "kl_coef")
    page = render([record(train=dict.fromkeys(names, loss(1.0)["loss"]))])
    assert re.findall("<h2>(.*?)</h2>", page) == ["Distillation and completions", "Curves"]
    assert len(re.findall("<figcaption>", section(page, "Distillation and completions"))) == 5


def test_a_run_of_alignment_has_a_panel_of_rewards_before_the_curves() -> None:
    watched = dict.fromkeys(("loss", "reward", "kl", "entropy", "clip_fraction", "policy_loss"), loss(1.0)["loss"])
    page = render([record(train=watched)])
    assert re.findall("<h2>(.*?)</h2>", page) == ["Rewards and completions", "Curves"]
    titles = re.findall(r"<figcaption><h3>([^<]*)", section(page, "Rewards and completions"))
    assert [title.strip() for title in titles] == [
        "Reward",
        "KL to the reference",
        "Entropy",
        "Clip fraction",
    ]
    assert "Rewards" not in render([record(train=loss(1.0) | {"accuracy": loss(1.0)["loss"]})])


def test_what_is_left_out_is_said() -> None:
    sets = tuple(SampleSet(step=step, samples=(Sample(prompt="", text="x" * 4000),) * 9) for step in range(12, 0, -1))
    events = tuple(LoggedEvent(step=step, name=f"event {step}", message="") for step in range(230))
    page = render([record(samples=sets, events=events)])
    assert "4 earlier steps are not shown here" in page
    assert "1 more samples: samples/step_12.json" in page
    assert "(1,000 more characters)" in page
    assert "30 earlier events are not shown here" in page


def test_many_events_of_one_name_are_folded() -> None:
    events = tuple(LoggedEvent(step=step, name="checkpoint", message="saved") for step in (10, 20, 30, 40))
    found = section(render([record(events=events)]), "Events")
    assert "steps 10 to 40" in found and "4 times" in found


def test_problems_stand_at_the_top() -> None:
    page = render([record(problems=("metrics.jsonl line 9 is torn.",))])
    assert page.index("line 9 is torn") < page.index("<h2>")


def test_the_best_of_several_runs_is_bold() -> None:
    page = render([record(name="one", train=loss(9.0, 3.0)), record(name="two", train=loss(9.0, 2.0))])
    row = re.search(r'<th scope="row">Loss</th>(.*?)</tr>', section(page, "Final numbers"))
    assert row and row[1].startswith("<td>3 <small>") and "<td><strong>2</strong>" in row[1]


def test_a_tie_is_not_bold() -> None:
    page = render([record(name="one", train=loss(9.0, 2.0)), record(name="two", train=loss(9.0, 2.0))])
    assert "<strong>" not in section(page, "Final numbers")


def test_a_metric_that_one_run_lacks_is_a_dash() -> None:
    page = render([record(name="one", train=loss(9.0, 2.0)), record(name="two")])
    assert "<td>\N{EM DASH}</td>" in section(page, "Final numbers")


def test_only_differences_of_configuration_are_shown_side_by_side() -> None:
    page = render([record(config_text="seed: 1\nrate: 2\n"), record(config_text="seed: 1\nrate: 3\n")])
    found = section(page, "Differences of configuration")
    assert "<code>rate</code></th><td>2</td><td>3</td>" in found
    assert "seed" not in found
    assert "1 other options are the same" in found


def test_runs_of_one_name_are_told_apart() -> None:
    runs = [record(folder=Path(folder)) for folder in ("a/run", "b/run", "b/run")]
    assert run_labels(runs) == ["a/run", "b/run (1)", "b/run (2)"]


def test_runs_named_by_their_time_are_called_by_what_differs() -> None:
    first, second = (f"20261127-235413-recommendation-{name}" for name in ("dcn_v2", "deepfm"))
    runs = [
        record(name=first, config_text="model:\n  family: dcn\nseed: 1\n"),
        record(name=second, config_text="seed: 1\n"),
    ]
    assert run_labels(runs) == ["family dcn", "no family"]
    assert all(f"<td>{name}</td>" in section(render(runs), "Final numbers") for name in (first, second))
    assert run_labels(runs[:1]) == [first]


def test_unknown_values_are_one_table_sorted_by_share_and_nothing_else() -> None:
    shares = {"os": 0.0, "ip": 0.8, "site": 0.1234, "void": math.nan}
    evaluated = {f"eval/unknown_share/{name}": Series(steps=(1,), values=(value,)) for name, value in shares.items()}
    runs = [record(name="one", eval=evaluated), record(name="two")]
    for page in (render(runs[:1]), render(runs)):
        found = section(page, "Values that training never saw")
        assert re.findall("<code>(.*?)</code>", found) == ["ip", "site"]
        assert "<td>80.0%</td>" in found and "2 further features have none" in found
        assert page.count("unknown") == 0


def test_panels_of_a_kit_follow_the_curves() -> None:
    page = render([record()], [Panel("A & B", "<p>made by a kit</p>"), ("Tuple", "<p>too</p>")])
    assert section(page, "A &amp; B") == "<p>made by a kit</p>"
    assert page.index("<h2>Curves</h2>") < page.index("<h2>A &amp; B</h2>")
    assert section(page, "Tuple") == "<p>too</p>"


def test_a_page_without_scripts_says_where_its_numbers_are(write_run) -> None:
    found = section(render([read_run(write_run(num_steps=60))]), "Curves")
    assert "<noscript>" in found and "The curves as a table" in found


def test_a_run_without_numbers_has_a_page() -> None:
    assert "has logged no numbers yet" in render([record()])


def test_half_a_character_in_a_sample_does_not_stop_the_page(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "step_1.json").write_text('{"step": 1, "samples": [{"prompt": "a", "text": "\\ud83d"}]}')
    assert "\N{REPLACEMENT CHARACTER}" in write_report([tmp_path]).read_text("utf-8")


def test_the_report_of_one_run_lies_in_it(write_run) -> None:
    folder = write_run(num_steps=12)
    assert write_report([folder]) == folder / "report.html"
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "metrics.jsonl", "report.html", "samples"]


def test_a_comparison_leaves_the_runs_own_reports_alone(write_run) -> None:
    folders = [write_run("one", num_steps=12), write_run("two", num_steps=12, seed=2)]
    assert write_report(folders) == folders[0] / "comparison.html"
    assert not (folders[0] / "report.html").exists()


def test_a_report_of_nothing_is_an_error() -> None:
    with pytest.raises(DataError, match="no run to report"):
        write_report([])


def test_a_page_that_cannot_be_written_is_an_error(write_run) -> None:
    folder = write_run(num_steps=12)
    (folder / "report.html").mkdir()
    with pytest.raises(DataError, match="cannot be written"):
        write_report([folder])


_VALUES = st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.text(max_size=3))
_NAMES = st.sampled_from(["loss", "eval/loss", "skipped", "time/seconds", "time/memory_bytes", "tokens", "", "x\n<"])
_LINES = st.fixed_dictionaries(
    {"kind": st.sampled_from(["train", "eval", "event"]), "step": st.integers(0, 2**48 - 1), "event": st.text()},
    optional={},
).flatmap(lambda line: st.dictionaries(_NAMES, _VALUES).map(lambda values: {**line, **values}))


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(_LINES, max_size=6))
def test_whatever_stands_in_the_metrics_there_is_a_page(tmp_path, lines) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert _Elements(render([run])).open == []
    assert _Elements(render([run, run])).open == []
