"""Kernels on small inputs, against their references: outputs, gradients, and loops over rows of tables.

It needs torch and numpy only, as `scripts/gpu_check.py` does.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kitforge.core.kernels.add_norm.reference import add_norm
from kitforge.core.kernels.attention.packed_mask import PackedMask, find_boundaries
from kitforge.core.kernels.dispatch import (
    REFERENCE,
    TABLE_REFERENCE,
    CompileLevel,
    Kernels,
    TableKernels,
    select,
    select_table,
)
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.kernels.quantized_linear.reference import quantize
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.foundation.errors import ModelError
from kitforge.verify.contract import furthest

# Relative to the largest element of the float64 reference.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TABLE_TOLERANCE = 1e-5
# Units add products in FP8 with 14 bits.
FLOAT8_TOLERANCE = 2e-3
# Whole numbers and their scales.
Packed: TypeAlias = tuple[Tensor, Tensor]
# By name: how to call a kernel, and its float arguments in float64.
Cases: TypeAlias = dict[str, tuple[Callable[[Kernels], Callable[..., Tensor]], list[Tensor]]]


def kernel_cases(device: torch.device) -> Cases:
    """For every kernel: how to call it, and its float arguments in float64."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(device)

    angles = torch.rand(1, 33, 8, generator=generator).to(device)
    targets = torch.randint(0, 301, (37,), generator=generator).to(device)
    some = targets.masked_fill(torch.arange(37, device=device) % 5 == 0, -100)
    permutation = permutation_of(torch.rand(37, 8, generator=generator).topk(2, 1).indices.to(device), 8)

    def turn(kernels: Kernels, interleaved: bool) -> Callable[..., Tensor]:
        def turned(x: Tensor) -> Tensor:
            exact = angles.to(torch.promote_types(x.dtype, torch.float32))
            result: Tensor = kernels.rotary(x, exact.cos(), exact.sin(), interleaved)
            return result

        return turned

    return {
        "linear": (lambda kernels: kernels.linear, [random(37, 48), random(64, 48), random(64)]),
        "rms_norm": (lambda kernels: lambda x, w: kernels.rms_norm(x, w, 1e-6), [random(37, 48), random(48)]),
        "layer_norm": (
            lambda kernels: lambda x, w, b: kernels.layer_norm(x, w, b, 1e-6),
            [random(37, 48), random(48), random(48)],
        ),
        "add_norm": (
            lambda kernels: lambda x, y, w: torch.stack((kernels.add_norm or add_norm)(x, y, w, None, 1e-6)),
            [random(37, 48), random(37, 48), random(48)],
        ),
        "rotary": (lambda kernels: turn(kernels, False), [random(2, 4, 33, 24)]),
        "rotary interleaved": (lambda kernels: turn(kernels, True), [random(2, 4, 33, 24)]),
        "swiglu": (lambda kernels: kernels.swiglu, [random(37, 48), random(37, 48)]),
        "geglu": (lambda kernels: kernels.geglu, [random(37, 48), random(37, 48)]),
        "moe_permute": (
            lambda kernels: lambda x, w: kernels.moe_unpermute(kernels.moe_permute(x, permutation), w, permutation),
            [random(37, 48), random(37, 2)],
        ),
        "linear_cross_entropy": (
            lambda kernels: lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, some),
            [random(37, 48), random(301, 48)],
        ),
        "linear_log_probs": (
            lambda kernels: lambda hidden, weight: torch.stack(kernels.linear_log_probs(hidden, weight, targets, 0.7)),
            # Small logits: entropies and their gradients suffer most where logits are rounded.
            [random(37, 48) / 8, random(301, 48)],
        ),
        **_product_cases(random, device),
        **_attention_cases(random, device),
    }


def tolerance(name: str, dtype: torch.dtype) -> float:
    """The error that a kernel of `kernel_cases` may have in a dtype."""
    return max(TOLERANCE[dtype], FLOAT8_TOLERANCE) if name.startswith("float8") else TOLERANCE[dtype]


def _product_cases(random: Callable[..., Tensor], device: torch.device) -> Cases:
    ends = torch.tensor([9, 9, 30], dtype=torch.int32, device=device)
    float8 = [random(40, 48), random(64, 48)]
    cases: Cases = {
        "grouped_linear": (
            lambda kernels: lambda x, w: kernels.grouped_linear(x, w, ends),
            [random(37, 48), random(3, 64, 48)],
        ),
        "float8_linear": (lambda kernels: kernels.float8_linear, float8),
        # One row, and sizes that the units do not take.
        "float8_linear of 1 row": (lambda kernels: kernels.float8_linear, [random(1, 24), random(20, 24)]),
    }
    for bits in (8, 4):
        of_groups, of_rows = quantize(random(100, 256), bits, 32), quantize(random(100, 256), bits)
        for num_rows in (1, 37):
            cases[f"quantized_linear int{bits} of {num_rows} rows"] = (
                partial(_multiply_quantized, of_groups, of_rows),
                [random(num_rows, 256), random(100)],
            )
    return cases


def _multiply_quantized(of_groups: Packed, of_rows: Packed, kernels: Kernels) -> Callable[..., Tensor]:
    """Products with a weight that has scales of groups, and with one that has a scale a row."""

    def multiplied(x: Tensor, bias: Tensor) -> Tensor:
        return torch.stack((kernels.quantized_linear(x, *of_groups, bias), kernels.quantized_linear(x, *of_rows)))

    return multiplied


def _attention_cases(random: Callable[..., Tensor], device: torch.device) -> Cases:
    tables, lengths = torch.tensor([[3, 1, 1], [0, 2, 4]], device=device), torch.tensor([19, 48], device=device)
    pages: dict[str, Any] = {"block_size": 16, "window": None, "scale": 0.25}
    documents = torch.tensor([[0] * 9 + [1] * 24, [0] * 20 + [1] * 3 + [2] * 10])
    begins, longest = find_boundaries(documents)
    order = torch.arange(33)
    seen = (documents[:, :, None] == documents[:, None]) & (order[:, None] >= order) & (order[:, None] - order < 7)
    packed = PackedMask(begins.to(device), longest, 7, lambda: seen[:, None].to(device))
    return {
        "attention": (
            lambda kernels: lambda q, k, v: kernels.attention(q, k, v, mask=None, causal=True, scale=0.25),
            [random(2, 4, 33, 16), random(2, 2, 33, 16), random(2, 2, 33, 16)],
        ),
        "attention of packed rows": (
            lambda kernels: lambda q, k, v: kernels.attention(q, k, v, mask=packed, causal=True, scale=0.25),
            [random(2, 4, 33, 16), random(2, 2, 33, 16), random(2, 2, 33, 16)],
        ),
        "paged_attention": (
            lambda kernels: lambda q, k, v: kernels.paged_attention(q, k, v, tables, lengths, **pages),
            [random(2, 4, 16), random(80, 2, 16), random(80, 2, 16)],
        ),
    }


def kernel_errors(device: torch.device, level: CompileLevel) -> Iterator[tuple[str, dict[torch.dtype, float]]]:
    """For every kernel the largest error of outputs and gradients by dtype, against the float64 reference."""
    for name, (get, arguments) in kernel_cases(device).items():
        errors = {}
        for dtype in TOLERANCE:
            if device.type == "cpu" and dtype == torch.float16 and name.startswith("linear"):
                continue
            rounded = [each.to(dtype) for each in arguments]
            wanted = run_kernel(get(REFERENCE), [each.double() for each in rounded])
            found = run_kernel(get(select(level, device.type)), rounded)
            errors[dtype] = furthest(
                float((one.double() - other).abs().max() / other.abs().max().clamp(min=1e-9))
                for one, other in zip(found, wanted, strict=False)
            )
        yield name, errors


def run_kernel(kernel: Callable[..., Tensor], arguments: list[Tensor]) -> list[Tensor]:
    """The output, the gradients where the kernel has them, and the second ones in fp32 and float64 if not refused."""
    leaves = [each.detach().clone().requires_grad_() for each in arguments]
    try:
        output = kernel(*leaves)
        gradient = _quarters(output)
        found = [output.detach(), *torch.autograd.grad(output, leaves, gradient)]
    except (RuntimeError, NotImplementedError):
        with torch.no_grad():
            return [kernel(*leaves)]
    if leaves[0].dtype not in (torch.float32, torch.float64):
        return found
    try:
        first = torch.autograd.grad(kernel(*leaves), leaves, gradient, create_graph=True)
        # Gradients that are constants have second ones of zero.
        parts = [each * _quarters(each) for each in first] + [0 * each for each in leaves]
        total = torch.cat([each.flatten() for each in parts]).sum()
        return [*found, *torch.autograd.grad(total, leaves)]
    except (ModelError, RuntimeError):  # refused by us, or by torch as its attention does
        return found


def _quarters(like: Tensor) -> Tensor:
    # Not made of the tensor, which is rounded differently in each dtype; quarters are the same in all, FP8 too.
    return ((4 * torch.arange(like.numel(), device=like.device).cos()).round() / 4).view_as(like).to(like.dtype)


def table_errors(device: torch.device) -> Iterator[tuple[str, float]]:
    """For every loop over rows of tables the largest error on the device, against the reference on the CPU."""
    slab, slots = torch.randn(500, 40), torch.randperm(500)[:200]
    inverse, bags = torch.randint(0, 200, (900,)), Bags(offsets=torch.arange(0, 901, 3), mode="mean")

    def run(kernels: TableKernels, target: torch.device) -> dict[str, Tensor]:
        here = Bags(offsets=bags.offsets.to(target), mode="mean")
        rows, at, of = slab.to(target).clone(), slots.to(target), inverse.to(target)
        pooled = kernels.embedding_bag(rows, at, 32, inverse=of, bags=here)
        sums = kernels.embedding_bag_backward(pooled, of, 200, bags=here)
        distinct, numbers = kernels.unique(of - 100)
        table = kernels.hash_map()
        table.insert(at * 7 - 3, at)
        table.remove((at * 7 - 3)[:50])
        copied = torch.zeros_like(rows)
        kernels.copy_rows(rows, copied, at=at, to=at.flip(0))
        results = {"embedding_bag": pooled, "embedding_bag_backward": sums, "copy_rows": copied}
        found = table.find_distinct(of * 7 - 3)
        known = torch.cat([table.lookup(of * 7 - 3), found.keys, found.inverse, found.slots])
        results |= {"unique": torch.cat([distinct, numbers]), "hash_map": known}
        for name in ("sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "adam", "ftrl"):
            rule = build_row_optimizer(SparseOptimizerConfig(name=name), kernels)
            layout = rule.layout(32)
            records = torch.zeros(len(rows), layout.width, device=target)
            records[:, :32] = rows[:, :32]
            rule.init_states_(records, layout)
            for step in (1, 2, 3):
                rule.catch_up(records, at, step - 1, torch.full((9,), 0.1, dtype=torch.float64))
                rule.update(records, at, sums, 0.1, step)
            results[name] = records[:, :32]
        return results

    wanted, found = run(TABLE_REFERENCE, torch.device("cpu")), run(select_table(device.type), device)
    for name, one in wanted.items():
        yield name, float((found[name].cpu() - one).abs().max() / one.abs().max().clamp(min=1))


def has_same_mask(device: torch.device) -> bool:
    """Whether the dropout mask has the bits of the CPU's."""
    keys = torch.arange(-3, 500)
    masks = [
        select("O1", each.type).keep_mask(2**63 + 5, keys.to(each), 3, 77, 0.1).cpu()
        for each in (torch.device("cpu"), device)
    ]
    return torch.equal(*masks)
