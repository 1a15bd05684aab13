"""What the tasks share that put a linear head on a language model: options, rows with labels, the head, and the loss.

B rows, T tokens, C labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.sharding import Sharding, ShardingRule
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import fingerprint_of, missing_column
from kitforge.data.labels import ProblemType
from kitforge.data.source import open_rows
from kitforge.data.tokenizer import TokenizerConfig
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.transformers.rows import ClassifierTask, TokenizedRows
from kitforge.kits.transformers.task import EMBEDDINGS
from kitforge.models.sharding import sharding_of_network
from kitforge.trainer.options import RunOptions

BACKBONE, HEAD, HEAD_BIAS = "backbone.", "score.weight", "score.bias"
RowsT = TypeVar("RowsT", bound=TokenizedRows)
TargetT = TypeVar("TargetT")
_log = logger(__name__)


class LabelledRowOptions(Protocol):
    """What the data options of these tasks have."""

    @property
    def train(self) -> Any:
        """Rows of training."""
        ...

    @property
    def eval(self) -> Any:
        """Rows of evaluation."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows per step."""
        ...

    @property
    def shuffle(self) -> bool:
        """Whether the order is random."""
        ...

    @property
    def sequence_length(self) -> int:
        """Largest number of tokens of a row."""
        ...

    @property
    def on_too_long(self) -> Literal["refuse", "cut_right"]:
        """What becomes of longer rows."""
        ...

    @property
    def on_invalid(self) -> Literal["refuse", "skip"]:
        """What becomes of rows that cannot be used."""
        ...

    @property
    def cache(self) -> str | None:
        """Folder of caches."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LabellingOptions(RunOptions, ABC):
    """Options of a task with a head over labels; its `data` are those of the task."""

    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: Any = None
    # null: that of the checkpoint; else of several labels a row where all labels are lists. regression: numbers.
    problem_type: ProblemType | None = None
    labels: tuple[str, ...] = ()  # in the order of the logits; null: those of the checkpoint, else of the training rows
    lora: LoraOptions = field(default_factory=LoraOptions)
    freeze: tuple[str, ...] = ()  # parameters that are not trained, as patterns: ["backbone.embedding.*"]
    # Run, folder, .gguf file, named checkpoint (`kitforge models`) or Hub id (NAME/MODEL@REVISION) with the weights.
    checkpoint: str | None = None
    format: Literal["huggingface", "onnx", "torch_export"] = "huggingface"  # of `export`
    output: str | None = None  # jsonl file of `predict`

    def __post_init__(self) -> None:
        self.lora.check_parallel(self.parallel)
        is_one = not (self.freeze and self.lora.is_on)
        check(is_one, "freeze", list(self.freeze), "nothing with lora.rank, which freezes all weights")
        least = 1 if self.problem_type == "regression" else 2
        is_sound = len(set(self.labels)) == len(self.labels) and (not self.labels or len(self.labels) >= least)
        check(is_sound, "labels", list(self.labels), "two or more, all distinct; one with problem_type=regression")
        degrees = self.parallel
        is_whole = degrees.tensor == 1 or not degrees.sequence_parallel
        fix = "add parallel.sequence_parallel=false"
        check(is_whole, "parallel.sequence_parallel", True, "false for rows of any length", fix)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledData(Generic[RowsT]):
    """Training and evaluation rows, and the names of their labels."""

    train: RowsT
    eval: RowsT
    labels: tuple[str, ...]
    pad_id: int
    problem_type: ProblemType = "single_label_classification"

    @property
    def fingerprint(self) -> str:
        """Of all rows."""
        return fingerprint_of(cast(Any, self.train).fingerprint, cast(Any, self.eval).fingerprint, self.labels)


def read_rows(
    spec: object, read: Callable[[object, object], tuple[list[int], TargetT]], data: LabelledRowOptions
) -> list[tuple[object, list[int], TargetT]]:
    """Location, tokens and target of every row; `read` gives the latter two of a row and its location, and raises
    DataError for one that cannot be used."""
    found: list[tuple[object, list[int], TargetT]] = []
    num_skipped = num_cut = 0
    located = (pair for shard in (open_rows(spec) if spec is not None else ()) for pair in shard.rows())
    for location, row in located:
        try:
            tokens, target = read(row, location)
        except DataError:
            if data.on_invalid == "refuse":
                raise
            num_skipped += 1
            continue
        is_long = len(tokens) > data.sequence_length
        if is_long and data.on_too_long == "refuse":
            got, expected = f"{len(tokens)} tokens", f"at most data.sequence_length={data.sequence_length}"
            fix = "raise data.sequence_length, or add data.on_too_long=cut_right"
            raise DataError(f"{location} is too long", got=got, expected=expected, fix=fix)
        num_cut += is_long
        found.append((location, tokens[: data.sequence_length], target))
    if spec is not None and not found:
        raise DataError("there are no labelled rows", got=f"{num_skipped} unusable ones", expected="at least one")
    if num_skipped or num_cut:
        _log.warning("%d rows: %d more were skipped, %d were cut", len(found), num_skipped, num_cut)
    return found


def column(row: object, name: str, location: object) -> Any:
    """The value of a column of a row."""
    values = row if isinstance(row, dict) else {}
    if name not in values:
        raise missing_column(name, map(str, values), location)
    return values[name]


class HeadedModel(nn.Module, ABC):
    """A decoder with a linear head [C, dim]; `logits_at` is its forward pass in training."""

    has_bias = False

    def __init__(
        self, backbone: nn.Module, labels: Sequence[str], problem_type: ProblemType = "single_label_classification"
    ) -> None:
        super().__init__()
        self.problem_type = problem_type
        # The padding token of a published folder; False: that of the tokenizer.
        self.pad_id: int | None | Literal[False] = False
        like = cast(CausalLM, backbone).head_weight
        self.backbone = backbone
        self.labels = tuple(labels)
        dim = cast(CausalLM, backbone).geometry.dim
        self.score = nn.Linear(dim, len(self.labels), bias=self.has_bias, device=like.device, dtype=like.dtype)

    @abstractmethod
    def logits_at(self, *inputs: Any) -> Tensor:
        """Logits [B, C], or [B T, C] of all tokens, of the inputs of the task."""


def initial_head(num_labels: int, dim: int, seed: int) -> Tensor:
    """The first weights [C, dim] of a head, with standard deviation 0.02."""
    return torch.randn((num_labels, dim), generator=seeds.generator(seed, "init", HEAD)) * 0.02


def sharding_of_classifier(model: HeadedModel) -> Sharding:
    """How a classifier is sharded. The head is replicated, and so is its gradient."""
    backbone = sharding_of_network(model.backbone).with_prefix("backbone")
    score = Sharding(rules=(ShardingRule(module="score", gradient="whole"),) if backbone.rules else ())
    merged = backbone.merged_with(score)
    return Sharding(rules=merged.rules, divisible=merged.divisible, fsdp_roots={"": ("logits_at",)})


class HeadedTask(ClassifierTask, ABC):
    """Cross entropy of labels that a head gives."""

    def __init__(
        self,
        options: LabellingOptions,
        data: LabelledData[Any],
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        rows = options.data
        super().__init__(options, data, build, world, batch_size=rows.batch_size, shuffle=rows.shuffle)
        self._data = data
        self.num_labels = len(data.labels)
        self.problem_type = data.problem_type

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Weight decay for matrices only: not for embeddings, norms and biases."""
        names = [name for name, _ in model.named_parameters()]
        tables = [name for name in names if name.removeprefix(BACKBONE) in EMBEDDINGS]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables, heads=[HEAD])
