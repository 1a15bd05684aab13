"""The tasks `translation` and `summarization`: options, pairs of texts, the loss and the metrics of an encoder-decoder.

B pairs, S tokens of a source, T tokens of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.context import Context, DropoutKey, EncoderInput
from kitforge.core.nn.encoder_decoder import EncoderDecoder
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import document_of, fingerprint_of
from kitforge.data.optional_imports import import_optional
from kitforge.data.schedule import train_eval_split
from kitforge.data.source import open_rows
from kitforge.data.tokenizer import Tokenizer, TokenizerConfig
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger
from kitforge.foundation.progress import heartbeat
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.inference.folder_defaults import with_folder_search
from kitforge.inference.seq2seq import Seq2SeqInference, generate
from kitforge.kits.language_model import LoraOptions, start_tokens
from kitforge.kits.transformers.rows import RaggedTokens, RowTask
from kitforge.trainer.options import RunOptions

IGNORED = -100
_EMBEDDINGS = ("embedding.weight", "output", "encoder.relative.weight", "decoder.relative.weight")
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairDataOptions:
    """Pairs of texts."""

    train: Any = None  # a jsonl, json, csv, tsv or parquet file, a folder, a glob, a list of them, or rows
    eval: Any = None  # None: a fraction of the training rows (eval_fraction)
    source: str = "source"  # column of the text that is read
    target: str = "target"  # column of the text that is written
    prefix: str = ""  # before every source: "translate English to German: "
    batch_size: int = 32  # pairs per step
    sequence_length: int = 256  # largest number of tokens of a source, its prefix and end included
    target_length: int = 128  # largest number of tokens of a target, its end included
    on_too_long: Literal["refuse", "cut_right"] = "refuse"  # texts of more tokens: refuse, or drop the last ones
    on_invalid: Literal["refuse", "skip"] = "refuse"  # rows without both texts
    eval_fraction: float = 0.05  # fraction of the training rows held out if data.eval is not given
    eval_texts: int = 100  # first evaluation rows whose targets are generated for BLEU or ROUGE; 0: none
    shuffle: bool = True
    cache: str | None = None  # folder of trained tokenizers; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "target_length"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a whole number of at least 1")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")
        check(self.eval_texts >= 0, "data.eval_texts", self.eval_texts, "a whole number, or 0 for none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqOptions(RunOptions):
    """All options of both tasks."""

    task: str = "translation"
    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: PairDataOptions = field(default_factory=PairDataOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    freeze: tuple[str, ...] = ()  # parameters that are not trained, as patterns: ["encoder.*"]
    inference: Seq2SeqInference = field(default_factory=Seq2SeqInference)
    # Run, folder, or Hub id (NAME/MODEL@REVISION) with the weights.
    checkpoint: str | None = None
    format: Literal["huggingface", "onnx", "torch_export"] = "huggingface"  # of `export`
    output: str | None = None  # jsonl file of `predict`

    def __post_init__(self) -> None:
        self.lora.check_parallel(self.parallel)
        is_one = not (self.freeze and self.lora.is_on)
        check(is_one, "freeze", list(self.freeze), "nothing with lora.rank, which freezes all weights")
        degrees = self.parallel
        is_whole = degrees.tensor == 1 or not degrees.sequence_parallel
        fix = "add parallel.sequence_parallel=false"
        check(is_whole, "parallel.sequence_parallel", True, "false for rows of any length", fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class SummarizationOptions(Seq2SeqOptions):
    """The options of `summarization`."""

    task: str = "summarization"


@final
class PairRows:
    """Tokenized pairs in memory."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs
        self._sources, self._targets = (RaggedTokens(getattr(each, side) for each in pairs) for side in SIDES)
        self.lengths = np.maximum(self._sources.lengths, self._targets.lengths)
        self.fingerprint = fingerprint_of(*self._sources.identity(), *self._targets.identity())

    def __len__(self) -> int:
        return len(self.pairs)

    def batch(self, rows: NDArray[np.int64], pad_id: int) -> dict[str, Tensor]:
        """Pairs padded on the right: sources [B, S], targets [B, T] with IGNORED for padding, and `lengths` [B] of the
        sources. Without rows, a pair without targets."""
        targets = self._targets.padded(rows, IGNORED)
        lengths = torch.from_numpy(self._sources.lengths[rows]) if len(rows) else torch.ones(1, dtype=torch.int64)
        return {"sources": self._sources.padded(rows, pad_id), "targets": targets, "lengths": lengths}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pair, its texts and their tokens, which end with the end of a text."""

    source: list[int]
    target: list[int]
    texts: tuple[str, str]


SIDES = ("source", "target")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PairData:
    """Training and evaluation pairs."""

    train: PairRows
    eval: PairRows
    pad_id: int

    @property
    def fingerprint(self) -> str:
        """Of all rows."""
        return fingerprint_of(self.train.fingerprint, self.eval.fingerprint)


def read_texts(spec: object, data: PairDataOptions) -> list[tuple[object, tuple[str, str]]]:
    """Location and texts of every row. Raises DataError naming the row that lacks one."""
    found: list[tuple[object, tuple[str, str]]] = []
    num_skipped = 0
    located = (pair for shard in (open_rows(spec) if spec is not None else ()) for pair in shard.rows())
    for location, row in located:
        try:
            texts = document_of(row, data.source, "strict", location), document_of(row, data.target, "strict", location)
            if not all(each.strip() for each in texts):
                raise DataError(f"{location} is no pair", got="an empty text", expected="a source and a target")
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
) -> PairData:
    """Tokenize pairs of texts. Without evaluation rows, a fraction of the training rows is held out. Raises DataError
    naming the row of a text that is too long."""
    data = options.data
    pairs = [_pair(location, texts, tokenizer, data) for location, texts in train]
    if evaluation is None:
        kept, held_out = train_eval_split(len(pairs), data.eval_fraction, options.seed)
        held = [pairs[index] for index in held_out]
        pairs = [pairs[index] for index in kept]
    else:
        held = [_pair(location, texts, tokenizer, data) for location, texts in evaluation]
    return PairData(train=PairRows(pairs), eval=PairRows(held), pad_id=tokenizer.pad_id)


def _pair(location: object, texts: tuple[str, str], tokenizer: Tokenizer, data: PairDataOptions) -> Pair:
    source, target = encode_source(tokenizer, data.prefix + texts[0]), encode_source(tokenizer, texts[1])
    limits = {"sequence_length": data.sequence_length, "target_length": data.target_length}
    for side, tokens, (name, limit) in zip(SIDES, (source, target), limits.items(), strict=True):
        if len(tokens) > limit and data.on_too_long == "refuse":
            fix = f"raise data.{name}, or add data.on_too_long=cut_right"
            got, expected = f"{len(tokens)} tokens", f"at most data.{name}={limit}"
            raise DataError(f"the {side} of {location} is too long", got=got, expected=expected, fix=fix)
    return Pair(source=cut(source, data.sequence_length), target=cut(target, data.target_length), texts=texts)


def encode_source(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, with the end of a text behind them."""
    tokens = tokenizer.encode_prompt(text)
    return tokens if tokens and tokens[-1] in tokenizer.eos_ids else [*tokens, tokenizer.eos_id]


def cut(tokens: list[int], limit: int) -> list[int]:
    """At most `limit` tokens, of which the last is that of the whole text: its end."""
    return tokens if len(tokens) <= limit else [*tokens[: limit - 1], tokens[-1]]


@final
class Seq2SeqTask(RowTask):
    """Cross entropy of the targets' tokens, their ends included. A micro-batch is that of `PairRows.batch`, with the
    numbers of its samples and of the step."""

    def __init__(
        self,
        options: Seq2SeqOptions,
        data: PairData,
        tokenizer: Tokenizer,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        rows = options.data
        super().__init__(options, data, build, world, batch_size=rows.batch_size, shuffle=rows.shuffle)
        self._options = options
        self._data = data
        self._tokenizer = tokenizer

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Weight decay for matrices only: not for embeddings, the head, relative biases and norms."""
        tables = [name for name, _ in model.named_parameters() if name in _EMBEDDINGS]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The target tokens of this rank: the denominator of the mean loss."""
        tokens = torch.stack([(each["targets"] != IGNORED).sum() for each in step]).sum()
        rows = torch.stack([(each["targets"] != IGNORED).any(1).sum() for each in step]).sum()
        inputs = torch.stack([each["lengths"].sum() for each in step]).sum()
        return {"loss": tokens, "samples": rows, "tokens": tokens, "input_tokens": inputs + tokens}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sum of cross entropies."""
        return {"loss": self._loss(model, micro_batch, self.dropout_key(model, micro_batch))}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss, a mean over all target tokens, and BLEU or ROUGE of generated targets."""
        if not len(self._data.eval):
            return {}
        sums = torch.zeros(2, dtype=torch.float64)
        parts = self.eval_micro_batches()
        for micro_batch in heartbeat(parts, "batches evaluated", enabled=self._options.trainer.progress):
            count = (micro_batch["targets"] != IGNORED).sum()
            sums += torch.stack([self._loss(model, micro_batch, None).double().cpu(), count.double()])
        total, count = self._world.sum({"sums": sums})["sums"].tolist()
        return {"eval/loss": total / max(count, 1.0), **self._text_metrics(model)}

    def _text_metrics(self, model: nn.Module) -> dict[str, float]:
        """Of the first evaluation rows. All ranks generate the same texts, since they share each forward pass."""
        pairs = self._data.eval.pairs[: self._options.data.eval_texts]
        if not pairs:
            return {}
        sources = [each.source for each in pairs]
        texts = write_targets(model, sources, self._tokenizer, self._options.inference, in_training=True)
        measure = bleu if self._options.task == "translation" else rouge
        return {f"eval/{name}": value for name, value in measure(texts, [each.texts[1] for each in pairs]).items()}

    def _loss(self, model: nn.Module, micro_batch: MicroBatch, noise: DropoutKey | None) -> Tensor:
        network = cast(EncoderDecoder, model)
        device = network.head_weight.device
        sources, targets, lengths = (copy_to(micro_batch[name], device) for name in ("sources", "targets", "lengths"))
        # Targets shifted by one, behind the token that they begin with.
        start = start_tokens(self._tokenizer, network.config).trained
        inputs = torch.cat([torch.full_like(targets[:, :1], start), targets[:, :-1]], dim=1)
        inputs = inputs.masked_fill(inputs == IGNORED, self._data.pad_id)
        context = Context(
            source=EncoderInput(tokens=sources, documents=source_documents(sources, lengths)), dropout=noise
        )
        hidden = network.hidden(inputs, context).flatten(0, 1)
        loss: Tensor = network.kernels.linear_cross_entropy(hidden, network.head_weight, targets.flatten())
        return loss


def source_documents(sources: Tensor, lengths: Tensor) -> Tensor:
    """[B, S]: 0 for the tokens of a source, -1 for padding."""
    positions = torch.arange(sources.shape[1], device=sources.device)
    return torch.where(positions < lengths.unsqueeze(1), 0, -1)


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
    found = generate(network, sources, chosen, **tokens)  # type: ignore[arg-type]
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
    return {name: sum(each[name].fmeasure for each in scores) / max(len(scores), 1) for name in names}
