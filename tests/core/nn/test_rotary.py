from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.rotary import RopeScaling, RotaryAngles, RotaryConfig, document_lengths
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError
from tests.core.nn.networks import CONFIGS, build

PLAIN = RotaryConfig(dim=8, theta=100.0, max_length=16)
FACTORS: dict[str, Any] = {"short_factor": [1, 1, 1, 1], "long_factor": [2, 3, 4, 5]}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 3.0, "original_length": 8},
    "llama3": {"factor": 3.0, "original_length": 8},
    "longrope": {"factor": 3.0, "original_length": 8, **FACTORS},
}


def angles_of(kind: str) -> RotaryAngles:
    scaling = from_dict(RopeScaling, {"kind": kind, **SCALINGS[kind]})
    return RotaryAngles(RotaryConfig(dim=8, theta=100.0, max_length=16, scaling=scaling))


def test_plain_angles_are_positions_times_powers_of_the_base() -> None:
    cos, sin = RotaryAngles(PLAIN)(torch.arange(16))
    wanted = torch.arange(16)[:, None].double() / 100.0 ** (torch.arange(4).double() / 4)
    assert cos.shape == sin.shape == (1, 16, 4)
    assert (cos - wanted.cos()).abs().max() < 1e-5
    assert (sin - wanted.sin()).abs().max() < 1e-5


@pytest.mark.parametrize("kind", SCALINGS)
def test_angles_are_fp32_under_autocast_to_the_last_bit(kind: str) -> None:
    angles, positions = angles_of(kind), torch.arange(300)
    wanted = angles(positions)
    with torch.autocast("cpu", torch.bfloat16):
        found = angles(positions)
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, right)


@pytest.mark.parametrize("cast", [True, False], ids=["model_in_bfloat16", "autocast"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gpt2"])
def test_blocks_are_handed_fp32_angles_in_half_precision(name: str, cast: bool) -> None:
    tokens = torch.zeros(1, 9, dtype=torch.long)
    wanted = seen_by_blocks(build(CONFIGS[name], dtype=torch.float32), tokens)
    model = build(CONFIGS[name], dtype=torch.bfloat16 if cast else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
        found = seen_by_blocks(model, tokens)
    for got, right in zip(found, wanted, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, right)


def seen_by_blocks(model: Decoder, tokens: Tensor) -> list[Tensor]:
    """Cos and sin as the first block gets them."""
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[1]))
    model(tokens, Context())
    hook.remove()
    return seen


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_the_length_of_the_text_decides(kind: str) -> None:
    angles, positions = angles_of(kind), torch.arange(6)
    assert angles.depends_on_length
    short, long = (angles(positions, torch.tensor([[length]])) for length in (6, 40))
    assert torch.equal(short[0], angles(positions)[0])
    assert not torch.equal(short[0], long[0])
    row = torch.tensor([[6, 40, 6, 40, 6, 40]])
    mixed = angles(positions, row)[0][0]
    assert torch.equal(mixed[0::2], short[0][0, 0::2])
    assert torch.equal(mixed[1::2], long[0][0, 1::2])


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_other_scalings_do_not_look_at_the_length(kind: str) -> None:
    assert not angles_of(kind).depends_on_length


def test_the_length_at_which_a_scaling_sets_in_is_still_short() -> None:
    for kind, edge in (("dynamic", 16), ("longrope", 8)):
        angles, positions = angles_of(kind), torch.arange(4)
        within, at, beyond = (angles(positions, torch.tensor([[edge + step]]))[0] for step in (-1, 0, 1))
        assert torch.equal(within, at)
        assert not torch.equal(at, beyond)


def test_every_token_knows_the_length_of_its_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2], [3, 3, 0, 0, 0, 0]], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 0, 0, 1], [0, 1, 0, 1, 2, 3]])
    assert document_lengths(positions, documents).tolist() == [[3, 3, 3, 1, 2, 2], [2, 2, 4, 4, 4, 4]]


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope"])
def test_a_scaling_that_lacks_its_options_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="rope_scaling"):
        from_dict(RopeScaling, {"kind": kind})
