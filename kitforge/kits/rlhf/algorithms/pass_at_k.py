"""pass@k: the probability that one of k completions solves a prompt (Chen et al., 2021)."""

import math
from dataclasses import dataclass

from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """Generation and pass@k of an evaluation."""

    num_generations: int = 1  # number of completions per prompt
    temperature: float | None = None  # 0: greedy; null: rollout.temperature
    # Minimum reward, before penalties, of a correct completion. Logs eval/pass@k, k = 1, 2, 4 ... num_generations.
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
    """The unbiased estimate of Chen et al. (2021): 1 - C(n - c, k) / C(n, k), the probability that k samples drawn
    without replacement include a correct one."""
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def measured_k(num_samples: int) -> list[int]:
    """The k of eval/pass@k: powers of two, and all samples."""
    return sorted({2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples})
