"""Every `Attend` of the package computes all of an attention layer's parameters, or refuses one.

T tokens, H heads, D head_dim.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kitforge
from kitforge.core.kernels.attention.reference import attention
from kitforge.core.kernels.dispatch import REFERENCE, select
from kitforge.core.nn.context import AttentionSpec, CausalAttend, DocumentAttend
from kitforge.core.nn.encoder_decoder import DecoderCache
from kitforge.core.nn.shared_prefix import SharedPrefixAttend, prefix_tree
from kitforge.foundation.errors import ModelError
from kitforge.inference.choice_scoring import TreeAttention
from kitforge.inference.paged_attention import DecodeBatch, KeyValueCache, PagedAttention, PagedBatch, PrefillSpan
from kitforge.kits.transformers.programs import MaskedAttend

T, H, D = 6, 2, 4
LINE = torch.arange(T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An implementation, and what it is to compute: who sees whom before any window, and at which positions."""

    name: str  # of the class
    run: Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]
    seen: Tensor  # [T, T]
    positions: Tensor = LINE
    refuses: tuple[str, ...] = ()


def one_by_one(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """As generation calls it: the first tokens at once, then one each time."""
    cache, found = DecoderCache(T), []
    for start, stop in [(0, 3), *((each, each + 1) for each in range(3, T))]:
        bias = None if spec.bias is None else spec.bias[:, start:stop, :stop]
        part = AttentionSpec(
            layer=0, kernel=spec.kernel, scale=spec.scale, window=spec.window, slopes=spec.slopes, bias=bias
        )
        found.append(cache(*(each[:, :, start:stop] for each in (query, key, value)), part))
        cache.length = stop
    return torch.cat(found, dim=2)


def paged(kind: str) -> Callable[..., Tensor]:
    """A prompt of three tokens, then one token each time, of a sequence in slots from 2 on."""

    def run(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        cache, found = KeyValueCache(5, 2), []
        for start, stop in [(0, 3), *((each, each + 1) for each in range(3, T))]:
            length, slots = torch.tensor([stop]), torch.arange(2, 2 + stop)
            span = PrefillSpan(first=0, num_tokens=stop - start, length=stop, start=2, slots=None)
            gathered = PrefillSpan(first=0, num_tokens=stop - start, length=stop, start=None, slots=slots)
            later = {
                "span": span,
                "gathered": gathered,
                "decode": DecodeBatch(first=0, starts=torch.tensor([2]), lengths=length),
                "paged": PagedBatch(first=0, tables=torch.tensor([[1, 2, 3]]), lengths=length),
            }
            segment: Any = span if start == 0 else later[kind]
            attend = PagedAttention(cache, slots[start:], [segment], REFERENCE)
            found.append(attend(*(each[:, :, start:stop] for each in (query, key, value)), spec))
        return torch.cat(found, dim=2)

    return run


CAUSAL = LINE.unsqueeze(1) >= LINE
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1]])
SAME = DOCUMENTS[0].unsqueeze(1) == DOCUMENTS[0]
# A prefix of two tokens, and two branches of two tokens each, which share positions.
BRANCHES, BRANCHED = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 2, 3, 2, 3])
OPEN = CAUSAL & ((BRANCHES == 0) | (BRANCHES.unsqueeze(1) == BRANCHES))
# The second of two columns of padding lies between tokens: distances count tokens.
PADDING = torch.tensor([[0, 1, 1, 0, 1, 1]])
UNPADDED = CAUSAL & (PADDING == 1) | torch.eye(T, dtype=torch.bool)
CASES = [
    Case(name="CausalAttend", run=CausalAttend(), seen=CAUSAL),
    Case(name="CausalAttend", run=CausalAttend(DOCUMENTS), seen=CAUSAL & SAME),
    Case(name="DocumentAttend", run=DocumentAttend(), seen=torch.ones(T, T).bool(), refuses=("window",)),
    Case(name="DocumentAttend", run=DocumentAttend(DOCUMENTS), seen=SAME, refuses=("window",)),
    Case(name="DecoderCache", run=one_by_one, seen=CAUSAL),
    Case(name="MaskedAttend", run=MaskedAttend(torch.ones(1, T).long(), T), seen=CAUSAL),
    Case(name="MaskedAttend", run=MaskedAttend(PADDING, T), seen=UNPADDED, positions=PADDING[0].cumsum(0) - 1),
    Case(
        name="TreeAttention",
        run=TreeAttention(torch.zeros(T), BRANCHES, BRANCHED),
        seen=OPEN,
        positions=BRANCHED,
    ),
    Case(
        name="SharedPrefixAttend",
        run=SharedPrefixAttend(prefix_tree(torch.tensor([[0, 1, 2, 3], [0, 1, 4, 5]]), [4, 4])),
        seen=OPEN,
        positions=BRANCHED,
        refuses=("bias",),
    ),
    *(Case(name="PagedAttention", run=paged(kind), seen=CAUSAL, refuses=("bias",)) for kind in ("span", "gathered")),
    *(Case(name="PagedAttention", run=paged(kind), seen=CAUSAL, refuses=("bias",)) for kind in ("decode", "paged")),
]
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 1.7},
    "window": {"window": 2},
    "slopes": {"slopes": torch.tensor([0.9, 0.3], dtype=torch.float64)},
    "bias": {"bias": torch.randn(H, T, T, generator=torch.Generator().manual_seed(3), dtype=torch.float64)},
}
FIELDS["all"] = {name: each for field in FIELDS.values() for name, each in field.items()}


def wanted(case: Case, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """The attention of the case, written out."""
    distance = case.positions - case.positions.unsqueeze(1)
    seen = case.seen if spec.window is None else case.seen & (distance > -spec.window) | torch.eye(T).bool()
    bias = torch.zeros(H, T, T, dtype=query.dtype) if spec.bias is None else spec.bias
    if spec.slopes is not None:
        bias = bias + spec.slopes.view(-1, 1, 1) * distance
    return attention(query, key, value, mask=seen, causal=False, scale=spec.scale, bias=bias)


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("case", CASES, ids=[f"{each.name}{number}" for number, each in enumerate(CASES)])
def test_each_parameter_of_a_layer_is_computed(case: Case, field: str, level: Any) -> None:
    chance = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, H, T, D, generator=chance, dtype=torch.float64) for _ in range(3))
    options = {"scale": 0.5, **FIELDS[field]}
    spec = AttentionSpec(layer=0, kernel=select(level).attention, **options)
    if set(case.refuses) & FIELDS[field].keys():
        with pytest.raises(ModelError, match=next(name for name in case.refuses if name in FIELDS[field])):
            case.run(query, key, value, spec)
        return
    torch.testing.assert_close(case.run(query, key, value, spec), wanted(case, query, key, value, spec))


def test_every_implementation_has_a_case() -> None:
    """They are found by the parameters of their call. tests/distributed has those that need ranks."""
    root, found = Path(kitforge.__file__).parent, set[str]()
    for path in root.rglob("*.py"):
        classes = (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, ast.ClassDef))
        for each in classes:
            calls = [part for part in each.body if isinstance(part, ast.FunctionDef) and part.name == "__call__"]
            if [arg.arg for call in calls for arg in call.args.args] == ["self", "query", "key", "value", "spec"]:
                found.add(each.name)
    assert found - {"Attend", "RowAttend", "HeadExchange", "KeyGather"} == {each.name for each in CASES}
