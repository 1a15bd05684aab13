"""The options of the task `recommendation`. Built from a plain dict, without Hydra."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kitforge.core.nn.embedding_spec import TableKind
from kitforge.core.optim.build import OptimizerConfig
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, SparseOptimizerName
from kitforge.data.tables.bad_rows import OnBadRow
from kitforge.data.tables.source import TableFormat
from kitforge.data.tables.split import SplitRule
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions, PolicyOptions, RemoteOptions
from kitforge.embedding_cache.serving.table import ServingDtype
from kitforge.embedding_cache.sharding.planner import ShardingType
from kitforge.foundation.config import check
from kitforge.inference.server.options import HttpOptions
from kitforge.trainer.options import RunOptions

TASK = "recommendation"
MIN_BATCH, MAX_BATCH = 64, 4096
# Steps of a pass over a small table: with fewer, what is learned first decides too much.
TARGET_STEPS = 256
WIDE_RATE = 0.1
# Passes over as many training rows as that, or fewer, where nobody says how long; of more rows, one. Few rows are
# learned in several passes at a low rate; many are learned in one, and a second makes vectors of rare ids fit noise.
PASSES = ((200_000, 4.0), (1_000_000, 2.0))
# Passes over as many sequences or fewer, each of which sees all items with other negatives, and the least of a batch: a
# sequence is as many samples as it has items.
SEQUENCE_PASSES = ((10_000, 50.0), (math.inf, 10.0))
SMALLEST_SEQUENCE_BATCH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NegativeOptions:
    """Negative sampling, for families that score rows: every row is a positive, and items are drawn beside it. They are
    drawn anew at each step, by the seed; for evaluation once."""

    num_negatives: int = 0  # items drawn beside each row, whose label is 1 then; theirs are 0. 0: rows have labels
    # From the items of the training rows: each is as likely, or by how often it was taken; of a stream among the items
    # of the step.
    negative_sampling: Literal["uniform", "popularity"] = "uniform"
    item: str | None = None  # the feature that holds the item; None: that of data.schema.events
    item_features: tuple[str, ...] = ()  # further features of the item, drawn with it
    # Draw no item that the user (data.schema.group, or the user of data.schema.events) is known to have taken. Takes 8
    # bytes for each pair of a user and an item of the training rows.
    exclude_seen: bool = True

    def __post_init__(self) -> None:
        name = "data.negatives.num_negatives"
        check(self.num_negatives >= 0, name, self.num_negatives, "a whole number of at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationDataOptions:
    """Which rows, what they mean, and how they are cut into batches."""

    train: Any = None  # click_log, a file, a folder, a glob, or a list of them; None: click_log
    eval: Any = None  # None: a share of the training rows
    # Which columns become which features: a YAML file, or what it would hold; None: guessed.
    schema: dict[str, Any] | str | None = None
    format: TableFormat = "auto"  # auto: by the suffix and the first line
    columns: tuple[str, ...] | None = None  # names for a csv or tsv file without a header
    # Between the cells of a csv or tsv file; None: what cuts the first line of a csv file into most cells, of , ; | and
    # tabs; a tab in a tsv file.
    delimiter: str | None = None
    missing_values: tuple[str, ...] = ()  # texts that stand for no value, besides an empty cell
    negatives: NegativeOptions = field(default_factory=NegativeOptions)
    batch_size: int | None = None  # samples of a step; None: a 256th of the rows, from 64 (sequences: 16) to 4096
    eval_fraction: float = 0.05  # share of the training rows kept for evaluation where data.eval is not given
    split: SplitRule = "random"  # which rows those are: random, the last ones, all rows of some groups, the newest ones
    # Of split=time: a column of numbers, dates or ISO 8601 texts; None: the time of data.schema.events.
    time_column: str | None = None
    on_bad_row: OnBadRow = "error"  # skip: left out, counted and told
    shuffle: bool = True
    prefetch: int = 2  # batches made ready ahead
    # Rows of a stream that its features are fitted on, and that are waited for before the first step; no more than the
    # run trains on. They are trained on as well.
    num_fit_rows: int = 10_000
    num_workers: int | None = None  # threads that parse files; None: one per core, up to four
    cache: str | None = None  # folder of column caches; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        for name in ("batch_size", "prefetch", "num_fit_rows"):
            value = getattr(self, name)
            check(value is None or value > 0, f"data.{name}", value, "a whole number of at least 1")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")

    @property
    def step_size(self) -> int:
        """Samples of a step; the largest where nobody has said."""
        return self.batch_size or MAX_BATCH


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepOptimizerConfig(SparseOptimizerConfig):
    """How rows of vectors move."""

    name: SparseOptimizerName = "lazy_adam"
    learning_rate: float | None = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class WideOptimizerConfig(SparseOptimizerConfig):
    """How weights of the wide part move: FTRL leaves those that say little at zero (McMahan et al., 2013)."""

    name: SparseOptimizerName = "ftrl"
    # None: by the number of rows, since many say more of each weight: 0.035 for ten thousand, 0.3 for a million.
    learning_rate: float | None = None
    # 0: by the size of a batch, since what is seen once has one sample's share of a gradient.
    initial_sum: float = 0.0
    l1: float = 1e-8
    l2: float = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTableOptions:
    """How rows of embedding tables begin, how bags of them are put together, and how they move."""

    deep: DeepOptimizerConfig = field(default_factory=DeepOptimizerConfig)
    wide: WideOptimizerConfig = field(default_factory=WideOptimizerConfig)
    pooling: Literal["sum", "mean"] = "sum"  # of the vectors of a bag
    init_std: float = 0.01  # deviation of the numbers that deep rows begin with; wide ones begin at zero
    # What a pipeline reads rows as, from files that it makes once in RUN/serving; None: as training left them.
    serving_dtype: ServingDtype | None = None

    def __post_init__(self) -> None:
        check(0 <= self.init_std < math.inf, "tables.init_std", self.init_std, "0 or more")

    def optimizer_of(self, kind: TableKind) -> SparseOptimizerConfig:
        """How rows of a table of that kind move."""
        return self.wide if kind == "wide" else self.deep


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """Where the rows of tables live. Nothing here changes what is computed."""

    device_rows: int | None = None  # rows of each table's fastest tier; None: all
    host_rows: int | None = None  # rows in memory below it; None: all where no file lies below
    path: str | None = None  # folder of files for the others
    file_rows: int | None = None  # rows of those files where a remote lies below them
    # redis:// or rediss:// URL of the last tier. User and password are not kept in the run; a password may be in
    # $KITFORGE_REMOTE_PASSWORD as well.
    remote: str | None = None
    remote_prefix: str = "kitforge"  # of its names there; runs at the same time need different ones
    remote_ca_file: str | None = None  # rediss: certificates that vouch for the server's; None: those of the system
    prefetch_batches: int = 0  # batches whose rows are fetched ahead; 0: only when they are needed
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    admission: AdmissionOptions = field(default_factory=AdmissionOptions)
    expiry: ExpiryOptions = field(default_factory=ExpiryOptions)
    fail_on_overflow: bool = False  # a batch with more distinct rows than device_rows is an error
    # On several ranks: each row on one of them, columns of all rows, a whole table on one, or all of it on all; by the
    # name of the table, or one way for all. auto: by size and by how many rows a step needs.
    placement: ShardingType | Literal["auto"] | dict[str, ShardingType | Literal["auto"]] = "auto"

    def __post_init__(self) -> None:
        check(
            self.prefetch_batches >= 0, "cache.prefetch_batches", self.prefetch_batches, "a whole number of at least 0"
        )
        self.server()

    def server(self) -> RemoteOptions | None:
        """The server of the last tier. Raises ConfigError for an address that is none."""
        if self.remote is None:
            return None
        return RemoteOptions(url=self.remote, prefix=self.remote_prefix, ca_file=self.remote_ca_file)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalOptions:
    """How families that find items, rather than score pairs, learn and are measured."""

    num_negatives: int = 512  # sasrec: items drawn for a step, which all its samples are told apart from
    top_k: int = 10  # the k of the HR@k that says what is best; HR@k and NDCG@k of 1, 5, 10 and 20 are told besides
    # Whether items of a user's history are left out of what is retrieved and ranked: for sasrec those of the sequence,
    # for two_tower of the sequences of model.user that share the item's table, as far back as max_length reaches.
    exclude_seen: bool = False
    index: str = "Flat"  # faiss's words for the index of item vectors; Flat is exact
    nprobe: int | None = None  # of an index with clusters (IVF): how many are searched; None: faiss's 1
    ef_search: int | None = None  # of an index that is a graph (HNSW): how many candidates are kept; None: faiss's 16

    def __post_init__(self) -> None:
        check(self.num_negatives >= 1, "retrieval.num_negatives", self.num_negatives, "a whole number of at least 1")
        for name in ("nprobe", "ef_search"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"retrieval.{name}", value, "a whole number of at least 1")
        check(self.top_k >= 1, "retrieval.top_k", self.top_k, "a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictOptions:
    """What `kitforge predict` writes for every row of data.eval."""

    top_k: int = 10  # items for a row, of families that find items
    columns: tuple[str, ...] | None = None  # of the input that are kept beside the predictions; None: all

    def __post_init__(self) -> None:
        check(self.top_k >= 1, "predict.top_k", self.top_k, "a whole number of at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommenderServeOptions(HttpOptions):
    """Those of every server, and how rows are batched and newer checkpoints taken over."""

    max_rows: int = 1024  # rows or users of one request
    max_batch_rows: int = 4096  # rows answered together, of any number of requests; a larger request goes alone
    max_wait_ms: float = 1.0  # milliseconds that the first request of a batch waits for others
    max_top_k: int = 1000  # items that one user may ask for, and items that a request may exclude
    # Seconds between two looks at the run's checkpoints, of which a newer one is taken over; null: none is.
    refresh_seconds: float | None = None

    def __post_init__(self) -> None:
        HttpOptions.__post_init__(self)
        for name in ("max_rows", "max_batch_rows", "max_top_k"):
            check(getattr(self, name) > 0, f"serve.{name}", getattr(self, name), "a whole number of at least 1")
        check(self.max_wait_ms >= 0, "serve.max_wait_ms", self.max_wait_ms, "milliseconds, at least 0")
        seconds = self.refresh_seconds
        check(seconds is None or seconds > 0, "serve.refresh_seconds", seconds, "seconds above 0, or null")


def _optimizer() -> OptimizerConfig:
    return OptimizerConfig(learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.999))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationOptions(RunOptions):
    """All options of the task."""

    task: str = TASK
    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    optimizer: OptimizerConfig = field(default_factory=_optimizer)  # of all that is no row of a table
    data: RecommendationDataOptions = field(default_factory=RecommendationDataOptions)
    tables: EmbeddingTableOptions = field(default_factory=EmbeddingTableOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    retrieval: RetrievalOptions = field(default_factory=RetrievalOptions)
    predict: PredictOptions = field(default_factory=PredictOptions)
    checkpoint: str | None = None  # weights and rows to start from, or to evaluate
    output: str | None = None  # file that `predict` writes: .csv, .jsonl or .parquet; or `export`: .pt2
    # What `export` writes: index, of items, into output_dir; torch_export, the network that scores, to output.
    format: Literal["index", "torch_export"] = "index"
    port: int = 8000  # that `serve` listens on; 0: any that is free
    serve: RecommenderServeOptions = field(default_factory=RecommenderServeOptions)

    def __post_init__(self) -> None:
        degree = self.parallel.tensor
        expected = "1: a recommender's network is small, and its rows lie on all ranks in any case"
        check(degree == 1, "parallel.tensor", degree, expected, f"parallel.data={degree}")
        check(0 <= self.port < 65536, "port", self.port, "0 to 65535")

    @property
    def summary(self) -> str | None:
        """Length, batch size and rates of the run, most of which follow from the number of training rows."""
        epochs, wide = self.trainer.epochs, self.tables.wide.learning_rate
        length = (
            "" if epochs is None else f"{epochs:g} {'pass' if epochs == 1 else 'passes'} over the training rows in "
        )
        rates = f"learning rates: {self.optimizer.learning_rate:.3g}"
        rates += "" if self.tables.deep.learning_rate is None else f", vectors {self.tables.deep.learning_rate:.3g}"
        rates += "" if wide is None else f", wide weights {wide:.3g}"
        return f"{length}batches of {self.data.step_size}; {rates}"


def with_size_defaults(options: RecommendationOptions, num_rows: int | None, family: str) -> RecommendationOptions:
    """With what was left to the number of training rows: the size of a batch, the passes over them, and how the wide
    weights move. None: nobody knows how many will come."""
    size, trainer, wide = options.data.step_size, options.trainer, options.tables.wide
    if options.data.batch_size is None and num_rows is not None:
        smallest = SMALLEST_SEQUENCE_BATCH if family == "sasrec" else MIN_BATCH
        size = min(max(2 ** (num_rows // TARGET_STEPS).bit_length() // 2, smallest), MAX_BATCH)
    if num_rows is not None and trainer.max_steps == trainer.epochs is None:
        known = SEQUENCE_PASSES if family == "sasrec" else PASSES
        trainer = replace(trainer, epochs=next((passes for most, passes in known if num_rows <= most), 1.0))
    if wide.learning_rate is None:
        rate = WIDE_RATE if num_rows is None else min(0.00035 * num_rows**0.5, 0.3)
        wide = replace(wide, learning_rate=rate)
    if wide.initial_sum == 0 and wide.learning_rate is not None:
        # In gradients of one sample: a weight that was seen once moves by a fourth of its gradient, as that of a
        # logistic regression would with a prior of that variance. To one that is seen often it is as if it were 0.
        wide = replace(wide, initial_sum=(4 * wide.learning_rate / size) ** 2)
    data, tables = replace(options.data, batch_size=size), replace(options.tables, wide=wide)
    return replace(options, data=data, trainer=trainer, tables=tables)
