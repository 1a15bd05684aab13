"""Sequences of several lengths with rubbish behind their ends."""

import torch
from torch import Tensor

LENGTHS = (5, 1, 8, 3)
MASK = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)


def numbers(seed: int, mask: Tensor = MASK, outside: float = float("nan")) -> Tensor:
    """Standard normal float64 numbers where the mask is true."""
    generator = torch.Generator().manual_seed(seed)
    return torch.where(mask, torch.randn(mask.shape, dtype=torch.float64, generator=generator), outside)
