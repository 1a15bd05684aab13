"""Compiles every Triton kernel for a GPU that need not be there, with the arguments of real calls.

`python -m tests.core.kernels.compile_triton CAPABILITY some|all` calls all operations on CPU tensors; instead of a
launch the kernel is compiled down to machine code. It prints a line of JSON for each variant: kernel, error or None,
and from the machine code the registers and the bytes of spilled registers of a thread, whether it waits for the kernel
before it, lets the next one begin behind that, and loads anything first. TRITON_INTERPRET must not be
set.
"""

import contextlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kitforge.core.kernels.dispatch import select, select_table
from kitforge.core.kernels.fused_decode_step import triton as triton_step
from kitforge.core.kernels.fused_decode_step.reference import BlockWeights, Locations
from kitforge.core.kernels.fused_decode_step.triton import TritonDecodeStep
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.kernels.quantized_linear.reference import quantize
from kitforge.core.kernels.sparse_update.reference import integer_view
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.triton import float8 as triton_float8
from kitforge.core.kernels.triton import runtime as triton_runtime
from kitforge.core.kernels.triton.float8 import round_to_float8
from kitforge.core.kernels.triton.moe import zero_past
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from tests.core.kernels.test_fused_decode_step import HEAD_NORMS, has, stack
from tests.row_records import new_records

# Of an H200, for tiles and grids as they are there.
DEVICE = triton_runtime.cuda_description(132)
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compiler:
    """Compiles what is launched, each variant once."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.known: set[str] = set()

    def __call__(self, kernel: Any, *arguments: Any, grid: Any = None, warmup: bool = False, **options: Any) -> None:
        """In place of `JITFunction.run`."""
        del grid, warmup
        names = [parameter.name for parameter in kernel.params]
        bound = dict(zip(names, arguments, strict=False)) | {
            name: options.pop(name) for name in names if name in options
        }
        signature: dict[str, str] = {}
        constants = {}
        # Triton makes other code where it knows that addresses and numbers are multiples of 16.
        aligned: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(kernel.params):
            name, value = parameter.name, bound[parameter.name]
            if name == "WIDEN":  # for the interpreter alone
                value = False
            if name == "PAIRED":  # for the GPU alone
                value = bound["input"].element_size() == 2
            if name == "PDL":  # for Hopper and later
                value = self.target.arch >= 90
                options["launch_pdl"] = value
            # Triton makes a constant of a whole number that is 1, and of None, and knows what divides by 16.
            if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, Tensor):
                signature[name] = "*" + TYPES[value.dtype]
                aligned[index,] = [["tt.divisibility", 16]]
            else:
                signature[name] = "i32" if isinstance(value, int) else parameter.annotation_type or "fp32"
                if isinstance(value, int) and value % 16 == 0:
                    aligned[index,] = [["tt.divisibility", 16]]
        variant = f"{kernel.__name__} {signature} {constants} {aligned} {options}"
        if variant in self.known:
            return
        self.known.add(variant)
        line: dict[str, Any] = {
            "module": kernel.__module__,
            "kernel": kernel.__name__,
            "error": None,
            "constants": str(constants),
        }
        try:
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
            made = triton.compile(source, target=self.target, options=options)
            line |= {"shared": made.metadata.shared, **resources(made.asm["cubin"])}
            before, _, behind = made.asm["ptx"].partition("griddepcontrol.wait")
            line |= {"waits": bool(behind), "releases": "launch_dependents" in behind, "first": "ld.global" in before}
        except Exception as error:  # noqa: BLE001 (whatever the compiler raises)
            line["error"] = f"{error}\n{error.__cause__}"
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def resources(machine_code: bytes) -> dict[str, int]:
    """Registers, and bytes on the stack (where registers are spilled), of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        words = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", words))
    return {"registers": int(found["REG"]), "stack": int(found["STACK"])}


@torch.no_grad()
def call_samplers(*, with_all: bool) -> None:
    """Both choices of a token of a large vocabulary and of a small one."""
    kernels = select("O1", "cuda")
    for width in (5000, 128256) if with_all else (128256,):
        kernels.greedy_sample(torch.zeros(3, width))
        kernels.random_sample(torch.zeros(3, width), torch.zeros(3, dtype=torch.float64), 0.7)


def call_networks(*, with_all: bool) -> None:
    """Every operation of networks that has a Triton kernel, at the sizes of a LLaMA."""
    kernels = select("O1", "cuda")
    for dtype in (torch.bfloat16, torch.float32) if with_all else (torch.bfloat16,):

        def random(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(shape).to(dtype).requires_grad_()

        for width in (200, 4096) if with_all else (4096,):
            kernels.rms_norm(random(9, width), random(width), 1e-5).sum().backward()
            kernels.layer_norm(random(9, width), random(width), random(width), 1e-5).sum().backward()
            assert kernels.add_norm is not None
            for bias in (None, random(width)):
                sum(kernels.add_norm(random(9, width), random(9, width), random(width), bias, 1e-5)).sum().backward()  # type: ignore[attr-defined]
            for gated in (kernels.swiglu, kernels.geglu):
                gated(random(9, width), random(9, width)).sum().backward()
        angles = torch.rand(1, 33, 64)
        turns = [(False, 128), (True, 160)]
        for interleaved, dim in itertools.product((False, True), (128, 160)) if with_all else turns:
            kernels.rotary(random(2, 4, 33, dim), angles, angles, interleaved).sum().backward()
        hidden, weight, targets = random(9, 16), random(5000, 16), torch.arange(9)
        kernels.linear_cross_entropy(hidden, weight, targets).backward()
        sum(each.sum() for each in kernels.linear_log_probs(hidden, weight, targets, 0.7)).backward()  # type: ignore[union-attr]
        with torch.no_grad():
            products: list[tuple[Any, ...]] = [(4, 128, 3, False), (8, None, 64, True)]
            all_products = itertools.product((4, 8), (None, 128), (3, 64), (False, True))
            for bits, group, rows, has_bias in all_products if with_all else products:
                packed = quantize(torch.randn(100, 4096), bits, group)
                kernels.quantized_linear(random(rows, 4096), *packed, random(100) if has_bias else None)
        for choices in (1, 2) if with_all else (2,):
            permutation = permutation_of(torch.randint(0, 8, (33, choices)), 8)
            permuted = kernels.moe_permute(random(33, 2048), permutation)
            kernels.moe_unpermute(permuted, random(33, choices), permutation).sum().backward()
        lengths = torch.tensor([5, 9])
        with torch.no_grad():
            for heads, dim, slopes in itertools.product(
                (1, 4, 32) if with_all else (8,), (64, 128) if with_all else (128,), (None, torch.rand(32))
            ):
                # Of several splits and of one.
                tables = torch.tensor([[0, 1, 2] * (100 if slopes is None else 1)] * 2)
                slabs = random(48, heads, dim), random(48, heads, dim)
                kernels.paged_attention(
                    *(random(2, 32, dim), *slabs, tables, lengths),
                    block_size=16,
                    window=None if slopes is None else 1,
                    scale=0.3,
                    slopes=slopes,
                )


@torch.no_grad()
def call_decode_steps(*, with_all: bool) -> None:
    """Steps of blocks with the parts of every family, at the sizes of a LLaMA of 1.2B."""
    dim, head_dim, heads = 2048, 64, {"query": 32, "key": 8, "value": 8}
    some = [(torch.bfloat16, "plain", 1), (torch.bfloat16, "sandwich", 16), (torch.bfloat16, "normed_heads", 16)]
    every = itertools.product((torch.bfloat16, torch.float32), ("plain", "sandwich", "normed_heads"), (1, 16))
    for dtype, kind, rows in every if with_all else some:

        def made(name: str, kind: str = kind, dtype: torch.dtype = dtype) -> Tensor | None:
            owner = name.removesuffix("_bias")
            if not has(kind, name):
                return None
            wide = {"out": (dim, dim), "gate": (8192, dim), "up": (8192, dim), "down": (dim, 8192)}
            wide |= {each: (head_dim * count, dim) for each, count in heads.items()}
            shape = wide.get(owner, (head_dim if owner in HEAD_NORMS else dim,))
            return torch.zeros(shape[:1] if name != owner else shape, dtype=dtype)

        layer = BlockWeights(**{each.name: made(each.name) for each in fields(BlockWeights)})  # type: ignore[arg-type]
        weights = replace(stack(kind, dtype, (None,)), layers=(layer,), head=torch.zeros(128256, dim, dtype=dtype))
        weights = replace(weights, head_dim=head_dim, norm=torch.zeros(dim, dtype=dtype))
        slab, angles = torch.zeros(64, 8, head_dim, dtype=dtype), torch.zeros(1, rows, 32)
        places = Locations(
            **dict.fromkeys(("starts", "slots", "rows"), torch.arange(rows)),
            lengths=torch.ones(rows, dtype=torch.long),
            tables=torch.zeros(rows, 1, dtype=torch.long),
            block_size=16,
        )
        rotary = None if kind == "plain" else (angles, angles)
        TritonDecodeStep(weights, [(slab, slab)])(torch.zeros(rows, dim, dtype=dtype), rotary, places)


def call_products(*, can_float8: bool, with_all: bool) -> None:
    """What stands around products in FP8 and products of experts."""
    roundings = [(torch.bfloat16, torch.float8_e5m2), (torch.float32, torch.float8_e4m3fn)]
    all_roundings = itertools.product((torch.bfloat16, torch.float32), (torch.float8_e4m3fn, torch.float8_e5m2))
    for dtype, to in () if not can_float8 else all_roundings if with_all else roundings:
        round_to_float8(torch.zeros(48, 4096, dtype=dtype), to)
    zero_past(torch.zeros(32, 2048, dtype=torch.bfloat16), torch.tensor([3, 32], dtype=torch.int32))


def call_tables(*, with_all: bool) -> None:
    """Every loop over rows that has a Triton kernel."""
    kernels = select_table("cuda")
    with contextlib.suppress(IndexError):  # no kernel has written what it reads
        kernels.unique(torch.arange(3000))
    table = kernels.hash_map()
    table.insert(torch.arange(3000), torch.arange(3000))
    table.lookup(torch.arange(3000))
    table.find_distinct(torch.arange(3000), 3000)
    kernels.hash_map().find_distinct(torch.arange(3000))
    slots, inverse = torch.randperm(50)[:20], torch.randint(0, 20, (60,))
    offsets = torch.arange(0, 61, 3)
    for dim in (1, 16, 128) if with_all else (16,):
        slab = torch.randn(50, dim + 4)
        for bags in (None, Bags(offsets=offsets), Bags(offsets=offsets, mode="mean", weights=torch.rand(60))):
            pooled = kernels.embedding_bag(slab, slots, dim, inverse=inverse, bags=bags)
            kernels.embedding_bag_backward(pooled, inverse, 20, bags=bags)
        kernels.embedding_bag(slab, slots, dim)
        kernels.copy_rows(slab, torch.zeros(20, dim + 4), at=slots)
        kernels.copy_rows(torch.zeros(20, dim + 4), slab, to=slots)
        names = ("sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "adam", "ftrl")
        for name in names:
            decays = (0.0, 0.1) if name in ("sgd", "lazy_adam") else (0.0,)
            for decay in decays:
                config = SparseOptimizerConfig(name=name, touched_weight_decay=decay)  # type: ignore[arg-type]
                rule = build_row_optimizer(config, kernels)
                records = new_records(rule, torch.randn(50, dim))
                for step in (1, 2) if with_all else (2,):
                    # No kernel runs, so the rows must be told that they are at this step.
                    integer_view(records)[:, -3] = step - 1
                    rule.update(records, slots, torch.randn(20, dim), 0.1, step)
                rule.catch_up(records, slots, 2, torch.ones(5, dtype=torch.float64))


def main() -> None:
    """Compile all of them."""
    for module in (triton_runtime, triton_float8, triton_step):
        module.device_description = lambda _device: DEVICE  # type: ignore[assignment]
    compiler = Compiler(int(sys.argv[1]))
    JITFunction.run = lambda kernel, *arguments, **options: compiler(kernel, *arguments, **options)
    with_all = sys.argv[2] == "all"
    call_samplers(with_all=with_all)
    call_networks(with_all=with_all)
    call_decode_steps(with_all=with_all)
    call_products(can_float8=int(sys.argv[1]) >= 89, with_all=with_all)
    call_tables(with_all=with_all)


if __name__ == "__main__":
    main()
