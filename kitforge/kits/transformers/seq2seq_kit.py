"""The wiring of `translation` and `summarization`: from options to a run, and from a folder to a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

from torch import nn

from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.data.source import open_source
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import to_dict
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.kits.batch_predict import Predict, predict_rows, row_batches
from kitforge.kits.kit import LoadModel, Prepared, RunInputs, datasets
from kitforge.kits.language_model import (
    ADAPTER,
    SaveAdapter,
    SaveTokenizer,
    stored_tokenizer,
)
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.seq2seq import (
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
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.task import Task

Inputs: TypeAlias = RunInputs[Tokenizer]
# Rows that `predict` reads at once.
_BATCH = 256


@final
class Seq2Seq(NetworkKit[Seq2SeqOptions, Tokenizer]):
    """The tasks `translation` and `summarization`, which differ in their metrics and in the keys of the pipeline."""

    KIND = "encoder-decoder"
    PREDICTS_AS_TRAINED = True

    def __init__(self, options: type[Seq2SeqOptions]) -> None:
        self.OPTIONS = options

    def prepare(
        self, options: Seq2SeqOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[Seq2SeqOptions, Tokenizer]:
        """Pairs, tokenizer and network."""
        train, evaluation = datasets(options, inputs, is_evaluation=is_evaluation)
        if train is None and evaluation is None:
            raise ConfigError("there are no pairs", got="data.train=null", fix="add data.train=ROWS.jsonl")
        if inputs.model is not None and not isinstance(inputs.model, EncoderDecoder):
            got, expected = type(inputs.model).__name__, "an encoder-decoder, such as t5"
            raise ModelError("this network reads no source", got=got, expected=expected)
        source = NetworkSource.find(options, inputs, self.open_model, is_evaluation=is_evaluation)
        if options.data.eval_texts:
            # Refused now, not at the first evaluation.
            metric_library(options.task)
        rows = read_texts(train, options.data)
        held = None if evaluation is None else read_texts(evaluation, options.data)
        # What a tokenizer is trained on, if the options name one that is to be trained.
        texts = [text for _, pair in rows for text in (options.data.prefix + pair[0], pair[1])]
        tokenizer = find_run_tokenizer(options, inputs.processor, open_source(texts) if texts else None)
        source = source.fitted(tokenizer, self.KIND)
        data = read_pairs(rows, held, tokenizer, options)

        def task(world: World) -> tuple[Task, list[Callback]]:
            made = Seq2SeqTask(options, data, tokenizer, source.build, world)
            adapter = SaveAdapter(lambda model: (model, ADAPTER, None), options.checkpoint, tokenizer)
            return made, [SaveTokenizer(tokenizer), adapter]

        recorded = to_dict(options) | {"model": source.recorded()}
        fingerprints = {"rows": data.fingerprint}
        return Prepared(options=options, recorded=recorded, fingerprints=fingerprints, processor=tokenizer, task=task)

    def export_program(self, options: Seq2SeqOptions) -> list[Path]:
        """Write the programs of the model under `options.checkpoint` into the folder `options.output_dir`."""
        return export_programs(self, options)

    def open_pipeline(self, model: nn.Module, processor: Tokenizer, options: Seq2SeqOptions) -> Seq2SeqPipeline:
        """What writes targets."""
        return Seq2SeqPipeline(model, processor, options)

    def predict_file(self, options: Seq2SeqOptions, load_model: LoadModel) -> Path:
        """Write each row of `data.eval` with its generated target, `predicted_<data.target>`, to `output`."""
        column, name = options.data.source, f"predicted_{options.data.target}"

        def opened(model: nn.Module, folder: Path) -> Predict[dict[str, Any]]:
            write = self.open_pipeline(model, stored_tokenizer(folder), options)
            return lambda rows: (
                row | {name: text}
                for row, text in zip(rows, write.texts([str(row[column]) for row in rows]), strict=True)
            )

        return predict_rows(options, row_batches(options.data.eval, column, _BATCH), load_model, opened)

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [
            f"kitforge predict checkpoint={folder} data.eval=ROWS.jsonl output=WRITTEN.jsonl",
            f"kitforge evaluate checkpoint={folder} data.eval=ROWS.jsonl",
        ]


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


TRANSLATION, SUMMARIZATION = Seq2Seq(Seq2SeqOptions), Seq2Seq(SummarizationOptions)
