"""The options of the task `recommendation`. Built from a plain dict, without Hydra."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.nn.embedding_spec import TableKind
from kitforge.core.optim.build import OptimizerConfig
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, SparseOptimizerName
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.tables.bad_rows import DecimalMark
from kitforge.data.tables.source import TableFormat
from kitforge.data.tables.split import SplitRule
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions, PolicyOptions, RemoteOptions
from kitforge.embedding_cache.serving.table import ServingDtype
from kitforge.embedding_cache.sharding.planner import ShardingType
from kitforge.foundation.config import INTERNAL, check, check_least
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.types import OnInvalid
from kitforge.inference.server.options import HttpOptions
from kitforge.trainer.options import RunOptions, TrainerOptions

TASK = "recommendation"
MIN_BATCH, MAX_BATCH = 64, 4096
# Steps of an epoch over a small table: with fewer, the first samples weigh too much.
TARGET_STEPS = 256
WIDE_RATE = 0.1
# Default epochs by the number of training rows (at most this many); one epoch above. A second epoch over many rows
# overfits the embeddings of rare ids.
PASSES = ((200_000, 4.0), (1_000_000, 2.0))
# Families that combine embeddings by crosses, products or attention overfit from the third epoch on also over few rows
# ("one-epoch phenomenon", Zhang et al., 2022): on 8,000 rows of Criteo, the log loss of DLRM after four epochs is above
# that of the base rate. The preset of Wide & Deep, smaller and with dropout, loses little there. With sampled
# negatives, which each epoch draws anew, these families rank better after four epochs.
INTERACTION_PASSES = ((1_000_000, 2.0),)
INTERACTION_FAMILIES = frozenset({"dlrm", "dcn_v2", "deepfm", "din"})
# Default epochs by the number of sequences, each epoch with other negatives, and the smallest batch: a sequence
# holds as many samples as items.
SEQUENCE_PASSES = ((10_000, 50.0), (math.inf, 10.0))
SMALLEST_SEQUENCE_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTrainerOptions(TrainerOptions):
    """Those of a recommender, which has no blocks to compute again."""

    activation_checkpointing: Recompute | bool = field(default="none", init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions(ParallelConfig):
    """The axes of a recommender: its network is small, and its embedding rows are sharded over all ranks anyway."""

    tensor: int = field(default=1, init=False)
    context: int = field(default=1, init=False)
    context_by: Literal["heads", "keys"] = field(default="heads", init=False)
    pipeline: int = field(default=1, init=False)
    expert: int = field(default=1, init=False)
    sequence_parallel: bool = field(default=True, init=False)
    zero_stage: Literal[1, 2, 3] = field(default=3, init=False)
    copies: Literal[1, 2] = field(default=1, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeOptions:
    """Negative sampling for families that score rows: every row is a positive. Negatives are drawn anew at each step,
    and once for evaluation."""

    num_negatives: int = 0  # negatives per row (rows get label 1, negatives 0); 0: rows have labels
    # Distribution over the items of the training rows: uniform, or by frequency. Streams draw from the step.
    negative_sampling: Literal["uniform", "popularity"] = "uniform"
    item: str | None = None  # the item feature; None: that of data.schema.events
    item_features: tuple[str, ...] = ()  # further features of the item, drawn with it
    # Exclude items that the user (data.schema.group, or the user of data.schema.events) has taken. Needs 8 bytes
    # for each pair of user and item in the training rows.
    exclude_seen: bool = True

    def __post_init__(self) -> None:
        check_least("data.negatives", self, 0, "num_negatives")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationDataOptions:
    """Training and evaluation rows, their schema, and batching."""

    train: Any = None  # click_log, a file, a folder, a glob, or a list of them; None: click_log
    eval: Any = None  # None: a fraction of the training rows (eval_fraction)
    # Features and their columns: a YAML file or its content; None: inferred from the table.
    schema: dict[str, Any] | str | None = None
    # Without a schema: the column of the label, and the value of it that counts as 1. None: guessed by name, place and
    # values; what they do not say is an error.
    label: str | None = None
    positive: str | int | float | bool | None = None
    format: TableFormat = "auto"  # auto: by the suffix and the first line
    columns: tuple[str, ...] | None = None  # column names of a csv or tsv file without a header
    # Delimiter of a csv or tsv file. None: a tab for tsv; for csv, the one of , ; | and tab that splits the first line
    # into most cells.
    delimiter: str | None = None
    missing_values: tuple[str, ...] = ()  # texts that mean a missing value, besides an empty cell
    # Decimal mark of numbers written as text. auto: a comma in a csv file with ; that has one; else what a cell
    # shows (1.5, 12,5, 1,250.5); one that may be either (1,250) is a bad row.
    decimal: DecimalMark = "auto"
    negatives: NegativeOptions = field(default_factory=NegativeOptions)
    batch_size: int | None = None  # samples per step; None: rows / 256, from 64 (sequences: 16) to 4096
    eval_fraction: float = 0.05  # fraction of the training rows held out for evaluation if data.eval is not given
    split: SplitRule = "random"  # held-out rows: random, the last, whole groups, or the newest
    # For split=time: a column of numbers, dates or ISO 8601 texts; None: the time of data.schema.events.
    time_column: str | None = None
    on_invalid: OnInvalid = "refuse"  # skip: leave bad rows out, count and log them
    shuffle: bool = True
    prefetch: int = 2  # batches prepared ahead in the background
    # First rows of a stream that the features are fitted on before the first step; at most the rows of the run. They
    # are trained on as well.
    num_fit_rows: int = 10_000
    num_workers: int | None = None  # threads that parse files; None: one per core, up to four
    cache: str | None = None  # folder of column caches; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        check_least("data", self, 1, "batch_size", "prefetch", "num_fit_rows", "num_workers")
        is_given = self.schema is not None and (self.label, self.positive) != (None, None)
        name = "data.label" if self.label is not None else "data.positive"
        check(not is_given, name, self.label or self.positive, "null beside data.schema, whose label says both")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")

    @property
    def step_size(self) -> int:
        """Samples per step; MAX_BATCH if unknown."""
        return self.batch_size or MAX_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepOptimizerConfig(SparseOptimizerConfig):
    """Optimizer of embedding rows."""

    name: SparseOptimizerName = "lazy_adam"
    learning_rate: float | None = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class WideOptimizerConfig(SparseOptimizerConfig):
    """Optimizer of the wide part: FTRL keeps uninformative weights at zero (McMahan et al., 2013)."""

    name: SparseOptimizerName = "ftrl"
    # None: by the number of rows: 0.035 for ten thousand, 0.3 for a million.
    learning_rate: float | None = None
    # 0: by the batch size: an id seen once gets 1 / batch_size of the gradient.
    initial_sum: float = 0.0
    l1: float = 1e-8
    l2: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTableOptions:
    """Initialization, pooling, optimizers and serving dtype of embedding tables."""

    deep: DeepOptimizerConfig = field(default_factory=DeepOptimizerConfig)
    wide: WideOptimizerConfig = field(default_factory=WideOptimizerConfig)
    pooling: Literal["sum", "mean"] = "sum"  # of the vectors of a bag (multi-hot feature)
    init_std: float = 0.01  # standard deviation of initial deep rows; wide rows begin at zero
    # Row format of pipelines, converted once into RUN/serving; None: as trained.
    serving_dtype: ServingDtype | None = None

    def __post_init__(self) -> None:
        check(0 <= self.init_std < math.inf, "tables.init_std", self.init_std, "0 or more")

    def optimizer_of(self, kind: TableKind) -> SparseOptimizerConfig:
        """The optimizer of a table of that kind."""
        return self.wide if kind == "wide" else self.deep


@dataclass(frozen=True, slots=True, kw_only=True)
class CountOptions(AdmissionOptions):
    """Admission of all ids, or by their count."""

    name: Literal["always", "count"] = "always"
    probability: float = field(default=0.1, init=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Cache tiers and sharding of the embedding tables. They do not change results."""

    device_rows: int | None = None  # rows of each table in the device tier; None: all
    host_rows: int | None = None  # rows of each table in host memory; None: all, if there is no file tier
    path: str | None = None  # folder of the file tier
    # redis:// or rediss:// URL of the remote tier. User and password are not recorded; the password may also be in
    # $KITFORGE_REMOTE_PASSWORD.
    remote: str | None = None
    remote_prefix: str = "kitforge"  # key prefix in the store; concurrent runs need different ones
    remote_ca_file: str | None = None  # rediss: CA certificates; None: those of the system
    prefetch_batches: int = 0  # batches whose rows are prefetched; 0: none
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    admission: CountOptions = field(default_factory=CountOptions)
    expiry: ExpiryOptions = field(default_factory=ExpiryOptions)
    # A batch with more distinct rows than device_rows is an error.
    fail_on_overflow: bool = field(default=False, metadata=INTERNAL)
    # Sharding over ranks: row-wise, column-wise, table-wise or replicated; for all tables, or by table name. auto: by
    # size and by rows per step.
    placement: ShardingType | Literal["auto"] | dict[str, ShardingType | Literal["auto"]] = "auto"

    def __post_init__(self) -> None:
        check_least("cache", self, 0, "prefetch_batches")
        fix = "leave cache.path out: host memory holds what is above the remote"
        check(not (self.path and self.remote), "cache.path", self.path, "null with cache.remote", fix)
        self.server()

    def server(self) -> RemoteOptions | None:
        """The server of the remote tier; None without one. Raises ConfigError for an invalid URL."""
        if self.remote is None:
            return None
        return RemoteOptions(url=self.remote, prefix=self.remote_prefix, ca_file=self.remote_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions:
    """Training, evaluation and index of retrieval families."""

    num_negatives: int = 512  # sasrec: negatives per step, shared by all its samples
    top_k: int = 10  # k of the HR@k that selects the best model; HR@k and NDCG@k of 1, 5, 10, 20 are logged too
    # Exclude items of the user's history from retrieval and ranking: for sasrec the sequence, for two_tower the
    # sequences of model.user that share the item's table, up to max_length items back.
    exclude_seen: bool = False
    index: str = "Flat"  # faiss index_factory string; Flat is exact
    nprobe: int | None = None  # IVF indexes: clusters searched; None: faiss's default of 1
    ef_search: int | None = None  # HNSW indexes: candidates kept; None: faiss's default of 16

    def __post_init__(self) -> None:
        check_least("retrieval", self, 1, "num_negatives", "nprobe", "ef_search", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """Output of `kitforge predict`."""

    top_k: int = 10  # items per row, for retrieval families
    columns: tuple[str, ...] | None = None  # input columns to keep in the output; None: all

    def __post_init__(self) -> None:
        check_least("predict", self, 1, "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommenderServeOptions(HttpOptions):
    """HTTP options, dynamic batching, and refresh from newer checkpoints."""

    max_rows: int = 1024  # rows or users per request
    max_batch_rows: int = 4096  # rows per batch over all requests; a larger request runs alone
    max_wait_ms: float = 1.0  # milliseconds that the first request of a batch waits for more
    # Limit of k, and of excluded items per request.
    max_top_k: int = field(default=1000, metadata=INTERNAL)
    # Seconds between checks for a newer checkpoint of the run, which is then served; null: never.
    refresh_seconds: float | None = None

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        check_least("serve", self, 1, "max_rows", "max_batch_rows", "max_top_k")
        check(self.max_wait_ms >= 0, "serve.max_wait_ms", self.max_wait_ms, "milliseconds, at least 0")
        seconds = self.refresh_seconds
        check(seconds is None or seconds > 0, "serve.refresh_seconds", seconds, "seconds above 0, or null")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationOptions(RunOptions):
    """All options of the task."""

    task: str = TASK
    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    trainer: TableTrainerOptions = field(default_factory=TableTrainerOptions)
    parallel: ReplicaOptions = field(default_factory=ReplicaOptions)
    dtype: ExportDtype | None = field(default=None, init=False)  # what it writes stays in fp32
    # Of the dense weights; `tables` has those of embedding rows.
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.999))
    )
    data: RecommendationDataOptions = field(default_factory=RecommendationDataOptions)
    tables: EmbeddingTableOptions = field(default_factory=EmbeddingTableOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    retrieval: RetrievalOptions = field(default_factory=RetrievalOptions)
    predict: PredictOptions = field(default_factory=PredictOptions)
    checkpoint: str | None = None  # weights and rows to start from, or to evaluate
    output: str | None = None  # file that `predict` writes: .csv, .jsonl or .parquet; or `export`: .pt2
    # Format of `export`: index (of items, into output_dir) or torch_export (the network, to output).
    format: Literal["index", "torch_export"] = "index"
    # Whether the options are those of the run under `checkpoint`, with the given ones over them.
    inherits_run: bool = field(default=False, metadata=INTERNAL)
    port: int = 8000  # port of `serve`; 0: any free port
    serve: RecommenderServeOptions = field(default_factory=RecommenderServeOptions)

    def __post_init__(self) -> None:
        check(0 <= self.port < 65536, "port", self.port, "0 to 65535")

    @property
    def summary(self) -> str | None:
        """The learning rates of the run, as logged at its start."""
        wide = self.tables.wide.learning_rate
        rates = f"learning rates: {self.optimizer.learning_rate:.3g}"
        rates += "" if self.tables.deep.learning_rate is None else f", vectors {self.tables.deep.learning_rate:.3g}"
        return rates + ("" if wide is None else f", wide weights {wide:.3g}")


def with_size_defaults(options: RecommendationOptions, num_rows: int | None, family: str) -> RecommendationOptions:
    """The options with defaults that depend on the number of training rows (None: unknown): batch size, epochs and the
    optimizer of the wide part."""
    size, trainer, wide = options.data.step_size, options.trainer, options.tables.wide
    if options.data.batch_size is None and num_rows is not None:
        smallest = SMALLEST_SEQUENCE_BATCH if family == "sasrec" else MIN_BATCH
        size = min(max(2 ** (num_rows // TARGET_STEPS).bit_length() // 2, smallest), MAX_BATCH)
    if num_rows is not None and trainer.max_steps == trainer.epochs is None:
        trainer = replace(trainer, epochs=_default_epochs(options, num_rows, family))
    if wide.learning_rate is None:
        rate = WIDE_RATE if num_rows is None else min(0.00035 * num_rows**0.5, 0.3)
        wide = replace(wide, learning_rate=rate)
    if wide.initial_sum == 0 and wide.learning_rate is not None:
        # In units of one sample's gradient: a weight seen once moves by a fourth of its gradient, like logistic
        # regression with a Gaussian prior. For frequent weights the value has no effect.
        wide = replace(wide, initial_sum=(4 * wide.learning_rate / size) ** 2)
    data, tables = replace(options.data, batch_size=size), replace(options.tables, wide=wide)
    return replace(options, data=data, trainer=trainer, tables=tables)


def _default_epochs(options: RecommendationOptions, num_rows: int, family: str) -> float:
    """Epochs over that many training rows, if neither epochs nor steps are given."""
    known: tuple[tuple[float, float], ...] = PASSES
    if family in INTERACTION_FAMILIES and options.data.negatives.num_negatives == 0:
        known = INTERACTION_PASSES
    elif family == "sasrec":
        known = SEQUENCE_PASSES
    return next((passes for most, passes in known if num_rows <= most), 1.0)
