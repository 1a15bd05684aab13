"""A network is cut into stages: what stands on each, under which names, and what a stage says of itself."""

import copy
import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.expert_load import LOAD, load_of, named_experts
from kitforge.core.parallel.gather import FullMatrices
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.pipeline import cut_stages, divide_layers
from kitforge.core.parallel.schedules import Pipeline
from kitforge.core.parallel.sharding import Sharding, check_geometry
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.inference.cuda_graphs import can_record_steps
from kitforge.kits.network_source import alias_weights, copy_model
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import DECODER, ENCODER_DECODER, VISION, sharding_of_network
from kitforge.models.vit.model import ViTConfig
from tests.distributed.step import FAMILIES, make_batch

VIT = ViTConfig(dim=24, num_layers=3, num_heads=3, image_size=12, patch_size=4, labels=("a", "b", "c"))
DECODERS = [name for name in FAMILIES if name != "t5"]


def stage(network: torch.nn.Module, own: int, num_stages: int = 2) -> dict[str, tuple[int, ...]]:
    return cut_stages(network, sharding_of_network(network), shapes(network), Pipeline(num_stages), own).ranks


def shapes(network: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in network.named_parameters()}


@pytest.mark.parametrize("family", DECODERS)
def test_stages_have_all_parameters_under_their_names(family: str) -> None:
    stages = [build_on_meta(FAMILIES[family]) for _ in range(2)]
    names = [name for name, _ in stages[0].named_parameters()]
    found = [stage(each, own) for own, each in enumerate(stages)]
    assert found[0] == found[1]
    assert set(found[0]) == set(names)
    for own, each in enumerate(stages):
        # In the order of the network, which is that of the messages between ranks.
        assert [name for name, _ in each.named_parameters()] == [name for name in names if own in found[0][name]]
    tied = [name for name, places in found[0].items() if len(places) > 1]
    assert tied == ([stages[0].head_name] if stages[0].head_name == "embedding.weight" else [])


@pytest.mark.parametrize("family", [*DECODERS, "vit"])
def test_a_pass_through_three_stages_has_the_bits_of_one_pass(family: str) -> None:
    options = VIT if family == "vit" else replace(FAMILIES[family], num_layers=3)
    whole: Any = build_on_meta(options, "O1").double().to_empty(device="cpu").eval()
    init_weights(whole.named_parameters(), 3, 0)
    batch = make_batch()
    context = Context.packed(batch["positions"], batch["documents"])
    input = torch.rand(2, 3, 12, 12) if family == "vit" else batch["tokens"]
    stream = None
    for own in range(3):
        network = copy.deepcopy(whole)
        stage(network, own, num_stages=3)
        stream = network.stage_pass(input, context, stream, *network.layers)
    assert stream is not None
    assert torch.equal(stream, whole.hidden(input, context))


def test_layers_are_divided_in_order_and_evenly() -> None:
    assert [each.layers for each in divide_layers([7] * 5, 2)] == [range(2), range(2, 5)]
    assert [len(each.layers) for each in divide_layers([1] * 80, 3)] == [26, 27, 27]


def test_no_cut_has_a_less_costly_stage_than_that_by_counted_cost() -> None:
    drawn = random.Random(5)
    for _ in range(60):
        costs = [drawn.randint(1, 9) for _ in range(drawn.randint(1, 8))]
        ends = drawn.randint(0, 9), drawn.randint(0, 9)
        num_stages = drawn.randint(1, len(costs))
        found = divide_layers(costs, num_stages, *ends)
        assert [layer for each in found for layer in each.layers] == list(range(len(costs)))

        def sorted_costs(cut: Any, costs: Any = costs, ends: Any = ends) -> list[int]:
            sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(cut)]
            sums[0] += ends[0]
            sums[-1] += ends[1]
            return sorted(sums, reverse=True)

        inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
        cuts = [(0, *each, len(costs)) for each in inner]
        assert sorted((each.products for each in found), reverse=True) == min(map(sorted_costs, cuts))


def test_the_costs_of_a_cut_are_the_products_of_a_token() -> None:
    """Counted by torch, over the matrices that a token meets: experts by their choices, a table by the row that is
    read."""
    for family in ("gpt2", "llama", "mixtral_shared"):
        whole: Any = build_on_meta(replace(FAMILIES[family], num_layers=3), "O0").to_empty(device="cpu")
        init_weights(whole.named_parameters(), 3, 0)
        cut = cut_stages(copy.deepcopy(whole), DECODER, shapes(whole), Pipeline(2), 0)
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            whole.eval()(torch.zeros(1, 1, dtype=torch.int64))
        products = sum(each.products for each in cut.layers[""])
        assert products == pytest.approx(counted.get_total_flops() / 2, rel=0.1), family


@pytest.mark.parametrize("family", DECODERS)
def test_a_stage_is_no_whole_network_and_says_its_device_and_dtype(family: str) -> None:
    whole = Decoder(FAMILIES[family])
    assert whole.is_whole
    name = whole.head_name
    for own in range(2):
        network = Decoder(FAMILIES[family]).bfloat16()
        stage(network, own)
        assert not network.is_whole
        assert network.head_name == name
        has_head = own == 1 or name == "embedding.weight"
        vocab = FAMILIES[family].vocab_size if has_head else 0
        assert network.head_weight.shape == (vocab, 16)
        assert (network.head_weight.dtype, network.head_weight.device.type) == (torch.bfloat16, "cpu")


def test_a_network_without_the_modules_behind_its_blocks_is_not_whole() -> None:
    network: Any = Decoder(FAMILIES["llama"])
    network.norm = network.output = None
    assert not network.is_whole


def test_a_stage_between_the_ends_has_no_head_and_says_the_dtype_of_its_matrices() -> None:
    options = LlamaConfig(vocab_size=50, dim=16, num_layers=3, num_heads=4, mlp_dim=24)
    network = Decoder(options).bfloat16()
    found = stage(network, 1, num_stages=3)
    for each in network.parameters():
        each.data = each.data.float() if each.dim() == 1 else each.data
    assert {name.split(".")[1] for name in dict(network.named_parameters())} == {"1"}
    assert found["embedding.weight"] == (0,)
    assert found["output"] == (2,)
    assert network.head_weight.shape == (0, 16)
    assert network.head_weight.dtype == torch.bfloat16


def test_a_stage_is_not_copied_for_a_network() -> None:
    network = Decoder(FAMILIES["llama"])
    stage(network, 1)
    for copied in (lambda: copy_model(network, torch.device("cpu")), lambda: alias_weights(network)):
        with pytest.raises(ModelError, match=r"(?s)layers range\(1, 2\) of 2.*checkpoint=RUN"):
            copied()


def test_a_step_of_a_stage_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "can_record", lambda _device: True)
    network = Decoder(FAMILIES["llama"])
    assert can_record_steps(network)
    stage(network, 1)
    assert not can_record_steps(network)


def test_the_networks_of_a_model_have_ends_of_their_own() -> None:
    tied = LlamaConfig(vocab_size=50, dim=16, num_layers=4, num_heads=4, mlp_dim=24, tie_embeddings=True)
    parts = {"policy": build_on_meta(tied), "critic": build_on_meta(FAMILIES["qwen3_moe"])}
    model = torch.nn.ModuleDict({**parts, "score": torch.nn.Linear(16, 1, device="meta")})
    sharding = DECODER.with_prefix("policy").merged_with(DECODER.with_prefix("critic"))
    whole = shapes(model)
    _, found, layers = cut_stages(model, sharding, whole, Pipeline(2), 0)
    assert list(layers) == ["policy", "critic"]
    assert found["policy.embedding.weight"] == (0, 1)
    assert found["critic.embedding.weight"] == (0,)
    assert found["critic.output"] == (1,)
    assert (found["policy.blocks.1.mlp.up.weight"], found["critic.blocks.2.mlp.router.weight"]) == ((0,), (1,))
    assert {"score.weight", "score.bias"} == set(whole) - set(found)


def test_a_network_that_names_no_ends_is_refused() -> None:
    for sharding in (ENCODER_DECODER, Sharding()):
        with pytest.raises(ConfigError, match=r"got: +parallel.pipeline=2(.|\n)*parallel.shard"):
            check_geometry(sharding, None, ParallelConfig(pipeline=2))
    for sharding in (DECODER, VISION):
        check_geometry(sharding, None, ParallelConfig(pipeline=2))


@pytest.mark.parametrize("options", [FAMILIES["llama"], VIT], ids=["llama", "vit"])
def test_fewer_blocks_than_stages_are_refused_with_the_arithmetic(options: Any) -> None:
    network: Any = build_on_meta(options)
    num = len(network.blocks)
    wanted = r"(?s)4 is more stages than model.num_layers={0}.*{0} / 4 .*parallel.pipeline={0} at most"
    with pytest.raises(ConfigError, match=wanted.format(num)):
        check_geometry(sharding_of_network(network), network.geometry, ParallelConfig(pipeline=4))
    with pytest.raises(ConfigError, match=wanted.format(num)):
        stage(network, 0, num_stages=4)


def test_a_tied_matrix_of_a_v_is_on_one_rank_and_there_once() -> None:
    for own, layers in enumerate([(range(1), range(3, 4)), (range(1, 2), range(2, 3))]):
        network = build_on_meta(replace(FAMILIES["gpt2"], num_layers=4))
        cut = cut_stages(network, DECODER, shapes(network), Pipeline(2, "zero_bubble_v", 2), own)
        assert (cut.parts["embedding.weight"], cut.ranks["embedding.weight"]) == ((0, 3), (0,))
        assert (cut.ranks["norm.weight"], cut.ranks["blocks.2.mlp.up.weight"]) == ((0,), (1,))
        assert network.layers == layers
        assert [layer for layer, each in enumerate(network.blocks) if each is not None] == [each[0] for each in layers]


def test_a_pass_has_the_load_of_the_experts_of_its_stage_alone() -> None:
    network = Decoder(FAMILIES["mixtral"])
    for number, each in enumerate(named_experts(network).values(), start=1):
        each.load = torch.full((4,), float(number))
    experts = {name: each.config.experts for name, each in named_experts(network).items()}
    parallel: Any = SimpleNamespace(model=network, experts=experts, device=torch.device("cpu"), mesh=None)
    found = load_of(parallel, is_composed=True, layers=range(1, 2))[LOAD]
    assert found.sum(1).tolist() == [0.0, 8.0]
    assert load_of(parallel, is_composed=True)[LOAD].sum(1).tolist() == [4.0, 8.0]


def test_the_names_of_all_stages_are_in_the_order_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = [["embedding", "blocks.0", "step"], ["embedding", "output", "blocks.1", "step", "own"]]
    monkeypatch.setattr(collectives, "all_gather_object", lambda _own, _group: stages)
    mesh: Any = SimpleNamespace(degree={"pipeline": 2}.get, world=None)
    network = ["output", "embedding", "blocks.0", "blocks.1", "norm"]
    assert Mesh.union(mesh, stages[0], network) == ["output", "embedding", "blocks.0", "blocks.1", "step", "own"]


def test_the_matrix_of_a_stage_is_gathered_from_its_own_ranks() -> None:
    def group(axis: str) -> None:
        assert axis != "pipeline", "other stages are at another matrix"

    matrix = torch.arange(6.0).view(2, 3)
    mesh: Any = SimpleNamespace(degree=lambda _axis: 2, group=group, index={"pipeline": 1})
    found = FullMatrices({matrix: Layout(shape=(2, 3), stages=(1,))}, mesh)
    assert torch.equal(found.full_tensor(matrix + 1, matrix), matrix + 1)
