"""The task `kto`: preference optimisation on completions labelled desirable or undesirable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.data.chat_datasets import TokenizedExample, UnpairedExample
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.preference_losses import kto_loss, mismatched_completions
from kitforge.kits.rlhf.batching import input_tokens, pad_examples
from kitforge.kits.rlhf.config import KTOOptions
from kitforge.kits.rlhf.supervised.dataset_task import DatasetTask
from kitforge.kits.rlhf.supervised.dpo import sequence_logprobs
from kitforge.trainer.precision import autocast


@final
class KTOTask(DatasetTask[KTOOptions, UnpairedExample]):
    """A micro-batch holds tokens and targets [S, T], is_desirable and weights [S], and the baseline of the whole step.

    The KL baseline is the mean log-ratio of policy and reference for mismatched completions: each prompt of the step
    with the completion of the previous row. It is computed once per step over all ranks, so that it depends neither on
    micro-batches nor on ranks.
    """

    def micro_batches(self, model: nn.Module, rows: Sequence[UnpairedExample], step: int) -> list[MicroBatch]:
        """Micro-batches with the KL baseline of the whole batch."""
        parts = [range(part.start, part.stop) for part in self._schedule.micro_batches(len(rows))]
        baseline = self._kl_baseline(model, rows, parts)
        return [{**self._padded_batch([rows[index] for index in part]), "kl_baseline": baseline} for part in parts]

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Completions of this rank's part of the step, in total and by label."""
        total = torch.stack([each["weights"].sum() for each in step]).sum()
        desirable = torch.stack([(each["weights"] * each["is_desirable"]).sum() for each in step]).sum()
        return {
            "loss": total,
            "samples": total,
            "input_tokens": input_tokens(step),
            "rewards/desirable": desirable,
            "rewards/undesirable": total - desirable,
        }

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums over completions of the weighted loss, the implicit rewards by label, and the accuracy: desirable
        completions above the KL baseline, undesirable ones below."""
        options = self._options.kto
        ratios = self._log_ratios(model, micro_batch)
        weights, good = micro_batch["weights"].to(ratios.device), micro_batch["is_desirable"].to(ratios.device)
        baseline = micro_batch["kl_baseline"].to(ratios)
        losses = kto_loss(ratios, good, baseline, options.beta)
        losses = losses * torch.where(good, options.desirable_weight, options.undesirable_weight)
        rewards = options.beta * ratios.detach()
        return {
            "loss": (losses * weights).sum(),
            "kl_baseline": baseline * weights.sum(),
            "rewards/accuracy": (((ratios > baseline) == good) * weights).sum(),
            "rewards/desirable": (rewards * good * weights).sum(),
            "rewards/undesirable": (rewards * ~good * weights).sum(),
        }

    @torch.no_grad()
    def _kl_baseline(self, model: nn.Module, rows: Sequence[UnpairedExample], parts: Sequence[range]) -> Tensor:
        """The KL estimate in nats per completion, 0-dim, at least 0, from prompts with mismatched completions. A batch
        of one row, such as the last of an epoch, has no mismatched completion: the estimate is 0."""
        if len(rows) == 1:
            return torch.zeros((), dtype=torch.float64)
        others, total = mismatched_completions([row.response for row in rows]), torch.zeros((), dtype=torch.float64)
        with autocast(self._world.device, self._options.precision):
            for part in parts:
                longest = self._options.data.sequence_length
                crossed = [_mismatched_example(rows[index].response, others[index], longest) for index in part]
                # A rank without rows computes a padding row: with a sharded model the forward pass is a collective.
                total += self._log_ratios(model, pad_examples(crossed, self._rows.pad_id)).double().sum().cpu()
        return (self._world.sum({"sum": total})["sum"] / len(rows)).clamp(min=0)

    def _log_ratios(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """log(policy / reference) of each completion [S]."""
        with torch.no_grad():
            reference, _ = sequence_logprobs(cast(nn.Module, self._reference_model.model), batch)
        self._reference_model.reshard()
        return sequence_logprobs(model, batch)[0] - reference

    def _padded_batch(self, rows: Sequence[UnpairedExample]) -> MicroBatch:
        """A padded batch; on a rank without rows, one padding row."""
        return {
            **pad_examples([row.response for row in rows], self._rows.pad_id),
            "is_desirable": torch.tensor([row.is_desirable for row in rows] or [True]),
            "weights": torch.ones(len(rows)) if rows else torch.zeros(1),
        }


def _mismatched_example(
    prompt_example: TokenizedExample, completion_example: TokenizedExample, longest: int
) -> TokenizedExample:
    """The prompt of one row with the completion of another, truncated to `longest` tokens. It is not trained on."""
    start, begin = int(np.argmax(prompt_example.loss_mask)), int(np.argmax(completion_example.loss_mask))
    tokens = np.concatenate([prompt_example.tokens[:start], completion_example.tokens[begin:]])[:longest]
    loss_mask = np.concatenate([prompt_example.loss_mask[:start], completion_example.loss_mask[begin:]])[:longest]
    return TokenizedExample(tokens=tokens, loss_mask=loss_mask)
