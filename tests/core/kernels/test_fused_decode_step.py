import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import run_on_threads
from kitforge.core.kernels.cpu_engine.spin_barrier import ThreadAutotuner
from kitforge.core.kernels.fused_decode_step.reference import BlockWeights, DecoderWeights, Locations, Update
from kitforge.core.kernels.fused_decode_step.reference import ReferenceDecodeStep as Reference
from tests.core.kernels.comparison import poison, random, relative

KINDS = ["gated", "gelu_gated", "partly_turned", "plain", "alibi", "sandwich", "normed_heads"]
# Which rotation turns the heads of each layer; there are two.
ROTATIONS = {"gelu_gated": (1, 0), "partly_turned": (None, 1)}
HEADS, KV_HEADS, HEAD_DIM, MLP_DIM, DIM, VOCAB = 4, 2, 6, 35, 24, 31
SHAPES = {
    "query": (HEADS * HEAD_DIM, DIM),
    "key": (KV_HEADS * HEAD_DIM, DIM),
    "value": (KV_HEADS * HEAD_DIM, DIM),
    "out": (DIM, HEADS * HEAD_DIM),
    "gate": (MLP_DIM, DIM),
    "up": (MLP_DIM, DIM),
    "down": (DIM, MLP_DIM),
}
HEAD_NORMS, OUT_NORMS = {"query_norm", "key_norm"}, {"attention_out_norm", "mlp_out_norm"}


def has(kind: str, name: str) -> bool:
    """Whether blocks of that kind have that weight; `plain` is GPT-2's, `alibi` BLOOM's, `sandwich` GLM-4's."""
    kind = "plain" if kind == "alibi" else kind
    if name in HEAD_NORMS:
        return kind == "normed_heads"
    if name.startswith("gate"):
        return kind != "plain" and name == "gate"
    if name.removesuffix("_bias") in OUT_NORMS:
        return kind == "sandwich" and name in OUT_NORMS
    if name in {"query_bias", "key_bias", "value_bias"}:
        return kind in {"plain", "sandwich"}
    return kind == "plain" or not name.endswith("_bias")


def weight(name: str, seed: int) -> Tensor:
    owner = name.removesuffix("_bias")
    if owner in SHAPES:
        rows, columns = SHAPES[owner]
        return random(rows, seed=seed) if name != owner else random(rows, columns, seed=seed) / columns**0.5
    return random(HEAD_DIM if owner in HEAD_NORMS else DIM, seed=seed) * 0.2 + (name == owner)


def stack(kind: str, dtype: torch.dtype, windows: tuple[int | None, ...] = (None, 3)) -> DecoderWeights:
    layers = []
    for layer in range(len(windows)):
        found: dict[str, Any] = {}
        for place, name in enumerate(field.name for field in fields(BlockWeights)):
            found[name] = weight(name, 40 * layer + place).to(dtype) if has(kind, name) else None
        layers.append(BlockWeights(**found))
    return DecoderWeights(
        layers=tuple(layers),
        scales=(0.4, 0.3),
        windows=windows,
        norm=(1 + 0.2 * random(DIM, seed=5)).to(dtype),
        norm_bias=random(DIM, seed=6).to(dtype) if kind in {"plain", "alibi"} else None,
        head=random(VOCAB, DIM, seed=7).to(dtype),
        head_dim=HEAD_DIM,
        norm_eps=1e-5,
        qk_norm_eps=1e-3,
        interleaved_rotary=kind == "sandwich",
        rotations=ROTATIONS.get(kind, (0, 0)),
        gate="gelu" if kind == "gelu_gated" else "silu",
        slopes=random(HEADS, seed=8).abs() if kind == "alibi" else None,
    )


def inputs(num_texts: int, kind: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Slabs, then what a call is given. Texts lie apart, and what lies between is not a number; nor is what comes."""
    lengths = torch.tensor([1 + 5 * text % 17 for text in range(num_texts)], dtype=torch.long)
    starts = torch.arange(num_texts) * 20 + 3
    slabs = []
    for layer in range(2):
        pair = tuple(random(20 * num_texts + 3, KV_HEADS, HEAD_DIM, seed=9 + 2 * layer + each) for each in range(2))
        seen = torch.zeros(len(pair[0]), dtype=torch.bool)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            seen[start : start + length - 1] = True
        slabs.append(tuple(slab.masked_fill(~seen[:, None, None], float("nan")).to(dtype) for slab in pair))
    # GLM rotates a part of each head, GPT-2 none.
    pairs = 2 if kind == "sandwich" else HEAD_DIM // 2
    angles = 3 * random(2, num_texts, pairs, dtype=torch.float32)
    rotary = None if kind in {"plain", "alibi"} else (angles.cos(), angles.sin())
    return slabs, random(num_texts, DIM).to(dtype), rotary, locations(starts, lengths)


def locations(starts: Tensor, lengths: Tensor) -> Locations:
    """With logits of all tokens."""
    slots = torch.empty(0, dtype=torch.long)
    return Locations(starts=starts, lengths=lengths, slots=slots, rows=torch.arange(len(starts)))


def run(
    kind: str, num_texts: int, dtype: torch.dtype, made: Callable[..., Any], weights: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden, logits, and all slabs after the call, with slabs in a dtype, weights in it or in their own."""
    slabs, stream, *rest = inputs(num_texts, kind, dtype)
    poison()
    hidden, logits = made(stack(kind, weights or dtype), slabs)(stream.to(weights or dtype), *rest)
    return hidden, logits, torch.stack([each for pair in slabs for each in pair])


def fast(*arguments: Any) -> Any:
    from kitforge.core.kernels.fused_decode_step.numba import NumbaDecodeStep

    return NumbaDecodeStep(*arguments)


def equal(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_texts", [1, 2, 3, 5, 8, 9, 17])
@torch.no_grad()
def test_one_call_is_the_reference(kind: str, num_texts: int) -> None:
    found, wanted = run(kind, num_texts, torch.float32, fast), run(kind, num_texts, torch.float64, Reference)
    assert torch.equal(found[2].isnan(), wanted[2].isnan())
    for got, exact in zip(found, wanted, strict=True):
        assert relative(got.nan_to_num(0), exact.nan_to_num(0)) < 3e-6


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_texts", [1, 9])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@torch.no_grad()
def test_bfloat16_is_rounded_where_the_reference_rounds(kind: str, num_texts: int, weights: torch.dtype) -> None:
    """With weights in fp32, as under autocast, the stream and its norms are not."""
    found, wanted = (run(kind, num_texts, torch.bfloat16, each, weights) for each in (fast, Reference))
    exact = run(kind, num_texts, torch.float64, Reference)
    for got, own, true in zip(found, wanted, exact, strict=True):
        assert got.dtype is own.dtype
        # Sums are taken in another order, so that a number now and then falls to the other side.
        assert relative(got.nan_to_num(0), own.nan_to_num(0)) < 2**-5
        assert relative(got.nan_to_num(0), true.nan_to_num(0)) < 2 * relative(own.nan_to_num(0), true.nan_to_num(0))


@pytest.mark.parametrize("kind", ["plain", "sandwich", "normed_heads"])
@torch.no_grad()
def test_norms_in_fp32_of_a_network_in_bfloat16_are_rounded_once(kind: str) -> None:
    whole, exact = (stack(kind, each, windows=(None,)) for each in (torch.bfloat16, torch.float32))
    whole, exact = (replace(each, scales=(0.4,), rotations=(0,)) for each in (whole, exact))
    kept = {name: None for name in BlockWeights.__dataclass_fields__ if "norm" in name}
    layers = [
        replace(half, **{name: getattr(each, name) for name in kept})
        for half, each in zip(whole.layers, exact.layers, strict=True)
    ]
    ends = {"norm": exact.norm, "norm_bias": exact.norm_bias, "has_exact_norms": True}
    mixed = replace(whole, layers=tuple(layers), **cast(Any, ends))
    found, wanted, rounded = (
        each(weights, [slabs])(stream, *rest)
        for each, weights in ((fast, mixed), (Reference, mixed), (Reference, whole))
        for (slabs, *_), stream, *rest in [inputs(9, kind, torch.bfloat16)]
    )
    near, far = ((each[0] == wanted[0]).float().mean() for each in (found, rounded))
    # Sums in another order round a number now and then to the other side.
    assert near > 1.2 * far


@pytest.mark.parametrize("kind", ["plain", "normed_heads"])
@torch.no_grad()
def test_under_autocast_the_stream_is_not_rounded(kind: str) -> None:
    """Seen where branches are zero: what is left of the stream is its norm, rounded once."""
    weights, (slabs, stream, *rest) = stack(kind, torch.float32), inputs(9, kind, torch.bfloat16)
    silent = [
        replace(each, out=each.out * 0, down=each.down * 0, out_bias=None, down_bias=None) for each in weights.layers
    ]
    stream = random(9, DIM, dtype=torch.float32)
    found = [made(replace(weights, layers=tuple(silent)), slabs)(stream, *rest)[0] for made in (fast, Reference)]
    assert found[0].dtype is torch.bfloat16
    assert (found[0] == found[1]).float().mean() > 0.98


@pytest.fixture
def shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As though there was enough to do for more threads than one."""
    monkeypatch.setattr("kitforge.core.kernels.fused_decode_step.numba.GRAIN", 0)


def late(work: Callable[[], None]) -> None:
    """The second thread comes when everything is done."""
    work()
    work()


def at_once(work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("way", [late, at_once, lambda work: run_on_threads(work, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_threads_change_no_bit(
    dtype: torch.dtype, way: Callable[..., None], shared_out: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = run("gated", 9, dtype, fast)
    monkeypatch.setattr(ThreadAutotuner, "call", lambda _company, _kind, work: way(work))
    for _ in range(30):
        assert equal(run("gated", 9, dtype, fast), alone)


@pytest.mark.slow
def test_memory_is_not_freed_before_its_last_use_by_address() -> None:
    """With glibc returning every freed block to the system, a late read is a segmentation fault."""
    code = (
        "import torch; from tests.core.kernels.test_fused_decode_step import fast, run\n"
        "with torch.no_grad(): run('gated', 9, torch.float32, fast)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096"}, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_text_that_is_not_finite_is_alone_with_it(kind: str) -> None:
    slabs, stream, *rest = inputs(9, kind, torch.float32)
    stream[4, 3] = float("nan")
    hidden, logits = fast(stack(kind, torch.float32), slabs)(stream, *rest)
    lost = torch.arange(9) == 4
    assert torch.equal(hidden.isnan().all(1), lost)
    assert torch.equal(logits.isnan().all(1), lost)
    assert torch.equal(logits.isnan().any(1), lost)


@torch.no_grad()
def test_large_numbers_pass_both_activations() -> None:
    for kind in ("gated", "gelu_gated", "plain"):
        whole = stack(kind, torch.float32)
        layers = tuple(
            replace(layer, up=layer.up * 300, gate=None if layer.gate is None else layer.gate * 300)
            for layer in whole.layers
        )
        large = replace(whole, layers=layers)
        (slabs, *rest), (others, *_) = inputs(3, kind, torch.float32), inputs(3, kind, torch.float32)
        found, wanted = fast(large, slabs)(*rest), Reference(large, others)(*rest)
        assert relative(found[1], wanted[1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_prompt_in_one_call_has_the_bits_of_its_tokens_one_by_one(kind: str, dtype: torch.dtype) -> None:
    """Of two prompts, whose slots are consecutive or not, and with a part of the logits."""
    length, windows = 41, (None, 7)
    stream = random(2 * length, DIM).to(dtype)
    angles = 3 * random(2, 2 * length, HEAD_DIM // 2, dtype=torch.float32)
    rotary = None if kind in {"plain", "alibi"} else (angles.cos(), angles.sin())
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1)) + 50
    starts = torch.tensor([2] * length + [-1] * length)
    lengths = torch.arange(1, length + 1).repeat(2)

    def step() -> Any:
        slabs = torch.zeros(2, 2, 99, KV_HEADS, HEAD_DIM, dtype=dtype)
        return fast(stack(kind, dtype, windows), [(pair[0], pair[1]) for pair in slabs])

    def called(step: Any, tokens: list[int], rows: list[int]) -> tuple[Tensor, Tensor]:
        own = Locations(starts=starts[tokens], lengths=lengths[tokens], slots=order, rows=torch.tensor(rows))
        found: tuple[Tensor, Tensor] = step(stream[tokens], rotary and tuple(each[:, tokens] for each in rotary), own)
        return found

    single = step()
    wanted = [called(single, [token], [0]) for token in range(2 * length)]
    for parts in ([2 * length], [1, 30, 2 * length - 31], [length + 3, length - 3]):
        tried, first = step(), 0
        for size in parts:
            tokens, first = list(range(first, first + size)), first + size
            rows = list(range(0, size, 3))
            hidden, logits = called(tried, tokens, rows)
            assert torch.equal(hidden, torch.cat([wanted[token][0] for token in tokens]))
            assert torch.equal(logits, torch.cat([wanted[tokens[row]][1] for row in rows]))


def adapted(kind: str, dtype: torch.dtype) -> DecoderWeights:
    """With three adapters: of queries and keys, of all layers and more than a panel's rank, and of DoRA."""
    whole, adapters = stack(kind, dtype), []
    for seed, (rank, names) in enumerate([(3, ["query", "key"]), (37, list(SHAPES)), (5, ["value", "up", "down"])]):
        layers = [{name: update(name, rank, 50 + seed, dtype) for name in names if has(kind, name)} for _ in range(2)]
        adapters.append(tuple(layers))
    return replace(whole, adapters=tuple(adapters))


def update(name: str, rank: int, seed: int, dtype: torch.dtype) -> Update:
    rows, columns = SHAPES[name]
    down, up = random(rank, columns, seed=seed) / columns**0.5, random(rows, rank, seed=seed + 9) / rank**0.5
    rescaling = 1 + 0.1 * random(rows, seed=seed, dtype=torch.float32) if rank == 5 else None
    return Update(down.to(dtype), up.to(dtype), rescaling)


@pytest.mark.parametrize("kind", ["gated", "plain", "sandwich"])
@torch.no_grad()
def test_updates_of_adapters_are_those_of_the_reference(kind: str) -> None:
    """Of texts in turn, and of runs of texts that are longer than a block of rows."""
    for numbers in (torch.arange(9) % 4 - 1, torch.arange(80) // 70):
        found = []
        for made, dtype in ((fast, torch.float32), (Reference, torch.float64)):
            slabs, stream, rotary, places = inputs(len(numbers), kind, dtype)
            places = replace(places, adapters=numbers)
            poison()
            found.append((*made(adapted(kind, dtype), slabs)(stream, rotary, places), slabs[1][0].nan_to_num(0)))
        assert all(relative(got, exact) < 3e-6 for got, exact in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_text_with_an_adapter_has_the_bits_that_it_has_alone(kind: str, dtype: torch.dtype) -> None:
    """So has one without, which has those of a step that knows no adapters."""
    numbers = torch.arange(9) * 5 % 4 - 1
    slabs, stream, rotary, places = inputs(9, kind, dtype)
    hidden, logits = fast(adapted(kind, dtype), slabs)(stream, rotary, replace(places, adapters=numbers))
    assert not torch.equal(logits, fast(stack(kind, dtype), slabs)(stream, rotary, places)[1])
    for text in range(9):
        weights = adapted(kind, dtype) if numbers[text] >= 0 else stack(kind, dtype)
        own = replace(locations(places.starts[[text]], places.lengths[[text]]), adapters=numbers[[text]])
        angles = rotary and tuple(each[:, [text]] for each in rotary)
        alone = fast(weights, slabs)(stream[[text]], angles, own)
        assert equal(alone, (hidden[[text]], logits[[text]]))
