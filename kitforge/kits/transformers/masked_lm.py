"""The task `masked_lm`: an encoder learns the tokens of a text that are masked (Devlin et al., 2019).

B rows, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.causal_lm import padded_context
from kitforge.core.nn.encoder import Encoder
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.source import SourceConfig, open_source
from kitforge.data.text.masking import MaskToken, frame_of, framed_rows, masked
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.kits.kit import Prepared, RunInputs, expect_network
from kitforge.kits.language_model import TokenizedOptions, check_whole_rows
from kitforge.kits.network_source import NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.rows import RaggedTokens, RowOptions, RowSplits, RowTask, SplitRows, hold_out
from kitforge.kits.transformers.text_kit import TextKit
from kitforge.report.notebook import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedDataOptions(RowOptions):
    """Texts, and how their tokens are masked."""

    train: Any = None  # a file, a folder, a glob, a list of them, or texts
    column: str = "text"  # column of the text in files of rows
    separator: str | None = None  # between two texts of a .txt file; null: a file is one text
    batch_size: int = 32  # rows per step
    sequence_length: int = 128  # largest number of tokens of a row; a longer text becomes several rows
    mask_fraction: float = 0.15  # of the tokens, or words, that are to be learned
    whole_words: bool = False  # mask all tokens of a word, or none

    def __post_init__(self) -> None:
        RowOptions.__post_init__(self)
        check(self.sequence_length > 3, "data.sequence_length", self.sequence_length, "a whole number of at least 4")
        check(0 < self.mask_fraction < 1, "data.mask_fraction", self.mask_fraction, "above 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLMOptions(TokenizedOptions):
    """All options of the task."""

    task: str = "masked_lm"
    data: MaskedDataOptions = field(default_factory=MaskedDataOptions)

    def __post_init__(self) -> None:
        TokenizedOptions.__post_init__(self)
        check_whole_rows(self.parallel)


class MaskedRows(SplitRows):
    """Tokenized rows in memory, and the word of each token."""

    def __init__(self, encoded: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> None:
        self._pad_id = pad_id
        self.tokens, self.words = (RaggedTokens(each[side] for each in encoded) for side in (0, 1))
        self.lengths = self.tokens.lengths
        self.fingerprint = fingerprint_of(*self.tokens.identity(), *self.words.identity())

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Rows padded on the right: tokens [B, T], their numbers of tokens `lengths` [B], and the `rows` [B]. Without
        rows, one token."""
        lengths = torch.from_numpy(self.lengths[rows]) if len(rows) else torch.ones(1, dtype=torch.int64)
        return {"tokens": self.tokens.padded(rows, self._pad_id), "lengths": lengths, "rows": torch.from_numpy(rows)}


class MaskedLMTask(RowTask):
    """Cross entropy of the masked tokens. Which are masked is a function of the seed, the pass over the rows and the
    row, and in evaluation of seed and row. A micro-batch is that of `MaskedRows.batch`, with the `targets` [B, T]."""

    _options: MaskedLMOptions

    def __init__(
        self,
        options: MaskedLMOptions,
        data: RowSplits[MaskedRows],
        tokenizer: Tokenizer,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        super().__init__(options, data, build, world)
        self._mask, self._vocab = MaskToken.of(tokenizer).number, tokenizer.vocab_size

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The masked tokens of this rank: the denominator of the mean loss."""
        targets = torch.stack([(each["targets"] != IGNORED).sum() for each in step]).sum()
        tokens = torch.stack([each["lengths"].sum() for each in step]).sum()
        rows = torch.tensor(sum(len(each["rows"]) for each in step))
        return {"loss": targets, "samples": rows, "input_tokens": tokens}

    def _micro_batches(self, rows: Any, indices: NDArray[np.int64], first: int, step: int) -> list[MicroBatch]:
        found = super()._micro_batches(rows, indices, first, step)
        return [self._masked(rows, each) for each in found]

    def _masked(self, rows: MaskedRows, micro_batch: MicroBatch) -> MicroBatch:
        tokens, options = micro_batch["tokens"].clone(), self._options
        targets, is_training = torch.full_like(tokens, IGNORED), rows is self._rows.train
        pairs = zip(micro_batch["rows"].tolist(), micro_batch["samples"].tolist(), strict=False)
        for index, (row, sample) in enumerate(pairs):
            own, words = rows.tokens.row(row), rows.words.row(row)
            if not options.data.whole_words:
                words = np.where(words > 0, np.arange(1, len(words) + 1), 0)
            seed = (options.seed, "mask", sample // len(rows) if is_training else "evaluation", row)
            changed, wanted = masked(own, words, seed, options.data.mask_fraction, self._mask, self._vocab)
            tokens[index, : len(own)], targets[index, : len(own)] = map(torch.from_numpy, (changed, wanted))
        return {**micro_batch, "tokens": tokens, "targets": targets}

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of the cross entropies of masked tokens, and of those that are the likeliest."""
        network = cast(Encoder, model)
        device = network.head_weight.device
        tokens, targets = (copy_to(micro_batch[name], device) for name in ("tokens", "targets"))
        dropout_key = self.dropout_key(micro_batch) if model.training else None
        hidden = network.hidden(tokens, padded_context(network, tokens, micro_batch["lengths"], dropout_key))
        wanted = targets[targets != IGNORED]
        logits = network.head(hidden[targets != IGNORED])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        right = (logits.argmax(-1) == wanted).sum().to(logits)
        return {"loss": functional.cross_entropy(logits, wanted, reduction="sum"), "accuracy": right}


class FillMaskPipeline:
    """Fills masks, in the shapes of Hugging Face's pipeline."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: MaskedLMOptions) -> None:
        expected = "an encoder, such as the model of a run of masked_lm"
        self._model = expect_network(model, Encoder, "this model fills no masks", expected).eval()
        self._tokenizer, self._mask = tokenizer, MaskToken.of(tokenizer)

    @torch.no_grad()
    def __call__(self, texts: str | Sequence[str], top_k: int = 5) -> list[Any]:
        """Of the mask in a text (the tokenizer's own spelling, else [MASK]) the `top_k` likeliest tokens, each as
        `{"score", "token", "token_str", "sequence"}`; of several masks a list of these for each, of several texts a
        list for each. Raises DataError for a text without a mask, or longer than the model's context."""
        rows = [texts] if isinstance(texts, str) else list(texts)
        found = Rows(self._fill(text, f"text {number}", top_k) for number, text in enumerate(rows))
        return found[0] if isinstance(texts, str) else found

    def predictions(self, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """The likeliest token of each mask of a text, `predicted_tokens`."""
        for text in values:
            found = self(str(text), top_k=1)
            yield {"predicted_tokens": [(each[0] if isinstance(each, list) else each)["token_str"] for each in found]}

    def _tokens(self, text: str) -> list[int]:
        """The tokens of a text with masks, between those that begin and end every text."""
        head, tail = frame_of(self._tokenizer)
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            marks = [each for each in self._tokenizer.find_added(text) if each.token == self._mask.number]
            own = self._tokenizer.encode_marked(text, marks)[0]
        else:
            parts = [self._tokenizer.encode(part) for part in text.split(self._mask.text)]
            own = [*parts[0], *(token for part in parts[1:] for token in (self._mask.number, *part))]
        return [*head, *own, *tail]

    def _fill(self, text: str, name: str, top_k: int) -> list[Any]:
        tokens, limit = self._tokens(text), self._model.geometry.max_length
        masks = [index for index, token in enumerate(tokens) if token == self._mask.number]
        if not masks or len(tokens) > limit:
            got = f"{len(masks)} masks in {len(tokens)} tokens"
            expected = f"at least one {self._mask.text}, and at most {limit} tokens"
            raise DataError(f"{name} cannot be filled", got=got, expected=expected)
        row = torch.tensor([tokens], device=self._model.head_weight.device)
        probabilities = self._model.head(self._model.hidden(row)[0, masks]).float().softmax(-1).cpu()
        found = []
        for mask, scores in zip(masks, probabilities, strict=True):
            best = scores.topk(min(top_k, len(scores)))
            found.append([self._answer(tokens, mask, *each) for each in zip(*map(Tensor.tolist, best), strict=True)])
        return found[0] if len(found) == 1 else found

    def _answer(self, tokens: Sequence[int], mask: int, score: float, token: int) -> dict[str, Any]:
        filled = [*tokens[:mask], token, *tokens[mask + 1 :]]
        # A mask behind the vocabulary has no text.
        kept = [each for each in filled if each < self._tokenizer.vocab_size]
        spelled = self._tokenizer.decode([token]) if token < self._tokenizer.vocab_size else self._mask.text
        return {"score": score, "token": token, "token_str": spelled, "sequence": self._tokenizer.decode(kept)}


Inputs: TypeAlias = RunInputs[Tokenizer]


class MaskedLM(TextKit[MaskedLMOptions]):
    """The task `masked_lm`."""

    OPTIONS, KIND, OUTPUT, COLUMN = MaskedLMOptions, "encoder", "FILLED.jsonl", "column"

    def resolved(self, options: MaskedLMOptions) -> dict[str, Any]:
        """See `NetworkKit`; the mask is behind the vocabulary of bytes, and of a tokenizer that is trained."""
        values = super().resolved(options)
        if options.checkpoint is None and options.model.get("vocab_size") is None:
            values["model"]["vocab_size"] += 1
        return values

    def prepare(
        self, options: MaskedLMOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[MaskedLMOptions, Tokenizer]:
        train, evaluation = self.required_datasets(options, inputs, "texts", is_evaluation=is_evaluation)
        if inputs.model is not None:
            expect_network(inputs.model, Encoder, "this network learns no masked tokens", "an encoder, such as bert")
        source = NetworkSource.find(options, inputs, self.open_model, is_evaluation=is_evaluation)
        reading = SourceConfig(column=options.data.column, separator=options.data.separator)
        texts, held = (None if each is None else open_source(each, reading) for each in (train, evaluation))
        tokenizer = find_run_tokenizer(options, inputs.processor, lambda: texts or held)
        if source.config is None and options.model.get("vocab_size") is None:
            # The mask may be behind the vocabulary.
            size = max(tokenizer.vocab_size, MaskToken.of(tokenizer).number + 1)
            source = replace(source, options=replace(options, model={**options.model, "vocab_size": size}))
        source = source.fitted(tokenizer, self.KIND)
        mask, known = MaskToken.of(tokenizer), source.family.vocab_size
        check(mask.number < known, "model.vocab_size", known, f"more than {mask.number}, the token of {mask.text}")
        documents = [[] if each is None else each.documents() for each in (texts, held)]
        encoded = [
            [row for text in each for row in framed_rows(tokenizer, text, options.data.sequence_length)]
            for each in documents
        ]
        parts = hold_out(encoded[0], encoded[1] or None, options.data.eval_fraction, options.seed)
        own, others = (MaskedRows(each, tokenizer.pad_id) for each in parts)
        data = RowSplits(train=own, eval=others)
        task = partial(MaskedLMTask, options, data, tokenizer, source.build)
        return self.prepared(options, source, tokenizer, data.fingerprint, task)

    def dry_rows(self, options: MaskedLMOptions) -> list[Any]:
        return ["a" * options.data.sequence_length]

    def open_pipeline(self, model: nn.Module, processor: Tokenizer, options: MaskedLMOptions) -> FillMaskPipeline:
        return FillMaskPipeline(model, processor, options)
