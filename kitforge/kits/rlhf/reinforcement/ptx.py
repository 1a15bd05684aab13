"""Pretraining (ptx) loss of InstructGPT (Ouyang et al., 2022, equation 2): rows added to each update."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import TokenizedExample
from kitforge.data.schedule import shuffled_indices
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.kits.rlhf.batching import pad_examples, row_schedule
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.dataset import DatasetSplits


class PtxBatches:
    """The ptx rows of each update, a pure function of its number. A micro-batch holds tokens and targets [B, T], and
    `ptx_weight`, the loss weight of a token."""

    def __init__(self, options: RLOptions, rows: DatasetSplits[TokenizedExample], world: World) -> None:
        self._options = options
        self.rows = rows
        self._order = row_schedule(len(rows.train), options, world)

    def micro_batches(self, update: int, weight: float) -> list[MicroBatch]:
        """This rank's ptx rows of an update. Their mean token loss over all ranks has the coefficient `weight`."""
        size = self._options.ptx.batch_size
        chosen = shuffled_indices(self._options.seed, len(self.rows.train), update * size, size, shuffle=True)
        rows = [self.rows.train[index] for index in chosen]
        tokens = int(sum(np.sum(row.loss_mask[1:]) for row in rows))
        parts = self._order.length_buckets(
            [len(row.tokens) for row in rows], self._options.rl.max_tokens_per_microbatch
        )
        batches = [pad_examples([rows[index] for index in part], self.rows.pad_id) for part in parts]
        return [{**each, "ptx_weight": weight / max(tokens, 1)} for each in batches]


def is_ptx(micro_batch: MicroBatch) -> bool:
    """Whether a micro-batch holds ptx rows instead of rollouts."""
    return "ptx_weight" in micro_batch


def ptx_count(step: Sequence[MicroBatch]) -> Sums:
    """Tokens of this rank's ptx rows; empty without them."""
    tokens = [(each["targets"] != IGNORED).sum() for each in step if is_ptx(each)]
    return {"ptx_loss": torch.stack(tokens).sum()} if tokens else {}


def ptx_loss(policy: nn.Module, micro_batch: MicroBatch) -> Sums:
    """The sum of cross-entropies, and its weighted share of the loss."""
    network = cast(CausalLM, policy)
    tokens, targets = (copy_to(micro_batch[name], network.head_weight.device) for name in ("tokens", "targets"))
    hidden = network.hidden(tokens).flatten(0, 1)
    total = network.kernels.linear_cross_entropy(hidden, network.head_weight, targets.flatten())
    return {"loss": total * micro_batch["ptx_weight"], "ptx_loss": total.detach()}
