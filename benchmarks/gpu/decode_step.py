"""The fused decoding step on one device: against its definition, and its speed; rows for `make gpu-check`.

A kernel that began before the one before it was done would read what is not written yet, now and then: so a step is
repeated many times, at the sizes whose speed is measured, and must have the same bits each time.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.kernels import Row, Sizes, build_llama, seconds
from benchmarks.gpu.texts import decoding_seconds
from kitforge.core.kernels.dispatch import implementation
from kitforge.core.kernels.fused_decode_step.reference import Locations, ReferenceDecodeStep
from kitforge.core.nn.decode_step import stack_of

# Positions of a block of the cache, and blocks of a text.
BLOCK, BLOCKS = 16, 3
ROWS = (1, 2, 16)
REPEATS = 200
TINY = {"dim": 80, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 200, "vocab_size": 300}
PER_CPU = 2  # repeats in Triton's interpreter


def step_inputs(shape: dict[str, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Slabs, then a stream, angles and places of sixteen texts, on the CPU."""
    generator, rows = torch.Generator().manual_seed(1), max(ROWS)
    head_dim = shape["dim"] // shape["num_heads"]
    size = (rows * BLOCKS + 1) * BLOCK, shape["num_kv_heads"], head_dim
    slabs = [
        (torch.randn(size, generator=generator).to(dtype), torch.randn(size, generator=generator).to(dtype))
        for _ in range(shape["num_layers"])
    ]
    tables = 1 + torch.randperm(rows * BLOCKS, generator=generator).view(rows, BLOCKS)
    lengths = torch.randint(1, BLOCK * BLOCKS + 1, (rows,), generator=generator)
    last = lengths - 1
    slots = tables[torch.arange(rows), last // BLOCK] * BLOCK + last % BLOCK
    angles = 3 * torch.randn(1, rows, head_dim // 2, generator=generator)
    places = Locations(
        starts=slots, lengths=lengths, slots=slots, rows=torch.arange(rows), tables=tables, block_size=BLOCK
    )
    return slabs, torch.randn(rows, shape["dim"], generator=generator).to(dtype), (angles.cos(), angles.sin()), places


def part(given: tuple[Any, ...], device: torch.device, texts: slice) -> tuple[Any, ...]:
    """The inputs of some of the texts on a device, with slabs of their own."""
    slabs, stream, angles, places = given
    names = ("starts", "lengths", "slots", "tables")
    own = {name: getattr(places, name)[texts].to(device) for name in names}
    return (
        [(keys.to(device, copy=True), values.to(device, copy=True)) for keys, values in slabs],
        stream[texts].to(device),
        tuple(each[:, texts].to(device) for each in angles),
        replace(places, rows=torch.arange(len(own["slots"]), device=device), **own),
    )


@torch.no_grad()
def check_decode_step(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Each dtype against the definition on the CPU; a text alone and among others; a step again and again."""
    made = implementation("fused_decode_step", "triton", "cuda")

    def run(model: Any, given: tuple[Any, ...], texts: slice) -> tuple[Tensor, Tensor]:
        slabs, *rest = part(given, device, texts)
        found: tuple[Tensor, Tensor] = made(stack_of(model), slabs)(*rest)
        return found

    for dtype, most in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        model, given = build_llama(TINY, device, dtype), step_inputs(TINY, dtype)
        slabs, *rest = part(given, torch.device("cpu"), slice(None))
        exact = build_llama(TINY, torch.device("cpu"), dtype)
        wanted = ReferenceDecodeStep(stack_of(exact), slabs)(*rest)[1]
        whole = run(model, given, slice(None))[1]
        for rows in ROWS:
            found = run(model, given, slice(rows))[1]
            error = float((found.cpu() - wanted[:rows]).abs().max() / wanted.abs().max())
            is_same = torch.equal(found, whole[:rows])
            words = f"{error:.0e} of the logits, bits {'as' if is_same else 'OTHER THAN'} among others"
            yield f"decode step, {dtype}, {rows} rows", words, "equal" if error < most and is_same else "DIFFERENT"
    shape = TINY if device.type == "cpu" else sizes.network
    model, given = build_llama(shape, device, torch.bfloat16), step_inputs(shape, torch.bfloat16)
    slabs, *rest = part(given, device, slice(1))
    step = made(stack_of(model), slabs)
    first, count = step(*rest)[1], PER_CPU if device.type == "cpu" else REPEATS
    others = sum(not torch.equal(step(*rest)[1], first) for _ in range(count))
    yield "decode step again", f"{others} of {count} with other bits", "DIFFERENT" if others else "equal"


def measure_decode_step(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Steps of the engine with the fused kernel and without, in turn; more than 16 texts run as without."""
    model = build_llama(sizes.network, device, torch.bfloat16)
    weights, source = (
        sum(each.nbytes for each in model.parameters()),
        torch.empty(sizes.rows, sizes.width, device=device),
    )
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source), device)
    for texts in (1, 16, 64) if device.type != "cpu" else (1,):
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(3):
            for fuses, taken in times.items():
                with torch.no_grad():
                    length = 32 if device.type != "cpu" else 8
                    taken.append(decoding_seconds(model, texts, sizes.num_new_tokens, length, 0.0, fused_decode=fuses))
        fused, plain = (min(taken) for taken in times.values())
        shares = " and ".join(f"{weights / taken / copy:.0%}" for taken in (fused, plain))
        words = f"{1e3 * fused:.3f} ms a step, {plain / fused:.2f}x the modules one by one; {shares} of a copy"
        yield f"decode {texts} texts, fused", words, ""
