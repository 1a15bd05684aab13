import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

from kitforge.core.kernels.add_norm.reference import add_norm
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.norm import Norm, NormKind


def norm_of(kind: NormKind, level: CompileLevel = "O1") -> Norm:
    norm = Norm(kind, 6, 1e-3, select(level))
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        nn.init.normal_(parameter, generator=generator)
    return norm


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_norms_are_torch_s_own(level: CompileLevel) -> None:
    input = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rms, layer = norm_of("rms", level).double(), norm_of("layer", level).double()
    assert (rms(input) - functional.rms_norm(input, (6,), rms.weight, 1e-3)).abs().max() < 1e-12
    assert (layer(input) - functional.layer_norm(input, (6,), layer.weight, layer.bias, 1e-3)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_gives_autocast_s_dtype_rounded_once(kind: NormKind, dtype: torch.dtype) -> None:
    norm = norm_of(kind)
    input = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        output = norm(input)
    assert output.dtype == torch.bfloat16
    exact = norm(input.float())
    if dtype == torch.float32:
        assert torch.equal(output, exact.bfloat16())
    assert (output.float() - exact).abs().max() < 5e-2


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_autocast_a_norm_keeps_its_input_s_dtype(kind: NormKind, dtype: torch.dtype) -> None:
    assert norm_of(kind)(torch.ones(5, 6, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_fused_residual_connection_is_an_addition_and_a_norm(kind: NormKind, is_mixed: bool) -> None:
    norm, fused = norm_of(kind), norm_of(kind)
    fused._kernels = dataclasses.replace(fused._kernels, add_norm=add_norm)
    input, branch = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1)).unbind()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        branch = branch.bfloat16() if is_mixed else branch
        wanted, found = norm.add(input, branch), fused.add(input, branch)
        assert torch.equal(wanted[0], input + branch)
        assert torch.equal(wanted[1], norm(wanted[0]))
    assert [each.dtype for each in found] == [each.dtype for each in wanted]
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("has_kernel", [False, True])
def test_a_weight_in_fp32_is_not_rounded_to_half_precision(kind: NormKind, has_kernel: bool) -> None:
    norm = norm_of(kind)
    norm._kernels = dataclasses.replace(norm._kernels, add_norm=add_norm if has_kernel else None)
    input = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = norm(input.float()).bfloat16()
    assert torch.equal(norm(input), wanted)
    assert torch.equal(norm.add(input, torch.zeros_like(input))[1], wanted)
