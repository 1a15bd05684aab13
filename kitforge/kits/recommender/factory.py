"""Builds models, objectives and item catalogues from options or from a run folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kitforge.core.checkpoint.load import Checkpoint, find_checkpoint, load_tensors
from kitforge.core.checkpoint.table_reader import tables_of
from kitforge.core.nn.embedding_spec import RecommenderConfig
from kitforge.core.parallel.world import World
from kitforge.data.tables.id_names import load_id_names
from kitforge.foundation.config import check, from_dict, option_names
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.kits.recommender.artifacts import find_item_catalog
from kitforge.kits.recommender.config import TASK, RecommendationOptions
from kitforge.kits.recommender.data import RecommendationDataset, label_choice
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.describe import describe_table
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.item_catalog import ItemCatalog, build_item_catalog, joined_catalog
from kitforge.kits.recommender.model import (
    Recommender,
    build_request_plan,
    build_tables,
    init_output_bias,
    init_recommender,
    sample_shape,
)
from kitforge.kits.recommender.negatives import NegativeSampler
from kitforge.kits.recommender.objective import Objective, RetrievalObjective
from kitforge.kits.recommender.pointwise_objective import PointwiseObjective
from kitforge.kits.recommender.sequential_objective import SampledSoftmax
from kitforge.kits.recommender.tables import EMPTY, shard_tables
from kitforge.kits.recommender.two_tower_objective import InBatchSoftmax
from kitforge.models.catalog import recommender_of
from kitforge.trainer.dropped_options import without_dropped

Options = TypeVar("Options")
# By the name that a family's configuration has for its own.
OBJECTIVES: dict[str, type[Objective[Any]]] = {
    "pointwise": PointwiseObjective,
    "in_batch_softmax": InBatchSoftmax,
    "sampled_softmax": SampledSoftmax,
}


def new_recommender(
    config: RecommenderConfig,
    encoder: FeatureEncoder,
    options: RecommendationOptions,
    world: World,
    distinct: Mapping[str, float] = EMPTY,
) -> Recommender:
    """An initialized model with its tables, on the world's device, dense part unsharded. `distinct`: rows of each table
    per step and rank, for the sharding planner."""
    plan = build_request_plan(config, encoder)
    shardings = shard_tables(plan, options, world, distinct)
    tables = build_tables(plan, options.tables, options.cache, options.seed, world, shardings)
    model = Recommender(config, encoder, tables, options.compile_level)
    init_recommender(model.network, options.seed)
    if config.logit is not None:
        statistics = encoder.statistics
        if num_negatives := options.data.negatives.num_negatives:
            statistics = dataclasses.replace(statistics, positive_rate=1 / (1 + num_negatives))
        init_output_bias(model.network, config.logit, statistics)
    return model if world.device.type == "cpu" else model.to(world.device)


def restore_recommender(
    checkpoint: Checkpoint,
    encoder: FeatureEncoder,
    options: RecommendationOptions,
    world: World,
    distinct: Mapping[str, float] = EMPTY,
) -> Recommender:
    """The model of a checkpoint for further training, with the cache tiers of `options`."""
    recorded = dataclasses.replace(recorded_options(checkpoint), cache=options.cache, trainer=options.trainer)
    model = new_recommender(recommender_of(recorded.model), encoder, recorded, world, distinct)
    load_tensors(dict(model.named_parameters()), checkpoint.model(), what="model")
    checkpoint.load_tables(tables_of(model.modules()))
    return model


def build_objective(
    config: RecommenderConfig, options: RecommendationOptions, dataset: RecommendationDataset
) -> Objective[Any]:
    """The training objective of a family. Raises ConfigError for unsuitable rows."""
    objective = build_retrieval_objective(config, options, dataset.encoder, dataset.catalogue)
    negatives = options.data.negatives
    if objective is not None:
        name, expected = "data.negatives.num_negatives", f"0: a {config.family} learns from the other items of a step"
        check(not negatives.num_negatives, name, negatives.num_negatives, expected)
        return objective
    sampler = None
    if negatives.num_negatives:
        rows = dataset.train if isinstance(dataset.train, ClickDataset) else None
        sampler = NegativeSampler(negatives, dataset.encoder.schema, options.seed, rows)
    elif dataset.encoder.schema.label is None:
        got: str | None = "a data.schema without a label"
        if options.data.schema is None and dataset.source is not None:
            choice = label_choice(options.data)
            got = describe_table(dataset.source, choice=choice).no_label
        raise DataError(
            "these rows have no label",
            got=got,
            expected="a column of 0 and 1, of -1 and 1, or of two texts that say which is positive",
            fix="data.label=COLUMN names it and data.positive=VALUE what counts as 1 (in data.schema: `label: {name: "
            "COLUMN, positive: TEXT}`); where all rows are positives (purchases, ratings, views), "
            "data.negatives.num_negatives=4 draws the others",
        )
    return PointwiseObjective(build_request_plan(config, dataset.encoder), options.seed, sampler)


def build_retrieval_objective(
    config: RecommenderConfig, options: RecommendationOptions, encoder: FeatureEncoder, catalogue: ItemCatalog | None
) -> RetrievalObjective[Any] | None:
    """The objective of a retrieval family; None for families that score rows."""
    objective = OBJECTIVES[config.objective]
    if not issubclass(objective, RetrievalObjective):
        return None
    plan = build_request_plan(config, encoder)
    if catalogue is None:
        raise ConfigError("there are no items to find", got="data.train=null", expected="rows to train on")
    return objective(config, plan, catalogue, options)


def with_item_catalog(
    dataset: RecommendationDataset, config: RecommenderConfig, root: Path, resumed: Checkpoint | None, *, is_open: bool
) -> RecommendationDataset:
    """The data set with the items that can be found, for families that find some: where the catalogue `is_open`, those
    of the training rows beside those that were known. Where whole sequences are asked to go on, the sequences that are
    trained on are evaluated as well, by the items that training leaves out. What items are called is kept in caches
    below `root`. A run that is `resumed` has counted some of these rows before."""
    held_out = OBJECTIVES[config.objective].num_held_out
    if held_out:
        given = dataset.eval is not None and dataset.eval.num_rows > 0
        dataset = dataset if given else dataclasses.replace(dataset, eval=dataset.train_rows())
    if not isinstance(dataset.train, ClickDataset) or not is_open:
        return dataset
    if (item := config.items(sample_shape(dataset.encoder))) is None:
        return dataset
    catalogue = build_item_catalog(dataset.train, item, held_out, dataset.time)
    column = dataset.encoder.schema.column_of(item)
    if dataset.source is not None and column.kind == "text":
        names = load_id_names(dataset.source, column, catalogue.keys, root)
        catalogue = dataclasses.replace(catalogue, names=names)
    if dataset.catalogue is not None:
        catalogue = joined_catalog(dataset.catalogue, catalogue, is_summed=True)
    if resumed is not None and (earlier := find_item_catalog(resumed)) is not None:
        catalogue = joined_catalog(earlier, catalogue, is_summed=False)
    return dataclasses.replace(dataset, catalogue=catalogue)


def open_run_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint of a run folder or a step folder. Raises ModelError for other folders."""
    checkpoint = find_checkpoint(folder) if folder.is_dir() else None
    if checkpoint is None:
        raise ModelError("there is no run", got=folder, expected="a run folder or a step folder of the recommender")
    return checkpoint


def recorded_options(checkpoint: Checkpoint) -> RecommendationOptions:
    """The recorded options of a run. Raises ModelError for a run of another task."""
    values = checkpoint.state.get("config", {})
    if values.get("task") != TASK:
        raise ModelError("this is not a run of the recommender", got=checkpoint.folder, expected=f"task: {TASK}")
    return from_dict(
        RecommendationOptions, without_dropped(values, option_names(RecommendationOptions), is_exact=False)
    )


def with_run_options(options: RecommendationOptions, checkpoint: Checkpoint) -> RecommendationOptions:
    """The options of a run with the given ones over them. The command line and `pipeline` compose them so, and know
    what was given; of options that were built otherwise, those that differ from their defaults count as given."""
    if options.inherits_run:
        return options
    recorded = recorded_options(checkpoint)
    sections = {
        name: merge_options(getattr(options, name), getattr(recorded, name)) for name in ("retrieval", "predict")
    }
    data = merge_options(options.data, recorded.data)
    if options.data.train is not None or options.data.eval is not None:
        # Rows that are named replace all of the run's own.
        data = dataclasses.replace(data, train=options.data.train, eval=options.data.eval)
    return dataclasses.replace(options, seed=options.seed or recorded.seed, data=data, inherits_run=True, **sections)


def merge_options(given: Options, recorded: Options) -> Options:
    """The recorded options, overridden by given values that are not defaults."""
    plain: Any = type(given)()
    asked: dict[str, Any] = {}
    for field in dataclasses.fields(recorded):  # type: ignore[arg-type]
        value, known = getattr(given, field.name), getattr(recorded, field.name)
        if value != getattr(plain, field.name):
            asked[field.name] = merge_options(value, known) if dataclasses.is_dataclass(known) else value
    return dataclasses.replace(recorded, **asked)  # type: ignore[type-var]
