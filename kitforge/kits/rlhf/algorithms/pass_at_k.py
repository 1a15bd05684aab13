"""How often a policy solves a prompt when it may try more than once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """How the answers of an evaluation are drawn."""

    num_generations: int = 1  # answers to each prompt
    temperature: float | None = None  # 0: greedy; None: rollout.temperature, at which the policy is trained
    # An answer whose reward, before penalties, is at least this solves its prompt: eval/pass@k, for k = 1, 2, 4 ... and
    # num_generations. None: it is not measured.
    pass_threshold: float | None = None

    def __post_init__(self) -> None:
        size, heat, least = self.num_generations, self.temperature, self.pass_threshold
        check(size > 0, "rl.eval.num_generations", size, "a whole number of at least 1")
        check(heat is None or 0 <= heat < math.inf, "rl.eval.temperature", heat, "at least 0, or null")
        check(
            heat != 0 or size == 1, "rl.eval.num_generations", size, "1 where rl.eval.temperature=0: all are the same"
        )
        check(least is None or math.isfinite(least), "rl.eval.pass_threshold", least, "a finite number, or null")


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The chance that k of the samples, drawn without putting back, hold a correct one: 1 - C(n - c, k) / C(n, k), the
    unbiased estimate of Chen et al. (2021)."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def measured_k(num_samples: int) -> list[int]:
    """The k that are measured: powers of two, and all."""
    return sorted({2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples})
