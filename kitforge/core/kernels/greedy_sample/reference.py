"""The definition of `greedy_sample`."""

from typing import Protocol

import torch
from torch import Tensor


class GreedySampleKernel(Protocol):
    """The index of the largest of each row of logits [rows, vocab], the first of equal ones, and its log-probability
    under their softmax: int64 and fp32 at least [rows]. A row with NaN has a log-probability of NaN and any index."""

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    chosen = logits.argmax(-1, keepdim=True)
    return chosen[:, 0], torch.log_softmax(logits, dim=-1).gather(-1, chosen)[:, 0]
