"""The task `embedding`: one vector of a text, so that texts which belong together are near by cosine.

B rows, N texts, T tokens, D dim of a vector.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.nn.causal_lm import CausalLM, padded_context
from kitforge.core.nn.context import DropoutKey
from kitforge.core.parallel import collectives
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.schedule import token_budget_batches
from kitforge.data.text.text_pairs import NEGATIVE, pair_texts
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.inference.pooling import PoolingMode, TextPooling, find_pooling, pool_rows, write_pooling
from kitforge.kits.kit import Prepared, RunInputs
from kitforge.kits.language_model import TokenizedOptions, check_whole_rows
from kitforge.kits.network_source import NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.contrastive import TextGroups, contrastive_losses, retrieval_metrics, spans
from kitforge.kits.transformers.labelling import TextRowOptions, read_text_rows
from kitforge.kits.transformers.rows import RaggedTokens, RowSplits, RowTask, SplitRows, fitting_tokens, hold_out
from kitforge.kits.transformers.text_kit import PIPELINE_ROWS, TextKit, row_corpus
from kitforge.models import loading as model_folder
from kitforge.models.catalog import TEXT_KINDS, without_head
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.precision import autocast
from kitforge.trainer.run_folder import Run
from kitforge.trainer.task import BestMetric

# Tokens, padding included, of the texts of like lengths that share a pass on a CPU: more are padded further.
PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingDataOptions(TextRowOptions):
    """Pairs of texts that belong together, and texts that do not."""

    anchor: str = "anchor"  # column of the text that is asked with
    positive: str = "positive"  # column of the text that is to be found
    negative: str | None = None  # column of a text, or a list of them, that is not; null: negative, where rows have it


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions(TokenizedOptions):
    """All options of the task."""

    task: str = "embedding"
    data: EmbeddingDataOptions = field(default_factory=EmbeddingDataOptions)
    # Of the outputs of all tokens: the last, the mean, the first (cls); null: as the checkpoint has it, else the last.
    pooling: PoolingMode | None = None
    # Vectors of predictions and exports to length 1; training compares by cosine in any case. null: as the checkpoint
    # has it, else true.
    normalize: bool | None = None
    temperature: float = 0.05  # of the cosines in the loss
    # numbers at the start of a vector that are vectors too (Matryoshka); the whole is added
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        TokenizedOptions.__post_init__(self)
        check(self.temperature > 0, "temperature", self.temperature, "more than 0")
        check(all(each > 0 for each in self.sizes), "sizes", list(self.sizes), "whole numbers of at least 1")
        check_whole_rows(self.parallel)


class EmbeddingRows(SplitRows):
    """Tokenized rows of texts in memory."""

    def __init__(self, rows: Sequence[Sequence[Sequence[int]]], pad_id: int) -> None:
        self._pad_id, self._tokens = pad_id, RaggedTokens(text for row in rows for text in row)
        numbers: dict[tuple[int, ...], int] = {}
        self.groups = TextGroups([[numbers.setdefault(tuple(text), len(numbers)) for text in row] for row in rows])
        # The tokens of a row in a micro-batch, whose texts are padded to its longest.
        self.lengths = np.array([len(row) * max(map(len, row)) for row in rows], np.int64)
        self.fingerprint = fingerprint_of(*self._tokens.identity(), self.groups.counts.tobytes())

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """The texts of the rows, padded on the right: tokens [N, T] and their lengths [N], and the `rows` [B]. Without
        rows, one text of a token."""
        slots = self.groups.slots(rows)
        lengths = torch.from_numpy(self._tokens.lengths[slots]) if len(rows) else torch.ones(1, dtype=torch.int64)
        return {"tokens": self._tokens.padded(slots, self._pad_id), "lengths": lengths, "rows": torch.from_numpy(rows)}


def read_embedding_rows(
    train: object, evaluation: object, tokenizer: Tokenizer, options: EmbeddingOptions
) -> RowSplits[EmbeddingRows]:
    """Read and tokenize rows of texts. Raises DataError naming the row that is unusable."""
    data = options.data

    def read(row: object, location: object) -> tuple[list[list[int]], None]:
        texts = pair_texts(row, (data.anchor, data.positive, data.negative), location)
        return [tokenizer.encode_prompt(text) for text in texts], None

    rows, held = ([texts for _, texts, _ in read_text_rows(each, read, data)[0]] for each in (train, evaluation))
    own, others = hold_out(rows, held or None, data.eval_fraction, options.seed)
    return RowSplits(train=EmbeddingRows(own, tokenizer.pad_id), eval=EmbeddingRows(others, tokenizer.pad_id))


class EmbeddingTask(RowTask):
    """`contrastive_losses` of the rows of a whole batch, over all ranks. Several micro-batches give the gradient of one
    in two passes (GradCache, Gao et al., 2021): the first computes all vectors without a graph and the gradient of the
    loss by each, the second the vectors of a micro-batch again, whose product with that gradient is its loss."""

    _options: EmbeddingOptions
    # A second micro-batch would cost another forward pass.
    MAX_TOKENS = None

    def metric_for_best(self) -> BestMetric:
        """The nDCG of whole vectors."""
        return BestMetric(name="eval/ndcg@10", mode="max")

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The rows of this rank: the denominator of the mean loss."""
        rows = torch.tensor(sum(len(each["rows"]) for each in step))
        tokens = torch.stack([each["lengths"].sum() for each in step]).sum()
        return {"loss": rows.float(), "samples": rows, "input_tokens": tokens}

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        """The batches of rows, with the gradients of the vectors where there are several micro-batches."""
        for step in super().steps(model, cursor):
            yield step if len(step) == 1 else self._with_gradients(model, step)

    def _micro_batches(self, rows: Any, indices: NDArray[np.int64], first: int, step: int) -> list[MicroBatch]:
        batch = torch.from_numpy(indices)  # the rows of all ranks
        found = super()._micro_batches(rows, indices, first, step)
        return [{**each, "batch": batch, "indices": (each["samples"] - first)[: len(each["rows"])]} for each in found]

    def _with_gradients(self, model: nn.Module, step: Sequence[MicroBatch]) -> list[MicroBatch]:
        with torch.no_grad(), autocast(self._world.device, self._options.precision):
            parts = [self._vectors(model, each) for each in step]
        vectors = torch.cat(parts).requires_grad_()
        losses, right = self._losses(vectors, torch.cat([each["indices"] for each in step]), step[0]["batch"])
        losses.sum().backward()  # type: ignore[no-untyped-call]
        assert vectors.grad is not None
        counts = [len(each["rows"]) for each in step]
        gradients = torch.split(vectors.grad, list(map(len, parts)))
        values, hits = (torch.split(each.detach(), counts) for each in (losses, right))
        return [
            {**each, "gradients": gradient, "losses": own, "right": hit}
            for each, gradient, own, hit in zip(step, gradients, values, hits, strict=True)
        ]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of the losses of the rows, and of those whose positive is the nearest candidate of the batch."""
        vectors = self._vectors(model, micro_batch)
        if "gradients" not in micro_batch:
            losses, right = self._losses(vectors, micro_batch["indices"], micro_batch["batch"])
            return {"loss": losses.sum(), "accuracy": right.sum().to(losses)}
        product = (vectors * micro_batch["gradients"]).sum()
        value, right = micro_batch["losses"].sum(), micro_batch["right"].sum()
        return {"loss": product + (value - product).detach(), "accuracy": right.to(value)}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss and the metrics of `retrieval_metrics`, over all evaluation rows."""
        if not self._num_eval_rows:
            return {}
        groups, batches = self._rows.eval.groups, list[Tensor]()
        dim = cast(CausalLM, model).geometry.dim
        whole = torch.zeros(len(groups.texts), dim, dtype=torch.float64)
        with self.shown(self.eval_micro_batches(model)) as micro_batches:
            for each in micro_batches:
                whole[torch.from_numpy(groups.slots(each["rows"].numpy()))] = self._vectors(model, each).double().cpu()
                batches += [each["batch"]]
        rows = np.unique(torch.cat(batches).numpy())
        whole = self._world.sum({"vectors": whole})["vectors"]
        found = retrieval_metrics(whole, groups, rows, self._options.temperature, self._sizes(dim))
        return {f"eval/{name}": value for name, value in found.items()}

    def _sizes(self, dim: int) -> list[int]:
        """The sizes of the loss, the whole vectors last."""
        return [*sorted(set(self._options.sizes) - {dim}), dim]

    def _vectors(self, model: nn.Module, micro_batch: MicroBatch) -> Tensor:
        """The vectors [N, D] of the texts of a micro-batch; none of one without rows, but with its graph."""
        network, rows = cast(CausalLM, model), micro_batch["rows"].numpy()
        dropout_key = None
        if model.training and len(rows):
            # A mask for each text: the texts of a row must not share one.
            groups = self._rows.train.groups
            first, counts = micro_batch["samples"].numpy() * groups.counts.max(), groups.counts[rows]
            within = groups.slots(rows) - np.repeat(groups.starts[rows], counts)
            texts = torch.from_numpy(np.repeat(first, counts) + within)
            dropout_key = self.dropout_key({**micro_batch, "samples": texts})
        found = self._pooled(network, micro_batch["tokens"], micro_batch["lengths"], dropout_key)
        return found if len(rows) else found[:0]

    def _pooled(self, network: CausalLM, tokens: Tensor, lengths: Tensor, dropout: DropoutKey | None) -> Tensor:
        """See `text_vectors`. On a CPU texts of like lengths share a pass, unless ranks must make equally many."""
        mode, degrees = self._options.pooling or "last", self._options.parallel
        if self._world.device_type != "cpu" or degrees.shard * degrees.expert > 1:
            return text_vectors(network, tokens, lengths, mode, dropout)
        sizes, found = lengths.tolist(), list[Tensor]()
        parts = [torch.from_numpy(each) for each in token_budget_batches(range(len(sizes)), sizes, PASS_TOKENS)]
        for part in parts:
            samples = () if dropout is None else tuple(dropout.samples[text] for text in part.tolist())
            key = dropout and replace(dropout, samples=samples)
            found.append(text_vectors(network, tokens[part, : int(lengths[part].max())], lengths[part], mode, key))
        return torch.cat(found).index_select(0, torch.cat(parts).argsort())

    def _losses(self, vectors: Tensor, indices: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of this rank's rows [B], which have these indices in the batch and whose texts have these
        vectors, and whether their positives are nearest; the candidates are the positives and negatives of the batch,
        which has a row twice where it runs across passes."""
        groups, mesh, rows, own = self._rows.train.groups, self._world.mesh, batch.numpy(), indices.numpy()
        counts = groups.counts[rows]
        starts = np.cumsum(counts) - counts
        texts = torch.from_numpy(spans(starts[own], counts[own])).to(vectors.device)
        whole = vectors.new_zeros(int(counts.sum()), vectors.shape[1]).index_copy(0, texts, vectors)
        whole = collectives.all_reduce_autograd(whole, None if mesh is None else mesh.replicas)
        is_candidate = np.ones(len(whole), bool)
        is_candidate[starts] = False
        wanted = torch.from_numpy((np.cumsum(is_candidate) - 1)[starts[own] + 1])
        excluded = groups.false_negatives(rows[own], groups.texts[groups.slots(rows)[is_candidate]])
        wanted, excluded = (copy_to(each, vectors.device) for each in (wanted, excluded))
        queries, candidates = whole[torch.from_numpy(starts[own])], whole[torch.from_numpy(is_candidate)]
        sizes, temperature = self._sizes(whole.shape[1]), self._options.temperature
        return contrastive_losses(queries, candidates, wanted, excluded, temperature, sizes)


def text_vectors(
    network: CausalLM, tokens: Tensor, lengths: Tensor, mode: PoolingMode, dropout: DropoutKey | None = None
) -> Tensor:
    """The vectors [N, D] of texts [N, T] with padding on the right, of these lengths [N]."""
    device = network.head_weight.device
    tokens, lengths = copy_to(tokens, device), copy_to(lengths, device)
    return pool_rows(network.hidden(tokens, padded_context(network, tokens, lengths, dropout)), lengths, mode)


class EmbeddingPipeline:
    """Embeds texts."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: EmbeddingOptions, pooling: TextPooling) -> None:
        expected = "a language model, such as the model of a run of embedding"
        if not isinstance(model, CausalLM):
            raise ModelError("this model embeds no texts", got=type(model).__name__, expected=expected)
        self._network, self._tokenizer = model.eval(), tokenizer
        self._pooling = pooling
        self._fitting = partial(fitting_tokens, model.geometry.max_length, options.data.on_too_long)

    @torch.no_grad()
    def __call__(
        self, texts: str | Sequence[str], normalize: bool | None = None, size: int | None = None
    ) -> NDArray[np.float32]:
        """The vectors [texts, D] in order; of a single text, its vector [D]. `normalize` None: as the model was trained
        and exported; `size`: their first so many numbers. Raises DataError for a text that is longer than the model's
        context, or without tokens."""
        rows, dim = [texts] if isinstance(texts, str) else list(texts), self._network.geometry.dim
        check(size is None or 0 < size <= dim, "size", size, f"a whole number from 1 to {dim}, or None")
        encoded = [
            self._fitting(self._tokenizer.encode_prompt(text), f"text {number}") for number, text in enumerate(rows)
        ]
        found = np.zeros((len(rows), size or dim), np.float32)
        order = np.argsort([-len(tokens) for tokens in encoded], kind="stable")
        for start in range(0, len(order), PIPELINE_ROWS):
            part = order[start : start + PIPELINE_ROWS]
            ragged = RaggedTokens(encoded[row] for row in part)
            lengths, numbers = torch.from_numpy(ragged.lengths), np.arange(len(part))
            vectors = text_vectors(self._network, ragged.padded(numbers, 0), lengths, self._pooling.mode)[:, :size]
            if self._pooling.normalize if normalize is None else normalize:
                vectors = functional.normalize(vectors, dim=-1)
            found[part] = vectors.float().cpu().numpy()
        return found[0] if isinstance(texts, str) else found

    def predictions(self, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """The vector of each text, `embedding`."""
        yield from ({"embedding": vector.tolist()} for vector in self([str(value) for value in values]))


class SavePooling(Callback):
    """Writes how the model embeds a text into the run folder, where serving finds it."""

    def __init__(self, pooling: TextPooling) -> None:
        self._pooling = pooling

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start" and run.folder is not None and run.world.rank == 0:
            geometry = cast(CausalLM, run.model).geometry
            write_pooling(run.folder, self._pooling, geometry.dim, geometry.max_length)


Inputs: TypeAlias = RunInputs[Tokenizer]


class Embedding(TextKit[EmbeddingOptions]):
    """The task `embedding`. `text_generation` serves its models at /v1/embeddings."""

    OPTIONS, OUTPUT, FURTHER_KINDS, COLUMN = EmbeddingOptions, "VECTORS.jsonl", ("encoder",), "anchor"

    def prepare(
        self, options: EmbeddingOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[EmbeddingOptions, Tokenizer]:
        train, evaluation = self.required_datasets(options, inputs, "rows of texts", is_evaluation=is_evaluation)
        if inputs.model is not None and not isinstance(inputs.model, CausalLM):
            got, expected = type(inputs.model).__name__, "a language model"
            raise ModelError("this network embeds no texts", got=got, expected=expected)
        source = NetworkSource.find(options, inputs, self.open_model, is_evaluation=is_evaluation)
        columns = {options.data.anchor, options.data.positive, options.data.negative or NEGATIVE}
        tokenizer = find_run_tokenizer(options, inputs.processor, lambda: row_corpus(train, columns))
        source = source.fitted(tokenizer, *TEXT_KINDS)
        if inputs.model is None:
            source = replace(source, config=without_head(source.family))
        config: Any = source.config or cast(CausalLM, inputs.model).geometry
        longest = max(options.sizes, default=0)
        check(longest <= config.dim, "sizes", longest, f"at most the width of the network, {config.dim}")
        pooling = _pooling_of(options)
        chosen = replace(options, pooling=pooling.mode, normalize=pooling.normalize)
        data = read_embedding_rows(train, evaluation, tokenizer, options)
        task = partial(EmbeddingTask, chosen, data, source.build)
        return self.prepared(chosen, source, tokenizer, data.fingerprint, task, SavePooling(pooling))

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """See `NetworkKit`; the head of a language model is not read, and many published folders have none."""
        return model_folder.open_model(folder, open_run, reads_head=False)

    def dry_rows(self, options: EmbeddingOptions) -> list[Any]:
        """A batch of them: equal texts would be computed once."""
        data, names = options.data, [options.data.anchor, options.data.positive]
        names += [] if data.negative is None else [data.negative]
        length = data.sequence_length
        return [{name: f"{row} {name}".ljust(length)[:length] for name in names} for row in range(data.batch_size)]

    def open_pipeline(self, model: nn.Module, processor: Tokenizer, options: EmbeddingOptions) -> EmbeddingPipeline:
        return EmbeddingPipeline(model, processor, options, _pooling_of(options))

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
        """Write a Hugging Face folder, adapters merged, that sentence-transformers reads too."""
        super().save(source, folder, processor, dtype)
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, Path) and folder.is_dir():
            # A step is RUN/checkpoints/step_N.
            known = (find_pooling(each, None, None) for each in (home, home.resolve().parent.parent))
            pooling = next((each for each in known if isinstance(each, TextPooling)), None)
            config: Any = self.open_model(home).config
            if pooling is not None:
                write_pooling(folder, pooling, config.dim, config.max_length)


def _pooling_of(options: EmbeddingOptions) -> TextPooling:
    """The pooling of the options, else of the checkpoint, else of the last token."""
    if options.checkpoint is not None:
        found = find_pooling(resolve(options.checkpoint), options.pooling, options.normalize)
        if isinstance(found, TextPooling):
            return found
    return TextPooling(mode=options.pooling or "last", normalize=options.normalize is not False)
