"""The tasks `translation` and `summarization`: options, pairs of texts, the loss and the metrics of an encoder-decoder.

B pairs, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.context import Context, DropoutKey, EncoderInput
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import document_of, fingerprint_of
from kitforge.data.optional_imports import import_optional
from kitforge.data.source import Source, open_rows, open_source
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check, check_least
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.inference.folder_defaults import with_folder_search
from kitforge.inference.seq2seq import Seq2SeqInference, generate_targets
from kitforge.kits.kit import Prepared, RunInputs, expect_network
from kitforge.kits.language_model import TokenizedOptions, check_whole_rows, start_tokens
from kitforge.kits.network_source import NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.labelling import TextRowOptions
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.rows import RaggedTokens, RowSplits, RowTask, SplitRows, hold_out
from kitforge.kits.transformers.text_kit import TextKit
from kitforge.report.notebook import Rows

_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDataOptions(TextRowOptions):
    """Pairs of texts."""

    source: str = "source"  # column of the text that is read
    target: str = "target"  # column of the text that is written
    prefix: str = ""  # before every source: "translate English to German: "
    batch_size: int = 32  # pairs per step
    sequence_length: int = 256  # largest number of tokens of a source, its prefix and end included
    target_length: int = 128  # largest number of tokens of a target, its end included
    eval_texts: int = 100  # first evaluation rows whose targets are generated for BLEU or ROUGE; 0: none

    def __post_init__(self) -> None:
        TextRowOptions.__post_init__(self)
        check_least("data", self, 1, "target_length")
        check(self.eval_texts >= 0, "data.eval_texts", self.eval_texts, "a whole number of at least 0; 0 is none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqOptions(TokenizedOptions):
    """All options of both tasks."""

    task: str = "translation"
    data: PairDataOptions = field(default_factory=PairDataOptions)
    inference: Seq2SeqInference = field(default_factory=Seq2SeqInference)
    format: Literal["huggingface", "onnx", "torch_export"] = "huggingface"  # of `export`

    def __post_init__(self) -> None:
        TokenizedOptions.__post_init__(self)
        check_whole_rows(self.parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizationOptions(Seq2SeqOptions):
    """The options of `summarization`."""

    task: str = "summarization"


class PairRows(SplitRows):
    """Tokenized pairs in memory."""

    def __init__(self, pairs: Sequence[Pair], pad_id: int) -> None:
        self.pairs, self._pad_id = pairs, pad_id
        self._sources, self._targets = (RaggedTokens(getattr(each, side) for each in pairs) for side in SIDES)
        self.lengths = np.maximum(self._sources.lengths, self._targets.lengths)
        self.fingerprint = fingerprint_of(*self._sources.identity(), *self._targets.identity())

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Pairs padded on the right: sources [B, S], targets [B, T] with IGNORED for padding, and `lengths` [B] of the
        sources. Without rows, a pair without targets."""
        targets = self._targets.padded(rows, IGNORED)
        lengths = torch.from_numpy(self._sources.lengths[rows]) if len(rows) else torch.ones(1, dtype=torch.int64)
        return {"sources": self._sources.padded(rows, self._pad_id), "targets": targets, "lengths": lengths}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pair, its texts and their tokens, which end with the end of a text."""

    source: list[int]
    target: list[int]
    texts: tuple[str, str]
    is_cut: bool = False


SIDES = ("source", "target")


def read_texts(spec: object, data: PairDataOptions) -> list[tuple[object, tuple[str, str]]]:
    """Location and texts of every row. Raises DataError naming the row that lacks one."""
    found: list[tuple[object, tuple[str, str]]] = []
    num_skipped = 0
    located = (pair for shard in (open_rows(spec) if spec is not None else ()) for pair in shard.rows())
    for location, row in located:
        try:
            source = document_of(row, data.source, "strict", location, "data.source")
            texts = source, document_of(row, data.target, "strict", location, "data.target")
            if not all(each.strip() for each in texts):
                raise DataError(f"{location} is not a pair", got="an empty text", expected="a source and a target")
        except DataError:
            if data.on_invalid == "refuse":
                raise
            num_skipped += 1
            continue
        found.append((location, texts))
    if spec is not None and not found:
        raise DataError("there are no pairs", got=f"{num_skipped} unusable rows", expected="at least one")
    if num_skipped:
        _log.warning("%d pairs: %d more rows were skipped", len(found), num_skipped)
    return found


def read_pairs(
    train: Sequence[tuple[object, tuple[str, str]]],
    evaluation: Sequence[tuple[object, tuple[str, str]]] | None,
    tokenizer: Tokenizer,
    options: Seq2SeqOptions,
) -> RowSplits[PairRows]:
    """Tokenize pairs of texts. Without evaluation rows, a fraction of the training rows is held out. Raises DataError
    naming the row of a text that is too long."""
    data = options.data
    rows = [_pair(location, texts, tokenizer, data) for location, texts in train]
    held = None if evaluation is None else [_pair(location, texts, tokenizer, data) for location, texts in evaluation]
    for each in (rows, held or []):
        if num_cut := sum(pair.is_cut for pair in each):
            _log.warning("%d pairs: %d were cut", len(each), num_cut)
    own, others = hold_out(rows, held, data.eval_fraction, options.seed)
    return RowSplits(train=PairRows(own, tokenizer.pad_id), eval=PairRows(others, tokenizer.pad_id))


def _pair(location: object, texts: tuple[str, str], tokenizer: Tokenizer, data: PairDataOptions) -> Pair:
    source, target = encode_source(tokenizer, data.prefix + texts[0]), encode_source(tokenizer, texts[1])
    limits = {"sequence_length": data.sequence_length, "target_length": data.target_length}
    for side, tokens, (name, limit) in zip(SIDES, (source, target), limits.items(), strict=True):
        if len(tokens) > limit and data.on_too_long == "refuse":
            fix = f"raise data.{name}, or add data.on_too_long=cut_right"
            got, expected = f"{len(tokens)} tokens", f"at most data.{name}={limit}"
            raise DataError(f"the {side} of {location} is too long", got=got, expected=expected, fix=fix)
    is_cut = len(source) > data.sequence_length or len(target) > data.target_length
    source, target = cut(source, data.sequence_length), cut(target, data.target_length)
    return Pair(source=source, target=target, texts=texts, is_cut=is_cut)


def encode_source(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, with the end of a text behind them."""
    tokens = tokenizer.encode_prompt(text)
    return tokens if tokens and tokens[-1] in tokenizer.eos_ids else [*tokens, tokenizer.eos_id]


def cut(tokens: list[int], limit: int) -> list[int]:
    """At most `limit` tokens, of which the last is that of the whole text: its end."""
    return tokens if len(tokens) <= limit else [*tokens[: limit - 1], tokens[-1]]


class Seq2SeqTask(RowTask):
    """Cross entropy of the targets' tokens, their ends included. A micro-batch is that of `PairRows.batch`, with the
    numbers of its samples and of the step."""

    _options: Seq2SeqOptions

    def __init__(
        self,
        options: Seq2SeqOptions,
        data: RowSplits[PairRows],
        tokenizer: Tokenizer,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        super().__init__(options, data, build, world)
        self._tokenizer = tokenizer

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The target tokens of this rank: the denominator of the mean loss."""
        tokens = torch.stack([(each["targets"] != IGNORED).sum() for each in step]).sum()
        rows = torch.stack([(each["targets"] != IGNORED).any(1).sum() for each in step]).sum()
        inputs = torch.stack([each["lengths"].sum() for each in step]).sum()
        return {"loss": tokens, "samples": rows, "tokens": tokens, "input_tokens": inputs + tokens}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return {"loss": self._loss(model, micro_batch, self.dropout_key(micro_batch) if model.training else None)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss, a mean over all target tokens, and BLEU or ROUGE of generated targets of the first rows."""
        found, pairs = super().evaluate(model), self._rows.eval.pairs[: self._options.data.eval_texts]
        if not found or not pairs:
            return found
        # All ranks generate the same texts, since they share each forward pass.
        sources = [each.source for each in pairs]
        texts = write_targets(model, sources, self._tokenizer, self._options.inference, in_training=True)
        measured = (bleu if self._options.task == "translation" else rouge)(texts, [each.texts[1] for each in pairs])
        return found | {f"eval/{name}": value for name, value in measured.items()}

    def _loss(self, model: nn.Module, micro_batch: MicroBatch, dropout_key: DropoutKey | None) -> Tensor:
        network = cast(EncoderDecoder, model)
        device = network.head_weight.device
        sources, targets, lengths = (copy_to(micro_batch[name], device) for name in ("sources", "targets", "lengths"))
        # Targets shifted by one, behind the token that they begin with.
        start = start_tokens(self._tokenizer, network.config).trained
        inputs = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], dim=1)
        inputs = inputs.masked_fill(inputs == IGNORED, self._tokenizer.pad_id)
        positions = torch.arange(sources.shape[1], device=sources.device)
        context = Context(
            source=EncoderInput(tokens=sources, documents=torch.where(positions < lengths.unsqueeze(1), 0, -1)),
            dropout=dropout_key,
        )
        hidden = network.hidden(inputs, context).flatten(0, 1)
        loss: Tensor = network.kernels.linear_cross_entropy(hidden, network.head_weight, targets.flatten())
        return loss


def write_targets(
    model: nn.Module,
    sources: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    options: Seq2SeqInference,
    *,
    in_training: bool = False,
) -> list[str]:
    """The generated target of each source. Raises DataError for a setting of the folder that is not computed; within a
    training it is named in the log."""
    network = cast(EncoderDecoder, model)
    chosen = with_folder_search(options, tokenizer.generation_config, in_training=in_training)
    start_id = start_tokens(tokenizer, network.config).generated
    tokens = {"eos_ids": tokenizer.eos_ids, "pad_id": tokenizer.pad_id, "start_id": start_id}
    found = generate_targets(network, sources, chosen, **tokens)  # type: ignore[arg-type]
    return [tokenizer.decode(tokens) for tokens in found]


def metric_library(task: str) -> Any:
    """The library of a task's metrics. Raises DependencyError where it is not installed."""
    name, needed = ("sacrebleu", "BLEU") if task == "translation" else ("rouge_score.rouge_scorer", "ROUGE")
    return import_optional(name, needed_for=f"{needed} (data.eval_texts=0 goes without)", extra="transformers")


def bleu(texts: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
    """BLEU (Papineni et al., 2002) and chrF (Popovic, 2015) of the corpus by sacrebleu, from 0 to 100."""
    sacrebleu = metric_library("translation")
    wanted = [list(references)]
    return {
        "bleu": sacrebleu.corpus_bleu(list(texts), wanted).score,
        "chrf": sacrebleu.corpus_chrf(texts, wanted).score,
    }


def rouge(texts: Sequence[str], references: Sequence[str]) -> Mapping[str, float]:
    """The mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin, 2004) by rouge-score, with stemming, from 0 to 1."""
    rouge_score = metric_library("summarization")
    names = ["rouge1", "rouge2", "rougeL"]
    scorer = rouge_score.RougeScorer(names, use_stemmer=True)
    scores = [scorer.score(wanted, text) for wanted, text in zip(references, texts, strict=True)]
    return {name: sum(each[name].fmeasure for each in scores) / len(scores) for name in names}


Inputs: TypeAlias = RunInputs[Tokenizer]


class Seq2Seq(TextKit[Seq2SeqOptions]):
    """The tasks `translation` and `summarization`, which differ in their metrics and in the keys of the pipeline."""

    KIND, OUTPUT, COLUMN = "encoder-decoder", "WRITTEN.jsonl", "source"
    PREDICTED_ROWS = 256

    def __init__(self, options: type[Seq2SeqOptions]) -> None:
        self.OPTIONS = options

    def prepare(
        self, options: Seq2SeqOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[Seq2SeqOptions, Tokenizer]:
        train, evaluation = self.required_datasets(options, inputs, "pairs", is_evaluation=is_evaluation)
        if inputs.model is not None:
            expected = "an encoder-decoder, such as t5"
            expect_network(inputs.model, EncoderDecoder, "this network reads no source", expected)
        source = NetworkSource.find(options, inputs, self.open_model, is_evaluation=is_evaluation)
        if options.data.eval_texts:
            # Refused now, not at the first evaluation.
            metric_library(options.task)
        rows = read_texts(train, options.data)
        held = None if evaluation is None else read_texts(evaluation, options.data)

        def corpus() -> Source | None:
            texts = [text for _, pair in rows for text in (options.data.prefix + pair[0], pair[1])]
            return open_source(texts) if texts else None

        tokenizer = find_run_tokenizer(options, inputs.processor, corpus)
        source = source.fitted(tokenizer, self.KIND)
        data = read_pairs(rows, held, tokenizer, options)
        task = partial(Seq2SeqTask, options, data, tokenizer, source.build)
        return self.prepared(options, source, tokenizer, data.fingerprint, task)

    def dry_rows(self, options: Seq2SeqOptions) -> list[Any]:
        """A pair without the prefix, and without the token that ends each text."""
        data, given = options.data, len(options.data.prefix.encode()) + 1
        return [{data.source: "a" * (data.sequence_length - given), data.target: "a" * (data.target_length - 1)}]

    def export_program(self, options: Seq2SeqOptions) -> list[Path]:
        return export_programs(self, options)

    def open_pipeline(self, model: nn.Module, processor: Tokenizer, options: Seq2SeqOptions) -> Seq2SeqPipeline:
        return Seq2SeqPipeline(model, processor, options)


class Seq2SeqPipeline:
    """Writes targets, in the shapes of Hugging Face's pipelines."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: Seq2SeqOptions) -> None:
        expected = "the model of a run of translation or summarization"
        self._model = expect_network(model, EncoderDecoder, "this model reads no source", expected).eval()
        self._tokenizer = tokenizer
        self._options = options
        self._key = "translation_text" if options.task == "translation" else "summary_text"

    def __call__(self, texts: str | Sequence[str]) -> list[dict[str, str]]:
        """`{"translation_text"}` or `{"summary_text"}` of each text, in order; of a single text, a list of one. Raises
        DataError for a text of more than data.sequence_length tokens, unless data.on_too_long=cut_right."""
        return Rows({self._key: text} for text in self.texts([texts] if isinstance(texts, str) else list(texts)))

    def predictions(self, values: Sequence[Any]) -> Iterator[dict[str, str]]:
        """The generated target of each text, `predicted_<data.target>`."""
        name = f"predicted_{self._options.data.target}"
        yield from ({name: text} for text in self.texts([str(value) for value in values]))

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
