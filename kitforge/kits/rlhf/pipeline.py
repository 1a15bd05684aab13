"""Scores texts with a reward model: in memory, or a file of rows into a file of scores."""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.chat.template import template_of
from kitforge.data.source import open_rows
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.errors import ConfigError, ContextLengthError, DataError
from kitforge.foundation.files import atomic_file
from kitforge.foundation.log import logger
from kitforge.foundation.progress import Advance
from kitforge.kits.rlhf.batching import pad_examples
from kitforge.kits.rlhf.config import ChatDatasetOptions
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.report.notebook import Rows

BATCH_SIZE = 16


class RewardPipeline:
    """`pipeline(text)` returns `[{"score": ...}]`; a list of texts, or of rows with prompt and completion or messages,
    returns a list of those. Scores are normalized to the training texts."""

    def __init__(self, model: ValueHeadModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._reader = ChatDatasetReader(tokenizer, template_of(tokenizer))

    def __call__(self, texts: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]) -> list[Any]:
        """The scores, in order."""
        if isinstance(texts, (str, Mapping)):
            result: list[Any] = self([texts])[0]
            return result
        rows = [{"text": text} if isinstance(text, str) else text for text in texts]
        responses = list(self._reader.demonstrations(rows)) if rows else []
        return Rows(Rows([{"score": score}]) for score in self.scores(responses))

    def score_texts(self, texts: Sequence[Any]) -> list[tuple[float, int]]:
        """The score of each pair of prompt and completion, or list of messages, and the number of its tokens."""
        names = ("prompt", "completion")
        rows = [
            dict(zip(names, each, strict=True)) if isinstance(each, tuple) else {"messages": each} for each in texts
        ]
        responses, most = list(self._reader.demonstrations(rows)), self.model.language_model.geometry.max_length
        sizes = [len(each.tokens) for each in responses]
        if max(sizes) > most:
            raise ContextLengthError(
                "a text is longer than the model allows", got=max(sizes), expected=f"at most {most}"
            )
        return list(zip(self.scores(responses), sizes, strict=True))

    @torch.no_grad()
    def scores(self, responses: Sequence[TokenizedExample]) -> Iterator[float]:
        """The scores of tokenized responses, in order."""
        device = self.model.score.weight.device
        for start in range(0, len(responses), BATCH_SIZE):
            batch = pad_examples(responses[start : start + BATCH_SIZE], self.tokenizer.pad_id)
            scores = self.model.scores_at(batch["tokens"].to(device), batch["ends"].to(device))
            yield from self.model.normalized(scores).tolist()


_log = logger(__name__)


def write_scores(pipeline: RewardPipeline, options: ChatDatasetOptions, target: Path, progress: Advance) -> None:
    """Score each row of `data.eval` into the column `score` of `target`, which is written atomically. Invalid rows
    raise DataError, or are dropped and counted with data.on_invalid=skip."""
    if target.suffix != ".jsonl":
        raise ConfigError("invalid value for option 'output'", got=target, expected="a file .jsonl for a reward model")
    done, responses = 0, _responses(pipeline, options)
    with atomic_file(target) as file:
        while rows := list(islice(responses, BATCH_SIZE)):
            scores = pipeline.scores([response for _, response in rows])
            for (row, _), score in zip(rows, scores, strict=True):
                file.write(_json_line({**row, "score": score}))
            done += len(rows)
            progress(done)
        if not done:
            raise DataError("data.eval has no rows to score", got=options.eval, expected="at least one row")


def _responses(
    pipeline: RewardPipeline, options: ChatDatasetOptions
) -> Iterator[tuple[Mapping[str, Any], TokenizedExample]]:
    """Every valid row with its tokens."""
    reader, num_dropped = ChatDatasetReader(pipeline.tokenizer, template_of(pipeline.tokenizer), options.columns), 0
    described = ((shard.features, shard) for shard in open_rows(options.eval))
    for features, (location, row) in ((found, pair) for found, shard in described for pair in shard.rows()):
        try:
            response = reader.demonstration(row, location, features)
            if "score" in row:
                raise DataError("the row has a column `score` already", fix="rename it: the scores are written there")
        except DataError as error:
            if options.on_invalid == "refuse":
                raise error if str(location) in str(error) else DataError(f"{location}: {error}") from None
            if not num_dropped:
                _log.warning("%s: %s: row dropped; further invalid rows are dropped silently", location, error)
            num_dropped += 1
            continue
        yield row, response
    if num_dropped:
        _log.warning("%s invalid rows were dropped", f"{num_dropped:,}")


def _json_line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError("a row cannot be written as JSON", got=error) from None
