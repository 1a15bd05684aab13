"""Recommenders and what they are trained for, made from options or from a run's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kitforge.core.checkpoint.load import Checkpoint, find_checkpoint, load_tensors
from kitforge.core.checkpoint.tables import tables_of
from kitforge.core.nn.lookup import RecommenderConfig
from kitforge.core.parallel.world import World
from kitforge.data.tables.names import names_of
from kitforge.foundation.config import check, from_dict
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.kits.recommender.catalogue import Catalogue, catalogue_of
from kitforge.kits.recommender.clicks import Clicks
from kitforge.kits.recommender.config import TASK, DataOptions, RecommendationOptions
from kitforge.kits.recommender.data import Dataset
from kitforge.kits.recommender.features import Encoder
from kitforge.kits.recommender.inspection import inspect
from kitforge.kits.recommender.matching import Matching
from kitforge.kits.recommender.model import Recommender, begin_at_rate, initialise, make_tables, plan_of, sample_shape
from kitforge.kits.recommender.negatives import NegativeSampler
from kitforge.kits.recommender.next_item import HELD_OUT, NextItem
from kitforge.kits.recommender.objective import Finding, Objective
from kitforge.kits.recommender.placing import EMPTY, spread_tables
from kitforge.kits.recommender.samples import Samples
from kitforge.models.catalog import recommender_of
from kitforge.models.sasrec.model import SASRecConfig
from kitforge.models.two_tower.model import TwoTowerConfig

Options = TypeVar("Options")


def new_recommender(
    config: RecommenderConfig,
    encoder: Encoder,
    options: RecommendationOptions,
    world: World,
    distinct: Mapping[str, float] = EMPTY,
) -> Recommender:
    """A network with its initial weights and tables, on the world's device; nothing is cut yet. `distinct`: how many
    rows of each table a rank needs in a step, by which tables are spread over several."""
    plan = plan_of(config, encoder)
    spreads = spread_tables(plan, options, world, distinct)
    tables = make_tables(plan, options.tables, options.cache, options.seed, world, spreads)
    model = Recommender(config, encoder, tables, options.compile_level)
    initialise(model.network, options.seed)
    if config.logit is not None:
        statistics = encoder.statistics
        if num_negatives := options.data.negatives.num_negatives:
            statistics = dataclasses.replace(statistics, positive_rate=1 / (1 + num_negatives))
        begin_at_rate(model.network, config.logit, statistics)
    return model.to(world.device)


def restored(
    checkpoint: Checkpoint,
    encoder: Encoder,
    options: RecommendationOptions,
    world: World,
    distinct: Mapping[str, float] = EMPTY,
) -> Recommender:
    """The recommender of a checkpoint, its rows in the tiers that `options` say, ready to train further."""
    recorded = dataclasses.replace(recorded_options(checkpoint), cache=options.cache, trainer=options.trainer)
    model = new_recommender(recommender_of(recorded.model), encoder, recorded, world, distinct)
    load_tensors(dict(model.named_parameters()), checkpoint.model(), what="model")
    checkpoint.load_tables(tables_of(model.modules()))
    return model


def objective_of(config: RecommenderConfig, options: RecommendationOptions, dataset: Dataset) -> Objective[Any]:
    """What a network of that family is trained for. Raises ConfigError for rows that it cannot be trained on."""
    found = finding_of(config, options, dataset.encoder, dataset.catalogue)
    negatives = options.data.negatives
    if found is not None:
        name, expected = "data.negatives.num_negatives", f"0: a {config.family} learns from the other items of a step"
        check(not negatives.num_negatives, name, negatives.num_negatives, expected)
        return found
    if negatives.num_negatives:
        rows = dataset.train if isinstance(dataset.train, Samples) else None
        sampler = NegativeSampler(negatives, dataset.encoder.schema, options.seed, rows)
        return Clicks(plan_of(config, dataset.encoder), options.seed, sampler)
    if dataset.encoder.schema.label is None:
        is_guessed = options.data.schema is None and dataset.source is not None
        raise DataError(
            "these rows have no label",
            got=inspect(dataset.source).no_label if is_guessed else "a data.schema without a label",
            expected="a column of 0 and 1, of two texts, or of -1 and 1",
            fix="name it in data.schema: `label: {name: COLUMN}`, with `positive: TEXT` where it is not 0 and 1; where "
            "all rows are positives (purchases, ratings, views), data.negatives.num_negatives=4 draws the others",
        )
    return Clicks(plan_of(config, dataset.encoder), options.seed)


def finding_of(
    config: RecommenderConfig, options: RecommendationOptions, encoder: Encoder, catalogue: Catalogue | None
) -> Finding[Any] | None:
    """The objective of a family that finds items; None for one that scores rows."""
    if not isinstance(config, (TwoTowerConfig, SASRecConfig)):
        return None
    plan = plan_of(config, encoder)
    if catalogue is None:
        raise ConfigError("there are no items to find", got="data.train=null", expected="rows to train on")
    if isinstance(config, TwoTowerConfig):
        return Matching(config, plan, catalogue, options.retrieval, options.seed)
    feature = config.items(sample_shape(encoder))
    return NextItem(feature, config.max_length, plan, catalogue, options.retrieval, options.seed)


def with_items(dataset: Dataset, config: RecommenderConfig, root: Path) -> Dataset:
    """The data set with the items that can be found, for families that find some. Where whole sequences are asked to
    go on, the sequences that are trained on are evaluated as well, by the items that training leaves out. What
    items are called is kept in caches below `root`."""
    if isinstance(config, SASRecConfig):
        given = dataset.eval is not None and dataset.eval.num_rows > 0
        dataset = dataset if given else dataclasses.replace(dataset, eval=dataset.train_rows())
    if dataset.catalogue is not None or not isinstance(dataset.train, Samples):
        return dataset
    if isinstance(config, TwoTowerConfig):
        config.lookups(sample_shape(dataset.encoder))
        item, held_out = config.item[0], 0
    elif isinstance(config, SASRecConfig):
        item, held_out = config.items(sample_shape(dataset.encoder)), HELD_OUT
    else:
        return dataset
    catalogue = catalogue_of(dataset.train, item, held_out)
    column = dataset.encoder.schema.column_of(item)
    if dataset.source is not None and column.kind == "text":
        names = names_of(dataset.source, column, catalogue.keys, root)
        catalogue = dataclasses.replace(catalogue, names=names)
    return dataclasses.replace(dataset, catalogue=catalogue)


def checkpoint_of(folder: Path) -> Checkpoint:
    """The checkpoint of a run folder or a step folder; raises ModelError for any other."""
    found = find_checkpoint(folder) if folder.is_dir() else None
    if found is None:
        raise ModelError("there is no run", got=folder, expected="a run folder or a step folder of the recommender")
    return found


def recorded_options(checkpoint: Checkpoint) -> RecommendationOptions:
    """What the run was trained with; raises ModelError for a run of another task."""
    values = checkpoint.state.get("config", {})
    if values.get("task") != TASK:
        raise ModelError("this is no run of the recommender", got=checkpoint.folder, expected=f"task: {TASK}")
    return from_dict(RecommendationOptions, values)


def data_of(given: DataOptions, recorded: DataOptions) -> DataOptions:
    """How the rows of a run were read, but for what is asked for otherwise; the run's own where no other are named."""
    found = with_asked(given, recorded)
    if given.train is None and given.eval is None:
        return found
    return dataclasses.replace(found, train=given.train, eval=given.eval)


def with_asked(given: Options, recorded: Options) -> Options:
    """The options of a run, but for those that are asked for otherwise now."""
    plain: Any = type(given)()
    names = (field.name for field in dataclasses.fields(recorded))  # type: ignore[arg-type]
    asked = {name: value for name in names if (value := getattr(given, name)) != getattr(plain, name)}
    return dataclasses.replace(recorded, **asked)  # type: ignore[type-var]
