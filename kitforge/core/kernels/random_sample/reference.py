"""The definition of `random_sample`."""

from typing import Protocol

import torch
from torch import Tensor


class RandomSampleKernel(Protocol):
    """An index of each row of logits [rows, vocab], drawn by inverse transform sampling at points [rows] in float64,
    from 0 to 1 - 2**-32, from the softmax of logits / temperature, and its log-probability there: int64 and fp32 at
    least [rows]. The temperature is above 0. An index with a logit of -inf is never drawn. A row with NaN, and one of
    -inf alone, has a log-probability of NaN and any index."""

    def __call__(self, logits: Tensor, points: Tensor, temperature: float) -> tuple[Tensor, Tensor]: ...


def random_sample(logits: Tensor, points: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    # The largest score is 0, which stays finite for any temperature.
    scores = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    # In double precision the cumulative sums are exact enough for any vocabulary.
    ends = torch.softmax(scores, dim=-1).cumsum(-1, dtype=torch.float64)
    chosen = torch.searchsorted(ends, points[:, None] * ends[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    return chosen[:, 0], torch.log_softmax(scores, dim=-1).gather(-1, chosen)[:, 0]
