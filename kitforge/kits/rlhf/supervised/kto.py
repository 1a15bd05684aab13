"""The task `kto`: preference optimisation on completions labelled desirable or undesirable."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from kitforge.data.chat.datasets import TokenizedExample, UnpairedExample
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.algorithms.preference_losses import kto_loss, mismatched_completions
from kitforge.kits.rlhf.batching import input_tokens, pad_examples
from kitforge.kits.rlhf.config import KTOOptions
from kitforge.kits.rlhf.supervised.dpo import sequence_logprobs
from kitforge.kits.rlhf.supervised.example_task import ExampleTask
from kitforge.trainer.precision import autocast


class KTOTask(ExampleTask[KTOOptions, UnpairedExample]):
    """A micro-batch holds tokens and targets [S, T], is_desirable and weights [S], and the baseline of the whole step.

    The KL baseline is the mean log-ratio of policy and reference for mismatched completions: each prompt of the step
    with the completion of the previous row. It is computed once per step over all ranks, so that it depends neither on
    micro-batches nor on ranks. An evaluation has one baseline over all of its rows, in an order by their content.
    """

    def micro_batches(self, model: nn.Module, rows: Sequence[UnpairedExample], step: int) -> list[MicroBatch]:
        """Micro-batches with the KL baseline of the whole batch."""
        parts = [range(part.start, part.stop) for part in self._schedule.micro_batches(len(rows))]
        examples = [row.completion for row in rows]
        mismatched = self._mismatched_sum(model, examples, mismatched_completions(examples)) if len(rows) > 1 else 0.0
        baseline = self._kl_baseline(mismatched, len(rows))
        return [{**self._padded_batch([rows[index] for index in part]), "kl_baseline": baseline} for part in parts]

    def eval_micro_batches(self, model: nn.Module) -> Iterator[MicroBatch]:
        """Micro-batches with the KL baseline of all evaluation rows, whatever their batches and their order."""
        rows, batches = self._rows.eval, list(self._schedule.eval_batches(len(self._rows.eval)))
        # The digests of the rows order them: neighbours by content would share their prompt.
        order = sorted(np.concatenate(batches).tolist(), key=lambda index: _digest(rows[index].completion))
        previous = dict(zip(order, [order[-1], *order], strict=False))
        mismatched = 0.0
        for batch in batches if len(order) > 1 else ():
            others = [rows[previous[index]].completion for index in batch.tolist()]
            mismatched += self._mismatched_sum(model, [rows[index].completion for index in batch], others)
        baseline = self._kl_baseline(mismatched, len(order))
        for batch in batches:
            for part in self._schedule.micro_batches(len(batch)):
                yield {**self._padded_batch([rows[index] for index in batch[part]]), "kl_baseline": baseline}

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

    def _kl_baseline(self, mismatched: float, num_rows: int) -> Tensor:
        """The KL estimate in nats per completion, 0-dim, at least 0, from this rank's sum over mismatched completions.
        One row alone, such as the last batch of an epoch, has no mismatched completion: the estimate is 0."""
        total = torch.tensor(mismatched, dtype=torch.float64)
        return (self._world.sum({"sum": total})["sum"] / num_rows).clamp(min=0)

    @torch.no_grad()
    def _mismatched_sum(
        self, model: nn.Module, prompts: Sequence[TokenizedExample], completions: Sequence[TokenizedExample]
    ) -> float:
        """The log-ratios of this rank's part of a batch of prompts, with the completions of other rows, summed."""
        total, longest = 0.0, self._options.data.sequence_length
        with autocast(self._world.device, self._options.precision):
            for part in self._schedule.micro_batches(len(prompts)):
                crossed = []
                for prompt, completion in zip(prompts[part], completions[part], strict=True):
                    # The prompt of one row with the completion of another, which is not trained on.
                    start, begin = int(np.argmax(prompt.loss_mask)), int(np.argmax(completion.loss_mask))
                    tokens = np.concatenate([prompt.tokens[:start], completion.tokens[begin:]])[:longest]
                    mask = np.concatenate([prompt.loss_mask[:start], completion.loss_mask[begin:]])[:longest]
                    crossed.append(TokenizedExample(tokens=tokens, loss_mask=mask))
                # A rank without rows computes a padding row: with a sharded model the forward pass is a collective.
                total += float(self._log_ratios(model, pad_examples(crossed, self._rows.pad_id)).double().sum())
        return total

    def _log_ratios(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """log(policy / reference) of each completion [S]."""
        with torch.no_grad():
            reference, _ = sequence_logprobs(cast(nn.Module, self._reference_model.model), batch)
        self._reference_model.reshard()
        return sequence_logprobs(model, batch)[0] - reference

    def _padded_batch(self, rows: Sequence[UnpairedExample]) -> MicroBatch:
        """A padded batch; on a rank without rows, one padding row."""
        return {
            **pad_examples([row.completion for row in rows], self._rows.pad_id),
            "is_desirable": torch.tensor([row.is_desirable for row in rows] or [True]),
            "weights": torch.ones(len(rows)) if rows else torch.zeros(1),
        }


def _digest(example: TokenizedExample) -> bytes:
    """A hash of the tokens of an example, and of which are trained on."""
    content = np.asarray([example.tokens, example.loss_mask], dtype=np.int64)
    return hashlib.blake2b(content.tobytes(), digest_size=16).digest()
