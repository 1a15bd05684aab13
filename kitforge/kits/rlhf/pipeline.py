"""Scores texts with a reward model: in memory, or a file of rows into a file of scores."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.chat.template import template_of
from kitforge.data.source import open_rows
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.errors import ContextLengthError, DataError
from kitforge.foundation.log import logger
from kitforge.kits.rlhf.batching import pad_examples
from kitforge.kits.rlhf.config import ChatDatasetOptions
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.report.notebook import Rows

BATCH_SIZE = 16
# A row and its tokens.
Scored: TypeAlias = tuple[Mapping[str, Any], TokenizedExample]
_log = logger(__name__)


class RewardPipeline:
    """`pipeline(text)` returns `[{"score": ...}]`; a list of texts, or of rows with prompt and completion or messages,
    returns a list of those. Scores are normalized to the training texts."""

    def __init__(self, model: ValueHeadModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._reader = ChatDatasetReader(tokenizer, template_of(tokenizer))

    def __call__(self, texts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[Any]:
        if isinstance(texts, (str, Mapping)):
            result: list[Any] = self([texts])[0]
            return result
        rows = [{"text": text} if isinstance(text, str) else text for text in texts]
        completions = list(self._reader.demonstrations(rows)) if rows else []
        return Rows(Rows([{"score": score}]) for score in self.scores(completions))

    def score_texts(self, texts: Sequence[Any]) -> list[tuple[float, int]]:
        """The score of each pair of prompt and completion, or list of messages, and the number of its tokens."""
        names = ("prompt", "completion")
        rows = [
            dict(zip(names, each, strict=True)) if isinstance(each, tuple) else {"messages": each} for each in texts
        ]
        completions, most = list(self._reader.demonstrations(rows)), self.model.language_model.geometry.max_length
        sizes = [len(each.tokens) for each in completions]
        if max(sizes) > most:
            raise ContextLengthError(
                "a text is longer than the model allows", got=max(sizes), expected=f"at most {most}"
            )
        return list(zip(self.scores(completions), sizes, strict=True))

    @torch.no_grad()
    def scores(self, completions: Sequence[TokenizedExample]) -> Iterator[float]:
        """The scores of tokenized completions, in order."""
        device = self.model.score.weight.device
        for start in range(0, len(completions), BATCH_SIZE):
            batch = pad_examples(completions[start : start + BATCH_SIZE], self.tokenizer.pad_id)
            scores = self.model.scores_at(batch["tokens"].to(device), batch["ends"].to(device))
            yield from self.model.normalized(scores).tolist()


def scored_rows(tokenizer: Tokenizer, options: ChatDatasetOptions) -> Iterator[Scored]:
    """Every row of `data.eval` with its tokens. Invalid rows raise DataError, or are dropped and counted with
    data.on_invalid=skip."""
    reader, num_dropped = ChatDatasetReader(tokenizer, template_of(tokenizer), options.columns), 0
    described = ((shard.features, shard) for shard in open_rows(options.eval))
    for features, (location, row) in ((found, pair) for found, shard in described for pair in shard.rows()):
        try:
            completion = reader.demonstration(row, location, features)
            if "score" in row:
                raise DataError("the row has a column `score` already", fix="rename it: the scores are written there")
        except DataError as error:
            if options.on_invalid == "refuse":
                raise error if str(location) in str(error) else DataError(f"{location}: {error}") from None
            if not num_dropped:
                _log.warning("%s: %s: row dropped; further invalid rows are dropped silently", location, error)
            num_dropped += 1
            continue
        yield row, completion
    if num_dropped:
        _log.warning("%s invalid rows were dropped", f"{num_dropped:,}")
