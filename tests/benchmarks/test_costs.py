"""FLOPs as torch counts them in the references, forward and backward; bytes as those of inputs and outputs."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu.costs import COSTS, cost
from kitforge.core.kernels import dispatch
from kitforge.core.kernels.dispatch import REFERENCE, TABLE_REFERENCE, Kernels, TableKernels, select
from kitforge.core.kernels.tables.bags import Bags

N, DIM, VOCAB = 6, 16, 40
QUERY, KEY = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8)
TARGETS = torch.arange(N)
ENDS = torch.tensor([2, N], dtype=torch.int32)
PRODUCTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], int]] = {
    # Arguments, options, and operations for each logit that torch does not count.
    "linear": ((torch.randn(2, 3, DIM), torch.randn(7, DIM), None), {}, 0),
    "float8_linear": ((torch.randn(2, 3, DIM), torch.randn(7, DIM), None), {}, 0),
    "grouped_linear": ((torch.randn(N, DIM), torch.randn(2, 7, DIM), ENDS), {}, 0),
    "attention": ((QUERY, KEY, KEY), {"mask": None, "causal": False, "scale": 0.3}, 0),
    "linear_cross_entropy": ((torch.randn(N, DIM), torch.randn(VOCAB, DIM), TARGETS), {}, 4),
    "linear_log_probs": ((torch.randn(N, DIM), torch.randn(VOCAB, DIM), TARGETS), {}, 6),
}


@pytest.mark.parametrize("operation", PRODUCTS)
def test_flops_of_products_are_those_that_torch_counts(operation: str) -> None:
    inputs, options, per_logit = PRODUCTS[operation]
    leaves = [
        each.clone().requires_grad_() if torch.is_tensor(each) and each.is_floating_point() else each for each in inputs
    ]
    found = cost(operation, *leaves, **options)
    with FlopCounterMode(display=False) as forward:
        output = getattr(REFERENCE, operation)(*leaves, **options)
    with FlopCounterMode(display=False) as backward:
        (output if torch.is_tensor(output) else output[0]).sum().backward()
    elementwise = per_logit * N * VOCAB
    assert found.flops == forward.get_total_flops() + elementwise
    assert found.backward_flops == backward.get_total_flops() + elementwise


def test_a_causal_call_counts_the_pairs_that_see_each_other() -> None:
    mask = torch.ones(5, 9).tril(4).bool()
    found = cost("attention", QUERY, KEY, KEY, mask=None, causal=True, scale=1.0)
    assert found.flops == 4 * 2 * 4 * int(mask.sum()) * 8


SLAB, SLOTS, INVERSE = torch.randn(11, 8), torch.tensor([3, 0, 7]), torch.tensor([0, 1, 1, 2])
BAGS = Bags(offsets=torch.tensor([0, 3, 4]))
ROWS, OUT = torch.randn(3, 8), torch.zeros(4, 8)
# Calls whose inputs are read whole and once; `written` is what they write beside their results.
WHOLE: dict[str, tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]] = {
    "grouped_linear": ((torch.randn(N, DIM), torch.randn(2, 7, DIM), ENDS), {}, []),
    "linear": ((torch.randn(2, 3, DIM), torch.randn(7, DIM), torch.randn(7)), {}, []),
    "attention": ((QUERY, KEY, KEY), {"mask": None, "causal": False, "scale": 0.3}, []),
    "rms_norm": ((torch.randn(4, DIM), torch.randn(DIM), 1e-5), {}, []),
    "layer_norm": ((torch.randn(4, DIM), torch.randn(DIM), torch.randn(DIM), 1e-5), {}, []),
    "add_norm": ((torch.randn(4, DIM), torch.randn(4, DIM), torch.randn(DIM), None, 1e-5), {}, []),
    "rotary": ((QUERY, torch.randn(1, 5, 3), torch.randn(1, 5, 3), False), {}, []),
    "swiglu": ((torch.randn(4, DIM), torch.randn(4, DIM)), {}, []),
    "geglu": ((torch.randn(4, DIM), torch.randn(4, DIM)), {}, []),
    "keep_mask": ((5, torch.arange(3), 0, 10, 0.5), {}, []),
    "greedy_sample": ((torch.randn(4, DIM),), {}, []),
    "random_sample": ((torch.randn(4, DIM), torch.rand(4).double(), 0.7), {}, []),
    "copy_rows": ((ROWS, OUT), {"to": SLOTS[:3] % 4}, [ROWS]),
    "unique": ((torch.tensor([4, 2, 9]),), {}, []),
    "embedding_bag_backward": ((torch.randn(4, 8), INVERSE, 3), {}, []),
}


@pytest.mark.parametrize("operation", WHOLE)
def test_bytes_are_those_of_inputs_and_outputs(operation: str) -> None:
    inputs, options, written = WHOLE[operation]
    kernels = REFERENCE if hasattr(REFERENCE, operation) else TABLE_REFERENCE
    found = cost(operation, *inputs, **options)
    output = (getattr(kernels, operation) or dispatch._REFERENCES[operation])(*inputs, **options)
    outputs = [] if output is None else [output] if torch.is_tensor(output) else list(output)
    read = [each for each in (*inputs, *options.values()) if torch.is_tensor(each) and each is not OUT]
    assert found.bytes == sum(each.numel() * each.element_size() for each in (*read, *outputs, *written))


def test_rows_that_are_not_read_do_not_count() -> None:
    size = SLAB.element_size()
    assert cost("embedding_bag", SLAB, SLOTS, 6, inverse=INVERSE).bytes == (4 + 4) * 6 * size + 8 * (3 + 4)
    pooled = cost("embedding_bag", SLAB, SLOTS, 6, inverse=INVERSE, bags=BAGS)
    assert (pooled.bytes, pooled.flops) == ((4 + 2) * 6 * size + 8 * (3 + 4), 4 * 6)
    assert cost("swap_rows", SLAB, OUT, SLOTS, SLOTS % 4).bytes == 4 * 3 * 8 * size + 8 * 6
    assert cost("pread_rows", 0, OUT, SLOTS, SLOTS).bytes == 2 * 3 * 8 * size + 8 * 6
    assert cost("sparse_update", SLAB, SLOTS, ROWS[:, :2], 0.1, 1).bytes == 2 * 3 * 8 * size + 24 + 3 * 2 * size
    keys, lengths = torch.randn(20, 2, 8), torch.tensor([3, 9])
    found = cost("decode_attention", QUERY[0, :2], keys, keys, lengths, lengths, window=4, scale=1.0)
    assert found.flops == 4 * 5 * 8 * (3 + 4)
    assert found.bytes == (2 * QUERY[0, :2].numel() + 2 * (3 + 4) * 2 * 8) * 4


def test_every_operation_without_a_state_has_a_cost() -> None:
    names = {each.name for each in (*fields(Kernels), *fields(TableKernels))}
    assert names - set(COSTS) == {"fused_decode_step", "hash_map"}


def test_the_counter_of_torch_looks_into_the_custom_ops() -> None:
    with FakeTensorMode() as mode, torch.no_grad(), FlopCounterMode(display=False) as counter:
        input, weight = (mode.from_tensor(torch.randn(shape)) for shape in ((3, DIM), (7, DIM)))
        select("O1").linear(input, weight, None)
        assert cost("linear", input, weight).flops == 2 * 3 * DIM * 7
    assert counter.get_total_flops() == 2 * 3 * DIM * 7
