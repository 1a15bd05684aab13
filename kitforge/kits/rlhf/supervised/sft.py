"""The task `sft`: supervised fine-tuning on demonstrations; the loss covers assistant tokens only."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kitforge.core.nn.context import Context, DropoutKey
from kitforge.data.chat.datasets import TokenizedExample
from kitforge.data.collate import drop_trivial_columns
from kitforge.data.schedule import Indices
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.kits.language_model import packed_inputs, token_cross_entropy
from kitforge.kits.rlhf.batching import input_tokens, pack_examples
from kitforge.kits.rlhf.config import SFTOptions
from kitforge.kits.rlhf.supervised.example_task import ExampleTask


class SFTTask(ExampleTask[SFTOptions, TokenizedExample]):
    """A micro-batch holds tokens, targets and positions [rows, length], documents if a row packs several examples,
    members [rows], the number of examples in a row, places [rows], the index of a row in the batch, and the step.

    The whole batch is packed before it is split, so that rows depend neither on ranks nor on micro-batches.
    """

    def micro_batches(self, model: nn.Module, rows: Sequence[TokenizedExample], step: int) -> list[MicroBatch]:
        whole = pack_examples(rows, self._rows.pad_id, packing=self._options.packing)
        num_rows, width = whole["tokens"].shape
        parts = self._schedule.length_buckets([width] * num_rows)
        return [{**drop_trivial_columns(_slice_rows(whole, part)), "step": step} for part in parts]

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """Trained tokens of this rank's part of the step."""
        num_trained = torch.as_tensor(sum((micro_batch["targets"] != IGNORED).sum() for micro_batch in step))
        samples = torch.tensor(sum(int(micro_batch["members"].sum()) for micro_batch in step))
        return {"loss": num_trained, "samples": samples, "tokens": num_trained, "input_tokens": input_tokens(step)}

    def inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, Context]:
        """The tokens, and the examples that share a row."""
        indices = tuple(micro_batch["places"].tolist())
        dropout_key = DropoutKey(seed=self._options.seed, step=micro_batch["step"], samples=indices)
        return packed_inputs(micro_batch, dropout_key, self._world.device)

    def loss_of(self, model: nn.Module, hidden: Tensor, micro_batch: MicroBatch) -> Sums:
        return token_cross_entropy(model, hidden, micro_batch["targets"])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss in nats per trained token, eval/perplexity."""
        found = super().evaluate(model)
        return found and found | {"eval/perplexity": math.exp(min(found["eval/loss"], 700.0))}


def _slice_rows(whole: dict[str, Tensor], part: Indices) -> dict[str, Tensor]:
    """Some rows of a batch; on a rank without rows, one padding row."""
    if len(part):
        return {name: column[part] for name, column in whole.items()} | {"places": torch.from_numpy(part)}
    dry = {name: column[:1] for name, column in whole.items()}
    nothing = torch.zeros(1, dtype=torch.int64)
    return dry | {"targets": torch.full_like(dry["targets"], IGNORED), "members": nothing, "places": nothing}
