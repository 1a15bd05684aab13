"""Scores texts with a reward model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch

from kitforge.data.chat_datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.template import template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.kits.rlhf.collate import pad_examples
from kitforge.kits.rlhf.reward_model import ValueHeadModel

BATCH_SIZE = 16


@final
class RewardPipeline:
    """`pipeline(text)` gives `[{"score": ...}]`; a list of texts, or of rows with prompt and completion or messages,
    gives a list of those. Scores are in units of those of the texts that the model was trained on."""

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
        return [[{"score": score}] for score in self.scores(responses)]

    @torch.no_grad()
    def scores(self, responses: Sequence[TokenizedExample]) -> Iterator[float]:
        """The scores of responses that are tokens already, in order."""
        device = self.model.score.weight.device
        for start in range(0, len(responses), BATCH_SIZE):
            batch = pad_examples(responses[start : start + BATCH_SIZE], self.tokenizer.pad_id)
            scores = self.model.scores_at(batch["tokens"].to(device), batch["ends"].to(device))
            yield from self.model.normalized(scores).tolist()
