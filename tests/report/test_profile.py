"""`kitforge profile`: the causes of each step, on one clock, and what is said of them."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kitforge.cli.main import run
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.report import step_times as module
from kitforge.report.profile_page import findings, profile_page, rank_rows, work_excess
from kitforge.report.rank_trace import MESSAGE, Collective, RankTrace, read_traces, reduce_trace
from kitforge.report.step_times import CAUSES, COMPUTE, DATA, HOST, StepTimes, step_times
from tests.report.profiles import MS, chrome_trace, drawn, moved, planned, trace_of

SECONDS = 1_000_000_000
JOINT = ("allreduce", "allgather")


def write(folder: Path, traces: Sequence[RankTrace]) -> Path:
    for trace in traces:
        trace.write(folder / "profile")
    return folder


def by_hand(traces: Sequence[RankTrace], trace: RankTrace) -> tuple[list[list[int]], list[int]]:
    """The causes of each counted step of a rank, nanosecond by nanosecond, on one clock; its communication."""
    steps = [{number for number, *_ in each.steps[1:]} for each in traces]
    collectives = []
    for place, each in enumerate(trace.collectives):
        last = max(other.collectives[place].start for other in traces)
        collectives.append((each.start, each.start if each.kind not in JOINT and each.end < last else last, each.end))
    found, communication = [], []
    for number, start, end in trace.steps[1:]:
        assert all(number in each for each in steps)
        counts, transfers = [0] * len(CAUSES), 0
        for now in range(start, end):
            runs = any(arrival <= now < last for _, arrival, last in collectives)
            transfers += runs
            if any(low <= now < high for low, high in trace.compute.tolist()):
                counts[0] += 1
            elif runs:
                counts[1] += 1
            elif any(low <= now < min(arrival, last) for low, arrival, last in collectives):
                counts[2] += 1
            else:
                counts[3 if any(low <= now < high for low, high in trace.data.tolist()) else 4] += 1
        found.append(counts)
        communication.append(transfers)
    return found, communication


@pytest.mark.parametrize("seed", range(60))
def test_causes_and_hidden_communication_are_those_of_every_single_nanosecond(seed: int) -> None:
    generator = random.Random(seed)
    traces = drawn(generator)
    wanted = [by_hand(traces, trace) for trace in traces]
    times = step_times([moved(trace, generator.randint(-5 * SECONDS, 5 * SECONDS)) for trace in traces])
    assert times.causes.tolist() == [causes for causes, _ in wanted]
    assert times.transfers.tolist() == [communication for _, communication in wanted]


@pytest.mark.parametrize("seed", range(20))
def test_the_causes_of_a_step_sum_to_its_length(seed: int) -> None:
    traces = drawn(random.Random(seed + 1000))
    lengths = [[end - start for _, start, end in trace.steps[1:]] for trace in traces]
    assert step_times(traces).causes.sum(axis=2).tolist() == lengths


def test_clocks_that_are_seconds_apart_change_nothing() -> None:
    plan = {"groups": [(0, 1), (2, 3), (0, 2), (1, 3)], "extra": {(2, "compute"): 50}, "transfer": {1: 9}}
    generator = random.Random(3)
    offsets = [generator.randint(-5 * SECONDS, 5 * SECONDS) for _ in range(4)]
    one, other = step_times(planned(4, **plan)), step_times(planned(4, **plan, offsets=offsets))
    assert one.causes.tolist() == other.causes.tolist()
    assert findings(one) == findings(other)
    assert one.links == other.links


def test_clocks_are_aligned_from_group_to_group() -> None:
    chain = [(rank, rank + 1) for rank in range(7)]
    traces = [
        trace._replace(collectives=[each for each in trace.collectives if each.num_ranks == 2])
        for trace in planned(8, groups=chain, offsets=[(-1) ** rank * rank * SECONDS for rank in range(8)])
    ]
    met = [
        trace._replace(collectives=[each for each in trace.collectives if each.num_ranks == 2])
        for trace in planned(8, groups=chain)
    ]
    assert step_times(traces).causes.tolist() == step_times(met).causes.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_leave_most_collectives_late_keep_their_clocks(seed: int) -> None:
    generator = random.Random(seed)
    plan = planned(4, num_steps=60)
    late = [generator.randint(0, 4 * MS) * (generator.random() < 0.6) for _ in range(60)]

    def delayed(trace: RankTrace) -> RankTrace:
        rows = zip(trace.collectives, late, strict=True)
        return trace._replace(collectives=[each._replace(end=each.end + more) for each, more in rows])

    times = step_times([plan[0], delayed(plan[1]), delayed(plan[2]), plan[3]])
    assert not times.causes[:, :, module.WAITING].any()


@pytest.mark.parametrize(
    ("part", "cause", "words"),
    [
        ("compute", COMPUTE, "most of it computing"),
        ("data", DATA, "most of it loading data"),
        ("host", HOST, "most of it on its host"),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_the_slow_rank_is_named_with_its_part_and_its_size(num_ranks: int, part: str, cause: int, words: str) -> None:
    times = step_times(planned(num_ranks, extra={(1, part): 50}))
    assert (times.causes[1, :, cause] - times.causes[0, :, cause]).tolist() == [50 * MS] * 3
    assert work_excess(times)[1].tolist() == [50 * MS] * 3
    found = findings(times)
    wanted = f"rank 1 works 50.0 ms a step longer than the median rank, {words}"
    assert any(each.startswith(wanted) and "the others wait 50.0 ms a step (47%)" in each for each in found), found


def test_waiting_is_not_communication() -> None:
    times = step_times(planned(4, extra={(2, "host"): 50}))
    assert times.causes[:, 0, module.COMMUNICATION].tolist() == [2 * MS] * 4
    assert times.causes[:, 0, module.WAITING].tolist() == [50 * MS, 50 * MS, 0, 50 * MS]


def test_the_first_traced_step_is_warm_up() -> None:
    assert step_times(planned(2, warm_up=3000)).causes.tolist() == step_times(planned(2)).causes.tolist()
    assert step_times(planned(2)).steps == [2, 3, 4]


def test_the_slow_link_is_named() -> None:
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    times = step_times(planned(8, groups=pairs, transfer={2: 12}))
    assert times.links[0][:4] == (10 * MS, [4, 5], "allreduce", 1000)
    words = "the link of ranks 4, 5 is slow: allreduce of 1\N{NO-BREAK SPACE}k numbers takes 12.0 ms there and 2.0 ms"
    assert f"{words} in the median group" in findings(times)
    assert not any("slow" in each for each in findings(step_times(planned(8, groups=pairs))))


def test_equal_ranks_that_compute_have_nothing_to_be_said_of_them() -> None:
    times = step_times(
        [trace._replace(data=trace.data[:0]) for trace in planned(2, extra={(rank, "compute"): 300 for rank in (0, 1)})]
    )
    assert findings(times) == ["no rank, link or cause stands out"]


@pytest.mark.parametrize("cause", ["data", "host"])
def test_a_cause_with_a_large_share_is_named(cause: str) -> None:
    found = findings(step_times(planned(2, extra={(rank, cause): 45 for rank in (0, 1)})))
    assert any(re.match(r"(54|49)% of a step is ", each) for each in found), found


def test_a_rank_with_more_memory_is_named() -> None:
    traces = planned(3)
    times = step_times([*traces[:2], traces[2]._replace(peak_memory=3 * 2**30)])
    assert "rank 2 takes 3 GiB and the median rank 1 GiB: it limits the size of the batch" in findings(times)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_trace_of_a_profiler_is_read(backend: str, num_ranks: int) -> None:
    for trace in planned(num_ranks, groups=[(0, 1), (2, 3)] if num_ranks == 4 else (), extra={(0, "host"): 1}):
        found = reduce_trace(
            *chrome_trace(trace, backend), run="one", rank=trace.rank, num_ranks=num_ranks, peak_memory=2**30
        )
        assert found.compute.tolist() == trace.compute.tolist()
        assert found.data.tolist() == trace.data.tolist()
        assert found.collectives == trace.collectives
        assert list(found.steps) == list(trace.steps)


def test_collectives_of_two_groups_that_start_in_another_order_keep_their_groups() -> None:
    steps = [(1, 0, 900)]
    met = [Collective(f"{place % 2}@0", 2, "allreduce", 4, 10 * place, 10 * place + 5) for place in range(12)]
    trace, flights = chrome_trace(trace_of(0, 2, steps=steps, collectives=met), "gloo")
    # As the threads of the groups take them up: the fifth before the fourth.
    calls = [each for each in trace["traceEvents"] if each["name"] == "gloo:all_reduce"]
    late = sorted(calls, key=lambda each: float(each["ts"]))[3]
    late["ts"] += 0.012
    found = reduce_trace(trace, flights, run="one", rank=0, num_ranks=2, peak_memory=0).collectives
    assert [each.group for each in found] == [met[place].group for place in (0, 1, 2, 4, 3, *range(5, 12))]


def test_a_message_of_gloo_has_the_ranks_and_the_size_of_the_span_around_it() -> None:
    trace, flights = chrome_trace(planned(1)[0], "gloo")
    start = trace["traceEvents"][1]["ts"]
    common = {"ph": "X", "cat": "user_annotation", "tid": 1, "args": {}}
    trace["traceEvents"] += [
        {**common, "name": f"{MESSAGE}3>1 640", "ts": start, "dur": 9},
        {**common, "name": "gloo:recv", "ts": start + 1, "dur": 30},
    ]
    found = reduce_trace(trace, flights, run="one", rank=0, num_ranks=1, peak_memory=0)
    assert [each[:4] for each in found.collectives if each.kind == "message"] == [("3>1", 2, "message", 640)]


def test_a_message_is_over_when_it_is_received() -> None:
    joint = [Collective("0@0", 2, "allreduce", 1, 10 * step + 1, 10 * step + 2) for step in (0, 100)]
    sent, received = (Collective("0>1", 2, "message", 1, 1020, end) for end in (1900, 1030))
    steps = [(1, 0, 1000), (2, 1000, 2000)]
    traces = [trace_of(rank, 2, steps=steps, collectives=[*joint, each]) for rank, each in enumerate((sent, received))]
    assert step_times(traces).causes[:, 0, module.COMMUNICATION].tolist() == [11, 11]


def test_collectives_that_a_rank_lacks_are_left_out_and_counted() -> None:
    traces = planned(3)
    short = traces[1]._replace(collectives=traces[1].collectives[:-1])
    times = step_times([traces[0], short, traces[2]])
    assert times.num_unmatched == 2
    assert any(each.startswith("2 collectives lack a rank") for each in findings(times))


@pytest.mark.parametrize("is_named", [False, True])
def test_a_collective_without_a_group_or_before_the_first_step_meets_nobody(is_named: bool) -> None:
    traces = planned(3)
    known = step_times(traces)
    name, begin = traces[0].collectives[-1][:4], traces[0].steps[0][1]
    alone = Collective(*name, begin - 9, begin - 5) if is_named else Collective("", 0, "allreduce", 1, 1, 2)
    found = step_times(
        [each._replace(collectives=sorted([alone, *each.collectives], key=lambda one: one.start)) for each in traces]
    )
    assert found.num_unmatched == known.num_unmatched + 3
    assert found.links == known.links


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    traces = [moved(trace, -7 * SECONDS) for trace in planned(3, groups=[(0, 1)])]
    for found, trace in zip(read_traces(write(tmp_path, traces)), traces, strict=True):
        assert found.compute.tolist() == trace.compute.tolist()
        assert found.collectives == trace.collectives
        assert [tuple(each) for each in found.steps] == trace.steps


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def of_another_run(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "run": "two"}))


REFUSALS: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, r"traces are missing\n.*none of rank 2\n.*4 ranks\n.*partial=true"),
    (cut, r"rank-00002.json is cut off or damaged\n.*\n.*\n.*partial=true"),
    (of_another_run, r"of several runs\n.*rank 3 of run one, rank 2 of run two\n.*\n.*delete the older"),
]


@pytest.mark.parametrize(("damage", "words"), REFUSALS)
def test_traces_that_do_not_belong_together_are_refused(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    damage(write(tmp_path, planned(4)) / "profile" / "rank-00002.json")
    with pytest.raises(DataError, match=words):
        read_traces(tmp_path)


@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_partial_reads_the_ranks_that_are_there(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    damage(write(tmp_path, planned(4, extra={(1, "data"): 50})) / "profile" / "rank-00002.json")
    times = step_times(read_traces(tmp_path, partial=True))
    assert times.ranks == [0, 1, 3]
    assert work_excess(times)[1].tolist() == [50 * MS] * 3


def test_a_run_without_a_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"was not profiled\n.*\n.*\n  do: .*trainer.profile=true"):
        read_traces(tmp_path)
    with pytest.raises(DataError, match=r"got: +no such folder; look into runs/"):
        read_traces(tmp_path / "absent")


def test_warm_up_alone_is_refused() -> None:
    traces = planned(2)
    with pytest.raises(DataError, match=r"no step was traced on all ranks\n  got: +1 steps of rank 1"):
        step_times([traces[0], traces[1]._replace(steps=traces[1].steps[:1])])


def test_ranks_without_a_collective_in_common_are_refused() -> None:
    with pytest.raises(DataError, match="clocks of the ranks cannot be aligned"):
        step_times([trace._replace(collectives=()) for trace in planned(2)])


def test_a_thousand_ranks_are_aligned_in_one_pass_over_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()
    whole = module._apart
    monkeypatch.setattr(module, "_apart", lambda ends: sizes.append(ends.size) or whole(ends))
    groups = [range(first, first + 8) for first in range(0, 1000, 8)]
    traces = planned(1000, groups=groups, extra={(321, "compute"): 50}, num_steps=3)
    times = step_times(traces)
    assert sum(sizes) <= sum(len(trace.collectives) for trace in traces)
    assert findings(times)[0].startswith("rank 321 works 50.0 ms a step longer")
    rows = rank_rows(times, 16)
    assert [rows[0][0], rows[-1][0], len(rows)] == ["rank 321", "median of 1,000", 17]


def test_the_record_of_a_rank_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    for num_ranks in (2, 200):
        write(tmp_path / str(num_ranks), planned(num_ranks)[:1])
    small, large = (tmp_path / str(each) / "profile" / "rank-00000.json" for each in (2, 200))
    assert large.stat().st_size < small.stat().st_size + 40


def page_of(times: StepTimes) -> str:
    return profile_page(times, "<b>run</b>")


def test_the_page_has_its_numbers_as_text_and_fetches_nothing() -> None:
    page = page_of(step_times(planned(4, extra={(2, "compute"): 50})))
    text = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.S)
    assert "<b>run</b>" not in page and "&lt;b&gt;run" in page
    assert text.count("<table>") == 3 and "rank 2 works 50.0 ms" in text
    assert '<span class="heat" style="--share:100%">50.0</span>' in text
    assert not re.search(r"(src|href)=\"(?!data:)", text)


def test_the_command_prints_the_table_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, planned(4, extra={(2, "compute"): 50}))
    for arguments in ([], [f"output={tmp_path}/found.html"], []):
        assert run(["profile", str(tmp_path), *arguments]) == 0
    printed = capsys.readouterr().out
    assert "- rank 2 works 50.0 ms a step longer than the median rank" in printed
    assert re.search(r"rank 2 +107.0 +90.0 +2.0 +0.0 +10.0 +5.0 +0% +1 GiB", printed)
    assert (tmp_path / "profile" / "times.html").read_text() == (tmp_path / "found.html").read_text()


@pytest.mark.parametrize("arguments", [[], ["one", "two"], ["one", "outptu=x.html"]])
def test_other_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="profile needs one run"):
        run(["profile", *arguments])


def test_a_page_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path, planned(2))
    (tmp_path / "notes.html").write_text("mine")
    with pytest.raises(ConfigError, match="was not written by profile"):
        run(["profile", str(tmp_path), f"output={tmp_path}/notes.html"])
