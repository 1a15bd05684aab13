"""Compiled loops as custom ops: traced by torch.compile and FakeTensor, with the gradients of the reference."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from kitforge.core.kernels.dispatch import CUSTOM_OPS, IMPLEMENTATIONS, REFERENCE, implementation, select
from tests.core.nn import networks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


CASES: dict[str, tuple[Any, ...]] = {
    "linear": (random(2, 3, 8), random(5, 8), random(5)),
    "rms_norm": (random(2, 3, 8), random(8), 1e-5),
    "rotary": (random(2, 3, 4, 8).transpose(1, 2), random(1, 3, 3).cos(), random(1, 3, 3).sin(), True),
    "decode_attention": (
        random(2, 4, 8),
        random(9, 2, 8),
        random(9, 2, 8),
        torch.tensor([0, 3]),
        torch.tensor([2, 5]),
    ),
}
OPTIONS = {"decode_attention": {"window": 3, "scale": 0.3}}


def call(operation: str, function: Any) -> Callable[..., Tensor]:
    return partial(function, **OPTIONS.get(operation, {}))


@pytest.mark.parametrize("operation", CUSTOM_OPS)
def test_torch_checks_schema_fakes_and_autograd(operation: str) -> None:
    assert set(CASES) == set(CUSTOM_OPS)
    for dtype in (torch.float32, torch.bfloat16):
        inputs = tuple(
            each.to(dtype) if torch.is_tensor(each) and each.is_floating_point() and operation != "rotary" else each
            for each in CASES[operation]
        )
        torch.library.opcheck(CUSTOM_OPS[operation], inputs, OPTIONS.get(operation, {}))


@pytest.mark.parametrize("operation", CUSTOM_OPS)
def test_gradients_are_those_of_the_reference(operation: str) -> None:
    grads = []
    for function in (CUSTOM_OPS[operation], getattr(REFERENCE, operation)):
        leaves = [each.clone() if torch.is_tensor(each) else each for each in CASES[operation]]
        wanted = [each.requires_grad_() for each in leaves if torch.is_tensor(each) and each.is_floating_point()]
        output = call(operation, function)(*leaves)
        grads.append(torch.autograd.grad((output * output.detach().cos()).sum(), wanted))
    for own, reference in zip(*grads, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("operation", CUSTOM_OPS)
@torch.no_grad()
def test_the_compiler_traces_one_operator_without_a_break(operation: str) -> None:
    graphs = []

    def record(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    own = call(operation, getattr(select("O1"), operation))
    found = torch.compile(own, fullgraph=True, backend=record)(*CASES[operation])
    assert f"{operation}_numba" in str(graphs[0].graph)
    assert torch.equal(found, call(operation, implementation(operation, "numba"))(*CASES[operation]))


@pytest.mark.parametrize("operation", CUSTOM_OPS)
@torch.no_grad()
def test_fake_tensors_have_the_layout_of_real_ones(operation: str) -> None:
    own = call(operation, getattr(select("O1"), operation))
    real = own(*CASES[operation])
    with FakeTensorMode() as mode:
        fake = own(*(mode.from_tensor(each) if torch.is_tensor(each) else each for each in CASES[operation]))
    assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


def test_a_loop_without_an_operator_is_traced_as_its_reference() -> None:
    with_loops = {name for name, found in IMPLEMENTATIONS.items() if "numba" in found}
    assert "keep_mask" in with_loops - set(CUSTOM_OPS)
    with FakeTensorMode() as mode:
        rows = mode.from_tensor(torch.arange(3))
        assert select("O1").keep_mask(7, rows, 0, 10, 0.5).shape == (3, 10)
    # A fake call is no failure, so the loop is still chosen.
    assert select("O1").keep_mask(7, torch.arange(3), 0, 10, 0.5).shape == (3, 10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "is_training"),
    # A graph without gradients has the operators of the forward pass of the other.
    [("llama", True), ("gpt2", True), ("bloom", True), ("glm4", True), ("window", True), ("llama", False)],
)
def test_a_network_at_o1_is_one_graph(family: str, is_training: bool) -> None:
    # What the operators of the others tell autograd of themselves, opcheck asks above.
    backend = "aot_eager" if family == "llama" else "eager"
    # Each network is a graph of its own, of the few that torch compiles of one function.
    torch._dynamo.reset()
    model = networks.build(replace(networks.CONFIGS[family], num_layers=1), "O1", torch.float32)
    tokens = torch.arange(12).view(2, 6)
    with torch.set_grad_enabled(is_training):
        wanted = model(tokens)
        found = torch.compile(model, fullgraph=True, backend=backend)(tokens)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    if is_training:
        names, parameters = zip(*model.named_parameters(), strict=True)
        grads = [
            torch.autograd.grad(functional.cross_entropy(each.flatten(0, 1), tokens.flatten()), parameters)
            for each in (found, wanted)
        ]
        for name, own, reference in zip(names, *grads, strict=True):
            torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-6, msg=name)
