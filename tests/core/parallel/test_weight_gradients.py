"""Gradients of weights that wait are those of the backward pass, and none is there before its pass."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd import mixed_precision
from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.nn.context import Context
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.moe import EXPERT_MATRICES
from kitforge.core.parallel import weight_gradients
from kitforge.core.parallel.weight_gradients import WeightGradients
from kitforge.foundation.errors import TrainingError
from kitforge.models.loading import build_on_meta
from tests.distributed.step import ALL, make_batch

KEYS = [(0, 0), (0, 1)]


def built(family: str, level: str = "O1", dtype: torch.dtype = torch.float64) -> Any:
    model: Any = build_on_meta(replace(ALL[family], num_layers=2), level).to(dtype).to_empty(device="cpu")
    init_weights(model.named_parameters(), 2, 0)
    return model.train()


def passes(model: Any, keys: list[tuple[int, int]] = KEYS, queue: WeightGradients | None = None) -> None:
    """A forward and a backward pass of each micro-batch."""
    batch = make_batch()
    for _, number in keys:
        rows = slice(4 * number, 4 * number + 4)
        context = Context.packed(batch["positions"][rows], batch["documents"][rows])
        loss = model.hidden(batch["tokens"][rows], context).float().square().mean()
        if queue is not None:
            queue.key = (0, number)
        loss.backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: each.grad for name, each in model.named_parameters()}


def queued_names(model: nn.Module) -> set[str]:
    linear = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, Linear)}
    experts = {name for name, _ in model.named_parameters() if name.split(".")[-1] in EXPERT_MATRICES}
    return linear | experts


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral_shared"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_weights_have_the_gradients_of_the_backward_pass_once_their_passes_run(
    family: str, level: str, recompute: Recompute
) -> None:
    wanted, model = built(family, level), built(family, level)
    passes(wanted)
    queue = WeightGradients(model)
    model.recompute, queue.is_scheduled = recompute, True
    passes(model, queue=queue)
    early = gradients(model)
    names = queued_names(model)
    assert len(names) > 8
    assert all(early[name] is None for name in names)
    for key in KEYS:
        queue.run(*key)
    queue.check_empty()
    for name, each in gradients(wanted).items():
        found = gradients(model)[name]
        assert (each is None) == (found is None), name
        if each is not None and found is not None:
            torch.testing.assert_close(found, each, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("is_deferred", [True, False])
@pytest.mark.parametrize("is_native", [True, False])
def test_half_precision_is_that_of_the_backward_pass(
    family: str, is_deferred: bool, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.bfloat16, is_native)
    models = [built(family, dtype=torch.float32) for _ in range(2)]
    queue = WeightGradients(models[1], is_deferred=is_deferred)
    queue.is_scheduled = True
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        passes(models[0])
        passes(models[1], queue=queue)
    for key in KEYS:
        queue.run(*key)
    wanted, found = (gradients(each) for each in models)
    for name, each in wanted.items():
        assert each is None or found[name] is not None
        if each is not None and (got := found[name]) is not None:
            assert got.dtype == torch.float32
            assert float((got - each).norm()) <= 2e-2 * float(each.norm()), name


def test_a_forward_pass_keeps_no_weight_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.bfloat16, True)
    model, kept = built("llama", dtype=torch.float32), list[tuple[int, ...]]()
    queue = WeightGradients(model, is_deferred=False)

    def keep(tensor: Tensor) -> Tensor:
        if tensor.dtype is torch.bfloat16:
            kept.append(tuple(sorted(tensor.shape)))  # transposed or not
        return tensor

    shapes = {tuple(sorted(each.weight.shape)) for each in model.modules() if isinstance(each, Linear)}
    for queue.is_scheduled in (False, True):
        kept.clear()
        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), hooks:
            passes(model, KEYS[:1], queue)
        assert shapes.isdisjoint(kept) == queue.is_scheduled


def test_a_pass_adds_the_gradients_of_its_micro_batch_alone() -> None:
    model, first = built("gpt2"), built("gpt2")
    passes(first, KEYS[:1])
    queue = WeightGradients(model)
    queue.is_scheduled = True
    passes(model, queue=queue)
    queue.run(*KEYS[0])
    for name in queued_names(model):
        torch.testing.assert_close(gradients(model)[name], gradients(first)[name], rtol=1e-12, atol=1e-14)
    with pytest.raises(TrainingError, match=r"(?s)left at the end of a step.*stage 0 micro-batch 1"):
        queue.check_empty()


def test_frozen_layers_and_other_passes_leave_nothing() -> None:
    model = built("gpt2")
    queue = WeightGradients(model)
    passes(model)  # a relay, or an evaluation
    queue.check_empty()
    assert all(gradients(model)[name] is not None for name in queued_names(model))
    for each in model.blocks.parameters():
        each.requires_grad_(False)
    queue.is_scheduled = True
    passes(model, queue=queue)
    queue.check_empty()


def test_products_of_experts_are_computed_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, real = list[bool](), weight_gradients.grouped_linear_backward

    def counting(*arguments: Any) -> Any:
        calls.append(arguments[-1])
        return real(*arguments)

    monkeypatch.setattr(weight_gradients, "grouped_linear_backward", counting)
    model = built("mixtral")
    queue = WeightGradients(model)
    queue.is_scheduled = True
    passes(model, KEYS[:1], queue)
    assert calls == [False] * 6
    queue.run(*KEYS[0])
    assert calls == [False] * 6 + [True] * 6
