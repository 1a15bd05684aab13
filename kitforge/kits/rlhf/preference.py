"""The tasks `dpo`, `ipo`, `orpo` and `simpo`: a policy learns from pairs, without a reward model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.parallel.world import World
from kitforge.data.dialogues import Pair
from kitforge.data.packing import IGNORED
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.preference import dpo_loss, ipo_loss, orpo_loss, preference_margin, simpo_loss
from kitforge.kits.rlhf.config import PreferenceOptions
from kitforge.kits.rlhf.pairs import PairBatches, halves
from kitforge.kits.rlhf.rows import Rows
from kitforge.kits.rlhf.weights import decoder_groups, fingerprint
from kitforge.trainer.evaluate import weighted_means
from kitforge.trainer.task import Task


@final
class PreferenceTask(Task):
    """See `PairBatches` for what a micro-batch holds. `reference` is the policy that the run began with, frozen; None
    for losses that need none. Dropout is off: both policies are compared on the same network."""

    def __init__(
        self,
        options: PreferenceOptions,
        rows: Rows[Pair],
        build: Callable[[World], nn.Module],
        reference: nn.Module | None,
        world: World,
    ) -> None:
        self._options = options
        self._rows = rows
        self._build = build
        self._reference = reference
        self._world = world
        self._batches = PairBatches(options, rows, world)

    def build(self, world: World) -> nn.Module:
        """The policy, on the device."""
        return self._build(world)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Matrices decay; embeddings, the head, norms and biases do not."""
        return decoder_groups(model, weight_decay)

    def num_steps(self, epochs: float) -> int | None:
        """Steps in that many passes over the pairs."""
        return self._batches.num_steps(epochs)

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on."""
        return self._batches.steps(cursor)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Pairs."""
        return self._batches.count(step)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums of the pairs' losses, of what the policy's implicit rewards are, and of how often they are ordered
        rightly."""
        sums, lengths = response_log_probs(model, micro_batch)
        reference = torch.zeros_like(sums)
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = response_log_probs(self._reference, micro_batch)
        losses = self._losses(sums, reference, lengths)
        weights = micro_batch["weights"].to(losses.device)
        rewards = self._options.preference.beta * (self._scale(sums, lengths) - self._scale(reference, lengths))
        chosen, rejected = halves(rewards.detach())
        return {
            "loss": (losses * weights).sum(),
            "accuracy": ((chosen > rejected) * weights).sum(),
            "reward_margin": ((chosen - rejected) * weights).sum(),
            "chosen_reward": (chosen * weights).sum(),
            "rejected_reward": (rejected * weights).sum(),
        }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The same figures over the evaluation pairs."""
        if not self._rows.eval:
            return {}
        means = weighted_means(
            self._batches.evaluation(),
            lambda batch: self.loss(model, batch),
            lambda batch: self.count([batch]),
            self._world.sum,
        )
        return {f"eval/{name}": value for name, value in means.items()}

    def state(self) -> dict[str, Any]:
        """Which rows the cursor counts, and what the policy is compared with."""
        return {"rows": self._rows.fingerprint, "reference": self._fingerprint()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Refuse to go on over other rows or with another reference than the run began with."""
        self._rows.check_same(state["rows"], self._options.trainer.allow_changes)
        check_reference(state["reference"], self._fingerprint(), self._options.trainer.allow_changes)

    def _fingerprint(self) -> str | None:
        return None if self._reference is None else fingerprint(self._reference)

    def _scale(self, sums: Tensor, lengths: Tensor) -> Tensor:
        """What the loss compares: sums over tokens, or means of them."""
        return sums if self._options.preference.loss == "dpo" else sums / lengths

    def _losses(self, sums: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """The loss of each pair [P]."""
        options = self._options.preference
        scaled, frozen = self._scale(sums, lengths), self._scale(reference, lengths)
        chosen, rejected = halves(scaled)
        if options.needs_reference:
            log_ratio = preference_margin(chosen, rejected, *halves(frozen))
            if options.loss == "ipo":
                return ipo_loss(log_ratio, options.beta)
            return dpo_loss(log_ratio, options.beta, options.label_smoothing)
        if options.loss == "simpo":
            return simpo_loss(chosen, rejected, options.beta, options.margin)
        return -chosen + options.odds_weight * orpo_loss(chosen, rejected)


def check_reference(wanted: str | None, found: str | None, allowed: bool) -> None:
    """Raise ConfigError for another reference than the one of that fingerprint, unless it is allowed."""
    if wanted != found and not allowed:
        raise ConfigError(
            "the reference is not the one that the run began with",
            fix="start from the same model, or add trainer.allow_changes=true to go on all the same",
        )


def response_log_probs(model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The sums [B] of the log-probabilities of the learnt tokens of each row, and how many there are (1 for none)."""
    network = cast(CausalLM, model)
    device = network.head_weight.device
    targets = micro_batch["targets"].to(device)
    learnt = targets != IGNORED
    hidden = network.hidden(micro_batch["tokens"].to(device))
    # Only rows that count are multiplied with the head.
    log_probs, _ = network.kernels.linear_log_probs(hidden[learnt], network.head_weight, targets[learnt])
    rows = learnt.nonzero()[:, 0]
    sums = torch.zeros(len(targets), dtype=log_probs.dtype, device=device).index_add(0, rows, log_probs)
    return sums, learnt.sum(-1).clamp(min=1)
