"""Weight-only int8 and int4: what quantization loses, and the Triton kernel against the dequantized weight."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import implementation, select
from kitforge.core.kernels.quantized_linear import triton as module
from kitforge.core.kernels.quantized_linear.reference import dequantize, quantize, quantized_linear
from kitforge.core.kernels.triton.accepts import accepts_triton_quantized
from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import random

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("group", [None, 32, 96])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_is_half_a_step_off_at_most(bits: Any, group: int | None) -> None:
    weight = random(7, 192).float()
    weight[3] = 0
    quantized, scales = quantize(weight, bits, group)
    assert quantized.nbytes == weight.numel() * bits // 8
    assert scales.shape == (7, 1 if group is None else 192 // group)
    off = (dequantize(quantized, scales) - weight).abs().view(7, scales.shape[1], -1)
    assert (off <= scales.unsqueeze(2) * 0.5001).all()
    assert torch.equal(dequantize(quantized, scales)[3], weight[3])


def test_pairs_of_four_bits_are_in_the_order_of_the_page() -> None:
    quantized, scales = quantize(torch.tensor([[7.0, -7.0, 1.0, 0.0]]), 4)
    assert (scales.tolist(), quantized.tolist()) == ([[1.0]], [[15 | 1 << 4, 9 | 8 << 4]])


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 32), (4, 64), (4, None)])
@torch.no_grad()
def test_programs_share_the_features(bits: Any, group: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRACTION", 2)
    input, bias = random(9, 1600).float(), random(40).float()
    packed = quantize(random(40, 1600, seed=1).float(), bits, group)
    found = implementation("quantized_linear", "triton", "cuda")
    for shift in (None, bias):
        torch.testing.assert_close(
            found(input, *packed, shift), quantized_linear(input, *packed, shift), rtol=1e-5, atol=1e-4
        )
    assert torch.equal(found(input, *packed)[:2], found(input[:2], *packed))


def test_what_it_does_not_take_goes_to_torch() -> None:
    packed = quantize(random(9, 96).float(), 8, 48)
    with torch.no_grad():
        assert accepts_triton_quantized(random(2, 96).float(), *quantize(random(9, 96).float(), 8, 32))
        assert not accepts_triton_quantized(random(2, 96).float(), *packed)
        assert not accepts_triton_quantized(random(300, 96).float(), *quantize(random(9, 96).float(), 8))
    assert select("O1", "cuda").quantized_linear(random(2, 96).float(), *packed).shape == (2, 9)


@pytest.mark.parametrize(("features", "bits", "group"), [(10, 8, 3), (9, 4, None), (8, 8, 0)])
def test_features_that_do_not_divide_are_refused(features: int, bits: Any, group: int | None) -> None:
    with pytest.raises(ModelError, match="cannot be quantized"):
        quantize(torch.ones(2, features), bits, group)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@torch.no_grad()
def test_torch_checks_the_operator() -> None:
    implementation("quantized_linear", "triton", "cuda")
    inputs: tuple[Tensor | None, ...] = (random(3, 64).float(), *quantize(random(9, 64).float(), 4), None)
    torch.library.opcheck(torch.ops.kitforge.quantized_linear.default, inputs)
