"""The task `kto`: a policy learns from single answers that were found good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.data.chat_datasets import TokenizedExample, UnpairedExample
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.preference import kto_loss, other_answers
from kitforge.kits.rlhf.collate import input_tokens, padded
from kitforge.kits.rlhf.config import KTOOptions
from kitforge.kits.rlhf.order import Indices
from kitforge.kits.rlhf.preference import response_log_probs
from kitforge.kits.rlhf.row_task import RowTask
from kitforge.trainer.precision import autocast


@final
class KTOTask(RowTask[KTOOptions, UnpairedExample]):
    """A micro-batch holds tokens and targets [S, T], is_desirable and weights [S], and the baseline of the whole step.

    The baseline is the mean log-ratio of policy and reference for answers to other prompts: each prompt of the step
    with the answer of the row before. It is found once a step, over all ranks, so that neither micro-batches nor ranks
    change it.
    """

    def micro_batches(self, model: nn.Module, rows: Sequence[UnpairedExample], step: int) -> list[MicroBatch]:
        """With the baseline of the whole batch."""
        parts = self._order.parts(len(rows))
        baseline = self._baseline(model, rows, parts)
        return [{**self._laid([rows[index] for index in part]), "baseline": baseline} for part in parts]

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Answers of this rank's part of the step, of each kind for what is said of it."""
        good, all_ = (
            torch.stack([(each["weights"] * factor(each)).sum() for each in step]).sum()
            for factor in (_is_good, lambda _: 1.0)
        )
        return {
            "loss": all_,
            "samples": all_,
            "input_tokens": input_tokens(step),
            "desirable_reward": good,
            "undesirable_reward": all_ - good,
        }

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The weighted sum of the answers' losses, of the implicit rewards of both kinds, and of how many answers stand
        on their side of the baseline."""
        options = self._options.kto
        ratios = self._log_ratios(model, micro_batch)
        weights, good = micro_batch["weights"].to(ratios.device), micro_batch["is_desirable"].to(ratios.device)
        baseline = micro_batch["baseline"].to(ratios)
        losses = kto_loss(ratios, good, baseline, options.beta)
        losses = losses * torch.where(good, options.desirable_weight, options.undesirable_weight)
        rewards = options.beta * ratios.detach()
        return {
            "loss": (losses * weights).sum(),
            "baseline": baseline * weights.sum(),
            "accuracy": (((ratios > baseline) == good) * weights).sum(),
            "desirable_reward": (rewards * good * weights).sum(),
            "undesirable_reward": (rewards * ~good * weights).sum(),
        }

    @torch.no_grad()
    def _baseline(self, model: nn.Module, rows: Sequence[UnpairedExample], parts: Sequence[Indices]) -> Tensor:
        """An estimate of the divergence in nats an answer, 0-dim, at least 0: from prompts with answers to another one.
        A lone row, as a pass may end with, has no such answer beside it, and the estimate is 0."""
        if len(rows) == 1:
            return torch.zeros((), dtype=torch.float64)
        others, total = other_answers([row.response for row in rows]), torch.zeros((), dtype=torch.float64)
        with autocast(self._world.device, self._options.precision):
            for part in parts:
                longest = self._options.data.sequence_length
                crossed = [_crossed(rows[index].response, others[index], longest) for index in part]
                # A rank without a row computes along with the others, as the network may lie in pieces on all of them.
                total += self._log_ratios(model, padded(crossed, self._rows.pad_id)).double().sum().cpu()
        return (self._world.sum({"sum": total})["sum"] / len(rows)).clamp(min=0)

    def _log_ratios(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """log policy / reference of each answer [S]."""
        with torch.no_grad():
            reference, _ = response_log_probs(cast(nn.Module, self._frozen.reference), batch)
        self._frozen.rest()
        return response_log_probs(model, batch)[0] - reference

    def _laid(self, rows: Sequence[UnpairedExample]) -> MicroBatch:
        """For a rank that has no row left, one that counts for nothing."""
        return {
            **padded([row.response for row in rows], self._rows.pad_id),
            "is_desirable": torch.tensor([row.is_desirable for row in rows] or [True]),
            "weights": torch.ones(len(rows)) if rows else torch.zeros(1),
        }


def _is_good(micro_batch: MicroBatch) -> Tensor:
    good: Tensor = micro_batch["is_desirable"]
    return good


def _crossed(asked: TokenizedExample, other: TokenizedExample, longest: int) -> TokenizedExample:
    """The prompt of one row with the answer of another, of which what is beyond `longest` tokens is left out: this is
    measured, and not learnt from."""
    start, begin = int(np.argmax(asked.loss_mask)), int(np.argmax(other.loss_mask))
    tokens = np.concatenate([asked.tokens[:start], other.tokens[begin:]])[:longest]
    learnt = np.concatenate([asked.loss_mask[:start], other.loss_mask[begin:]])[:longest]
    return TokenizedExample(tokens=tokens, loss_mask=learnt)
