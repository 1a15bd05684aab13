"""An adapter adds to a network without touching it."""

import pytest
import torch
from torch import nn

from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach, merged_weights
from kitforge.foundation.errors import ConfigError, ModelError
from tests.kits.rlhf.runs import network

TOKENS = torch.arange(12).unsqueeze(0)
CONFIG = LoraConfig(rank=3, alpha=6.0, target_modules=("query", "value", "down"))


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def fill(model: nn.Module, name: str, seed: int) -> None:
    """An adapter as training may leave it."""
    generator = torch.Generator().manual_seed(seed)
    for factors in adapter_tensors(model, name).values():
        for factor in factors:
            factor.data.copy_(torch.randn(factor.shape, generator=generator) * 0.1)


def test_a_new_adapter_changes_nothing() -> None:
    model = network()
    before = logits(model)
    attach(model, "policy", CONFIG)
    assert torch.equal(logits(model), before)
    fill(model, "policy", 0)
    assert not torch.allclose(logits(model), before, atol=1e-3)


def test_only_the_adapter_is_trained() -> None:
    model = network()
    attach(model, "policy", CONFIG)
    fill(model, "policy", 0)
    model(TOKENS).logsumexp(-1).sum().backward()
    trained = [name for name, each in model.named_parameters() if each.grad is not None]
    assert len(trained) == 2 * 3 * 2
    assert all(".adapters.policy." in name for name in trained)


def test_an_adapter_is_its_delta_in_the_matrices() -> None:
    model = network(torch.float64)
    attach(model, "policy", CONFIG)
    fill(model, "policy", 1)
    apart = logits(model)
    plain = network(torch.float64)
    for path, matrix in merged_weights(model).items():
        plain.get_submodule(path).weight.data.copy_(matrix)
    assert torch.allclose(logits(plain), apart, atol=1e-12, rtol=0)


def test_the_first_factor_is_a_function_of_seed_and_name() -> None:
    first, second, third = network(), network(), network()
    for model, seed in ((first, 1), (second, 1), (third, 2)):
        attach(model, "policy", CONFIG, seed)
    downs = [
        torch.cat([down.flatten() for down, _ in adapter_tensors(each, "policy").values()])
        for each in (first, second, third)
    ]
    assert torch.equal(downs[0], downs[1])
    assert not torch.equal(downs[0], downs[2])


def test_names_that_are_not_there_are_refused() -> None:
    model = network()
    with pytest.raises(ModelError, match="did you mean 'query'"):
        attach(model, "policy", LoraConfig(target_modules=("quary",)))
    with pytest.raises(ConfigError, match="rank"):
        LoraConfig(rank=0)
