"""Losses of preference pairs and unpaired completions [P], and of reward models.

`chosen`, `rejected` and their references are sums over a completion's tokens unless said otherwise.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

CompletionT = TypeVar("CompletionT")


def dpo_loss(log_ratio: Tensor, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Direct preference optimisation (Rafailov et al., 2023) of log-ratios [P], see `logratio_margin`. With
    `label_smoothing` e the label is right with probability 1 - e (cDPO; Mitchell, 2023)."""
    return -(1 - label_smoothing) * logsigmoid(beta * log_ratio) - label_smoothing * logsigmoid(-beta * log_ratio)


def rpo_loss(chosen: Tensor, lengths: Tensor) -> Tensor:
    """The NLL per token [P] of the chosen completions, which iterative RPO adds to the DPO loss (Pang et al., 2024).
    `chosen` are sums over tokens."""
    return -chosen / lengths


def ipo_loss(log_ratio: Tensor, beta: float) -> Tensor:
    """Identity preference optimisation (Azar et al., 2023): the squared distance of the log-ratio [P], of means over
    tokens, to 1 / (2 beta)."""
    return (log_ratio - 1 / (2 * beta)).square()


def logratio_margin(chosen: Tensor, rejected: Tensor, chosen_reference: Tensor, rejected_reference: Tensor) -> Tensor:
    """How much more the policy prefers the chosen completion than the reference does [P]."""
    return (chosen - chosen_reference) - (rejected - rejected_reference)


def kto_loss(log_ratio: Tensor, is_desirable: Tensor, baseline: Tensor, beta: float) -> Tensor:
    """Kahneman-Tversky optimisation (Ethayarajh et al., 2024) of log policy / reference [S] of single completions.

    `baseline` is the KL estimate, 0-dim, without a gradient, clamped at 0.
    """
    advantage = beta * (log_ratio - baseline.detach().clamp(min=0))
    return 1 - torch.sigmoid(torch.where(is_desirable, advantage, -advantage))


def mismatched_completions(completions: Sequence[CompletionT]) -> list[CompletionT]:
    """Each completion replaced by that of the previous row, for the KL baseline of KTO. Needs two rows."""
    return [completions[number - 1] for number in range(len(completions))]


def orpo_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The odds-ratio part of ORPO (Hong et al., 2024), of means over tokens [P]."""
    odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return -logsigmoid(odds)


def simpo_loss(chosen: Tensor, rejected: Tensor, beta: float, gamma: float) -> Tensor:
    """SimPO (Meng et al., 2024) of means over tokens [P]: the rewards beta * mean differ by at least `gamma`."""
    return -logsigmoid(beta * (chosen - rejected) - gamma)


def _log1mexp(log_probs: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0, exact at both ends (Maechler, 2012) and finite at 0."""
    log_probs = log_probs.clamp(max=-torch.finfo(log_probs.dtype).tiny)
    near_zero = log_probs > -0.6931471805599453
    # Each branch gets only its own range, so that the other's gradient stays finite.
    close = torch.where(near_zero, log_probs, -1.0)
    far = torch.where(near_zero, -1.0, log_probs)
    return torch.where(near_zero, (-close.expm1()).log(), (-far.exp()).log1p())


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coefficient: float = 0.0
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) of scores [P] (Bradley and Terry, 1952; margins as in LLaMA 2).

    `center_coefficient` weights the squared sum of each pair, which centers scores at 0 (Eisenstein et al., 2023).
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_coefficient * (chosen + rejected).square() if center_coefficient else loss
