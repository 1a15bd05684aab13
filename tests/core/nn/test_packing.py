"""Documents that share a row do not know of one another, under every position scheme."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from tests.core.nn.networks import (
    CONFIGS,
    MIXTURES,
    TRAINED,
    build,
    distance,
    documents_of,
    gradients,
    loss_of,
    packed,
)

LENGTHS = (5, 2, 8, 1)
assert min(LENGTHS) < TRAINED < max(LENGTHS)
ORDERS = [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)]


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logits_are_those_of_each_document_alone(name: str, order: Sequence[int], level: CompileLevel) -> None:
    model, documents = build(CONFIGS[name], level), documents_of(*LENGTHS)
    for document, logits in zip(reordered(documents, order), packed_logits(model, documents, order), strict=True):
        assert (logits - model(document.unsqueeze(0))[0]).abs().max() < 1e-12


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_gradients_are_those_of_each_document_alone(name: str, order: Sequence[int]) -> None:
    model, documents = build(CONFIGS[name]), documents_of(*LENGTHS)
    alone = torch.stack([gradients(model, loss_of(model(each.unsqueeze(0))[0], each)) for each in documents]).sum(0)
    losses = map(loss_of, packed_logits(model, documents, order), reordered(documents, order))
    together = gradients(model, torch.stack(list(losses)).sum())
    assert distance(together, alone) < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_one_batch_may_be_packed_differently(name: str) -> None:
    model, documents = build(CONFIGS[name]), documents_of(*LENGTHS)
    rows = [packed(reordered(documents, order)) for order in ORDERS]
    context = Context.packed(
        torch.cat([context.positions for _, context in rows if context.positions is not None]),
        torch.cat([context.documents for _, context in rows if context.documents is not None]),
    )
    logits = model(torch.cat([tokens for tokens, _ in rows]), context)
    for row, (tokens, alone) in enumerate(rows):
        assert (logits[row] - model(tokens, alone)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MIXTURES])
def test_another_document_changes_nothing_to_the_last_bit(name: str) -> None:
    model, documents = build(CONFIGS[name]), documents_of(*LENGTHS)
    before = packed_logits(model, documents, ORDERS[0])
    documents[0] = (documents[0] + 1) % 31
    after = packed_logits(model, documents, ORDERS[0])
    assert all(torch.equal(one, other) for one, other in zip(before[1:], after[1:], strict=True))
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_left_padding_changes_nothing(name: str, level: CompileLevel) -> None:
    model, (document,) = build(CONFIGS[name], level), documents_of(6)
    padding = torch.zeros(5, dtype=torch.long)
    tokens = torch.cat((padding, document)).unsqueeze(0)
    positions = torch.cat((padding, torch.arange(6))).unsqueeze(0)
    is_text = torch.cat((padding, torch.ones(6, dtype=torch.long))).unsqueeze(0)
    logits = model(tokens, Context(positions=positions, documents=is_text))[0, 5:]
    assert (logits - model(document.unsqueeze(0))[0]).abs().max() < 1e-12


def test_documents_are_isolated_without_being_told_twice() -> None:
    model, documents = build(CONFIGS["llama"]), documents_of(3, 4)
    tokens, context = packed(documents)
    logits = model(tokens, Context(positions=context.positions, documents=context.documents))[0, 3:]
    assert (logits - model(documents[1].unsqueeze(0))[0]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["llama", "dynamic"])
def test_documents_may_be_named_without_positions(name: str) -> None:
    model, (document,) = build(CONFIGS[name]), documents_of(6)
    context = Context(documents=torch.zeros(1, 6, dtype=torch.long))
    assert (model(document.unsqueeze(0), context) - model(document.unsqueeze(0))).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "fault"), [("llama", "documents"), ("window", "documents"), ("gpt2", "positions"), ("dynamic", "lengths")]
)
def test_a_planted_fault_shows(name: str, fault: str) -> None:
    model, documents = build(CONFIGS[name]), documents_of(*LENGTHS)
    tokens, context = packed(documents)
    wrong = {
        "documents": Context.packed(torch.arange(tokens.shape[1]).unsqueeze(0), None),
        "positions": replace(context, positions=None),
        "lengths": replace(context, lengths=torch.full_like(tokens, tokens.shape[1])),
    }[fault]
    logits = model(tokens, wrong)[0, 5:7]
    assert (logits - model(documents[1].unsqueeze(0))[0]).abs().max() > 1e-6


def reordered(documents: Sequence[Tensor], order: Sequence[int]) -> list[Tensor]:
    return [documents[place] for place in order]


def packed_logits(model: Decoder, documents: Sequence[Tensor], order: Sequence[int]) -> list[Tensor]:
    """The logits of each document, in packing order."""
    chosen = reordered(documents, order)
    tokens, context = packed(chosen)
    return list(model(tokens, context)[0].split([len(document) for document in chosen]))
