"""Tasks over rows in memory: tokens of any length, padded to the longest of a micro-batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.context import DropoutKey
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.labels import ProblemType
from kitforge.data.prefetch import BackgroundPrefetcher
from kitforge.data.schedule import train_eval_split
from kitforge.foundation.config import check, check_least
from kitforge.foundation.errors import DataError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.kits.language_model import NetworkOptions
from kitforge.trainer.dataset_task import DatasetTask
from kitforge.trainer.task import batch_schedule

# Tokens of a micro-batch on a CPU, padding included: with more, activations leave its caches.
CPU_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Rows and their batches; the columns are those of the task."""

    train: Any = None  # a jsonl, json, csv, tsv or parquet file, a folder, a glob, a list of them, or rows
    eval: Any = None  # None: a fraction of the training rows (eval_fraction)
    batch_size: int = 16  # rows per step
    sequence_length: int = 256  # largest number of tokens of a row
    eval_fraction: float = 0.05  # fraction of the training rows held out if data.eval is not given
    shuffle: bool = True
    cache: str | None = None  # folder of trained tokenizers; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        check_least("data", self, 1, "batch_size", "sequence_length")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


class RaggedTokens:
    """Token sequences in one array, with their offsets."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        chosen = list(sequences)
        self.lengths = np.array([len(each) for each in chosen], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), self.lengths.cumsum()])
        self._tokens = np.fromiter((token for each in chosen for token in each), np.uint32, int(self._starts[-1]))

    def row(self, index: int) -> NDArray[np.int64]:
        """The tokens of a sequence."""
        return self._tokens[self._starts[index] : self._starts[index + 1]].astype(np.int64)

    def padded(self, rows: NDArray[np.int64], pad_id: int) -> Tensor:
        """Sequences [B, T] padded on the right; without rows, one of padding."""
        longest = int(self.lengths[rows].max()) if len(rows) else 1
        tokens = torch.full((max(len(rows), 1), longest), pad_id)
        for row, index in enumerate(rows):
            own = self.row(index)
            tokens[row, : len(own)] = torch.from_numpy(own)
        return tokens

    def identity(self) -> tuple[bytes, bytes]:
        """What a fingerprint is made of."""
        return self._tokens.tobytes(), self.lengths.tobytes()


class SplitRows(ABC):
    """Rows of a split."""

    fingerprint: str  # of the rows and their labels
    lengths: NDArray[np.int64]  # tokens of each row, by which rows of like lengths share a micro-batch

    def __len__(self) -> int:
        return len(self.lengths)

    @abstractmethod
    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The tensors of some rows; without rows, those of one that does not count."""


RowT = TypeVar("RowT")
RowsT = TypeVar("RowsT", bound=SplitRows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplits(Generic[RowsT]):
    """Training and evaluation rows, and the names of their labels; none of rows that are not labelled."""

    train: RowsT
    eval: RowsT  # may be empty
    labels: tuple[Any, ...] = ()
    problem_type: ProblemType = "single_label_classification"

    @property
    def fingerprint(self) -> str:
        """Of all rows."""
        own = (self.train.fingerprint, self.eval.fingerprint)
        return fingerprint_of(*own, self.labels) if self.labels else fingerprint_of(*own)


def hold_out(
    rows: Sequence[RowT], held: Sequence[RowT] | None, fraction: float, seed: int
) -> tuple[Sequence[RowT], Sequence[RowT]]:
    """Training and evaluation rows. Without evaluation rows, a fraction of the training rows is held out."""
    if held is not None:
        return rows, held
    kept, held_out = train_eval_split(len(rows), fraction, seed)
    return [rows[index] for index in kept], [rows[index] for index in held_out]


class RowTask(DatasetTask, ABC):
    """Batches of rows, of which those of like lengths share a micro-batch. A micro-batch is that of
    `SplitRows.batch`, with the numbers of its samples and of the step."""

    # Tokens of a micro-batch on a CPU without trainer.micro_batch_size; None: the whole batch.
    MAX_TOKENS: ClassVar[int | None] = CPU_TOKENS

    def __init__(
        self, options: NetworkOptions, data: RowSplits[Any], build: Callable[[World], nn.Module], world: World
    ) -> None:
        self._options, self._rows = options, data
        schedule = batch_schedule(
            options,
            world,
            num_rows=len(data.train),
            batch_size=options.data.batch_size,
            shuffle=options.data.shuffle,
            max_tokens=self.MAX_TOKENS if world.device_type == "cpu" else None,
        )
        super().__init__(options, build, world, schedule, {"rows": data.fingerprint}, len(data.eval))

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """Batches from the cursor on, made ready in the background; rows of like lengths share a micro-batch."""
        batches = enumerate(self._schedule.batches(cursor.samples), start=cursor.step)
        made = (self._micro_batches(self._rows.train, batch.rows, batch.start, step) for step, batch in batches)
        with BackgroundPrefetcher(made) as prefetched:
            yield from prefetched

    def eval_micro_batches(self, model: nn.Module) -> Iterator[MicroBatch]:
        for batch in self._schedule.eval_batches(len(self._rows.eval)):
            yield from self._micro_batches(self._rows.eval, batch, 0, 0)

    def _micro_batches(self, rows: SplitRows, indices: NDArray[np.int64], first: int, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of the rows of a step, whose samples are counted from `first` on."""
        found: list[MicroBatch] = []
        for part in self._schedule.length_buckets(rows.lengths[indices].tolist()):
            samples = torch.from_numpy(first + part) if len(part) else torch.full((1,), -1)
            found.append({**rows.batch(indices[part]), "samples": samples, "step": step})
        return found


class ClassifierTask(RowTask, ABC):
    """Cross entropy of labels over rows; binary, and a mean over the labels, where a row may have several; the mean
    squared error of numbers in a regression. `count` and `logits` are those of the task."""

    @abstractmethod
    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, labels], labels [B] and weights [B] on the device; of several labels a row, zeros and ones
        [B, labels]; of a regression, numbers [B, labels]."""

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of cross entropies and of right answers, or of squared errors."""
        dropout_key = self.dropout_key(micro_batch) if model.training else None
        logits, labels, weights = self.logits(model, micro_batch, dropout_key)
        if self._rows.problem_type == "regression":
            return {"loss": ((logits - labels).square().mean(-1) * weights).sum()}
        losses, right = losses_of(logits, labels), rightness(logits.detach(), labels).to(weights)
        return {"loss": (losses * weights).sum(), "accuracy": (right * weights).sum()}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss, eval/accuracy and eval/f1 (macro) over all evaluation rows; independent of the batch size. Of rows
        with several labels, those that are right have all of them. Of a regression eval/loss, eval/mse, which is the
        same, and eval/pearson, a mean over the outputs."""
        if not self._num_eval_rows:
            return {}
        if self._rows.problem_type == "regression":
            return self._evaluate_numbers(model)
        size = len(self._rows.labels)
        total, confusion = torch.zeros((), dtype=torch.float64), torch.zeros(size, size, dtype=torch.float64)
        several = torch.zeros(2 + 3 * size, dtype=torch.float64)
        with self.shown(self.eval_micro_batches(model)) as batches:
            for micro_batch in batches:
                logits, labels, weights = self.logits(model, micro_batch, None)
                total += (losses_of(logits, labels) * weights).sum().double().cpu()
                if labels.dim() == 2:
                    several += _counts_of(logits, labels, weights)
                    continue
                pairs = (labels * size + logits.argmax(-1)).cpu()
                confusion.view(-1).index_add_(0, pairs, weights.double().cpu())
        summed = self._world.sum({"sums": torch.cat([total.view(1), confusion.flatten(), several])})["sums"]
        confusion, several = summed[1 : -len(several)].view(confusion.shape), summed[-len(several) :]
        found = metrics_of(summed[0], confusion) if several[0] == 0 else _metrics_of_several(summed[0], several)
        return {f"eval/{name}": value for name, value in found.items()}

    def _evaluate_numbers(self, model: nn.Module) -> dict[str, float]:
        sums = torch.zeros(7, len(self._rows.labels), dtype=torch.float64)
        with self.shown(self.eval_micro_batches(model)) as batches:
            for micro_batch in batches:
                logits, labels, weights = (each.double().cpu() for each in self.logits(model, micro_batch, None))
                parts = [torch.ones_like(logits), (logits - labels).square(), logits, labels]
                parts += [logits.square(), labels.square(), logits * labels]
                sums += torch.stack([(each * weights.unsqueeze(1)).sum(0) for each in parts])
        found = self._world.sum({"sums": sums})["sums"]
        error = float((found[1] / found[0]).mean())
        return {"eval/loss": error, "eval/mse": error, "eval/pearson": float(_correlations(found).mean())}


def _correlations(sums: Tensor) -> Tensor:
    """Pearson's correlation of each output [labels] with its numbers, 0 where either does not vary; from the sums of
    `_evaluate_numbers`."""
    means = sums[2:] / sums[0]
    variances = (means[2:4] - means[:2].square()).clamp(min=0)
    covariance = means[4] - means[0] * means[1]
    # Smaller ones are rounding.
    varies = (variances > 1e-12 * means[2:4]).all(0)
    return torch.where(varies, covariance / variances.prod(0).sqrt(), 0.0).clamp(-1, 1)


def metrics_of(loss: Tensor, confusion: Tensor) -> dict[str, float]:
    """Mean loss, accuracy, and the unweighted mean of the labels' F1 (a label that neither occurs nor is predicted is
    left out), from the sum of losses and the counts [label, prediction]."""
    count, right = confusion.sum(), confusion.diagonal()
    both = confusion.sum(0) + confusion.sum(1)
    f1 = (2 * right / both)[both > 0]
    return {"loss": float(loss / count), "accuracy": float(right.sum() / count), "f1": float(f1.mean())}


def _counts_of(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Of rows with several labels: rows, right rows, and of each label right predictions, predictions and rows that
    have it [2 + 3 labels]."""
    exact = weights.double()
    wanted, predicted = ((each.double() * exact.unsqueeze(1)) for each in (labels > 0.5, logits > 0))
    rows = torch.stack([exact.sum(), (rightness(logits, labels) * exact).sum()])
    return torch.cat([rows, *(each.sum(0) for each in (torch.minimum(wanted, predicted), predicted, wanted))]).cpu()


def _metrics_of_several(loss: Tensor, counts: Tensor) -> dict[str, float]:
    """`metrics_of` of rows with several labels, from the sums of `_counts_of`."""
    right, predictions, occurrences = counts[2:].view(3, -1)
    both = predictions + occurrences
    f1 = (2 * right / both)[both > 0]
    return {"loss": float(loss / counts[0]), "accuracy": float(counts[1] / counts[0]), "f1": float(f1.mean())}


def fitting_tokens(longest: int, on_too_long: str, tokens: Sequence[int], name: str) -> Sequence[int]:
    """The tokens of a text for which the model has room. Raises DataError for a text without tokens, or with more
    unless it is to be cut."""
    if not tokens or (len(tokens) > longest and on_too_long == "refuse"):
        got, fix = f"{len(tokens)} tokens", "shorten it, or add data.on_too_long=cut_right"
        raise DataError(f"{name} does not fit into the model", got=got, expected=f"1 to {longest}", fix=fix)
    return tokens[:longest]


def last_token(row: Sequence[int], pad_id: int | None) -> int:
    """The position whose output classifies a row: as in transformers that of the last token other than `pad_id`, which
    may also be what a tokenizer ends a text with. None: the last one."""
    kept = (number for number in reversed(range(len(row))) if row[number] != pad_id)
    return next(kept, 0)


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy [B] of rows; see `ClassifierTask.logits`."""
    if labels.dim() == 1:
        return functional.cross_entropy(logits, labels, reduction="none")
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)


def rightness(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether a row's label is the likeliest, or each of several is likelier than not [B]."""
    return logits.argmax(-1) == labels if labels.dim() == 1 else ((logits > 0) == (labels > 0.5)).all(-1)


def label_probabilities(logits: Tensor, problem_type: ProblemType) -> Tensor:
    """The scores [B, labels] that transformers' pipelines give: of labels that exclude one another, of each label on
    its own or of a single one, or the numbers of a regression."""
    if problem_type == "regression":
        return logits
    is_own = problem_type == "multi_label_classification" or logits.shape[-1] == 1
    return logits.sigmoid() if is_own else logits.softmax(-1)
