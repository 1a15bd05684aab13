"""`fused_decode_step` in Triton, in its interpreter: against the definition, over a paged cache.

A kernel that does not wait for the one before it cannot be seen there, where launches follow each other; that each
waits is read from the machine code (`test_triton_compiles`).
"""

import math
import random as chances
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kitforge.core.kernels import dispatch
from kitforge.core.kernels.dispatch import DecodeSteps
from kitforge.core.kernels.fused_decode_step.reference import DecoderWeights, Locations, ReferenceDecodeStep
from kitforge.core.kernels.fused_decode_step.triton import TritonDecodeStep
from kitforge.core.kernels.triton import dependent
from tests.core.kernels import test_fused_decode_step as blocks
from tests.core.kernels.comparison import poison, random, relative
from tests.differential.drawn import WHOLE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
# A GPU rounds to bfloat16, the interpreter truncates.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-2}


def sizes(monkeypatch: pytest.MonkeyPatch, chance: chances.Random) -> None:
    """Draw those of a block, most of which no tile divides."""
    heads, kv_heads = chance.choice([(4, 2), (3, 3), (6, 1)])
    head_dim, mlp, dim = chance.choice([6, 8, 20]), chance.randint(17, 60), chance.choice([24, 32, 45])
    width, kv_width = heads * head_dim, kv_heads * head_dim
    shapes = {"query": (width, dim), "key": (kv_width, dim), "value": (kv_width, dim), "out": (dim, width)}
    shapes |= {"gate": (mlp, dim), "up": (mlp, dim), "down": (dim, mlp)}
    found = {"HEADS": heads, "KV_HEADS": kv_heads, "HEAD_DIM": head_dim, "MLP_DIM": mlp, "DIM": dim, "SHAPES": shapes}
    for name, value in found.items():
        monkeypatch.setattr(blocks, name, value)


def paged(kind: str, lengths: list[int], size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Slabs, then what a call is given. The blocks of the texts are shuffled, and what no text has written is not a
    number, with the places that this call writes."""
    width, num_texts = -(-max(lengths) // size), len(lengths)
    tables = 1 + torch.randperm(num_texts * width, generator=torch.Generator().manual_seed(size)).view(num_texts, width)
    places = [tables[text][torch.arange(n) // size] * size + torch.arange(n) % size for text, n in enumerate(lengths)]
    slabs = []
    for seed in range(2):
        pair = torch.full((2, (num_texts * width + 1) * size, blocks.KV_HEADS, blocks.HEAD_DIM), math.nan)
        for text, own in enumerate(places):
            pair[:, own[:-1]] = random(2, len(own) - 1, *pair.shape[2:], seed=31 * seed + text).float()
        slabs.append((pair[0].to(dtype), pair[1].to(dtype)))
    pairs = 2 if kind == "sandwich" else blocks.HEAD_DIM // 2
    angles = 3 * random(2, num_texts, pairs, dtype=torch.float32)
    rotary = None if kind in {"plain", "alibi"} else (angles.cos(), angles.sin())
    written = torch.stack([own[-1] for own in places])
    where = Locations(
        **dict.fromkeys(("starts", "slots"), written),
        lengths=torch.tensor(lengths),
        rows=torch.arange(num_texts),
        tables=tables,
        block_size=size,
    )
    return slabs, random(num_texts, blocks.DIM).to(dtype), rotary, where


def found_by(made: Any, weights: DecoderWeights, given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Hidden, logits, and all slabs after the call."""
    slabs, *rest = given
    poison(12)
    hidden, logits = made(weights, slabs)(*rest)
    return hidden, logits, torch.stack([each for pair in slabs for each in pair])


def cases() -> Iterator[Any]:
    """A kind of block and a seed for the rest; in the gate one number of rows of each, and once in bfloat16."""
    for place, kind in enumerate(blocks.KINDS):
        for seed in range(40 if WHOLE else 1):
            # The first seeds draw one row to sixteen.
            yield kind, 132 + place + 7 * seed, torch.float32
            if WHOLE or kind in {"plain", "sandwich", "normed_heads"}:
                yield kind, 132 + place + 7 * seed, torch.bfloat16


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("kind", "seed", "dtype"), list(cases()), ids=str)
@torch.no_grad()
def test_a_step_is_the_reference(kind: str, seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = chances.Random(seed)
    sizes(monkeypatch, chance)
    size, count = chance.choice([2, 4, 8]), chance.choice([1, 2, 3, 5, 8, 16])
    # One position, a whole block, one more and one less.
    lengths = [chance.choice([1, size - 1 or 1, size, size + 1, 2 * size, chance.randint(1, 20)]) for _ in range(count)]
    found, wanted = (
        found_by(made, blocks.stack(kind, own), paged(kind, lengths, size, own))
        for made, own in ((TritonDecodeStep, dtype), (ReferenceDecodeStep, torch.float64))
    )
    assert found[0].dtype is dtype and found[1].dtype is torch.float32
    # Nothing is written but the tokens of this step.
    assert torch.equal(found[2].isnan(), wanted[2].isnan())
    for got, exact in zip(found, wanted, strict=True):
        assert relative(got.nan_to_num(0), exact.nan_to_num(0)) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("dtype", TOLERANCE if WHOLE else [torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_text_has_the_bits_that_it_has_among_others(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a tile holds a single row sixteen times, and one of three rows five times."""
    # BLAS, with which the interpreter multiplies, adds up some rows of a tile in another order than the others.
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("...mk,...kn->...mn", a, b, dtype=dtype))
    lengths = [1 + 5 * text % 13 for text in range(16)]
    weights, (slabs, stream, rotary, places) = blocks.stack("sandwich", dtype), paged("sandwich", lengths, 4, dtype)
    # What is not finite stays with its text.
    stream[3] = math.nan
    hidden, logits = TritonDecodeStep(weights, slabs)(stream, rotary, places) or (None, None)
    assert hidden is not None and logits is not None
    assert torch.equal(logits.isnan().any(1), torch.arange(16) == 3)
    for texts in ([15], [4, 2, 9], [3, 0, 7, 8, 1]):
        names = ("starts", "slots", "lengths", "tables")
        own = replace(places, rows=torch.arange(len(texts)), **{name: getattr(places, name)[texts] for name in names})
        angles = tuple(each[:, texts] for each in rotary)
        alone = found_by(TritonDecodeStep, weights, (slabs, stream[texts], angles, own))
        assert blocks.equal(alone[:2], (hidden[texts], logits[texts]))


@torch.no_grad()
def test_norms_in_fp32_of_a_network_in_bfloat16_are_rounded_once() -> None:
    """Seen where branches are zero: what is left of the stream is its norm, of which the interpreter cuts a bit at
    most off."""
    exact, (slabs, *rest) = blocks.stack("gated", torch.float32, windows=()), paged("gated", [5, 3], 4, torch.bfloat16)
    wanted = ReferenceDecodeStep(exact, slabs)(rest[0].float(), *rest[1:])[0].double()
    errors = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = replace(exact, norm=exact.norm.to(dtype), head=exact.head.bfloat16(), has_exact_norms=True)
        hidden, _ = TritonDecodeStep(weights, [])(*rest) or (wanted, None)
        assert hidden.dtype is torch.bfloat16
        errors.append(float(((hidden.double() - wanted) / wanted).abs().max()))
    assert errors[0] < 2**-7 < errors[1]


@pytest.mark.slow
@torch.no_grad()
def test_logits_may_be_those_of_some_tokens_and_other_steps_are_not_taken() -> None:
    weights, (slabs, stream, rotary, places) = (
        blocks.stack("gated", torch.float32),
        paged("gated", [3, 1, 4], 2, torch.float32),
    )
    step, some = TritonDecodeStep(weights, slabs), replace(places, rows=torch.tensor([0, 2]))
    whole, part = step(stream, rotary, places), step(stream, rotary, some)
    assert whole is not None and part is not None
    assert torch.equal(part[1], whole[1][[0, 2]]) and torch.equal(part[0], whole[0])
    assert step(stream, rotary, replace(places, tables=None)) is None
    assert step(stream, rotary, replace(places, adapters=torch.tensor([-1, 0, 0]))) is None
    assert step(stream.repeat(6, 1), rotary, places) is None


@torch.no_grad()
def test_a_step_off_a_cpu_that_fails_takes_no_tokens_from_then_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **_options: object) -> None:
        raise RuntimeError("the driver refuses the launch")

    monkeypatch.setattr(dispatch, "_failed", set())
    monkeypatch.setattr(TritonDecodeStep, "__call__", fail)
    slabs, *rest = paged("gated", [3, 1, 4], 2, torch.float32)
    step = DecodeSteps("triton", "cuda")(blocks.stack("gated", torch.float32), slabs)
    assert [step(*rest) for _ in range(2)] == [None, None]
    (said,) = caplog.messages
    assert "fused_decode_step by 'triton' failed" in said and "refuses the launch" in said


def test_launches_overlap_on_hopper_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    found = dependent.dependent_launch.__wrapped__
    for capability, overlaps in (((8, 9), False), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(dependent.devices, "compute_capability", lambda _, own=capability: own)
        assert found(torch.device("cuda")) == ({"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False})
        assert found(torch.device("cpu")) == {"PDL": False}
    monkeypatch.delattr(dependent.cuda, "gdc_wait")
    assert found(torch.device("cuda")) == {"PDL": False}
