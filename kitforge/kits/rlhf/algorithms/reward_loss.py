"""What a reward model is trained on: one value a pair [P]."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid


def pairwise_loss(
    chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0, center_coefficient: float = 0.0
) -> Tensor:
    """-log sigmoid(chosen - rejected - margin) of scores [P] (Bradley and Terry, 1952; margins as in LLaMA 2).

    Scores are known up to a constant only; `centre` draws the sum of each pair to 0, by its square (Eisenstein et al.,
    2023).
    """
    loss = -logsigmoid(chosen - rejected - margin)
    return loss + center_coefficient * (chosen + rejected).square() if center_coefficient else loss
