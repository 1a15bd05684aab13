"""An int8 copy is near the original, shares it, and leaves it alone."""

import copy
from typing import Any

import pytest
import torch

from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.quantized_linear.reference import quantized_linear
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.quantized import Int8Linear, WeightOnlyLinear, quantized_copy, with_linear
from kitforge.foundation.errors import ModelError
from tests.core.nn.networks import CONFIGS, VOCAB, build
from tests.differential.drawn import WHOLE

TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(3))


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e6])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_products_are_within_a_percent_of_their_factors(rows: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, 64, generator=generator) * torch.logspace(-2, 2, 48).unsqueeze(1)
    bias = torch.randn(48, generator=generator)
    input = torch.randn(1, rows, 64, generator=generator) * scale
    got = Int8Linear()(input, weight, bias)
    wanted = torch.nn.functional.linear(input, weight, bias)
    assert got.shape == wanted.shape
    # Against the lengths of the factors, as products near zero say nothing of them; all rows share one scale.
    longest = float(input.norm(dim=-1).amax()) if rows else 0.0
    assert ((got - wanted).abs() <= 0.01 * longest * weight.norm(dim=-1)).all()


def test_large_activations_do_not_overflow_sixteen_bits() -> None:
    """With eight bits instead of seven the sums of two products would be cut off here."""
    weight, input = torch.full((16, 64), 1.0), torch.full((3, 64), 1.0)
    assert relative(Int8Linear()(input, weight), torch.full((3, 16), 64.0)) < 0.02


def test_a_row_of_zeros_stays_zero() -> None:
    weight = torch.randn(4, 8)
    weight[2] = 0
    assert Int8Linear()(torch.randn(5, 8), weight)[:, 2].eq(0).all()


@pytest.mark.parametrize("name", ["gpt2", "bloom", "pangu_alpha", "llama", "glm4", "window_in_one_layer"])
@torch.no_grad()
def test_logits_are_near_and_weights_are_shared(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float32).eval()
    wanted = model(TOKENS)
    network, _ = quantized_copy(model)
    assert relative(network(TOKENS), wanted) < 0.06
    assert torch.equal(model(TOKENS), wanted)
    own, shared = dict(model.named_parameters()), dict(network.named_parameters())
    assert all(shared[name] is parameter for name, parameter in own.items())


@torch.no_grad()
def test_changed_weights_are_quantised_anew_when_told() -> None:
    model = build(CONFIGS["llama"], dtype=torch.float32).eval()
    network, linear = quantized_copy(model)
    old = network(TOKENS)
    for parameter in model.parameters():
        parameter.mul_(0.8)
    assert relative(network(TOKENS), model(TOKENS)) > 0.06
    linear.forget()
    assert relative(network(TOKENS), model(TOKENS)) < 0.06
    assert not torch.equal(network(TOKENS), old)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "kind"),
    [("gpt2", "int8"), ("llama", "int4"), ("glm4", "int8"), ("gpt2", "int4"), ("llama", "int8"), ("glm4", "int4")][
        : None if WHOLE else 3
    ],
)
@torch.no_grad()
def test_weight_only_logits_are_near_those_of_the_dequantized_weights(name: str, kind: Any) -> None:
    """As on an accelerator, by the kernel that runs there."""
    most = {"int8": 0.02, "int4": 0.5}[kind]
    model = build(CONFIGS[name], dtype=torch.float32).eval()
    linear = WeightOnlyLinear(kind, select("O1", "cuda").quantized_linear)
    found = with_linear(model, linear)(TOKENS)
    assert relative(found, model(TOKENS)) < most
    exact = with_linear(model, WeightOnlyLinear(kind, quantized_linear))(TOKENS)
    assert relative(found, exact) < 1e-5
    for parameter in model.parameters():
        parameter.mul_(0.8)
    linear.forget()
    assert relative(with_linear(model, linear)(TOKENS), model(TOKENS)) < most


def test_int4_on_cpu_of_other_widths_is_refused_with_what_to_do() -> None:
    with pytest.raises(ModelError, match=r"24 features, no multiple of 32(.|\n)*quantization=int8"):
        quantized_copy(build(CONFIGS["llama"], dtype=torch.float32), "int4")


def test_other_networks_are_refused() -> None:
    with pytest.raises(ModelError, match="int8 needs a decoder that is not sharded"):
        quantized_copy(torch.nn.Linear(2, 2))
    split: Decoder = copy.copy(build(CONFIGS["llama"]))
    split.__dict__["forward"] = lambda *_: None
    with pytest.raises(ModelError, match="int8 needs a decoder that is not sharded"):
        quantized_copy(split)
