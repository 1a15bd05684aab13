from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import INIT_STD, ROWS_PER_BLOCK, init_weights, materialize, normal_rows
from tests.core.nn.networks import CONFIGS, GPT2, LLAMA

ROWS = 2 * ROWS_PER_BLOCK + 37
SHAPE = torch.Size((ROWS, 3))
WHOLE = normal_rows(0, "weight", SHAPE, 0, ROWS)


@given(st.integers(0, ROWS), st.integers(0, ROWS))
@settings(max_examples=60)
def test_any_slice_is_the_slice_of_the_whole(first: int, last: int) -> None:
    start, stop = sorted((first, last))
    assert torch.equal(normal_rows(0, "weight", SHAPE, start, stop), WHOLE[start:stop])


@pytest.mark.parametrize("edge", [ROWS_PER_BLOCK, 2 * ROWS_PER_BLOCK, ROWS])
def test_a_slice_may_end_at_a_block(edge: int) -> None:
    assert torch.equal(normal_rows(0, "weight", SHAPE, edge - 1, edge), WHOLE[edge - 1 : edge])
    assert normal_rows(0, "weight", SHAPE, edge, edge).shape == (0, 3)


@pytest.mark.parametrize(("seed", "name"), [(1, "weight"), (0, "weight2")])
def test_values_depend_on_seed_and_name(seed: int, name: str) -> None:
    assert not torch.equal(normal_rows(seed, name, SHAPE, 0, ROWS), WHOLE)


def test_no_two_blocks_are_alike() -> None:
    assert not torch.equal(WHOLE[:ROWS_PER_BLOCK], WHOLE[ROWS_PER_BLOCK : 2 * ROWS_PER_BLOCK])


def test_values_do_not_depend_on_nor_move_torch_s_own_state() -> None:
    before = torch.get_rng_state()
    assert torch.equal(normal_rows(0, "weight", SHAPE, 0, ROWS), WHOLE)
    assert torch.equal(torch.get_rng_state(), before)


def test_values_are_standard_normal() -> None:
    values = normal_rows(0, "large", torch.Size((1000, 100)), 0, 1000)
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01


@pytest.mark.parametrize("config", [GPT2, replace(GPT2, tie_embeddings=False), LLAMA])
def test_parameters_start_where_they_should(config: GPT2 | LLAMA) -> None:  # type: ignore[valid-type]
    model = Decoder(replace(config, dim=96))
    init_weights(model.named_parameters(), 2, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0))
            continue
        residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
        wanted = INIT_STD / 2 if residual else INIT_STD
        assert abs(float(parameter.detach().std()) / wanted - 1) < 0.1


def test_a_tied_embedding_is_initialized_once() -> None:
    tied, untied = (Decoder(replace(GPT2, tie_embeddings=tie)) for tie in (True, False))
    init_weights(tied.named_parameters(), 2, seed=0)
    init_weights(untied.named_parameters(), 2, seed=0)
    assert tied.head_weight is tied.embedding.weight
    assert torch.equal(tied.embedding.weight, untied.embedding.weight)
    assert not torch.equal(untied.head_weight, untied.embedding.weight)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_built_without_memory_becomes_the_same_one(name: str) -> None:
    direct = Decoder(CONFIGS[name])
    init_weights(direct.named_parameters(), 2, seed=4)
    with torch.device("meta"):
        later = Decoder(CONFIGS[name])
    materialize(later, torch.device("cpu"))
    init_weights(later.named_parameters(), 2, seed=4)
    assert later.state_dict().keys() == direct.state_dict().keys()
    assert all(torch.equal(later.state_dict()[key], value) for key, value in direct.state_dict().items())
    tokens = torch.arange(9).unsqueeze(0)
    assert torch.equal(later(tokens), direct(tokens))


def test_another_seed_gives_another_network() -> None:
    one, other = Decoder(LLAMA), Decoder(LLAMA)
    init_weights(one.named_parameters(), 2, seed=4)
    init_weights(other.named_parameters(), 2, seed=5)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
