"""`parallel=auto`: its order beside true traces, what a user fixes, and what does not fit."""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kitforge.cli.plan import plan
from kitforge.composition import compose_config
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.plan.search import Estimate, legal_layouts
from kitforge.foundation.errors import ConfigError
from kitforge.kits import auto_layout
from kitforge.kits.auto_layout import ASSUMED, FoundLayouts, LayoutSearch
from kitforge.kits.planning import ClusterConfig, MemoryPlan, plan_memory
from kitforge.kits.registry import kit_of
from tests.measured_step import options_of

KIT = kit_of("text_generation")
TINY = {"model.num_layers": 2, "model.dim": 64, "data.batch_size": 8, "data.sequence_length": 32}
# Neither stages nor cut batches, so that all layouts can be traced.
FIXED = {"parallel.pipeline": 1, "parallel.zero_stage": 3, "trainer.activation_checkpointing": "none"}
CLUSTER = ClusterConfig(speed=ASSUMED)


def found(given: dict[str, Any], cluster: ClusterConfig = CLUSTER, num_ranks: int = 4, **changes: Any) -> FoundLayouts:
    options = options_of(TINY | {name: each for name, each in given.items() if name.startswith("trainer.")} | changes)
    return LayoutSearch(KIT, options, cluster, given, num_ranks).run()


@pytest.mark.slow
def test_the_best_of_the_search_are_the_best_of_all_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    given = FIXED | {"trainer.micro_batch_size": 2}
    options, traced = options_of(TINY | {"trainer.micro_batch_size": 2}), dict[str, tuple[float, float]]()
    plans = dict[str, MemoryPlan]()
    for data, shard, tensor, context in itertools.product((1, 2, 4), repeat=4):
        if data * shard * tensor * context == 4:
            degrees = ParallelConfig(data=data, shard=shard, tensor=tensor, context=context)
            try:
                one = plan_memory(KIT, dataclasses.replace(options, parallel=degrees), CLUSTER)
            except ConfigError:
                continue
            time = one.time(CLUSTER)
            assert time is not None
            traced[degrees.describe()] = time.seconds, one.memory.peak
            plans[degrees.describe()] = one
    # Each layout is traced once.
    monkeypatch.setattr(auto_layout, "plan_memory", lambda _, options, __: plans[options.parallel.describe()])
    result = found(given)
    assert len(traced) == len(result.best) == 10
    by_time = sorted(traced, key=lambda each: traced[each][0])
    assert result.best[0].options.parallel.describe() in by_time[:3]
    # The estimate agrees on which of them fit where half of them do.
    sizes = sorted(size for _, size in traced.values())
    limit = (sizes[4] + sizes[5]) / 2
    fitting = {each.options.parallel.describe() for each in result.best if each.bytes <= limit}
    assert fitting == {name for name, (_, size) in traced.items() if size <= limit}
    # What is given stays.
    kept = {
        (each.options.trainer.micro_batch_size, each.options.trainer.activation_checkpointing) for each in result.best
    }
    assert kept == {(2, "none")}


@pytest.mark.slow
def test_the_estimate_of_a_layout_that_was_probed_is_its_trace() -> None:
    given = FIXED | {"parallel.tensor": 1, "parallel.context": 1, "parallel.zero_stage": 2}
    search = LayoutSearch(KIT, options_of(TINY | {"data.batch_size": 4}), CLUSTER, given, 2)
    columns, _, sizes, seconds = search.estimated()
    # With shards and without, one row at once; buckets free temporaries that the estimate leaves half of.
    probed = np.flatnonzero((columns["count"] == 2) & (columns["rows"] == 1))
    kinds = {(int(columns["shard"][at]), int(columns["zero"][at])) for at in probed}
    assert kinds == {(1, 2), (2, 2)}
    for at in probed:
        near = 1e-3 if columns["shard"][at] > 1 else 1e-2
        plan = plan_memory(KIT, search.options_at(columns, int(at)), CLUSTER)
        time = plan.time(CLUSTER)
        assert time is not None
        assert (sizes[at], seconds[at]) == pytest.approx((plan.memory.peak, time.seconds), rel=near)


def test_every_layout_multiplies_to_the_ranks_and_keeps_what_is_fixed() -> None:
    powers = [2**each for each in range(17)]
    allowed = {
        "data": powers,
        "shard": powers,
        "tensor": [1, 2, 4, 8],
        "context": [1, 2, 4],
        "pipeline": [1, 2, 4, 8, 16],
    }
    further = {"expert": [1], "zero": [1, 2, 3], "schedule": [0, 1, 2, 3], "recompute": [0, 1, 2]}
    columns = legal_layouts(65_536, allowed | further, 16_384, 1, 80)
    degrees = [columns[each].astype(int) for each in ("data", "shard", "tensor", "context", "pipeline")]
    assert set(math.prod(degrees)) == {65_536}
    assert set(columns["data"] * columns["shard"] * columns["rows"] * columns["count"]) == {16_384}
    assert not (columns["schedule"][columns["pipeline"] == 1] > 0).any()
    # Each layout is there once, and all columns together take a part of a gigabyte.
    kinds = np.stack([*degrees, *(columns[each] for each in ("zero", "schedule", "count", "recompute"))])
    assert len(np.unique(kinds, axis=1).T) == kinds.shape[1] > 50_000
    assert sum(each.nbytes for each in columns.values()) < 2**28
    fixed = legal_layouts(65_536, allowed | further | {"tensor": [4], "rows": [3]}, 16_384, 1, 80)
    assert set(fixed["tensor"]) == {4} and max(fixed["rows"]) == 3


def test_an_axis_divides_in_the_estimate_what_its_probe_shows() -> None:
    def probe(weights: float, activations: float, products: float) -> dict[tuple[Any, ...], Any]:
        sizes = {("memory", "head", "weights"): weights, ("memory", "head", "activations"): activations}
        seconds = {(group, "products"): products for group in ("each", "last")}
        return {name: np.array([0.0, each]) for name, each in (sizes | seconds).items()}

    one, cut = probe(8.0, 4.0, 2.0), probe(4.0, 4.0, 1.0)
    estimate = Estimate([one] * 3, [(one, one)] * 4, {"tensor": [(one, cut, 2)]}, ASSUMED, (1, 1, 10))
    axes = dict.fromkeys(("data", "shard", "context", "expert", "zero", "rows"), 1)
    values = axes | {"tensor": 4, "pipeline": 2, "schedule": 0, "recompute": 0, "count": 8}
    size, seconds = estimate.of({name: np.array([each], dtype=np.int32) for name, each in values.items()})
    # Half of the blocks: a quarter of their weights, and their activations for the two micro-batches in flight.
    assert size == pytest.approx(10 / 2 * (8 / 4 + 2 * 4))
    assert seconds["products"] == pytest.approx(8 * 10 / 2 * 2 / 4)
    # One of two stages waits for one micro-batch.
    assert seconds["bubble"] == pytest.approx(10 / 2 * 2 / 4)


def test_a_kind_of_layout_is_traced_while_it_may_be_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = {"data": [1, 4], "tensor": [1, 4], "shard": [1, 4], "context": [1], "pipeline": [1], "expert": [1]}
    columns = legal_layouts(4, allowed | {"zero": [3], "schedule": [0], "recompute": [0]}, 32, 1, 2)
    # By the estimate tensor is a tenth slower than data, in truth as much faster; shard is twice as slow.
    estimated = np.where(columns["tensor"] > 1, 1.1, np.where(columns["shard"] > 1, 2.0, 1.0)) + columns["count"] / 100
    asked = list[str]()

    class Traced:
        memory = SimpleNamespace(peak=1)

        def __init__(self, _kit: object, options: Any, _cluster: object) -> None:
            self.degrees = options.parallel
            asked.append(self.degrees.describe())

        def time(self, _cluster: object) -> Any:
            return SimpleNamespace(by_cause={"products": 0.9 if self.degrees.tensor > 1 else 1.0})

    monkeypatch.setattr(auto_layout, "plan_memory", Traced)
    search = LayoutSearch(KIT, options_of(TINY | {"data.batch_size": 32}), CLUSTER, {}, 4)
    estimate: Any = SimpleNamespace(of=lambda _columns: (None, {"products": 1.0}))
    result = search.ordered(columns, estimate, np.ones(len(estimated)), estimated)
    assert result.best[0].options.parallel.tensor == 4
    assert "shard=4 = 4" not in asked and len(asked) < len(estimated)


@pytest.mark.parametrize("value", ["autom", "auto", 2])
def test_a_value_of_parallel_that_is_none_is_told_of_auto(value: object) -> None:
    with pytest.raises(ConfigError, match=f"got: +parallel={value}\n.*auto, for which `kitforge plan`") as caught:
        compose_config("text_generation", {"parallel": value})
    assert ("`kitforge plan ... parallel=auto` prints" in str(caught.value)) == (value == "auto")


@pytest.mark.parametrize(
    ("given", "changes", "words"),
    [
        ({"parallel.data": 8}, {}, "no layout with these options[\\s\\S]*on 4 ranks"),
        ({"parallel.tensor": 0}, {}, "parallel.tensor"),
        ({"parallel.pipeline": 4}, {}, "pipeline"),
        ({"parallel.data": 4}, {"data.batch_size": 6}, "divides data.batch_size"),
        ({"parallel.copies": 2}, {}, "parallel.copies"),
        ({}, {"precision": "bf16"}, "no peak speed[\\s\\S]*peak_tflops of fp32"),
    ],
)
def test_what_no_layout_can_have_is_refused_before_a_trace(
    given: dict[str, Any], changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_layout, "trace_rank", lambda *_: pytest.fail("a step was traced"))
    cluster = ClusterConfig(speed=dataclasses.replace(ASSUMED, peak_tflops={"fp32": 1.0}))
    with pytest.raises(ConfigError, match=words) as caught:
        found(given, cluster, **changes)
    assert "got:" in str(caught.value)


SMALL = [f"{name}={each}" for name, each in (TINY | FIXED | {"parallel.context": 1}).items()]
SMALL += ["model=llama_tiny", "tokenizer=byte", "cluster=h100", "cluster.devices=2", "parallel=auto"]


@pytest.mark.slow
def test_the_page_of_the_best_layout_has_all_that_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    assert plan([*SMALL, "parallel.tensor=1", f"output={page}"]) == 0
    said = capsys.readouterr().out
    [command] = [line for line in said.splitlines() if line.startswith("kitforge train ")]
    options = command.split()
    assert {"parallel.tensor=1", "parallel.pipeline=1"} < {*options} and not {f"output={page}", "cluster=h100"} & {
        *options
    }
    [[name, degree]] = re.findall(r"parallel\.(data|shard)=(2)", command)
    text = page.read_text()
    assert "Layouts, the fastest first" in text and f"{name}={degree}" in text and text.count("beside the best") == 1
    # Of those that were not traced the figures are estimates, as the words before the table say.
    assert text.count("~") == said.count("~") - 1 > 0


@pytest.mark.slow
def test_a_cluster_that_nothing_fits_is_told_by_how_much_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([*SMALL, "cluster.memory_gb=0.0005"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"no layout fits; (data|shard|tensor)=2 = 2 needs least, \S+ GiB, \S+ GiB too many", said)
    # The three largest parts, of which the weights are one.
    assert re.search(r"many: (\w[\w ]* \S+ GiB,? ){3}are the most", said) and re.search(r"weights \S+ GiB", said)
    assert "trainer.offload=optimizer: " in said
    assert re.search(r"or about \d+ times as many devices", said)
