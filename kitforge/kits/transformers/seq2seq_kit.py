"""The wiring of `translation` and `summarization`: from options to a run, and from a folder to a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.parallel.world import World
from kitforge.data.source import open_rows, open_source
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.foundation.files import atomic_file
from kitforge.foundation.progress import show_progress
from kitforge.kits.kit import LoadModel, RunInputs
from kitforge.kits.language_model import (
    ADAPTER,
    SaveAdapter,
    SaveTokenizer,
    export_language_model,
    resolved_options,
    save_language_model,
    stored_tokenizer,
)
from kitforge.kits.network_source import NetworkSource, check_splits, find_run_tokenizer
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
from kitforge.models.loading import OpenCheckpoint, StoredModel
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
        check_splits(options, "encoder-decoder")

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
        train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
        evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
        # An evaluation reads the training rows only if the evaluation rows are split off them.
        train = None if is_evaluation and evaluation is not None else train
        if train is None and evaluation is None:
            raise ConfigError("there are no pairs", got="data.train=null", fix="add data.train=ROWS.jsonl")
        if inputs.model is not None and not isinstance(inputs.model, EncoderDecoder):
            got, expected = type(inputs.model).__name__, "an encoder-decoder, such as t5"
            raise ModelError("this network reads no source", got=got, expected=expected)
        opened = inputs.open_model or model_folder.open_model
        found = NetworkSource.find(options, inputs.model, opened, is_evaluation=is_evaluation)
        if options.data.eval_texts:
            # Refused now, not at the first evaluation.
            metric_library(options.task)
        rows = read_texts(train, options.data)
        held = None if evaluation is None else read_texts(evaluation, options.data)
        # What a tokenizer is trained on, if the options name one that is to be trained.
        texts = [text for _, pair in rows for text in (options.data.prefix + pair[0], pair[1])]
        source = open_source(texts) if texts else None
        self.processor = find_run_tokenizer(
            options.tokenizer, options.checkpoint, inputs.processor, source, options.data.cache
        )
        self.network = found.fitted(self.processor, "encoder-decoder")
        self.data: PairData = read_pairs(rows, held, self.processor, options)

    def recorded(self) -> dict[str, Any]:
        """The options of the model, as a checkpoint records them."""
        return {"model": self.network.recorded()}

    def build(self, world: World) -> nn.Module:
        """The network on the device, cut as the world's degrees say; with its adapter if it is to be trained."""
        return self.network.build(world)


def _adapted(model: nn.Module) -> tuple[nn.Module, str, None]:
    """The adapted network and its adapter's name; it has no head beside it."""
    return model, ADAPTER, None


TRANSLATION, SUMMARIZATION = Seq2Seq(Seq2SeqOptions), Seq2Seq(SummarizationOptions)
