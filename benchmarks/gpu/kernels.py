"""Speed of kernels, of a training step and of decoding on one device: rows for `make gpu-check`.

Bytes moved and FLOPs are those of `benchmarks.gpu.costs`. They stand beside the bandwidth of a copy.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.costs import cost
from kitforge.core.kernels.attention.packed_mask import PackedMask, find_boundaries
from kitforge.core.kernels.dispatch import implementation, select, select_table
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.kernels.quantized_linear.reference import quantize
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.nn.context import Context, causal_mask
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.foundation import device as devices
from kitforge.foundation.errors import DeviceError
from kitforge.inference.engine import Engine
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.llama.model import LlamaConfig

Row = tuple[str, str, str]  # what, measured, verdict; a verdict in capitals is a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of runs and measurements."""

    shape: dict[str, Any]  # of the LLaMA that is trained
    steps: int
    batch_size: int
    sequence_length: int
    rows: int  # of the memory-bound kernels
    width: int
    vocabulary: int
    num_new_tokens: int
    clicks: int  # batch size of Wide & Deep
    network: dict[str, int]  # of the LLaMA whose speed is measured


LLAMA: dict[str, Any] = {
    "family": "llama",
    "dim": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "mlp_dim": 1408,
}
GPU = Sizes(
    shape=LLAMA,
    steps=20,
    batch_size=16,
    sequence_length=512,
    rows=16384,
    width=4096,
    vocabulary=131072,
    num_new_tokens=128,
    clicks=16000,
    # LLaMA 3.2 1B.
    network={"dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 8192, "vocab_size": 128256},
)
CPU = replace(
    GPU,
    shape={**LLAMA, "dim": 64, "num_layers": 2, "mlp_dim": 128},
    batch_size=8,
    sequence_length=128,
    # A CPU multiplies in FP8 slowly.
    rows=256,
    width=128,
    vocabulary=1000,
    num_new_tokens=16,
    clicks=512,
    network={"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 128, "vocab_size": 512},
)


def build_llama(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> Decoder:
    """A LLaMA with random weights that do not depend on the device."""
    values: dict[str, Any] = {"max_length": 4096, "vocab_size": 512, **shape}
    config = LlamaConfig(**values)
    with torch.device("meta"):
        model = Decoder(config, select("O1", device.type))
    model = model.to_empty(device="cpu") if device.type == "cpu" else model.to_empty(device=device)
    init_weights(model.named_parameters(), len(model.blocks), seed=1)
    return model.to(dtype)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of a call; of calls that follow each other on a GPU, so that short ones are not waited for."""
    for _ in range(3):
        work()
    devices.synchronize(device)
    started = time.perf_counter()
    work()
    devices.synchronize(device)
    calls = 1 if device.type == "cpu" else int(min(max(0.005 / (time.perf_counter() - started), 1), 50))
    times = []
    for _ in range(9):
        devices.synchronize(device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        devices.synchronize(device)
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


def measure_kernels(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Bytes moved per second by forward and backward calls, against a copy and against torch's own operations."""
    dtype = torch.bfloat16
    x, gate = (torch.randn(sizes.rows, sizes.width, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (
        torch.ones(sizes.width, device=device, dtype=dtype),
        torch.zeros(sizes.width, device=device, dtype=dtype),
    )
    heads = torch.randn(4, sizes.rows // 4, sizes.width // 128, 128, device=device, dtype=dtype).transpose(1, 2)
    angles = torch.rand(1, sizes.rows // 4, 64, device=device)
    copy = 2 * x.nbytes / seconds(lambda: gate.copy_(x), device)
    yield "copy", f"{copy / 1e9:,.0f} GB/s", ""
    kernels = select("O1", device.type)

    def torch_rotary(input: Tensor, cos: Tensor, sin: Tensor, _: bool) -> Tensor:
        cos, sin, one, two = cos.to(dtype), sin.to(dtype), input[..., :64], input[..., 64:]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    # Torch's own, the arguments, and how many of them have gradients.
    cases: dict[str, tuple[Callable[..., Any], list[Any], int]] = {
        "rms_norm": (lambda x, w, eps: functional.rms_norm(x, (sizes.width,), w, eps), [x, weight, 1e-6], 2),
        "layer_norm": (lambda x, w, b, eps: functional.layer_norm(x, w.shape, w, b, eps), [x, weight, bias, 1e-6], 3),
        "add_norm": (
            lambda x, y, w, _, eps: (x + y, functional.rms_norm(x + y, (sizes.width,), w, eps)),
            [x, gate, weight, None, 1e-6],
            3,
        ),
        "swiglu": (lambda gate, up: functional.silu(gate) * up, [gate, x], 2),
        "geglu": (lambda gate, up: functional.gelu(gate, approximate="tanh") * up, [gate, x], 2),
        "rotary": (torch_rotary, [heads, angles, angles, False], 1),
    }
    for name, (other, arguments, num_leaves) in cases.items():
        if getattr(kernels, name) is None:
            continue
        own = cost(name, *arguments)
        for what, moved in (("forward", own.bytes), ("backward", own.backward_bytes)):
            leaves = num_leaves if what == "backward" else 0
            taken = [
                seconds(pass_of(function, arguments, leaves), device) for function in (getattr(kernels, name), other)
            ]
            share = moved / taken[0] / copy
            words = f"{moved / taken[0] / 1e9:,.0f} GB/s, {share:.0%} of a copy, {taken[1] / taken[0]:.2f}x torch's own"
            yield f"{name} {what}", words, ""


def pass_of(function: Callable[..., Any], arguments: list[Any], num_leaves: int) -> Callable[[], object]:
    """A call of the forward pass, or of the backward pass alone, for gradients of the first arguments."""
    if not num_leaves:
        return lambda: function(*arguments)
    leaves = [each.detach().requires_grad_() for each in arguments[:num_leaves]]
    made = function(*leaves, *arguments[num_leaves:])
    outputs = [made] if isinstance(made, Tensor) else list(made)
    gradients = [torch.randn_like(each) for each in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, gradients, retain_graph=True)


def measure_products(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Forward and backward: a linear layer in FP8 against bfloat16, and attention of packed rows against a mask."""
    kernels, dtype = select("O1", device.type), torch.bfloat16
    rows = sizes.rows // 2
    x = torch.randn(rows, sizes.width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(sizes.width, sizes.width, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(rows, sizes.width, device=device, dtype=dtype)

    def both(linear: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(linear(x, weight), [x, weight], gradient)

    flops = 6 * rows * sizes.width**2
    try:
        devices.check_float8(device)
        float8, exact = (seconds(both(each), device) for each in (kernels.float8_linear, kernels.linear))
        yield "float8_linear", f"{flops / float8 / 1e12:,.1f} TFLOP/s, {exact / float8:.2f}x bf16", ""
    except DeviceError as error:
        yield "float8_linear", str(error).splitlines()[0], ""
    length = rows // 4
    documents = (torch.arange(length) * 5 // length).expand(2, length)
    boundaries, longest = find_boundaries(documents)
    on_device = documents.to(device)
    mask = causal_mask(torch.arange(length, device=device), torch.arange(length, device=device), None)
    mask = (mask & (on_device.unsqueeze(2) == on_device.unsqueeze(1))).unsqueeze(1)
    packed = PackedMask(boundaries.to(device), longest, None, lambda: mask)
    query, key, value = (
        torch.randn(2, length, heads, 128, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (32, 8, 8)
    )

    def attend(given: Any) -> Callable[[], object]:
        return lambda: kernels.attention(query, key, value, mask=given, causal=True, scale=0.1).sum().backward()

    one, other = (seconds(attend(each), device) for each in (packed, mask))
    yield "attention of packed rows", f"{1e3 * one:.2f} ms, {other / one:.2f}x a dense mask", ""


@torch.no_grad()
def replay_seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    """`seconds` of 20 calls recorded in a graph, divided by 20; without graphs, of one."""
    if not devices.can_record(device):
        return seconds(work, device)
    work()
    replay = devices.recorded(lambda: [work() for _ in range(20)][-1], device)
    return seconds(replay, device) / 20


def measure_decoding(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Bytes a second of attention over paged keys and of quantized products, against torch's in bfloat16; in CUDA
    graphs, as in a decoding step."""
    kernels, dtype = select("O1", device.type), torch.bfloat16
    texts, length, page = sizes.rows // 256, sizes.width, 16
    blocks = texts * length // page
    query = torch.randn(texts, 32, 128, device=device, dtype=dtype)
    keys, values = (torch.randn(blocks * page, 8, 128, device=device, dtype=dtype) for _ in range(2))
    tables = torch.randperm(blocks, device=device).view(texts, -1)
    lengths = torch.full((texts,), length, device=device)
    options: dict[str, Any] = {"block_size": page, "window": None, "scale": 0.1}
    taken = replay_seconds(lambda: kernels.paged_attention(query, keys, values, tables, lengths, **options), device)
    one, key, value = query.unsqueeze(2), *(each.view(texts, length, 8, 128).transpose(1, 2) for each in (keys, values))
    other = replay_seconds(lambda: functional.scaled_dot_product_attention(one, key, value, enable_gqa=True), device)
    moved = 2 * keys.nbytes + 2 * query.nbytes
    words = f"{moved / taken / 1e9:,.0f} GB/s, {other / taken:.2f}x torch's over keys in one piece"
    yield f"paged_attention of {texts} texts of {length}", words, ""
    weight = torch.randn(8 * sizes.width, sizes.width, device=device, dtype=dtype)
    for bits, group in ((8, None), (4, 32)):
        numbers, scales = quantize(weight, bits, group)  # type: ignore[arg-type]
        scales = scales.to(dtype)
        for rows in (1, 16):
            x = torch.randn(rows, sizes.width, device=device, dtype=dtype)
            own = replay_seconds(lambda x=x, n=numbers, s=scales: kernels.quantized_linear(x, n, s), device)  # type: ignore[misc]
            other = replay_seconds(lambda x=x: functional.linear(x, weight), device)  # type: ignore[misc]
            rate = cost("quantized_linear", x, numbers, scales).bytes / own
            yield f"quantized_linear int{bits}, {rows} rows", f"{rate / 1e9:,.0f} GB/s, {other / own:.2f}x bf16", ""


def measure_experts(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Eight of 128 experts for each token, as in Qwen3-30B-A3B: products against dense ones, and the moves of rows."""
    kernels, dtype = select("O1", device.type), torch.bfloat16
    tokens, dim, experts = sizes.rows // 2, sizes.width // 2, 128
    x = torch.randn(tokens, dim, device=device, dtype=dtype)
    permutation = permutation_of(torch.rand(tokens, experts, device=device).topk(8).indices, experts)
    rows = x[permutation.tokens].requires_grad_()
    weight = torch.randn(experts, 768, dim, device=device, dtype=dtype, requires_grad=True)
    one = weight.detach()[0].requires_grad_()
    gradient = torch.randn(len(rows), 768, device=device, dtype=dtype)
    own, dense = (
        seconds(lambda work=work, of=of: torch.autograd.grad(work(), [rows, of], gradient), device)  # type: ignore[misc]
        for work, of in (
            (lambda: kernels.grouped_linear(rows, weight, permutation.ends), weight),
            (lambda: functional.linear(rows, one), one),
        )
    )
    flops = 6 * gradient.numel() * dim
    yield "grouped_linear", f"{flops / own / 1e12:,.1f} TFLOP/s, {own / dense:.2f}x the time of a dense product", ""
    choices = torch.rand(tokens, 8, device=device, dtype=dtype)
    for name, work, moved in (
        ("moe_permute", lambda: kernels.moe_permute(x, permutation), 2 * rows.nbytes),
        ("moe_unpermute", lambda: kernels.moe_unpermute(rows, choices, permutation), rows.nbytes + x.nbytes),
    ):
        with torch.no_grad():
            yield name, f"{moved / seconds(work, device) / 1e9:,.0f} GB/s", ""


def measure_tables(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """The loops over rows of one table for a batch of skewed ids, in bags of 10, against torch's own operations."""
    kernels, dim = select_table(device.type), 64
    ids = (torch.rand(20 * sizes.rows, device=device) ** 4 * 50 * sizes.rows).long()
    bags = Bags(offsets=torch.arange(0, len(ids) + 1, 10, device=device))
    slab = torch.randn(50 * sizes.rows, dim + 1, device=device)
    distinct, inverse = kernels.unique(ids)
    pooled = kernels.embedding_bag(slab, distinct, dim, inverse=inverse, bags=bags)
    sums = kernels.embedding_bag_backward(pooled, inverse, len(distinct), bags=bags)
    table = slab[:, :dim].contiguous()
    rule = build_row_optimizer(SparseOptimizerConfig(name="rowwise_adagrad"), kernels)
    spread = torch.arange(len(ids), device=device) // 10
    gathered = torch.empty(len(distinct), dim + 1, device=device)

    def torch_backward() -> Tensor:
        return torch.zeros_like(sums).index_add_(0, inverse, pooled[spread])

    cases: dict[str, tuple[Callable[[], object], Callable[[], object] | None, int]] = {
        "unique": (lambda: kernels.unique(ids), lambda: torch.unique(ids, return_inverse=True), 2 * ids.nbytes),
        "embedding_bag": (
            lambda: kernels.embedding_bag(slab, distinct, dim, inverse=inverse, bags=bags),
            lambda: functional.embedding_bag(ids, table, bags.offsets[:-1], mode="sum"),
            cost("embedding_bag", slab, distinct, dim, inverse=inverse, bags=bags).bytes,
        ),
        "embedding_bag_backward": (
            lambda: kernels.embedding_bag_backward(pooled, inverse, len(distinct), bags=bags),
            torch_backward,
            cost("embedding_bag_backward", pooled, inverse, len(distinct), bags=bags).bytes,
        ),
        "copy_rows": (
            lambda: kernels.copy_rows(slab, gathered, at=distinct),
            lambda: torch.index_select(slab, 0, distinct, out=gathered),
            2 * gathered.nbytes,
        ),
        "sparse_update": (
            lambda: rule.update(slab, distinct, sums, 0.01, 1),
            None,
            cost("sparse_update", slab, distinct, sums).bytes,
        ),
    }
    for name, (work, other, moved) in cases.items():
        taken = seconds(work, device)
        words = "" if other is None else f", {seconds(other, device) / taken:.2f}x torch's own"
        yield f"table {name}, {len(ids):,} ids", f"{1e3 * taken:.2f} ms, {moved / taken / 1e9:,.0f} GB/s{words}", ""


def measure_vocabulary(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """FLOP/s of both losses over the vocabulary, against the chunked torch version and whole logits."""
    rows = min(sizes.rows, 8192)
    hidden = torch.randn(rows, sizes.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(sizes.vocabulary, sizes.width, device=device, dtype=torch.bfloat16) / sizes.width**0.5
    targets = torch.randint(0, sizes.vocabulary, (rows,), device=device)
    own = select("O1", device.type)
    for name in ("linear_cross_entropy", "linear_log_probs"):
        flops = cost(name, hidden, weight, targets).flops
        with torch.no_grad():
            taken, chunked = (
                seconds(lambda call=call: call(hidden, weight, targets), device)  # type: ignore[misc]
                for call in (getattr(own, name), implementation(name, "chunked", device.type))
            )
        yield f"{name} forward", f"{flops / taken / 1e12:,.1f} TFLOP/s, {chunked / taken:.2f}x chunked torch", ""


def measure_llama(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Training steps and decoding of a LLaMA in bfloat16, against the datasheet and the bandwidth of a copy."""
    model = build_llama(sizes.network, device, torch.bfloat16)
    length = 2048 if device.type != "cpu" else 64
    tokens = torch.randint(0, sizes.network["vocab_size"], (4, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        hidden = model.hidden(tokens, Context())
        loss = model.kernels.linear_cross_entropy(
            hidden[:, :-1].flatten(0, 1), model.head_weight, tokens[:, 1:].flatten()
        )
        (loss / tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = seconds(step, device)
    weights = sum(each.numel() for each in model.parameters())
    # Chowdhery et al. (2022): 6 FLOPs a parameter and 12 * layers * width * length for attention, a token.
    flops = tokens.numel() * (6 * weights + 12 * sizes.network["num_layers"] * sizes.network["dim"] * length)
    words = f"{tokens.numel() / taken:,.0f} tokens/s, {flops / taken / 1e12:,.1f} TFLOP/s"
    yield f"train LLaMA of {weights / 1e9:.2f}B", words, ""
    optimizer.state.clear()
    engine, prompt = Engine(model), list(range(16))
    options = SamplingOptions(max_new_tokens=sizes.num_new_tokens, ignore_eos=True)
    for texts in (1, 64) if device.type != "cpu" else (1, 4):
        engine.generate([prompt] * texts, options)
        started = time.perf_counter()
        engine.generate([prompt] * texts, options)
        taken = (time.perf_counter() - started) / sizes.num_new_tokens
        words = f"{1e3 * taken:.2f} ms a step, {texts / taken:,.0f} tokens/s"
        yield f"decode {texts} texts", f"{words}, weights at {2 * weights / taken / 1e9:,.0f} GB/s", ""
