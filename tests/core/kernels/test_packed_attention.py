"""Packed rows through variable-length attention: what torch's kernel for GPUs is called with, emulated on a CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.attention import packed_mask
from kitforge.core.kernels.attention.packed_mask import PackedMask, dense_mask, find_boundaries, takes_packed
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn import context as context_file
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import FamilyConfig
from tests.core.nn import networks

CONFIGS: dict[str, FamilyConfig] = {
    "grouped": replace(networks.LLAMA, dim=32),  # 4 query heads share 2 key heads of dim 8
    "window": replace(networks.LLAMA, dim=32, sliding_window=3),
    "window_in_one_layer": replace(networks.LLAMA, dim=32, sliding_window=2, window_layers=(1,)),
    "gpt2": replace(networks.GPT2, dim=32),
    "bloom": networks.BLOOM,
}
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2, 3], [0] * 9])


def varlen_attn(  # noqa: PLR0917 (the signature of torch)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """torch's operation, by its documentation: one sequence after the other."""
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    starts = cu_seq_q.tolist()
    assert (starts[0], starts[-1]) == (0, len(query))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert max_q == max_k >= max(stop - start for start, stop in zip(starts, starts[1:], strict=False))
    outputs = []
    for start, stop in zip(starts, starts[1:], strict=False):
        q, k, v = (each[start:stop].transpose(0, 1) for each in (query, key, value))
        group = q.shape[0] // k.shape[0]
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
        distance = torch.arange(stop - start)[:, None] - torch.arange(stop - start)[None]
        assert window_size[1] == 0
        unseen = (distance < 0) | ((distance > window_size[0]) if window_size[0] >= 0 else False)
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        outputs.append((weights @ v.repeat_interleave(group, 0)).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A CPU with the operation, in every dtype; the calls of it."""
    made: list[Any] = []

    def recorded(*inputs: Any, **options: Any) -> Tensor:
        made.append((inputs, options))
        return varlen_attn(*inputs, **options)

    monkeypatch.setattr(packed_mask, "_is_packed_device", lambda kind: kind == "cpu")
    monkeypatch.setattr(packed_mask, "_varlen_attn", lambda: recorded)
    monkeypatch.setattr(packed_mask, "_DTYPES", (torch.float64, torch.bfloat16))
    # `Context.packed` finds boundaries for accelerators alone.
    monkeypatch.setattr(
        Context,
        "packed",
        lambda positions, documents: Context(
            positions=positions,
            documents=documents,
            attend=context_file.CausalAttend(documents, find_boundaries(documents)),
        ),
    )
    yield made


def refuse(*_: object) -> Tensor:
    raise AssertionError("a dense mask was made")


def run(config: FamilyConfig, level: CompileLevel, documents: Tensor | None) -> list[Tensor]:
    """Logits, and the gradients of all parameters."""
    model = networks.build(config, level)
    length = DOCUMENTS.shape[1]
    tokens = torch.arange(DOCUMENTS.numel()).view(-1, length) % networks.VOCAB
    positions = torch.arange(length).expand_as(tokens)
    context = Context() if documents is None else Context.packed(positions, documents)
    logits = model(tokens, context)
    grads = torch.autograd.grad((logits * logits.detach().cos()).sum(), list(model.parameters()))
    return [logits.detach(), *grads]


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_network_is_that_of_dense_masks(
    name: str, documents: Tensor | None, level: CompileLevel, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(context_file, "takes_packed", lambda *_: False)
        wanted = run(CONFIGS[name], level, documents)
        assert not calls
    monkeypatch.setattr(context_file, "_dense_mask", refuse)
    found = run(CONFIGS[name], level, documents)
    # Plain causal attention needs neither.
    assert len(calls) == (2 if documents is not None else {"window": 2, "window_in_one_layer": 1}.get(name, 0))
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)


def test_grouped_queries_share_keys_and_nothing_is_copied(calls: list[Any]) -> None:
    run(CONFIGS["grouped"], "O1", DOCUMENTS)
    (query, key, value, *_), options = calls[0]
    assert (query.shape, key.shape, value.shape) == ((27, 4, 8), (27, 2, 8), (27, 2, 8))
    assert options["enable_gqa"]
    assert all(each.is_contiguous() for each in (query, key, value))


def test_the_reference_and_dropout_take_the_dense_form(calls: list[Any]) -> None:
    wanted = run(CONFIGS["window"], "O0", DOCUMENTS)
    assert not calls
    for own, other in zip(run(CONFIGS["window"], "O1", DOCUMENTS), wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12)
    assert calls


@pytest.mark.parametrize(
    ("documents", "starts", "longest"),
    [
        (DOCUMENTS, [0, 3, 5, 9, 10, 16, 17, 18, 27], 9),
        (torch.zeros(1, 5, dtype=torch.int32), [0, 5], 5),
        (torch.tensor([[4, 4, 4, 7, 7, 4]]), [0, 3, 5, 6, 6], 4),  # one empty sequence up to a power of two
        (torch.zeros(0, 4, dtype=torch.int32), [0, 0], 1),
        (torch.zeros(3, 1, dtype=torch.int32), [0, 1, 2, 3, 3], 1),  # rows of equal documents are apart
    ],
)
def test_boundaries_of_documents(documents: Tensor, starts: list[int], longest: int) -> None:
    cu_seqlens, max_length = find_boundaries(documents)
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, max_length) == (starts, torch.int32, longest)


def test_a_cpu_and_other_dtypes_take_dense_masks() -> None:
    assert not takes_packed(torch.zeros(2, 3, dtype=torch.bfloat16), 64)
    mask = PackedMask(torch.tensor([0, 3]), 3, None, lambda: torch.ones(3, 3).tril().bool())
    assert dense_mask(mask) is mask.dense
    assert dense_mask(None) is None


@pytest.mark.parametrize(("head_dim", "takes"), [(64, True), (256, True), (264, False), (36, False)])
def test_heads_that_flash_attention_takes(head_dim: int, takes: bool, calls: list[Any]) -> None:
    del calls
    assert takes_packed(torch.zeros(2, dtype=torch.bfloat16), head_dim) == takes
    assert not takes_packed(torch.zeros(2), head_dim)
    with torch.autocast("cpu", torch.bfloat16):
        assert takes_packed(torch.zeros(2), head_dim) == takes


def test_this_torch_has_the_operation_with_windows_and_grouped_queries() -> None:
    assert packed_mask._varlen_attn() is not None
    assert packed_mask._is_packed_device("cuda")
    assert not packed_mask._is_packed_device("cpu")
