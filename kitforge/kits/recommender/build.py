"""The wiring of the recommender kit: from options and objects to a run, and from a folder to a pipeline."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from rich.console import RenderableType
from torch import nn

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.embedding_spec import RecommenderConfig, used_features
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.plan.dry_run import data_values
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import World
from kitforge.data.tables.source import open_table
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.dtype import LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import check_own, mark_own, user_path, write_text
from kitforge.foundation.log import logger
from kitforge.foundation.progress import show_progress
from kitforge.kits.batch_predict import prediction_files
from kitforge.kits.dry_task import cache_of_its_own, dry_step
from kitforge.kits.kit import AnyKit, Kit, LoadModel, Prepared, RunInputs, expect_network
from kitforge.kits.recommender.artifacts import SaveFeatures, find_features, find_item_catalog, resumed_checkpoint
from kitforge.kits.recommender.batch_inference import SUFFIXES, write_predictions
from kitforge.kits.recommender.config import TASK, RecommendationDataOptions, RecommendationOptions, with_size_defaults
from kitforge.kits.recommender.data import (
    RecommendationDataset,
    as_sequences,
    column_cache_root,
    iter_of,
    load_dataset,
    table_config,
)
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.describe import describe_table, render_description
from kitforge.kits.recommender.dry_rows import dry_rows, fill_table
from kitforge.kits.recommender.export import export_program
from kitforge.kits.recommender.factory import (
    OBJECTIVES,
    build_objective,
    new_recommender,
    open_run_checkpoint,
    recorded_options,
    restore_recommender,
    with_item_catalog,
    with_run_options,
)
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.model import Recommender, sample_shape
from kitforge.kits.recommender.negatives import with_user
from kitforge.kits.recommender.pipeline import RecommendationPipeline
from kitforge.kits.recommender.schema import FeatureSchema, read_schema, schema_yaml
from kitforge.kits.recommender.server.app import new_app
from kitforge.kits.recommender.server.service import RecommenderService
from kitforge.kits.recommender.serving import open_served, serve_quantized
from kitforge.kits.recommender.tables import TableStatsCallback, distinct_rows, hit_rate_curves
from kitforge.kits.recommender.task import RecommendationTask
from kitforge.kits.recommender.unknown_values import unlearned_values
from kitforge.models.catalog import families_of, recommender_of
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import Run
from kitforge.trainer.step_trace import DryStep, TracedTask
from kitforge.trainer.task import Task

_log = logger(__name__)

Inputs: TypeAlias = RunInputs[FeatureEncoder]


class Recommendation(Kit[RecommendationOptions, FeatureEncoder]):
    """The task `recommendation`."""

    OPTIONS = RecommendationOptions
    IS_SERVED = True
    PREDICTS_AS_TRAINED = True

    def evaluation_options(self, recorded: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The recorded options that every use of a run starts from: how rows are read and items are found. If
        other rows are given, neither of the run's own tables is read."""
        found = {name: recorded[name] for name in ("seed", "data", "retrieval", "predict") if name in recorded}
        if {"data.train", "data.eval"} & set(chosen):
            found["data"] = {**found["data"], "train": None, "eval": None}
        return {"task": TASK, **found, "inherits_run": True}

    def prepare(
        self, options: RecommendationOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[RecommendationOptions, FeatureEncoder]:
        given, start = _model_of(inputs), None
        if given is None and options.checkpoint is None and is_evaluation:
            raise ModelError("there is no model to evaluate", fix="add checkpoint=RUN, or train one first")
        if options.checkpoint is not None and not (is_evaluation and given is not None):
            start = open_run_checkpoint(Path(options.checkpoint))
        if is_evaluation and start is not None:
            options = _evaluation_of_run(options, start)
        described = options.model if given is not None or start is None else recorded_options(start).model
        config = recommender_of(described) if given is None else given.config
        with rendezvous.local_rank_zero_first():
            resumed = None if is_evaluation else resumed_checkpoint(options)
            dataset = _dataset(options, inputs, config, start, resumed, is_evaluation=is_evaluation)
        if is_evaluation and (dataset.eval is None or dataset.eval.num_rows == 0):
            raise ConfigError("there is nothing to evaluate on", got="data.eval=null", fix="add data.eval=FILE")
        if not is_evaluation:
            # Defaults depend on the training rows that a run began with, however many there are now.
            has_begun = resumed is not None and given is None and start is None
            begun, now = dataset.encoder.statistics.num_rows, dataset.train
            num_rows = (begun if has_begun else now.num_rows) if isinstance(now, ClickDataset) else None
            options = with_size_defaults(options, num_rows, config.family)
        objective = build_objective(config, options, dataset)
        recorded = to_dict(options) | {"model": {"family": config.family, **to_dict(config)}}
        # A server without its credentials.
        server = options.cache.server()
        recorded["cache"] |= {} if server is None else {"remote": server.endpoint}

        def build(world: World) -> nn.Module:
            if given is not None:
                parallel_model_of(given.to(world.device), world)
                given.item_catalog = given.item_catalog if is_evaluation else dataset.catalogue
                return given
            is_counted = world.mesh is not None and not is_evaluation
            distinct = distinct_rows(config, options, dataset, objective) if is_counted else {}
            known = (dataset.encoder, options, world, distinct)
            model = new_recommender(config, *known) if start is None else restore_recommender(start, *known)
            model.item_catalog = dataset.catalogue
            parallelize(model, Sharding(), world)
            return model

        def task(world: World) -> tuple[Task, list[Callback]]:
            made = RecommendationTask(options, dataset, objective, build, world)
            if is_evaluation:
                return made, []
            features = used_features(config, sample_shape(dataset.encoder))
            stats = TableStatsCallback(hit_rate_curves(config, options, dataset, objective))
            return made, [SaveFeatures(dataset.encoder, dataset.catalogue, features, dataset.unlearned), stats]

        return Prepared(
            options=options,
            recorded=recorded,
            fingerprints={"training rows": dataset.fingerprint},
            processor=dataset.encoder,
            task=task,
        )

    def plan(self, options: RecommendationOptions) -> TracedTask:
        """The step of the rows of the options, or of rows that stand in for them, over tables that are full."""
        data, trainer = options.data, dataclasses.replace(options.trainer, progress=False)
        cache = dataclasses.replace(options.cache, prefetch_batches=0)
        options = dataclasses.replace(options, trainer=trainer, cache=cache)
        rows = (
            None
            if data.train is not None or data.schema is None
            else dry_rows(read_schema(data.schema), data.step_size)
        )
        inputs: Inputs = Inputs(train_dataset=rows)

        def step(world: World, _num_blocks: int) -> DryStep:
            with cache_of_its_own():
                rendezvous = Rendezvous(options.parallel, world.device, None, None)
                with data_values():
                    prepared = self.prepare(options, inputs, rendezvous, is_evaluation=False)
                made = dry_step(self, prepared.task(world)[0], prepared.options, world)
            growing = [fill_table(each) for each in cast(Any, made.loop.state.parallel.tables)]
            with torch.no_grad():
                for micro_batch in made.micro_batches:
                    for requests in micro_batch["calls"]:
                        cast(Recommender, made.loop.model).tables(requests)
            # The rows of a table are copied when it grows for the last time.
            slab, room, _ = max(growing, key=lambda each: each[1] * each[0].shape[1])
            below = [each for _, _, slabs in growing for each in slabs]
            copied = lambda: [slab.new_empty(room, slab.shape[1])]  # noqa: E731
            return dataclasses.replace(made, further={"growth of a table": ("table rows", copied)}, on_host=below)

        return TracedTask(options=options, num_blocks=1, kinds=range, step=step)

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> Recommender:
        """The network of a run folder or a step folder over its tables, which stay in the files and are only read. Rows
        are served in `tables.serving_dtype`."""
        check(dtype == "fp32", "dtype", dtype, "fp32 for the network of a recommender")
        return open_served(folder, device, level)

    def find_processor(self, folder: Path) -> FeatureEncoder:
        """What reads rows for the network of a run: its features."""
        return find_features(folder)

    def open_pipeline(
        self, model: nn.Module, tokenizer: FeatureEncoder, options: RecommendationOptions
    ) -> RecommendationPipeline:
        recommender = _model_of(Inputs(model=model))
        assert recommender is not None
        if recommender.checkpoint_folder is not None:
            options = with_run_options(options, open_checkpoint(recommender.checkpoint_folder, verify=False))
        if options.tables.serving_dtype is not None:
            serve_quantized(recommender, options.tables.serving_dtype)
        return RecommendationPipeline(recommender, tokenizer, options)

    def open_service(
        self, model: nn.Module, tokenizer: FeatureEncoder, name: str, options: RecommendationOptions
    ) -> RecommenderService:
        """What scores rows and finds items over HTTP, by the options of the run but for those that are asked for."""
        found, seconds = _model_of(Inputs(model=model)), options.serve.refresh_seconds
        if found is None or found.checkpoint_folder is None:
            raise ConfigError("serving needs a run", fix="add checkpoint=RUN")
        folder = user_path(options.checkpoint or found.checkpoint_folder)
        if seconds is not None and (options.tables.serving_dtype is not None or not (folder / "checkpoints").is_dir()):
            raise ConfigError(
                "newer checkpoints can be taken over from a run folder, by its own rows",
                got=f"serve.refresh_seconds={seconds:g} checkpoint={folder} "
                f"tables.serving_dtype={options.tables.serving_dtype}",
                fix="name the run folder, and leave tables.serving_dtype out",
            )
        return RecommenderService(self.open_pipeline(found, tokenizer, options), name)

    def new_app(self, service: RecommenderService) -> Any:
        return new_app(service)

    def predict_file(self, options: RecommendationOptions, load_model: LoadModel) -> Path:
        """Score the rows of `data.eval`, or find items for them, into the file `output`."""
        folder, target = prediction_files(options, "data.eval=rows.csv output=scores.csv")
        options = with_run_options(options, open_run_checkpoint(folder))
        schema = (encoder := self.find_processor(folder)).schema
        source = open_table(options.data.eval, table_config(options.data)).with_known(schema.known_columns)
        if target.suffix.lower() not in SUFFIXES:
            raise ConfigError("invalid value for option 'output'", got=target, expected=f"a file {', '.join(SUFFIXES)}")
        if target.exists() and any(path.exists() and path.samefile(target) for path, _ in source.stamps):
            fix = "name another"
            raise ConfigError("the predictions would overwrite their input", got=f"output={target}", fix=fix)
        events = schema.events
        if events is not None and {events.user, events.item, events.time} <= set(source.names):
            # Events as the run was trained on, and not yet the sequences that they become.
            source = as_sequences(source, schema, events)
        opened = self.open_pipeline(load_model(str(folder), options.device, "fp32"), encoder, options)
        with show_progress("rows predicted", enabled=options.trainer.progress) as progress:
            write_predictions(opened, source, target, progress)
        mark_own(target, "predict")
        return target

    def export_program(self, options: RecommendationOptions) -> list[Path]:
        """Write the network of a run to `output` as a program of torch.export; the files that were written."""
        if options.checkpoint is None or options.output is None:
            raise ConfigError(
                "an exported program needs a run and a file",
                got=f"checkpoint={options.checkpoint} output={options.output}",
                fix="add checkpoint=RUN output=model.pt2",
            )
        target = user_path(options.output)
        written = [target, target.with_suffix(".json")]
        for each in written:
            check_own(each, "export", overwrite=options.overwrite)
        model = open_served(user_path(options.checkpoint), torch.device("cpu"), "O1")
        assert model.checkpoint_folder is not None
        checkpoint = open_checkpoint(model.checkpoint_folder, verify=False)
        export_program(model, recorded_options(checkpoint).tables.pooling, checkpoint.step, target)
        for each in written:
            mark_own(each, "export")
        return written

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: FeatureEncoder, dtype: str | None = None
    ) -> None:
        """Write the item vectors of a family that retrieves items as a faiss index. Raises ModelError for any other
        family, and ConfigError for a dtype."""
        check(dtype is None, "dtype", dtype, "null: an index of faiss holds float32")
        if isinstance(source, Path):
            source = self.load(source, torch.device("cpu"))
        model = source.model if isinstance(source, Run) else source
        self.open_pipeline(model, processor, RecommendationOptions()).save_index(folder)

    def resolved(self, options: RecommendationOptions) -> dict[str, Any]:
        """The whole tree of options, the model's own defaults among them unless it comes with the checkpoint."""
        values = to_dict(options)
        if options.checkpoint is not None:
            return values
        config = recommender_of(options.model)
        return values | {"model": {"family": config.family, **to_dict(config)}}

    def describe_presets(self, presets: Mapping[str, Mapping[str, Any]]) -> list[dict[str, str]]:
        """A row for every preset of a family of ours."""
        rows = []
        for name, values in presets.items():
            if values.get("family") in families_of("recommender"):
                config: Any = recommender_of(values)
                hidden = getattr(config, "hidden", getattr(config, "top", ()))
                row = {"model": name, "family": config.family, "row width": str(config.dim)}
                rows.append(row | {"tower": " ".join(map(str, hidden)) or f"{config.num_layers} blocks"})
        return rows

    def describe_data(self, spec: object, schema_file: Path | None = None) -> RenderableType:
        described = describe_table(spec)
        if schema_file is not None:
            write_text(schema_file, schema_yaml(described.schema, has_left_out=True))
        return render_description(described)

    def next_steps(self, folder: Path) -> list[str]:
        return [
            f"kitforge evaluate checkpoint={folder} data.eval=FILE",
            "kitforge inspect FILE",
            "kitforge train task=recommendation data.train=FILE",
        ]


def _evaluation_of_run(options: RecommendationOptions, checkpoint: Checkpoint) -> RecommendationOptions:
    recorded, options = recorded_options(checkpoint), with_run_options(options, checkpoint)
    data = options.data
    if data.negatives.num_negatives and data.train is None:
        # Which items there are, and who has taken which, is known of the training rows.
        data = dataclasses.replace(data, train=recorded.data.train)
    # No progress output: callers parse the metrics.
    return dataclasses.replace(options, data=data, trainer=dataclasses.replace(options.trainer, progress=False))


def _model_of(inputs: Inputs) -> Recommender | None:
    complaint, expected = "this network cannot be trained on recommendation", "a preset, or the model of a run"
    fix = "or give it its own loss in a Task of your own (docs/tasks.md)"
    return None if inputs.model is None else expect_network(inputs.model, Recommender, complaint, expected, fix)


def _dataset(
    options: RecommendationOptions,
    inputs: Inputs,
    config: RecommenderConfig,
    start: Checkpoint | None,
    resumed: Checkpoint | None,
    *,
    is_evaluation: bool,
) -> RecommendationDataset:
    """Rows read as the model's own were, where there is one already: nothing is fitted anew beside weights that are
    kept, since which value a row of a table stands for was decided when the run began."""
    train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
    evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
    given = _model_of(inputs)
    encoder, catalogue = (None, None) if given is None else (given.encoder, given.item_catalog)
    if given is None and start is not None:
        encoder, catalogue = find_features(start.folder), find_item_catalog(start)
    elif given is None and resumed is not None:
        encoder = find_features(resumed.folder)
    data = options.data
    if encoder is not None and not is_evaluation:
        _compare_schemas(data, encoder.schema, is_resumed=given is None and start is None)
    objective = OBJECTIVES[config.objective]
    if objective.num_held_out:
        # What is kept for evaluation are the last items of sequences, not whole ones.
        check(data.split != "time", "data.split", data.split, "random: the last item of every sequence is held out")
        data = dataclasses.replace(data, eval_fraction=0.0)
    if options.trainer.max_steps is not None:
        # No stream is read further than it is trained on.
        wanted = max(options.trainer.max_steps * data.step_size, 1)
        data = dataclasses.replace(data, num_fit_rows=min(data.num_fit_rows, wanted))
    is_guessed = encoder is None and data.schema is None and train is not None and iter_of(train) is None
    if is_guessed and (guessed := objective.default_schema(config, train, data)) is not None:
        data = dataclasses.replace(data, schema=to_dict(guessed))
    with show_progress("rows read", enabled=options.trainer.progress) as progress:
        dataset = load_dataset(train, evaluation, data, options.seed, encoder, progress)
    # A run that is resumed over its own rows left some out as too rare, and said so.
    if encoder is not None and not is_evaluation and (resumed is None or options.trainer.allow_data_changes):
        dataset = dataclasses.replace(dataset, unlearned=unlearned_values(dataset.train))
        unread = [] if dataset.source is None else sorted({*dataset.source.names} - {*encoder.schema.known_columns})
        if unread:
            _log.info("the network has no feature for %s; a new run would", ", ".join(map(repr, unread)))
    dataset, is_open = dataclasses.replace(dataset, catalogue=catalogue), catalogue is None or not is_evaluation
    return with_item_catalog(dataset, config, column_cache_root(data), resumed, is_open=is_open)


def _compare_schemas(data: RecommendationDataOptions, known: FeatureSchema, *, is_resumed: bool) -> None:
    """Refuse another `data.schema` for a run that goes on, and warn that a network that is there keeps its own."""
    if data.schema is None or (isinstance(data.schema, str) and not Path(data.schema).is_file()):
        return
    asked = read_schema(data.schema)
    asked = with_user(asked) if data.negatives.num_negatives else asked
    parts = [part.name for part in dataclasses.fields(asked) if part.compare]
    if changed := [part for part in parts if getattr(asked, part) != getattr(known, part)]:
        error = ConfigError(
            "data.schema is not the one that the network was trained with",
            got=f"other {', '.join(changed)}",
            expected="the features of the run, which a network keeps",
            fix="leave data.schema out, or begin a new run without resume and checkpoint",
        )
        if is_resumed:
            raise error
        _log.warning("%s", error)


TASKS: dict[str, AnyKit] = {"recommendation": Recommendation()}
