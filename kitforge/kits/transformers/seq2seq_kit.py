"""The wiring of `translation` and `summarization`: from options to a run, and from a folder to a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.lora import config_of as config_of_adapter
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.sharding import check_geometry
from kitforge.core.parallel.world import World
from kitforge.data.source import open_rows, open_source
from kitforge.data.tokenizer import ByteTokenizer, Tokenizer
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.foundation.files import atomic_file
from kitforge.foundation.progress import show_progress
from kitforge.kits.kit import LoadModel, RunInputs
from kitforge.kits.language_model import (
    ADAPTER,
    LoraOptions,
    SaveAdapter,
    SaveTokenizer,
    export_language_model,
    freeze,
    load_weights,
    resolved_options,
    save_language_model,
    stored_tokenizer,
    with_adapter,
)
from kitforge.kits.transformers.network import check_fit, find_run_tokenizer, new_config, prepare
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.row_kit import PreparedRows, RowKit
from kitforge.kits.transformers.seq2seq import (
    PairData,
    Seq2SeqOptions,
    Seq2SeqTask,
    SummarizationOptions,
    cut,
    encode_source,
    metric_library,
    read_pairs,
    read_texts,
    write_targets,
)
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of, config_of_network, initial_deviations
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.sharding import sharding_of_network
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import Run

Inputs: TypeAlias = RunInputs[Tokenizer]
# Rows that `predict` reads at once.
_BATCH = 256


@final
class Seq2Seq(RowKit[Seq2SeqOptions, Tokenizer]):
    """The tasks `translation` and `summarization`, which differ in their metrics and in the keys of the pipeline."""

    def __init__(self, options: type[Seq2SeqOptions]) -> None:
        self.OPTIONS = options

    def prepare(self, options: Seq2SeqOptions, inputs: Inputs, *, is_evaluation: bool) -> _Prepared:
        """Everything that can be read before any rank is started."""
        return _Prepared(options, inputs, is_evaluation=is_evaluation)

    def task(
        self,
        options: Seq2SeqOptions,
        prepared: PreparedRows,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> Seq2SeqTask:
        """The loss over the rows, of the network that `build` gives."""
        assert isinstance(prepared, _Prepared)
        return Seq2SeqTask(options, prepared.data, prepared.processor, build, world)

    def callbacks(self, options: Seq2SeqOptions, prepared: PreparedRows) -> list[Callback]:
        """The tokenizer and the adapter are kept with the run."""
        tokenizer = prepared.processor
        return [SaveTokenizer(tokenizer), SaveAdapter(_adapted, options.checkpoint, tokenizer)]

    def check_parallel(self, options: Seq2SeqOptions) -> None:
        """Raise ConfigError for a network that the degrees of `options` cannot split; before any rank is started."""
        if options.checkpoint is None and options.model:
            size = options.model.get("vocab_size") or ByteTokenizer.vocab_size
            config = config_of({**options.model, "vocab_size": size}, "encoder-decoder")
            network = model_folder.build_on_meta(config)
            check_geometry(sharding_of_network(network), network.geometry, options.parallel)

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        """The model of a run folder, a step folder or a Hugging Face folder, adapters merged."""
        return model_folder.load_stored(self.open_model(folder), device=device, level=level, dtype=dtype)

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a folder; no weight is read yet."""
        return model_folder.open_model(folder, open_run)

    def find_processor(self, folder: Path) -> Tokenizer:
        """The tokenizer that lies with a run, a step or a Hugging Face folder."""
        return stored_tokenizer(folder)

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Tokenizer | None, dtype: ExportDtype | None
    ) -> None:
        """Write a Hugging Face folder, adapters merged."""
        if isinstance(source, nn.Module):
            save_language_model(source, folder, processor, dtype)
            return
        home = source.folder if isinstance(source, Run) else source
        export_language_model(self.open_model(home), folder, processor, dtype)

    def export_program(self, options: Seq2SeqOptions) -> list[Path]:
        """Write the programs of the model under `options.checkpoint` into the folder `options.output_dir`."""
        return export_programs(self, options)

    def open_pipeline(self, model: nn.Module, processor: Tokenizer, options: Seq2SeqOptions) -> Seq2SeqPipeline:
        """What writes targets."""
        return Seq2SeqPipeline(model, processor, options)

    def predict_file(self, options: Seq2SeqOptions, load_model: LoadModel) -> Path:
        """Write each row of `data.eval` with its generated target, `predicted_<data.target>`, to `output`."""
        if options.checkpoint is None or options.output is None or options.data.eval is None:
            fix = "add checkpoint=RUN data.eval=rows.jsonl output=written.jsonl"
            raise ConfigError("targets need a model, a file of sources and a file to write", fix=fix)
        folder, target = Path(options.checkpoint).expanduser(), Path(options.output).expanduser()
        check(not target.exists(), "output", target, "a file that does not exist yet")
        write = self.open_pipeline(
            load_model(options.checkpoint, options.device, "fp32"), stored_tokenizer(folder), options
        )
        column, name = options.data.source, f"predicted_{options.data.target}"
        with (
            atomic_file(target) as file,
            show_progress("targets written", enabled=options.trainer.progress) as progress,
        ):
            done = 0
            for rows in _row_batches(options.data.eval, column):
                for row, text in zip(rows, write.texts([str(row[column]) for row in rows]), strict=True):
                    file.write(json.dumps({**row, name: text}, ensure_ascii=False).encode() + b"\n")
                done += len(rows)
                progress(done)
        return target

    def resolved(self, options: Seq2SeqOptions) -> dict[str, Any]:
        """All options, with the defaults of the model unless a checkpoint brings it."""
        return resolved_options(options, options.checkpoint, options.model, options.tokenizer)

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [
            f"kitforge predict checkpoint={folder} data.eval=ROWS.jsonl output=WRITTEN.jsonl",
            f"kitforge evaluate checkpoint={folder} data.eval=ROWS.jsonl",
        ]


def _row_batches(spec: object, column: str) -> Any:
    """The rows of a file, some at a time, each a dict."""
    for shard in open_rows(spec):
        rows = list[dict[str, Any]]()
        for location, row in shard.rows():
            values = dict(row) if isinstance(row, Mapping) else {column: row}
            if column not in values:
                raise DataError(f"{location} lacks a column", got=", ".join(map(str, values)), expected=column)
            rows.append(values)
            if len(rows) == _BATCH:
                yield rows
                rows = []
        if rows:
            yield rows


@final
class Seq2SeqPipeline:
    """Writes targets, in the shapes of Hugging Face's pipelines."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: Seq2SeqOptions) -> None:
        if not isinstance(model, EncoderDecoder):
            expected = "the model of a run of translation or summarization"
            raise ModelError("this model reads no source", got=type(model).__name__, expected=expected)
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._options = options
        self._key = "translation_text" if options.task == "translation" else "summary_text"

    def __call__(self, texts: str | Sequence[str]) -> list[dict[str, str]]:
        """`{"translation_text"}` or `{"summary_text"}` of each text, in order; of a single text, a list of one. Raises
        DataError for a text of more than data.sequence_length tokens, unless data.on_too_long=cut_right."""
        return [{self._key: text} for text in self.texts([texts] if isinstance(texts, str) else list(texts))]

    def texts(self, texts: Sequence[str]) -> list[str]:
        """The generated target of each text."""
        data = self._options.data
        sources = [encode_source(self._tokenizer, data.prefix + text) for text in texts]
        for number, source in enumerate(sources):
            if len(source) > data.sequence_length and data.on_too_long == "refuse":
                got, expected = f"{len(source)} tokens", f"at most data.sequence_length={data.sequence_length}"
                fix = "raise it, or add data.on_too_long=cut_right"
                raise DataError(f"text {number} is too long", got=got, expected=expected, fix=fix)
        sources = [cut(source, data.sequence_length) for source in sources]
        return write_targets(self._model, sources, self._tokenizer, self._options.inference)


@final
class _Prepared:
    """Tokenizer and pairs of a run, and how its network is built."""

    def __init__(self, options: Seq2SeqOptions, inputs: Inputs, *, is_evaluation: bool) -> None:
        self._options, self._given, self._is_evaluation = options, inputs.model, is_evaluation
        self._open = model_folder.open_model if inputs.open_model is None else inputs.open_model
        train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
        evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
        # An evaluation reads the training rows only if the evaluation rows are split off them.
        train = None if is_evaluation and evaluation is not None else train
        if train is None and evaluation is None:
            raise ConfigError("there are no pairs", got="data.train=null", fix="add data.train=ROWS.jsonl")
        stored = None
        if self._given is None and options.checkpoint is not None:
            stored = self._open(Path(options.checkpoint), partial(find_checkpoint, verify=False))
        elif options.lora.is_on and self._given is None:
            fix = "name a run or a folder: checkpoint=RUN"
            raise ConfigError("an adapter needs a model to adapt", got=f"lora.rank={options.lora.rank}", fix=fix)
        if options.data.eval_texts:
            # Refused now, not at the first evaluation.
            metric_library(options.task)
        rows = read_texts(train, options.data)
        held = None if evaluation is None else read_texts(evaluation, options.data)
        # What a tokenizer is trained on, if the options name one that is to be trained.
        texts = [text for _, pair in rows for text in (options.data.prefix + pair[0], pair[1])]
        source = open_source(texts) if texts else None
        self.processor = find_run_tokenizer(options, inputs.processor, source)
        self._config = self._network_config(stored)
        if self._config is not None:
            check_fit(self._config, options, self.processor)
        self.data: PairData = read_pairs(rows, held, self.processor, options)

    def recorded(self) -> dict[str, Any]:
        """The options of the model, as a checkpoint records them."""
        model = {} if self._config is None else {"family": self._config.family, **to_dict(self._config)}
        return {"model": model}

    def build(self, world: World) -> nn.Module:
        """The network on the device, cut as the world's degrees say; with its adapter if it is to be trained."""
        options = self._options
        lora, frozen = (LoraOptions(), ()) if self._is_evaluation else (options.lora, options.freeze)
        if self._given is not None:
            model = self._given.to(world.device)
            freeze(model, frozen)
            if lora.is_on and config_of_adapter(model) is None:
                with_adapter(model, lora, options.seed)
            parallel_model_of(model, world, sharding_of_network(model))
            return prepare(model, options)
        assert self._config is not None
        model = model_folder.build_on_meta(self._config, options.compile_level)
        freeze(model, frozen)
        if lora.is_on:
            with_adapter(model, lora, options.seed)
        parallel = parallelize(model, sharding_of_network(model), world)
        parallel.materialize(world.device)
        if options.checkpoint is not None:
            stored = self._open(Path(options.checkpoint), partial(find_checkpoint, world=world))
            load_weights(parallel, stored, lora, options.seed)
        else:
            shards = parallel.parameters()
            regions = {name: parallel.region(name) for name in shards}
            own = initial_deviations(self._config)
            init_weights(shards.items(), self._config.num_layers, options.seed, regions, own)
        return prepare(model, options)

    def _network_config(self, stored: StoredModel | None) -> FamilyConfig | None:
        if self._given is not None:
            if not isinstance(self._given, EncoderDecoder):
                got, expected = type(self._given).__name__, "an encoder-decoder, such as t5"
                raise ModelError("this network reads no source", got=got, expected=expected)
            return config_of_network(self._given)
        config = new_config(self._options, self.processor, "encoder-decoder") if stored is None else stored.config
        return config_of({"family": config.family, **to_dict(config)}, "encoder-decoder")


def _adapted(model: nn.Module) -> tuple[nn.Module, str, None]:
    """The adapted network and its adapter's name; it has no head beside it."""
    return model, ADAPTER, None


TRANSLATION, SUMMARIZATION = Seq2Seq(Seq2SeqOptions), Seq2Seq(SummarizationOptions)
