"""Decoding in one call: which networks take it, and that it sees every change of a network."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.kernels.dispatch import DecodeSteps
from kitforge.core.nn import lora
from kitforge.core.nn.context import Context
from kitforge.core.nn.decode_step import FusedDecodeStep, is_fusable
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.mlp import MLP, MLPConfig
from kitforge.core.nn.quantized import WeightOnlyLinear, quantize_linears, quantized_copy
from kitforge.foundation.errors import ModelError
from tests.core.kernels.comparison import relative
from tests.core.kernels.test_fused_decode_step import locations
from tests.core.nn.networks import CONFIGS, MIXTRAL, MIXTURES, PANGU_ALPHA, QWEN3_MOE, VOCAB, build

pytest.importorskip("numba")
LENGTH = 6
# A query layer and a mixture of experts run module by module.
FUSED = [name for name in CONFIGS if name not in ("pangu_alpha", *MIXTURES)]


class Slabs:
    """Of every layer, all zero at first."""

    def __init__(self, num_texts: int) -> None:
        self._num_slots = num_texts * LENGTH
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        shape = self._num_slots, like.shape[1], like.shape[3]
        return self._slabs.setdefault(layer, (like.new_zeros(shape), like.new_zeros(shape)))


def step(single: FusedDecodeStep, tokens: Tensor, position: int) -> tuple[Tensor, Tensor] | None:
    """Tokens [texts] at a position of texts that will come to `LENGTH` tokens."""
    num_texts = len(tokens)
    context = Context(positions=torch.full((1, num_texts), position), lengths=torch.full((1, num_texts), LENGTH))
    starts, lengths = torch.arange(num_texts) * LENGTH, torch.full((num_texts,), position + 1)
    return single(tokens.unsqueeze(0), context, locations(starts, lengths))


def single(model: nn.Module, num_texts: int = 3) -> FusedDecodeStep:
    return FusedDecodeStep(model, Slabs(num_texts))


def decoded(single: FusedDecodeStep, tokens: Tensor) -> Tensor:
    """Logits [texts, LENGTH, vocab] of tokens [texts, LENGTH], read one by one."""
    found = [step(single, tokens[:, position], position) for position in range(LENGTH)]
    return torch.stack([each[1] for each in found if each is not None], dim=1)


def texts(num_texts: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (num_texts, LENGTH), generator=torch.Generator().manual_seed(1))


def forward(model: Decoder, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens, Context(lengths=torch.full((1, 1), LENGTH)))
    return logits


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_every_family_is_decoded_in_one_call(name: str) -> None:
    model, tokens = build(CONFIGS[name], dtype=torch.float32), texts()
    assert relative(decoded(single(model), tokens), forward(model, tokens)) < 2e-6


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_forward_pass(name: str) -> None:
    tokens, exact = texts(), build(CONFIGS[name], dtype=torch.bfloat16).double()
    model = build(CONFIGS[name], dtype=torch.bfloat16)
    wanted = forward(exact, tokens)
    assert relative(decoded(single(model), tokens), wanted) < 2 * relative(forward(model, tokens), wanted)


@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_angles_that_are_looked_up_are_those_that_are_computed(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float32)
    tried, last = single(model), model.geometry.max_length - 1
    for places in ([0], [2, 1], [5, 5, 0, 4], [last, 1, last // 2], [3]):
        positions = torch.tensor([places])
        context = Context(positions=positions, lengths=torch.full_like(positions, last))
        found, wanted = tried._angles(positions, context), model.encode_positions(positions, context).rotary
        assert (found is None) == (not wanted)
        for angles, computed in zip(found or (), zip(*wanted, strict=True), strict=True):
            assert torch.equal(angles, torch.cat(computed))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies in bfloat16, as far as dispatch knows."""
    monkeypatch.setitem(NATIVE_DTYPES, torch.bfloat16, True)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.usefixtures("native")
@torch.no_grad()
def test_under_autocast_it_is_as_near_to_the_truth_as_the_forward_pass(name: str) -> None:
    tokens, model = texts(24), build(CONFIGS[name], dtype=torch.float32)
    wanted = forward(build(CONFIGS[name], dtype=torch.float32).double(), tokens)
    with autocast():
        found, own = decoded(single(model, 24), tokens), forward(model, tokens)
    assert (found - wanted).norm() < 1.2 * (own - wanted).norm()


@pytest.mark.usefixtures("native")
@torch.no_grad()
def test_autocast_may_begin_and_end_between_steps() -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()[:, 0]
    slabs: dict[torch.dtype, Slabs] = {torch.float32: Slabs(3), torch.bfloat16: Slabs(3)}
    tried = FusedDecodeStep(model, lambda layer, like: slabs[like.dtype](layer, like))
    found = []
    for is_half in (False, True, False, True):
        with autocast() if is_half else nullcontext():
            result = step(tried, tokens, 0)
            assert result is not None and result[0].dtype is (torch.bfloat16 if is_half else torch.float32)
            found.append(result[1])
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    assert 0 < relative(found[1], found[0]) < 2**-5


@pytest.mark.usefixtures("native")
@torch.no_grad()
def test_copies_under_autocast_are_of_the_weights_as_they_are_now() -> None:
    tokens = texts()[:, 0]
    with autocast():
        for has_trace in (True, False):
            model = build(CONFIGS["llama"], dtype=torch.float32)
            tried = single(model)
            step(tried, tokens, 0)
            for each in model.parameters():
                (each if has_trace else each.data).mul_(1.25)
            if not has_trace:
                tried.reread()
            found, wanted = step(tried, tokens, 0), step(single(model), tokens, 0)
            assert found is not None and wanted is not None and torch.equal(found[1], wanted[1])


@torch.no_grad()
def test_under_autocast_dtypes_without_such_products_are_asked_module_by_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()[:, 0]
    with torch.autocast("cpu", torch.float16):
        assert step(single(model), tokens, 0) is None
    monkeypatch.setitem(NATIVE_DTYPES, torch.bfloat16, False)
    with autocast():
        assert step(single(model), tokens, 0) is None
        # Weights in bfloat16 are multiplied as they are.
        assert step(single(build(CONFIGS["llama"], dtype=torch.bfloat16)), tokens, 0) is not None


def hook(model: Decoder) -> None:
    model.blocks[1].register_forward_hook(lambda *_: None)


def hook_before(model: Decoder) -> None:
    model.blocks[0].get_submodule("mlp").register_forward_pre_hook(lambda *_: None)


def wrap(model: Decoder) -> None:
    block = model.blocks[0]
    block.__dict__["forward"] = block.forward


def adapt(model: Decoder) -> None:
    lora.attach(model, "own", lora.LoraConfig(rank=1))


def widen(model: Decoder) -> None:
    model.double()


def widen_one(model: Decoder) -> None:
    model.norm.double()


@pytest.mark.parametrize("change", [hook, hook_before, wrap, adapt, widen, widen_one], ids=lambda each: each.__name__)
@torch.no_grad()
def test_a_network_that_becomes_more_than_its_weights_is_asked_module_by_module(
    change: Callable[[Decoder], None],
) -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()
    tried = single(model)
    assert step(tried, tokens[:, 0], 0) is not None
    change(model)
    assert step(tried, tokens[:, 1], 1) is None


@torch.no_grad()
def test_others_are_asked_module_by_module_from_the_start() -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()
    assert step(single(quantized_copy(model)[0]), tokens[:, 0], 0) is None
    assert step(single(build(CONFIGS["llama"], "O0", torch.float32)), tokens[:, 0], 0) is None
    assert step(single(nn.Linear(1, 1)), tokens[:, 0], 0) is None
    assert step(single(model, 70), texts(70)[:, 0], 0) is not None
    with torch.enable_grad():
        assert step(single(model), tokens[:, 0], 0) is None
    other = build(CONFIGS["llama"], dtype=torch.float32)
    for block in other.blocks:
        block.mlp = MLP(MLPConfig(dim=24, hidden_dim=32, kind="relu"), other.kernels)  # type: ignore[union-attr]
    assert step(single(other), tokens[:, 0], 0) is None
    rounded = build(CONFIGS["glm"], dtype=torch.float32)
    for module in rounded.modules():
        if isinstance(module, Linear):
            module.use_float8()
    assert step(single(rounded), tokens[:, 0], 0) is None
    model.blocks[1] = build(replace(CONFIGS["llama"], mlp_dim=40), dtype=torch.float32).blocks[1]
    assert step(single(model), tokens[:, 0], 0) is None


@torch.no_grad()
def test_off_a_cpu_the_kernel_of_the_device_takes_weights_that_are_not_quantized() -> None:
    def model(name: str = "llama", kernel: str = "meta", **sizes: int) -> Decoder:
        found = build(replace(CONFIGS[name], **sizes), dtype=torch.float32).to("meta")
        found.kernels = replace(found.kernels, fused_decode_step=DecodeSteps("triton", kernel))
        return found

    assert all(is_fusable(model(name)) for name in FUSED)
    assert not any(is_fusable(model(name)) for name in set(CONFIGS) - set(FUSED))
    assert not is_fusable(model(kernel="cpu"))
    assert is_fusable(model(dim=512, num_heads=2, num_kv_heads=2))
    assert not is_fusable(model(dim=516, num_heads=2, num_kv_heads=2))
    apart, quantized = model(), model()
    apart.blocks[1].get_submodule("mlp.down").to_empty(device="cpu")
    quantized.kernels = replace(quantized.kernels, linear=WeightOnlyLinear("int8", quantized.kernels.quantized_linear))
    assert not is_fusable(apart) and not is_fusable(quantized)
    stored = build(replace(CONFIGS["llama"], dim=64, mlp_dim=64), dtype=torch.float32)
    quantize_linears(stored, 8)
    assert is_fusable(stored)
    stored.kernels = replace(stored.kernels, fused_decode_step=DecodeSteps("triton", "meta"))
    assert not is_fusable(stored.to("meta"))


@pytest.mark.parametrize("place", ["", "embedding", "blocks", "blocks.0", "blocks.1.attention", "blocks.1.mlp.up"])
@pytest.mark.parametrize("layer", [nn.Linear(24, 24), nn.Tanh()], ids=["with weights", "without weights"])
@torch.no_grad()
def test_a_layer_that_the_step_does_not_read_is_not_skipped(place: str, layer: nn.Module) -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()
    assert step(single(model), tokens[:, 0], 0) is not None
    model.get_submodule(place).add_module("another", layer)
    assert step(single(model), tokens[:, 0], 0) is None


@torch.no_grad()
def test_a_query_layer_is_not_skipped() -> None:
    topped = build(replace(PANGU_ALPHA, activation="gelu_tanh"), dtype=torch.float32)
    assert step(single(topped), texts()[:, 0], 0) is None


@torch.no_grad()
def test_a_mixture_of_experts_is_not_computed_as_one_mlp() -> None:
    for config in (MIXTRAL, QWEN3_MOE):
        assert step(single(build(config, dtype=torch.float32)), texts()[:, 0], 0) is None


@pytest.mark.parametrize("name", ["norm", "blocks.0", "blocks.1.attention", "blocks.0.mlp", "blocks.1.mlp.down"])
@torch.no_grad()
def test_a_layer_of_another_kind_is_not_computed_as_the_usual_one(name: str) -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()
    model.set_submodule(name, nn.Identity())
    assert step(single(model), tokens[:, 0], 0) is None


@torch.no_grad()
def test_a_stack_without_some_of_its_blocks_is_not_taken_for_a_whole_one() -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()
    names = [name for name in model.state_dict() if not name.startswith("blocks.0.")]
    model.blocks._modules["0"] = None
    assert list(model.state_dict()) == names
    assert step(single(model), tokens[:, 0], 0) is None
    with pytest.raises(ModelError, match="blocks.0"):
        model(tokens)


def scale(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.mul_(1.1)


def move(model: Decoder) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def replace_one(model: Decoder) -> None:
    down = model.blocks[1].get_submodule("mlp.down")
    down.weight = nn.Parameter(down.weight * 2)


@pytest.mark.parametrize("change", [scale, move, replace_one], ids=lambda each: each.__name__)
@torch.no_grad()
def test_weights_are_read_where_they_are_now(change: Callable[[Decoder], None]) -> None:
    model, tokens = build(CONFIGS["llama"], dtype=torch.float32), texts()
    tried = single(model)
    decoded(tried, tokens)
    change(model)
    assert relative(decoded(tried, tokens), forward(model, tokens)) < 2e-6
