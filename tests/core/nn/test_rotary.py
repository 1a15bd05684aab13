import math
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
@pytest.mark.parametrize(
    "name", [name for name in CONFIGS if isinstance(CONFIGS[name].decoder().positions, RotaryConfig)]
)
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
    """Cos and sin of all rotations as the first block gets them."""
    seen: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.extend(sum(inputs[1].rotary, ())))
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


def written_out(kind: str, theta: float, dim: int, max_length: int, scaling: RopeScaling, length: int) -> list[float]:
    """The frequency of each pair of features as the papers have it, number by number in double precision."""
    original = scaling.original_length or max_length
    factor = scaling.factor if scaling.factor is not None else max_length / original
    plain = [theta ** (-2 * pair / dim) for pair in range(dim // 2)]
    if kind == "linear":  # Chen et al., 2023
        return [each / factor for each in plain]
    if kind == "dynamic":  # NTK by parts of the length: the base grows with the text
        grown = theta * (factor * max(length, max_length) / max_length - (factor - 1)) ** (dim / (dim - 2))
        return [grown ** (-2 * pair / dim) for pair in range(dim // 2)]
    if kind == "longrope":  # Ding et al., 2024
        stretches = scaling.long_factor if length > original else scaling.short_factor
        assert stretches is not None
        return [each / stretch for each, stretch in zip(plain, stretches, strict=True)]
    found = []
    for pair, each in enumerate(plain):
        if kind == "llama3":
            turns = original * each / (2 * math.pi)
            share = (turns - scaling.low_frequency_factor) / (
                scaling.high_frequency_factor - scaling.low_frequency_factor
            )
        else:  # yarn: Peng et al., 2023, equation 23, with the ramp over dims
            low, high = (
                dim * math.log(original / (beta * 2 * math.pi)) / (2 * math.log(theta))
                for beta in (scaling.beta_fast, scaling.beta_slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
            share = 1 - (pair - low) / (high - low)
        kept = min(max(share, 0.0), 1.0)
        found.append(kept * each + (1 - kept) * each / factor)
    return found


CASES: list[dict[str, Any]] = [
    {"kind": "linear", "factor": 3.0},
    {"kind": "dynamic", "factor": 3.0},
    {"kind": "llama3", "factor": 8.0, "original_length": 64},
    {"kind": "yarn", "factor": 4.0, "original_length": 256, "attention_factor": 1.0},
    {"kind": "yarn", "original_length": 256, "attention_factor": 1.0},
    # Here the ramp begins behind the first dims.
    {"kind": "yarn", "factor": 6.0, "original_length": 4096, "attention_factor": 1.0},
    {"kind": "longrope", "original_length": 64, "attention_factor": 1.0}
    | {"short_factor": [1.0 + each for each in range(8)], "long_factor": [2.0 + each**2 for each in range(8)]},
]


@pytest.mark.parametrize("given", CASES, ids=lambda given: f"{given['kind']}-{given.get('factor')}")
@pytest.mark.parametrize("length", [5, 700])
def test_frequencies_are_those_of_the_papers(given: dict[str, Any], length: int) -> None:
    scaling = from_dict(RopeScaling, given)
    config = RotaryConfig(dim=16, theta=10_000.0, max_length=512, scaling=scaling)
    wanted = torch.tensor(written_out(given["kind"], 10_000.0, 16, 512, scaling, length), dtype=torch.float64)
    # So small a position that its angle is its frequency, in a text of that length.
    _, sin = RotaryAngles(config)(torch.tensor([1]), torch.tensor([[length]]))
    torch.testing.assert_close(sin[0, 0].double(), wanted.sin(), rtol=2e-6, atol=1e-9)
    assert len(set(wanted.tolist())) == 8
