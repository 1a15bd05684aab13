"""Weights that change in place between two texts: an engine that keeps panels generates what a fresh one does."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.kernels.fused_decode_step.numba import NumbaDecodeStep
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation import device as devices
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.model_runner import ModelRunner
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.core.nn.networks import GPT2, LLAMA, build

PROMPTS = [[3, 1, 4, 1, 5, 9], [2, 6], [7]]
OPTIONS = SamplingOptions(max_new_tokens=5, temperature=0, ignore_eos=True)


def optimizer_step(model: nn.Module) -> None:
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    torch.optim.SGD(model.parameters(), lr=0.5).step()


@torch.no_grad()
def add(model: nn.Module) -> None:
    for each in model.parameters():
        each.add_(torch.linspace(-0.4, 0.4, each.numel()).view_as(each))


def add_to_data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data.copy_(each.data + torch.linspace(-0.4, 0.4, each.numel()).view_as(each))


def add_by_address(model: nn.Module) -> None:
    """As compiled loops do."""
    for each in model.parameters():
        # The third bit of the mantissa.
        kind, bit = (torch.int16, 4) if each.element_size() == 2 else (torch.int32, 20)
        each.detach().view(kind).numpy()[...] ^= 1 << bit


def change_one_number(model: nn.Module) -> None:
    weight = model.get_parameter("blocks.1.mlp.down.weight").data
    weight[-1, -1] += 8


def swap_data(model: nn.Module) -> None:
    for each in model.parameters():
        each.data = each.data.flip(0).clone()


def load(model: nn.Module) -> None:
    model.load_state_dict({name: each.flip(0) for name, each in model.state_dict().items()})


def scale_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        for each in model.parameters():
            each.data.mul_(-1.25)


CHANGES = [
    optimizer_step,
    add,
    add_to_data,
    add_by_address,
    change_one_number,
    swap_data,
    load,
    scale_in_inference_mode,
]


def generated(engine: Engine) -> list[Completion]:
    return [each for samples in engine.generate(PROMPTS, OPTIONS) for each in samples]


def network(dtype: torch.dtype) -> Decoder:
    return build(replace(LLAMA, max_length=32), dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_next_text_is_of_the_new_weights(change: Callable[[nn.Module], None], dtype: torch.dtype) -> None:
    model = network(dtype)
    engine = Engine(model, EngineOptions(prefix_cache=False))
    before = generated(engine)
    change(model)
    after = generated(engine)
    assert after == generated(Engine(deepcopy(model), EngineOptions(prefix_cache=False)))
    assert after != before


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_so_it_is_in_a_rollout_whose_products_read_copies(
    change: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NATIVE_DTYPES, torch.bfloat16, True)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        test_the_next_text_is_of_the_new_weights(change, torch.float32)


def test_a_running_text_sees_a_version_and_an_update() -> None:
    model = network(torch.bfloat16)
    for change, updates in ((add, False), (add_to_data, True)):
        engine = Engine(model, EngineOptions(prefix_cache=False))
        engine.submit(PROMPTS[0], OPTIONS)
        first = [token for _ in range(2) for output in engine.step() for token in output.tokens]
        change(model)
        if updates:
            engine.update_weights(1)
        (output,) = engine.step()
        if updates:  # the keys are computed anew
            fresh = Engine(model, EngineOptions(prefix_cache=False))
            fresh.submit(PROMPTS[0] + first, OPTIONS)
            assert (output.tokens, output.logprobs) == ((wanted := fresh.step()[0]).tokens, wanted.logprobs)
        kept = _kept_of(engine)
        assert torch.equal(kept, _kept_of_fresh(model))


def test_weights_are_read_anew_once_for_texts_submitted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(ModelRunner, "on_admission", lambda _runner: found.append(engine._num_steps))
    engine = Engine(network(torch.bfloat16), EngineOptions(prefix_cache=False, max_num_seqs=1))
    generated(engine)
    assert found == [1]
    generated(engine)
    assert len(found) == 2


def _kept_of(engine: Engine) -> Tensor:
    blocks = engine._runner._fused_decode.kernel
    step = getattr(blocks, "_function", blocks)
    assert isinstance(step, NumbaDecodeStep)
    return step.panels()


def _kept_of_fresh(model: Decoder) -> Tensor:
    engine = Engine(model, EngineOptions(prefix_cache=False))
    engine.submit([1], OPTIONS)
    engine.step()
    return _kept_of(engine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_panels_that_are_kept_change_no_bits(
    family: object, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(replace(family, max_length=32), dtype=dtype).eval()  # type: ignore[type-var]
    kept = Engine(model, EngineOptions(prefix_cache=False))
    found = generated(kept)
    assert _kept_of(kept).numel()
    monkeypatch.setattr(devices, "free_host_memory", lambda: 0)
    scarce = Engine(model, EngineOptions(prefix_cache=False))
    assert generated(scarce) == found
    assert not _kept_of(scarce).numel()
