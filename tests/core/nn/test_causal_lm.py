"""A language model is asked for capabilities, never for its class."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE
from kitforge.core.nn.causal_lm import CausalLM, Geometry, Quantizable, Shardable, Trainable
from kitforge.core.nn.decoder import Decoder
from kitforge.models.catalog import config_of, config_of_network, families_of

SIZES = {"vocab_size": 11, "dim": 8, "num_layers": 1, "num_heads": 2}
OPTIONS: dict[str, Any] = {"llama": {"mlp_dim": 16}, "glm": {"mlp_dim": 16, "num_kv_heads": 2}}
OPTIONS["mixtral"] = {"mlp_dim": 16, "experts": {"num_experts": 4, "top_k": 2}}
OPTIONS["qwen3_moe"] = {**OPTIONS["mixtral"], "expert_dim": 8}


class Own(nn.Module):
    """A user's language model with the four things that a loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.geometry = Geometry(
            vocab_size=11, dim=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, max_length=4
        )
        self.kernels = REFERENCE
        self.head_weight = nn.Parameter(torch.zeros(11, 8))

    def hidden(self, tokens: Tensor, context: object = None) -> Tensor:
        return torch.zeros(*tokens.shape, 8)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head_weight.t()


@pytest.mark.parametrize("family", families_of("language model"))
def test_every_family_has_every_capability(family: str) -> None:
    network = families_of("language model")[family].build(
        config_of({"family": family, **SIZES, **OPTIONS.get(family, {})})
    )
    for capability in (CausalLM, Quantizable, Shardable, Trainable):
        assert isinstance(network, capability)
    assert config_of_network(network).family == family  # type: ignore[union-attr]


def test_a_network_of_one_s_own_has_those_that_it_implements() -> None:
    network = Own()
    assert isinstance(network, CausalLM)
    assert not any(isinstance(network, each) for each in (Quantizable, Shardable, Trainable))
    assert config_of_network(network) is None


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_name_of_the_head_is_that_of_its_matrix_and_a_tied_one_stays_trained(is_tied: bool) -> None:
    network = Decoder(config_of({"family": "llama", **SIZES, "mlp_dim": 16, "tie_embeddings": is_tied}))
    assert dict(network.named_parameters())[network.head_name] is network.head_weight
    network.freeze_head()
    assert network.head_weight.requires_grad is is_tied
    assert sum(not each.requires_grad for each in network.parameters()) == (not is_tied)


def test_a_wrapped_module_makes_a_network_less_than_whole() -> None:
    network = Decoder(config_of({"family": "gpt2", **SIZES}))
    assert network.is_whole
    network.norm.forward = network.norm.forward  # type: ignore[method-assign]
    assert not network.is_whole
