"""Options `role_ranks.*`: the ranks of the roles of a policy gradient run."""

from collections.abc import Sequence
from dataclasses import dataclass

from kitforge.foundation.config import check

# Roles that may have ranks of their own.
ROLES = ("rollout", "reference", "reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRanksOptions:
    """Ranks of the roles; policy and critic are trained on the first ranks. null: the training ranks."""

    rollout: tuple[int, ...] | None = None  # ranks that generate rollouts, with copies of policy and critic
    reference: tuple[int, ...] | None = None  # ranks of the reference model
    reward: tuple[int, ...] | None = None  # ranks of the reward model or function

    def __post_init__(self) -> None:
        for name in ROLES:
            if (ranks := getattr(self, name)) is not None:
                is_sound = len(ranks) > 0 and min(ranks) >= 0 and len(set(ranks)) == len(ranks)
                check(is_sound, f"role_ranks.{name}", list(ranks), "ranks from 0 on, at least one and each once")

    def ranks(self, role: str, num_training: int) -> tuple[int, ...]:
        """The ranks of a role, in order."""
        named: tuple[int, ...] | None = getattr(self, role)
        return tuple(range(num_training)) if named is None else tuple(sorted(named))

    def describe(self, num_training: int) -> str:
        """The placement as text; empty if all roles are on the training ranks."""
        named = [f"{name} on {rank_list(ranks)}" for name in ROLES if (ranks := getattr(self, name)) is not None]
        return ", ".join([f"training on {rank_list(range(num_training))}", *named]) if named else ""


def rank_list(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0 1 2`."""
    return f"rank{'s' * (len(ranks) > 1)} {' '.join(map(str, sorted(ranks)))}"
