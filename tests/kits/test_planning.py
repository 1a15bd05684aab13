"""Plans: networks from shallow traces, devices by name, and what is said of a run that does not fit."""

import re
from pathlib import Path
from typing import Any

import pytest

from kitforge.cli.plan import plan
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.kits.planning import ClusterConfig, fill_cluster, plan_memory
from kitforge.kits.registry import kit_of
from kitforge.preset_files import presets
from kitforge.yaml_options import read_yaml, to_plain_dict
from tests.measured_step import options_of, traced

CPU = ClusterConfig()


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"model.num_layers": 6},
        {"model.num_layers": 6, "precision": "bf16", "trainer.activation_checkpointing": "full", "parallel.shard": 2},
    ],
)
def test_a_deep_network_from_shallow_traces_is_the_deep_trace(choices: dict[str, Any]) -> None:
    options = options_of({"data.batch_size": 2, **choices})
    kit = kit_of("text_generation")
    shallow, deep = (plan_memory(kit, options, CPU, keeps_course=keeps).memory for keeps in (False, True))
    assert shallow.moments == deep.moments == traced(options).moments
    assert max(sum(sizes.values()) for _, sizes in deep.course) == deep.peak


def test_devices_that_the_degrees_leave_over_are_replicas() -> None:
    options = options_of({"parallel.tensor": 2})
    assert fill_cluster(options, ClusterConfig(devices=8)).parallel.data == 4
    with pytest.raises(ConfigError, match="do not divide the devices"):
        fill_cluster(options, ClusterConfig(devices=3))


def test_every_device_that_ships_has_its_data_sheet() -> None:
    for path in presets("cluster").values():
        ClusterConfig(**to_plain_dict(read_yaml(path)))
        assert path.stem == "cpu" or re.search(r"https://", path.read_text())


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="h100"):
        plan(["model=llama_tiny", "cluster=h1000"])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(presets("recipe")))
def test_every_recipe_is_planned_or_refused_in_words(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    less = ["data.batch_size=4"] if recipe in ("multi30k_retrieval", "squad", "dlrm_dcnv2_mlperf") else []
    try:
        assert plan([f"recipe={recipe}", *less]) in (0, 1)
    except KitforgeError as error:
        assert "do:" in str(error)
    else:
        assert "memory of a rank" in capsys.readouterr().out


def test_a_table_that_nothing_bounds_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"nothing bounds the rows[\s\S]*cache\.device_rows=N"):
        plan(["recipe=dlrm_dcnv2_mlperf", "data.batch_size=16"])


@pytest.mark.slow
def test_bytes_on_the_host_are_said_apart(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=llama_tiny", "model.num_layers=1", "data.batch_size=2", "data.sequence_length=8", "cluster=h100"]
    assert plan([*small, "trainer.offload=optimizer"]) == 0
    found = capsys.readouterr().out
    assert re.search(r"and 0\.\d+ GiB in the memory of the host \(trainer.offload=optimizer\)", found)
    assert "moments" not in found


@pytest.mark.slow
def test_of_a_pipeline_the_fullest_rank_is_printed_and_the_range_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    # The head and the logits of the last rank are more than all that the other two have.
    last = {"model.num_layers": 3, "model.vocab_size": 20_000, "parallel.pipeline": 3, "data.batch_size": 3}
    found = plan_memory(kit_of("text_generation"), options_of({**last, "model.tie_embeddings": False}), CPU)
    assert found.fullest == 2
    assert list(found.by_index) == [0, 1, 2]
    short = ["data.batch_size=4", "trainer.micro_batch_size=1", "data.sequence_length=8", "model.num_layers=4"]
    assert plan(["model=llama_tiny", "tokenizer=byte", "parallel.pipeline=4", *short]) == 0
    line = r"rank (\d) of parallel.pipeline=4 needs the most its ranks 0, 1, 3 need (\S+) to (\S+) GiB"
    fullest, least, most = re.findall(line, capsys.readouterr().out.replace("\n", " "))[0]
    assert int(fullest) == 0
    assert float(least) <= float(most)


@pytest.mark.slow
def test_what_is_not_exact_is_said_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=llama_moe_tiny", "model.num_layers=1", "data.batch_size=2", "data.sequence_length=8"]
    assert plan([*small, "precision=bf16", "cluster.devices=2", "compile_level=O2"]) == 0
    assert re.findall(r"not exact: (\S+ \S+)", capsys.readouterr().out) == [
        *("threads of", "with AMX,", "experts in", "compile_level=O2 is")
    ]
    assert plan([*small, "parallel.data=2", "parallel.expert=2", "cluster.expert_skew=9"]) == 0
    assert "gets 2 times the mean: cluster.expert_skew, from 1 to parallel.expert=2" in " ".join(
        capsys.readouterr().out.split()
    )
    assert plan([*small, "cluster=h100"]) == 0
    assert re.findall(r"not exact: (.*)", capsys.readouterr().out) == [
        "traced by the operations of a CPU: no step on a H100 has been compared yet"
    ]


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_what_would_with_figures(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model.num_layers=3", "data.batch_size=8", "data.sequence_length=64", "cluster.memory_gb=0.019"]
    assert plan([*small, "model=llama_tiny", "tokenizer=byte"]) == 1
    printed = capsys.readouterr().out
    assert "it does not fit" in printed
    peaks = [float(each) for each in re.findall(r"^  \S+=\S+ +(\S+) GiB", printed, re.MULTILINE)]
    assert len(peaks) >= 1
    assert printed.rstrip().endswith("fits")
    assert plan([*small[:-1], "model=llama_tiny"]) == 0


@pytest.mark.slow
def test_only_changes_that_save_memory_are_made_before_more_devices(capsys: pytest.CaptureFixture[str]) -> None:
    # The peak is in the update, and micro-batches would need the gradients twice.
    short = ["data.batch_size=4", "data.sequence_length=8", "precision=bf16", "cluster.memory_gb=0.001"]
    assert plan(["model=llama_tiny", "model.num_layers=1", "tokenizer=byte", *short]) == 1
    printed = capsys.readouterr().out
    assert "\n4 rows of 8 tokens" in printed
    assert not re.findall(r"^  \S+=\S+ ", printed, re.MULTILINE)
    assert re.search(r"about \d+ times as many devices", printed)


@pytest.mark.slow
def test_a_plan_has_the_time_by_cause_the_rate_and_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=llama_tiny", "model.num_layers=1", "tokenizer=byte", "data.batch_size=2", "precision=bf16"]
    assert plan([*small, "cluster=h100", "cluster.price_per_hour=3", "cluster.currency=EUR", "parallel.tensor=2"]) == 0
    printed = capsys.readouterr().out
    shares = [float(each) for each in re.findall(r"│ [\d.,]+ │ +([\d.]+)% │", printed.partition("time of a step")[2])]
    assert sum(shares[:-1]) == pytest.approx(shares[-1], abs=0.5)
    assert "communication over tensor" in printed
    words = " ".join(printed.split())
    rate, price = re.findall(r"([\d,]+) tokens/s, .* TFLOP/s in bf16, (\S+) EUR for a million tokens", words)[0]
    assert float(price) == pytest.approx(2 * 3 / 3600 / float(rate.replace(",", "")) * 1e6, rel=1e-2)
    assert plan([*small, "cluster=ascend_910b"]) == 0
    assert "of 280 TFLOP/s in bf16" in capsys.readouterr().out
    assert plan([*small, "cluster=v100_32g"]) == 0
    assert "no time: V100-32G has no cluster.speed with bf16" in capsys.readouterr().out


@pytest.mark.slow
def test_what_saves_memory_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["model=llama_tiny", "model.num_layers=1", "tokenizer=byte", "data.batch_size=8", "data.sequence_length=64"]
    assert plan([*small, "cluster=h100", "precision=bf16", "cluster.memory_gb=0.005"]) == 1
    found = re.findall(r"GiB less for ([+-]\d+)% time", capsys.readouterr().out)
    assert found
    assert all(int(each) >= 0 for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_the_page_of_a_plan_has_the_printed_peak_and_the_time(
    stages: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["model=llama_tiny", "model.num_layers=6", "data.batch_size=4", "data.sequence_length=8", "cluster=h100"]
    more = [f"parallel.pipeline={stages}", "trainer.micro_batch_size=1", f"output={tmp_path / 'plan.html'}"]
    assert plan([*small, *more]) == 0
    said, page = capsys.readouterr().out, (tmp_path / "plan.html").read_text()
    assert "wrote " in said and page.count("<rect") == stages + 8 * stages
    with pytest.raises(ConfigError, match="unknown|no such|option"):
        plan([*small, "outptu=x"])
    (tmp_path / "own.html").write_text("mine")
    with pytest.raises(ConfigError, match="was not written by plan"):
        plan([*small, f"output={tmp_path / 'own.html'}"])
