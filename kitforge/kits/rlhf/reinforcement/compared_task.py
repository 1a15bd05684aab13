"""The common part of tasks that compare the policy with a frozen model within their loss."""

from abc import ABC
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import PromptExample, TokenizedExample
from kitforge.kits.rlhf.dataset import DatasetSplits
from kitforge.kits.rlhf.on_policy_config import ComparedOptions
from kitforge.kits.rlhf.reinforcement.ppo import RolloutTask
from kitforge.kits.rlhf.reinforcement.rollout_collector import Roles
from kitforge.kits.rlhf.roles.reference_model import check_frozen_weights


class ComparedTask(RolloutTask, ABC):
    """Its frozen model is sharded like the policy: all ranks of a replica process the same rows."""

    ROLE: ClassVar[str]  # of the frozen model
    _options: ComparedOptions

    def __init__(
        self,
        options: ComparedOptions,
        rows: DatasetSplits[PromptExample],
        roles: Roles,
        build: Callable[[World], nn.Module],
        world: World,
        pretraining: DatasetSplits[TokenizedExample] | None,
    ) -> None:
        super().__init__(options, rows, roles, build, world, pretraining)
        assert roles.compared is not None
        self._world = world
        self._frozen = roles.compared
        self._fingerprint: str | None = None
        self._num_ids = roles.tokenizer.vocab_size
        self.is_rewarded = roles.is_rewarded

    def build(self, world: World) -> nn.Module:
        """See `RolloutTask`; the frozen model is in evaluation mode, its matrices in the run's precision."""
        model = super().build(world)
        self._fingerprint = world.broadcast_object(self._frozen.state["reference"])
        if self._frozen.model is not None:
            self._frozen.hold_in(self._options.precision, model)
            self._frozen.model.eval()
        return model

    def state(self) -> dict[str, Any]:
        return super().state() | {self.ROLE: self._fingerprint}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `RolloutTask`. Raises ConfigError for another frozen model."""
        # The collector has no reference where the loss has one.
        super().load_state(state | ({"reference": None} if self.ROLE == "reference" else {}))
        if self.recorded is None:
            own, recorded = {"reference": self._fingerprint}, {"reference": state[self.ROLE]}
            check_frozen_weights(own, recorded, self._options.trainer.allow_config_changes)
