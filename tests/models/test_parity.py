"""Our networks compute what `transformers` computes: logits in fp32, gradients in float64."""

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.decoder import Decoder
from kitforge.models.weight_mapping import import_tensors
from tests.models.conftest import GetPeer
from tests.models.variants import (
    VARIANTS,
    Peer,
    converter_and_config,
    largest_difference,
    logits_of,
    ours_from,
    read_all,
    tokens,
)

LOGITS, GRADIENTS = 1e-5, 1e-9


# tests/differential compares the references, O0, on drawn folders.
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(name: str, peer: GetPeer) -> None:
    expected = logits_of(peer(name).model, tokens())
    assert expected.abs().max() > 1
    assert largest_difference(logits_of(ours_from(peer(name).folder, "O1"), tokens()), expected) < LOGITS


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_equal_those_of_transformers(name: str, peer: GetPeer) -> None:
    ours = ours_from(peer(name).folder, "O1").double()
    assert gradient_distance(ours, peer(name)) < GRADIENTS


def gradient_distance(ours: Decoder, peer: Peer) -> float:
    """How far our gradients of a summed loss are from theirs, relative to the norm of all of them together."""
    theirs = exact(peer.model)
    ids = tokens()
    converter, config = converter_and_config(peer)
    named, parameters = dict(theirs.named_parameters()), dict(ours.named_parameters())
    mappings = converter.mappings_of(ours.config, config["model_type"], named)
    with torch.no_grad():
        for each in mappings:
            if each.offset:  # the sum was rounded to fp32
                parameters[each.ours].copy_(named[each.theirs] + each.offset)
    # BLOOM's softmax rounds to fp32 in any precision.
    with mock.patch.object(functional, "softmax", lambda input, dim, **_: torch.softmax(input, dim)):
        loss_of(theirs(input_ids=ids).logits, ids).backward()
    hidden = ours.hidden(ids)[:, :-1].flatten(0, 1)
    ours.kernels.linear_cross_entropy(hidden, ours.head_weight, ids[:, 1:].flatten()).backward()
    plain = [replace(each, offset=0.0) for each in mappings]
    gradients = import_tensors(converter, plain, named, lambda name: named[name].grad)
    pairs = [(parameters[name].grad, gradient) for name, gradient in read_all(gradients).items()]
    assert len(pairs) == len(parameters)
    error = sum((got - wanted).square().sum() for got, wanted in pairs if got is not None)
    scale = sum(wanted.square().sum() for _, wanted in pairs)
    return float(torch.sqrt(error / scale))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The summed next-token loss of logits [B, T, vocab]."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def exact(model: nn.Module) -> Any:
    """A float64 copy of a peer. Its RMSNorm rounds to fp32 in any precision, so it is given one that does not. (The
    angles of its rotary positions are fp32 too, but so are ours, bit for bit.)"""
    copied = copy.deepcopy(model).double()
    copied.config._experts_implementation = "eager"  # F.grouped_mm has no float64
    for module in copied.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = _Router(module)
        if type(module).__name__.endswith(("RMSNorm", "T5LayerNorm")):
            module.forward = _Norm(module)
    return copied


class _Router:
    """Without the softmax in fp32."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(input.flatten(0, -2), self.module.weight)
        weights, choices = torch.softmax(logits, -1).topk(self.module.top_k)
        weights = weights / weights.sum(-1, keepdim=True) if getattr(self.module, "norm_topk_prob", True) else weights
        return logits, weights, choices


class _Norm:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, input: Tensor) -> Tensor:
        is_gemma = type(self.module).__name__ == "Gemma3RMSNorm"
        eps = self.module.eps if is_gemma else self.module.variance_epsilon
        normal = input * torch.rsqrt(input.square().mean(-1, keepdim=True) + eps)
        return normal * (1 + self.module.weight if is_gemma else self.module.weight)
