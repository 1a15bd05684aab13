"""Degrees and declarations that cannot run are refused with the arithmetic."""

import dataclasses

import pytest
import torch
from torch import nn

from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.sharding import Sharding, ShardingRule, check_geometry
from kitforge.core.parallel.tensor import _lookup
from kitforge.foundation.errors import ConfigError
from kitforge.models.glm.model import GLMConfig
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.mixtral.model import MixtralConfig
from kitforge.models.sharding import DECODER, ENCODER_DECODER, VISION

CONFIGS = [
    GPT2Config(vocab_size=50, dim=16, num_layers=2, num_heads=4),
    LlamaConfig(vocab_size=50, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=24, qk_norm=True),
    GLMConfig(vocab_size=50, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=24, sandwich_norms=True),
]


def test_the_rows_of_a_vocabulary_add_up_though_a_rank_has_none() -> None:
    table, tokens, sum_of_parts = nn.Embedding(5, 3), torch.tensor([[4, 0, 2], [1, 1, 3]]), torch.zeros(2, 3, 3)
    for first, last in [(0, 2), (2, 4), (4, 5), (5, 5)]:
        part = nn.Embedding(last - first, 3, _weight=table.weight[first:last].detach())
        sum_of_parts += _lookup(part, first)(tokens)
    assert torch.equal(sum_of_parts, table(tokens))


def network(config: object) -> Decoder:
    return build_on_meta(config)  # type: ignore[arg-type]


def test_degrees_that_do_not_multiply_to_the_ranks_are_refused_with_the_product() -> None:
    with pytest.raises(ConfigError, match=r"shard=2 x tensor=3 = 6 of 4 ranks"):
        ParallelConfig(shard=2, tensor=3).check_world(4)
    ParallelConfig(shard=2, tensor=3).check_world(6)


@pytest.mark.parametrize("name", ["data", "shard", "tensor", "context", "pipeline", "expert"])
def test_a_degree_below_one_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"parallel.{name}"):
        ParallelConfig(**{name: 0})


def test_expert_divides_the_ranks_of_data_shard_and_context() -> None:
    wanted = (
        r"(?s)parallel.expert.*got: +4.*data x shard x context = 2 x 1 x 3 = 6, whose ranks it divides: 6 / 4 = 1.50"
    )
    with pytest.raises(ConfigError, match=wanted):
        ParallelConfig(data=2, context=3, tensor=2, expert=4)
    assert ParallelConfig(data=2, context=3, tensor=2, expert=3).world_size == 12


def test_experts_that_the_degree_does_not_divide_are_refused_and_so_are_networks_without() -> None:
    experts = ExpertsConfig(num_experts=6, top_k=2)
    mixture = MixtralConfig(vocab_size=50, dim=16, num_layers=2, num_heads=4, mlp_dim=8, experts=experts)
    geometry = network(mixture).geometry
    check_geometry(DECODER, geometry, ParallelConfig(data=3, expert=3))
    wanted = r"(?s)expert=4 does not divide model.experts.num_experts=6\n.*6 / 4 = 1.50.*one of 1, 2, 3, 6"
    with pytest.raises(ConfigError, match=wanted):
        check_geometry(DECODER, geometry, ParallelConfig(data=4, expert=4))
    dense = network(CONFIGS[0]).geometry
    for sharding, own in ((DECODER, dense), (ENCODER_DECODER, dense), (VISION, object()), (Sharding(), None)):
        with pytest.raises(ConfigError, match=r"(?s)no experts to be divided among ranks.*got: +parallel.expert=2"):
            check_geometry(sharding, own, ParallelConfig(shard=2, expert=2))


def test_heads_that_the_degree_does_not_divide_are_refused_with_what_fits() -> None:
    with pytest.raises(ConfigError, match=r"(?s)parallel.tensor=4 does not divide model.num_kv_heads=2.*one of 1, 2"):
        check_geometry(DECODER, network(CONFIGS[1]).geometry, ParallelConfig(tensor=4))


def test_a_network_without_a_declaration_takes_no_tensor_axis() -> None:
    with pytest.raises(ConfigError, match="does not say how its matrices are split"):
        check_geometry(Sharding(), None, ParallelConfig(tensor=2))
    check_geometry(Sharding(), None, ParallelConfig(shard=2))


def test_networks_whose_rows_cannot_be_cut_take_no_context_axis() -> None:
    for sharding in (ENCODER_DECODER, VISION, Sharding()):
        with pytest.raises(ConfigError, match=r"(?s)rows of this network cannot be cut.*got: +parallel.context=2"):
            check_geometry(sharding, network(CONFIGS[0]).geometry, ParallelConfig(context=2))


def test_context_and_tensor_together_divide_the_heads_but_not_those_of_keys() -> None:
    geometry = network(CONFIGS[1]).geometry
    check_geometry(DECODER, geometry, ParallelConfig(context=4))
    check_geometry(DECODER, geometry, ParallelConfig(context=2, tensor=2))
    with pytest.raises(ConfigError, match=r"context=4 x parallel.tensor=2 does not divide model.num_heads=4\n.*0.50"):
        check_geometry(DECODER, geometry, ParallelConfig(context=4, tensor=2))
    with pytest.raises(ConfigError, match="do: +parallel.context_by=keys"):
        check_geometry(DECODER, geometry, ParallelConfig(context=8))


def test_gathered_keys_divide_no_heads_among_the_ranks_of_context() -> None:
    geometry = network(CONFIGS[1]).geometry
    check_geometry(DECODER, geometry, ParallelConfig(context=3, tensor=2, context_by="keys"))
    with pytest.raises(ConfigError, match=r"tensor=4 does not divide model.num_kv_heads=2"):
        check_geometry(DECODER, geometry, ParallelConfig(context=2, tensor=4, context_by="keys"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_every_matrix_of_every_family_is_cut_and_nothing_else(config: object) -> None:
    model = network(config)
    for name, module in model.named_modules():
        rule = DECODER.rule(name)
        for own, parameter in module.named_parameters(recurse=False):
            is_position = name == "position"
            stays_whole = parameter.dim() < 2 and not (own == "bias" and rule.splits and not rule.output_layout)
            assert (own not in rule.splits) == (stays_whole or is_position), f"{name}.{own}"


def test_a_star_stands_for_one_part_of_a_name() -> None:
    rule = ShardingRule(module="blocks.*.mlp")
    assert rule.matches("blocks.11.mlp")
    assert not rule.matches("blocks.1.inner.mlp")
    assert not rule.matches("blocksX1.mlp")
    assert dataclasses.replace(rule, module="").matches("")
