"""Recomputed blocks: the bits of all gradients are those of no recomputation, for less memory."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kitforge.core.kernels.autograd import mixed_precision, recomputation
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.lora import LoraConfig, attach
from kitforge.core.nn.quantized import quantize_linears
from tests.core.nn import test_dropout
from tests.core.nn.networks import CONFIGS, GPT2, LLAMA, MIXTRAL, PANGU_ALPHA, VOCAB, build, documents_of, packed
from tests.core.nn.test_dropout import SAMPLES
from tests.differential.drawn import WHOLE

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
NETWORKS = CONFIGS | {f"{name} with dropout": each for name, each in test_dropout.CONFIGS.items()}


class Live(TorchDispatchMode):
    """Counts operations, and the bytes of memory that came into being and are still there, besides the parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._owned = {each.untyped_storage().data_ptr() for each in parameters}
        self.counts: Counter[str] = Counter()
        self._memory: list[torch.multiprocessing.reductions.StorageWeakRef] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name()] += 1
        output = function(*args, **(kwargs or {}))
        for each in output if isinstance(output, (list, tuple)) else [output]:
            if isinstance(each, Tensor):
                self._memory.append(torch.multiprocessing.reductions.StorageWeakRef(each.untyped_storage()))
        return output

    def live_bytes(self) -> int:
        """Bytes of the memory that is still there."""
        storages = {ref.cdata: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self._memory}
        found = [storage for storage in storages.values() if storage is not None]
        return sum(storage.nbytes() for storage in found if storage.data_ptr() not in self._owned)


def trained(model: Decoder) -> list[torch.nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def step(model: Decoder, recompute: Recompute, *, half: bool = False) -> tuple[Tensor, Tensor, int, Counter[str]]:
    """Output and gradients of a packed row and of rows with dropout, the bytes that are kept in between, and the
    operations that run."""
    model.recompute = recompute
    ids, context = packed(documents_of(5, 2, 8))
    rows = torch.randint(0, VOCAB, (len(SAMPLES), 7), generator=torch.Generator().manual_seed(1))
    noise = Context(dropout=DropoutKey(seed=0, step=0, samples=SAMPLES))
    found: list[Tensor] = []
    with Live(model.parameters()) as live:
        for tokens, around in ((ids, context), (rows, noise)):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                hidden = model.hidden(tokens, around)
            loss, kept = hidden.double().square().sum(), live.live_bytes()
            found += torch.autograd.grad(loss, [each for each in trained(model) if each is not model.output])
    return hidden.detach(), torch.cat([each.flatten() for each in found]), kept, live.counts


def assert_same(model: Decoder, *, half: bool = False) -> dict[Recompute, Counter[str]]:
    """The operations that ran, by what was recomputed: the same bits from fewer bytes."""
    found = {each: step(model, each, half=half) for each in RECOMPUTE}
    output, wanted, *_ = found["none"]
    for recompute, (other, gradient, *_) in found.items():
        assert gradient.isfinite().all() and torch.equal(other, output), recompute
        assert torch.equal(gradient, wanted), recompute
    assert found["none"][2] > found["selective"][2] > found["full"][2]
    return {recompute: counts for recompute, (_, _, _, counts) in found.items()}


# Of the definitions, by which blocks are recomputed alike, in the gate a network of each kind of attention, norm and
# experts.
OF_DEFINITIONS = NETWORKS if WHOLE else ("gpt2", "llama", "mixtral", "bloom", "window", "gpt2 with dropout")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("name", "level"), [*((name, "O1") for name in NETWORKS), *((name, "O0") for name in OF_DEFINITIONS)]
)
def test_every_network_has_the_same_gradients_from_less_memory(name: str, level: CompileLevel) -> None:
    assert_same(build(NETWORKS[name], level, torch.float32))


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bloom", "pangu_alpha", "gpt2 with dropout"])
def test_half_precision_has_the_same_gradients(name: str, is_native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.bfloat16, is_native)
    assert_same(build(NETWORKS[name], "O1", torch.float32), half=True)


def test_the_products_of_a_selectively_recomputed_block_run_once() -> None:
    counts = assert_same(build(replace(GPT2, num_layers=3), "O1", torch.float32))
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for operation in ("aten::addmm", "aten::mm", attention):
        assert counts["selective"][operation] == counts["none"][operation], operation
    assert counts["full"][attention] == 2 * counts["none"][attention]
    # The last product of a block is read by nothing that is saved.
    assert counts["full"]["aten::addmm"] == counts["none"]["aten::addmm"] * 11 // 6
    norm = "aten::native_layer_norm"
    assert counts["selective"][norm] == counts["full"][norm] > counts["none"][norm]


def test_the_products_of_experts_run_once() -> None:
    counts = assert_same(build(MIXTRAL, "O1", torch.float32))
    products = {recompute: each["kitforge::grouped_linear"] for recompute, each in counts.items()}
    # In two passes.
    assert products["selective"] == products["none"] == products["full"] // 2 == 2 * 3 * MIXTRAL.num_layers


@pytest.mark.parametrize("kind", ["lora", "dora", "qlora", "qlora4", "every layer"])
def test_adapters_have_the_same_gradients(kind: str) -> None:
    model = build(replace(LLAMA, attention_dropout=0.1), "O1", torch.float32)
    targets = ("query", "value") if "lora" in kind else ("query", "key", "value", "out", "gate", "up", "down")
    attach(model, "default", LoraConfig(kind="dora" if kind == "dora" else "lora", rank=3, target_modules=targets))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained(model):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    if kind.startswith("qlora"):
        quantize_linears(model, 4 if kind.endswith("4") else 8)
    assert_same(model)


def test_dora_on_the_last_product_has_the_same_gradients() -> None:
    model = build(LLAMA, "O1", torch.float32)
    attach(model, "default", LoraConfig(kind="dora", rank=3, target_modules=("out", "down")))
    assert_same(model)


def test_products_in_float8_have_the_same_gradients() -> None:
    config = replace(LLAMA, dim=32, mlp_dim=48)
    model = build(config, "O1", torch.float32)
    for module in model.modules():
        if isinstance(module, Linear):
            module.use_float8()
            assert module.is_float8
    assert_same(model)


def test_noise_that_a_recomputation_drew_anew_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(_: DropoutKey, _name: object, shape: torch.Size, rate: float, _device: torch.device) -> Tensor:
        return torch.rand(shape) >= rate

    model = build(NETWORKS["gpt2 with dropout"], "O1", torch.float32)
    assert_same(model)
    monkeypatch.setattr(DropoutKey, "mask", draw)
    for recompute in ("selective", "full"):
        torch.manual_seed(0)
        wanted = step(model, "none")
        torch.manual_seed(0)
        found = step(model, recompute)  # type: ignore[arg-type]
        assert torch.equal(found[0], wanted[0]) and not torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("config", [GPT2, PANGU_ALPHA], ids=["gpt2", "pangu_alpha"])
def test_the_results_of_neighbouring_calls_would_show(config: FamilyConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(config, "O1", torch.float32)
    wanted = step(model, "none")[1]
    assert torch.equal(step(model, "selective")[1], wanted)
    original = recomputation._Pass.__enter__

    def enter(self: recomputation._Pass) -> None:
        original(self)
        if not self.is_first:  # the results of query and key
            self.results[0], self.results[1] = self.results[1], self.results[0]

    monkeypatch.setattr(recomputation._Pass, "__enter__", enter)
    assert not torch.equal(step(model, "selective")[1], wanted)


def test_recomputation_runs_every_block_a_second_time() -> None:
    model = build(test_dropout.CONFIGS["gpt2"])
    runs: list[object] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: runs.append(module))
    for recompute in ("selective", "full"):
        runs.clear()
        model.recompute = recompute  # type: ignore[assignment]
        test_dropout.loss_of(model, slice(0, 5)).backward()
        assert len(runs) == 2 * len(model.blocks)


def test_without_gradients_no_pass_begins() -> None:
    model, seen = build(LLAMA), []
    model.recompute = "selective"
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _module, _: seen.append(recomputation.is_recomputed()))
    ids, context = packed(documents_of(5, 2, 8))
    with torch.no_grad():
        model.hidden(ids, context)
    model.hidden(ids, context)
    assert seen == [False, False, True, True]


def test_a_frozen_network_passes_gradients_on() -> None:
    model = build(replace(GPT2, residual_dropout=0.1), "O1")
    model.requires_grad_(False)
    model.embedding.weight.requires_grad_(True)
    found = [step(model, each)[1] for each in RECOMPUTE]
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
