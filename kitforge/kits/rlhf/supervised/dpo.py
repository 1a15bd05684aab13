"""The tasks `dpo`, `ipo`, `orpo` and `simpo`: preference optimisation on pairs, without a reward model."""

from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.preference_losses import (
    dpo_loss,
    ipo_loss,
    logratio_margin,
    orpo_loss,
    rpo_loss,
    simpo_loss,
)
from kitforge.kits.rlhf.batching import split_pairs
from kitforge.kits.rlhf.config import PreferenceLossOptions, PreferenceOptions
from kitforge.kits.rlhf.roles.reference_model import ReferenceModel
from kitforge.kits.rlhf.supervised.example_task import PairTask


class PreferenceTask(PairTask[PreferenceOptions]):
    """Preference optimisation. Dropout is off for policy and reference."""

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return preference_sums(model, micro_batch, self._reference_model, self._options.preference)


def preference_sums(
    model: nn.Module, micro_batch: MicroBatch, reference_model: ReferenceModel, options: PreferenceLossOptions
) -> Sums:
    """Sums over pairs of the loss, the implicit rewards, their margins and their accuracy."""
    sums, lengths = sequence_logprobs(model, micro_batch)
    reference = torch.zeros_like(sums)
    if reference_model.model is not None:
        with torch.no_grad():
            reference, _ = sequence_logprobs(reference_model.model, micro_batch)
        reference_model.reshard()
    losses = _losses(options, sums, reference, lengths)
    weights = micro_batch["weights"].to(losses.device)
    rewards = options.beta * (_length_scaled(options, sums, lengths) - _length_scaled(options, reference, lengths))
    chosen, rejected = split_pairs(rewards.detach())
    return {
        "loss": (losses * weights).sum(),
        "rewards/accuracy": ((chosen > rejected) * weights).sum(),
        "rewards/margins": ((chosen - rejected) * weights).sum(),
        "rewards/chosen": (chosen * weights).sum(),
        "rewards/rejected": (rejected * weights).sum(),
    }


def _length_scaled(options: PreferenceLossOptions, sums: Tensor, lengths: Tensor) -> Tensor:
    """Sequence log-probs of the loss: sums over tokens, or means."""
    return sums if options.loss == "dpo" else sums / lengths


def _losses(options: PreferenceLossOptions, sums: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
    """The loss of each pair [P]."""
    scaled, frozen = _length_scaled(options, sums, lengths), _length_scaled(options, reference, lengths)
    chosen, rejected = split_pairs(scaled)
    if options.needs_reference:
        log_ratio = logratio_margin(chosen, rejected, *split_pairs(frozen))
        if options.loss == "ipo":
            return ipo_loss(log_ratio, options.beta)
        losses = dpo_loss(log_ratio, options.beta, options.label_smoothing)
        demonstrated = rpo_loss(chosen, split_pairs(lengths)[0])
        return losses + options.rpo_alpha * demonstrated if options.rpo_alpha else losses
    if options.loss == "simpo":
        return simpo_loss(chosen, rejected, options.beta, options.simpo_gamma)
    return -chosen + options.orpo_lambda * orpo_loss(chosen, rejected)


def sequence_logprobs(model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The sums [B] of the target log-probs of each row, and the numbers of targets (1 for none)."""
    network = cast(CausalLM, model)
    # The head is applied to positions with a target only, and a prompt that answers share is read once.
    hidden = hidden_at(network, micro_batch["tokens"], micro_batch["targets"] != IGNORED)
    targets = copy_to(micro_batch["targets"], hidden.device)
    loss_mask = targets != IGNORED
    log_probs, _ = network.kernels.linear_log_probs(hidden, network.head_weight, targets[loss_mask])
    rows = loss_mask.nonzero()[:, 0]
    sums = torch.zeros(len(targets), dtype=log_probs.dtype, device=hidden.device).index_add(0, rows, log_probs)
    return sums, loss_mask.sum(-1).clamp(min=1)
