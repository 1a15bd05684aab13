"""Loads training and evaluation rows: sources, schema, split, feature statistics."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kitforge.data.cache_folder import default_root
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.tables.arrow_to_columns import form_of
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import ColumnTable
from kitforge.data.tables.events import EventColumns, sequences_of
from kitforge.data.tables.source import TableSource, TableSourceConfig, open_table
from kitforge.data.tables.split import RowRange, split_rows
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.data.tables.times import with_times
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import user_path
from kitforge.foundation.log import logger
from kitforge.foundation.progress import Advance
from kitforge.kits.recommender.config import RecommendationDataOptions
from kitforge.kits.recommender.dataset import ClickDataset, StreamingDataset
from kitforge.kits.recommender.describe import TableDescription, describe_table
from kitforge.kits.recommender.feature_fitting import fit_features
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.negatives import with_user
from kitforge.kits.recommender.schema import (
    BucketFeature,
    CategoricalFeature,
    CrossFeature,
    FeatureSchema,
    NumericFeature,
    SequenceFeature,
    read_schema,
)
from kitforge.kits.recommender.schema_inference import LabelChoice

_log = logger(__name__)

CLICK_LOG = "click_log"
# Learned to nearly the best possible AUC within the steps of the quickstart.
DEFAULT_CLICK_LOG = SyntheticClicksConfig(num_rows=1_300_000, fields=(500, 200, 50, 30, 24, 8), zipf=1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecommendationDataset:
    """Training and evaluation rows; either may be absent."""

    train: ClickDataset | StreamingDataset | None
    eval: ClickDataset | None
    encoder: FeatureEncoder
    source: TableSource | None = None  # of the training rows; None for synthetic ones
    catalogue: ItemCatalog | None = None  # the items of retrieval families
    unlearned: str | None = None  # words about values that the vocabularies of a run that goes on lack
    time: str | None = None  # the column of times that training rows were read with

    @property
    def fingerprint(self) -> str:
        """Equal for data sets that give equal batches."""
        return fingerprint_of(
            "dataset", *(None if each is None else each.fingerprint for each in (self.train, self.eval))
        )

    def train_rows(self) -> ClickDataset:
        """The training rows with random access. Raises ConfigError if there are none."""
        if not isinstance(self.train, ClickDataset):
            raise ConfigError("there is nothing to train on", got="data.train=null", expected="rows to train on")
        return self.train


def load_dataset(
    train: Any,
    evaluation: Any,
    options: RecommendationDataOptions,
    seed: int,
    encoder: FeatureEncoder | None,
    progress: Advance | None = None,
) -> RecommendationDataset:
    """Open and split the rows, and fit the feature statistics on the training rows.

    An `encoder` that is given is kept: new rows are read as those were that it was fitted on.
    """
    if train is None and evaluation is not None and encoder is not None:
        return RecommendationDataset(train=None, eval=_all(evaluation, options, encoder), encoder=encoder)
    spec = CLICK_LOG if train is None else train
    if (rows := iter_of(spec)) is not None:
        return _streaming(rows, evaluation, options, encoder)
    schema = schema_of(spec, options) if encoder is None else encoder.schema
    schema = with_user(schema) if options.negatives.num_negatives and encoder is None else schema
    fraction = 0.0 if evaluation is not None else options.eval_fraction
    time = time_column(options, schema) if fraction > 0 else None
    table = _table(spec, options, schema, progress, time)
    kept, held_out = split_rows(table, options.split, fraction, seed, schema.group, time)
    fitted = encoder or FeatureEncoder(schema, fit_features(schema, table, kept))
    given = ClickDataset(table, held_out, fitted) if evaluation is None else _all(evaluation, options, fitted)
    source = None if click_log(spec) is not None else _source(spec, options, schema)
    training = ClickDataset(table, kept, fitted)
    return RecommendationDataset(train=training, eval=given, encoder=fitted, source=source, time=time)


def iter_of(spec: Any) -> Iterator[Any] | None:
    """`spec` if it is an iterator (a stream), else None."""
    return spec if isinstance(spec, Iterator) else None


def _streaming(
    spec: Iterator[Any], evaluation: Any, options: RecommendationDataOptions, encoder: FeatureEncoder | None
) -> RecommendationDataset:
    """A data set over a stream. Its content is unknown beforehand, so it needs a schema."""
    if encoder is None and options.schema is None:
        raise ConfigError(
            "rows that come once cannot be looked at beforehand",
            got="data.schema=null",
            fix="add data.schema, or go on from a run: checkpoint=RUN",
        )
    schema = read_schema(options.schema) if encoder is None else encoder.schema
    expected = "a file, a list or a dataset, since events are sorted"
    check(schema.events is None, "data.schema.events", "rows that come once", expected)
    bad = BadRows(policy=options.on_invalid)
    stream = StreamingDataset(spec, schema, bad, encoder, options.num_fit_rows, table_config(options).cells)
    held_out = None if evaluation is None else _all(evaluation, options, stream.encoder)
    return RecommendationDataset(train=stream, eval=held_out, encoder=stream.encoder)


def schema_of(
    spec: Any,
    options: RecommendationDataOptions,
    *,
    is_scored: bool = True,
    has_sequences: bool = False,
    ids: Collection[str] = (),
) -> FeatureSchema:
    """The schema of the options, or one inferred from the rows. Rows that are not scored have a column as the label
    only by its name; `has_sequences`: events become sequences. `ids`: columns that are ids if in doubt."""
    if options.schema is not None:
        return read_schema(options.schema)
    if (log := click_log(spec)) is not None:
        return click_log_schema(log)
    choice = replace(label_choice(options), by_position=is_scored)
    description = describe_table(spec, table_config(options), choice=choice, ids=ids)
    if options.negatives.num_negatives:
        expected = "a schema, or columns called user_id, item_id and timestamp, or much like that"
        fix = "write data.schema: events, or group and features"
        check(description.targets is not None, "data.schema", "null", expected, fix)
        assert description.targets is not None
        return _without_others(description.targets, description)
    if has_sequences and not description.schema.sequences and description.sequences:
        return _without_others(description.sequences, description)
    return description.schema


def label_choice(options: RecommendationDataOptions) -> LabelChoice:
    """What the options say of the label."""
    positive = None if options.positive is None else form_of(options.positive)
    return LabelChoice(name=options.label, positive=positive)


def _without_others(schema: FeatureSchema, description: TableDescription) -> FeatureSchema:
    """A schema of events that says which columns it leaves out."""
    used = {*schema.layout().names, *(() if schema.events is None else (schema.events.user, schema.events.time))}
    others = [view.name for view in description.columns if view.name not in used]
    _log.info("the guessed schema uses user, item and time; left out: %s", ", ".join(others) or "nothing")
    return replace(schema, left_out=dict.fromkeys(others, "events are read as user, item and time"))


def time_column(options: RecommendationDataOptions, schema: FeatureSchema) -> str | None:
    """The time column of split=time; None for other splits."""
    if options.split != "time":
        return None
    return options.time_column or (None if schema.events is None else schema.events.time)


def table_config(options: RecommendationDataOptions) -> TableSourceConfig:
    """The options of file readers."""
    return TableSourceConfig(**{name: getattr(options, name) for name in TableSourceConfig.__dataclass_fields__})


def click_log(spec: Any) -> SyntheticClicks | None:
    """The synthetic click log that `spec` means; None for other data."""
    if isinstance(spec, str) and spec == CLICK_LOG:
        return SyntheticClicks(DEFAULT_CLICK_LOG)
    if isinstance(spec, SyntheticClicksConfig):
        return SyntheticClicks(spec)
    return spec if isinstance(spec, SyntheticClicks) else None


def click_log_schema(log: SyntheticClicks) -> FeatureSchema:
    """The schema of a synthetic click log."""
    crosses = {f"c{one + 1}_x_c{other + 1}": (f"c{one + 1}", f"c{other + 1}") for one, other in log.config.crosses}
    # A history has the ids of the second field.
    tables = {"c2": "c2"}
    return FeatureSchema(
        label=log.layout.label,
        numeric={name: NumericFeature(log=True) for name in log.layout.numbers},
        # Buckets express non-monotonic effects, which a tower learns late.
        bucketed={f"{name}_range": BucketFeature(column=name, num_buckets=32) for name in log.layout.numbers},
        categorical={
            key.name: CategoricalFeature(kind="integer", encoding="vocabulary", table=tables.get(key.name))
            for key in log.layout.keys
        },
        sequences={
            item.name: SequenceFeature(kind="integer", encoding="vocabulary", table="c2") for item in log.layout.lists
        },
        crosses={name: CrossFeature(of=pair) for name, pair in crosses.items()},
    )


def _all(spec: Any, options: RecommendationDataOptions, encoder: FeatureEncoder) -> ClickDataset:
    table = _table(spec, options, encoder.schema)
    return ClickDataset(table, RowRange(0, table.num_rows), encoder)


def _table(
    spec: Any,
    options: RecommendationDataOptions,
    schema: FeatureSchema,
    progress: Advance | None = None,
    time: str | None = None,
) -> ColumnTable:
    """The rows, with their time column if given."""
    if (log := click_log(spec)) is not None:
        return log
    source, bad = _source(spec, options, schema), BadRows(policy=options.on_invalid)
    layout, root = schema.layout(), column_cache_root(options)
    if time is not None:
        source = replace(source, times=(time,))
        layout = with_times(layout, time)
    return load_table(source, layout, root, bad, num_workers=options.num_workers, progress=progress)


def _source(spec: Any, options: RecommendationDataOptions, schema: FeatureSchema) -> TableSource:
    """The source of the rows; events become sequences."""
    source = open_table(spec, table_config(options))
    return source if schema.events is None else as_sequences(source, schema, schema.events)


def as_sequences(source: TableSource, schema: FeatureSchema, events: EventColumns) -> TableSource:
    """Events grouped into the sequences of a schema."""
    return sequences_of(source, events, [column.name for column in schema.layout().lists])


def column_cache_root(options: RecommendationDataOptions) -> Path:
    """The folder of column caches."""
    return default_root() if options.cache is None else user_path(options.cache)
