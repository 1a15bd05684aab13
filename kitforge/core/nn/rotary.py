"""Rotary position embeddings: angles under every scaling that published checkpoints use.

Sources: Su et al. 2021 (rotary); Chen et al. 2023 (linear); bloc97 2023 (dynamic NTK); Peng et al. 2023 (yarn);
Ding et al. 2024 (longrope); the LLaMA 3.1 release (llama3). Angles are fp32 from end to end: bfloat16 cannot tell
position 257 from 256.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.config import check, check_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How the frequencies of a longer context derive from those that a model was trained with."""

    kind: Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
    factor: float | None = None
    original_length: int | None = None  # positions seen before scaling; None: the model's max_length
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    attention_factor: float | None = None  # yarn, longrope: multiplies cos and sin
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] | None = None  # longrope
    long_factor: tuple[float, ...] | None = None  # longrope

    def __post_init__(self) -> None:
        if self.kind in ("linear", "dynamic", "llama3"):
            check(self.factor is not None, "rope_scaling.factor", self.factor, f"a number, for {self.kind}")
        if self.kind == "longrope":
            both = self.short_factor is not None and self.long_factor is not None
            check(both, "rope_scaling.short_factor", self.short_factor, "short_factor and long_factor, for longrope")
        check_counts("rope_scaling", {"original_length": self.original_length})
        for name in ("factor", "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            check(value is None or 0 < value < 1e6, f"rope_scaling.{name}", value, "above 0, less than a million")
        for name in ("mscale", "mscale_all_dim"):
            value = getattr(self, name)
            check(value is None or 0 <= value < 1e6, f"rope_scaling.{name}", value, "0 or more, less than a million")
        ordered = 0 < self.low_frequency_factor < self.high_frequency_factor < 1e6
        expected = f"above 0, less than high_frequency_factor={self.high_frequency_factor}"
        check(ordered, "rope_scaling.low_frequency_factor", self.low_frequency_factor, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Rotary positions over the first `dim` features of a head."""

    dim: int
    theta: float
    max_length: int
    interleaved: bool = False  # pairs are (2i, 2i + 1) instead of (i, i + dim / 2)
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_counts("model", {"max_length": self.max_length, "head_dim": self.dim})
        check(self.dim % 2 == 0, "model.head_dim", self.dim, "an even number of features that rotate")
        check(1 < self.theta < 1e12, "model.rope_theta", self.theta, "above 1")
        if (scaling := self.scaling) is None:
            return
        check(scaling.kind != "dynamic" or self.dim > 2, "model.head_dim", self.dim, "more than 2, for dynamic")
        for name in ("short_factor", "long_factor"):
            factors = getattr(scaling, name)
            fits = factors is None or (len(factors) == self.dim // 2 and all(0 < each < 1e6 for each in factors))
            check(fits, f"rope_scaling.{name}", factors, f"{self.dim // 2} numbers above 0")
        # The logarithm of the length is divided by.
        original = scaling.original_length or self.max_length
        check(original > 1, "rope_scaling.original_length", original, "more than 1")


class RotaryAngles:
    """Turns positions into cosines and sines. Holds no parameter and no buffer, so no cast changes its precision."""

    def __init__(self, config: RotaryConfig) -> None:
        self.config = config
        self.depends_on_length = False  # whether the frequencies change with the length of the sequence
        self.attention_factor = 1.0
        self._factors: dict[torch.device, list[Tensor]] = {}  # of longrope, on each device
        if (scaling := config.scaling) is None:
            return
        self.depends_on_length = scaling.kind in ("dynamic", "longrope")
        self._original = scaling.original_length or config.max_length
        self._factor = config.max_length / self._original if scaling.factor is None else scaling.factor
        if scaling.attention_factor is not None:
            self.attention_factor = scaling.attention_factor
        elif scaling.kind in ("yarn", "longrope") and self._factor > 1.0:
            self.attention_factor = self._default_attention_factor(scaling)

    def _default_attention_factor(self, scaling: RopeScaling) -> float:
        if scaling.kind == "longrope":
            return math.sqrt(1 + math.log(self._factor) / math.log(self._original))
        log = math.log(self._factor)
        if scaling.mscale and scaling.mscale_all_dim:
            return (0.1 * scaling.mscale * log + 1.0) / (0.1 * scaling.mscale_all_dim * log + 1.0)
        return 0.1 * 1.0 * log + 1.0

    def __call__(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cos and sin [B or 1, T, dim / 2] in fp32 for positions [B, T] or [T]; `lengths` broadcasts with them."""
        positions = positions if positions.dim() == 2 else positions.unsqueeze(0)
        with torch.autocast(positions.device.type, enabled=False):
            frequencies = self._frequencies(positions, lengths)
            angles = positions.unsqueeze(-1).float() * frequencies
            return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor

    def frequencies(self) -> Tensor:
        """The frequencies of position 0 [dim / 2], in fp32."""
        return self._frequencies(torch.zeros(1, 1, dtype=torch.long), None).flatten()

    def _frequencies(self, positions: Tensor, lengths: Tensor | None) -> Tensor:
        """[dim / 2], or [B, T, dim / 2] where they depend on the length of the sequence around a token."""
        config, scaling = self.config, self.config.scaling
        exponents = torch.arange(0, config.dim, 2, device=positions.device).float() / config.dim
        # Frequencies derive from wavelengths in radians [dim / 2] in the order of arithmetic that the published
        # checkpoints were trained with, so that they agree to the last bit.
        wavelengths = config.theta**exponents
        if scaling is None:
            return 1.0 / wavelengths
        if self.depends_on_length:
            lengths = (positions.amax(dim=1, keepdim=True) + 1 if lengths is None else lengths).unsqueeze(-1)
            if scaling.kind == "dynamic":
                factor, trained = self._factor, self.config.max_length
                stretched = factor * lengths.clamp(min=trained).float() / trained - (factor - 1)
                base = self.config.theta * stretched ** (self.config.dim / (self.config.dim - 2))
                return 1.0 / base**exponents
            # longrope: one set of factors within the original length, another beyond it.
            short, long = (1.0 / (factors * wavelengths) for factors in self._factors_on(lengths.device))
            return torch.where(lengths > self._original, long, short)
        if scaling.kind == "yarn":
            return self._yarn(wavelengths, scaling)
        if scaling.kind == "llama3":
            return self._llama3(1.0 / wavelengths, scaling)
        return 1.0 / wavelengths / self._factor

    def _factors_on(self, device: torch.device) -> list[Tensor]:
        """The short and the long factors of longrope. A CUDA graph cannot record their copy, so a device keeps them."""
        if device not in self._factors:
            scaling = self.config.scaling
            assert scaling is not None and scaling.short_factor is not None and scaling.long_factor is not None
            made = [torch.tensor(factors, device=device) for factors in (scaling.short_factor, scaling.long_factor)]
            if type(made[0]) is not Tensor:
                # Made while a network is traced.
                return made
            self._factors[device] = made
        return self._factors[device]

    def _llama3(self, plain: Tensor, scaling: RopeScaling) -> Tensor:
        """Low frequencies are interpolated, high ones kept, those between blended."""
        wavelength = 2 * math.pi / plain
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        blend = ((self._original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - blend) * plain / self._factor + blend * plain

    def _yarn(self, wavelengths: Tensor, scaling: RopeScaling) -> Tensor:
        """A ramp over the dims from frequencies that are kept to frequencies that are interpolated."""
        dim = self.config.dim
        # The dims that rotate `beta_fast` and `beta_slow` times over the original length.
        low, high = (
            dim * math.log(self._original / (rotations * 2 * math.pi)) / (2 * math.log(self.config.theta))
            for rotations in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high = high + 0.001 if low == high else high
        ramp = ((torch.arange(dim // 2, device=wavelengths.device).float() - low) / (high - low)).clamp(0, 1)
        kept = 1 - ramp
        stretched = 1.0 / (self._factor * wavelengths)
        return stretched * (1 - kept) + 1.0 / wavelengths * kept


def document_lengths(positions: Tensor, documents: Tensor) -> Tensor:
    """[B, T]: the length of the document that each token is in, from positions [B, T] or [T], documents [B, T]."""
    index, positions = documents.long(), positions.expand(documents.shape)
    longest = torch.zeros_like(positions).scatter_reduce(1, index, positions + 1, reduce="amax", include_self=True)
    return longest.gather(1, index)
