"""Generation by an encoder-decoder: greedy and beam search over a key-value cache, for batches of sources.

N sources, B beams of each, V tokens of the vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from kitforge.core.nn.context import Context, EncoderInput
from kitforge.core.nn.encoder_decoder import DecoderCache, EncoderDecoder
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqInference:
    """Options of generation from a source."""

    max_new_tokens: int = 128
    # None, here and below: what the folder's generation_config.json says, else 1, 1 and false.
    num_beams: int | None = None  # 1: greedy
    # A finished beam's score is the sum of its log-probabilities / length ** length_penalty.
    length_penalty: float | None = None
    # When a source with `num_beams` finished beams is done: at once (true); once its best running beam, at its present
    # length (false) or at any (never), cannot beat the worst of them.
    early_stopping: bool | Literal["never"] | None = None
    ignored_settings: tuple[str, ...] = ()  # keys of the folder's generation_config.json to generate without
    batch_size: int = 32  # sources computed at once

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "beams", "batch_size"):
            option = f"inference.{'num_beams' if name == 'beams' else name}"
            check(getattr(self, name) > 0, option, getattr(self, name), "a whole number of at least 1")
        is_known = isinstance(self.early_stopping, bool) or self.early_stopping in (None, "never")
        check(is_known, "inference.early_stopping", self.early_stopping, "true, false or never")

    @property
    def beams(self) -> int:
        """The beams of a source, 1 for none."""
        return 1 if self.num_beams is None else self.num_beams


@torch.no_grad()
def generate_targets(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    options: Seq2SeqInference,
    *,
    start_id: int,
    eos_ids: Sequence[int],
    pad_id: int,
) -> list[list[int]]:
    """The tokens that follow from each source, in order, without `start_id` and the end. Sources of like lengths are
    computed together."""
    largest = model.geometry.vocab_size // (1 + len(eos_ids))
    check(options.beams <= largest, "inference.num_beams", options.beams, f"at most {largest}, by the vocabulary")
    found: list[list[int]] = [[] for _ in sources]
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))
    for first in range(0, len(order), options.batch_size):
        part = order[first : first + options.batch_size]
        batch = _Batch(model, [sources[index] for index in part], options, start_id, pad_id)
        search = batch.greedy if options.beams == 1 else batch.beams
        for index, tokens in zip(part, search(tuple(eos_ids)), strict=True):
            found[index] = tokens
    return found


class _Batch:
    """Sources that are decoded together."""

    def __init__(
        self,
        model: EncoderDecoder,
        sources: Sequence[Sequence[int]],
        options: Seq2SeqInference,
        start_id: int,
        pad_id: int,
    ) -> None:
        self._model, self._options = model, options
        device = model.head_weight.device
        longest = max(1, *map(len, sources))
        tokens = torch.full((len(sources), longest), pad_id)
        documents = torch.full((len(sources), longest), -1)
        for row, source in enumerate(sources):
            tokens[row, : len(source)] = torch.tensor(source)
            documents[row, : len(source)] = 0
        self._source = EncoderInput(tokens=tokens.to(device), documents=documents.to(device), keeps_keys=True)
        self._cache = DecoderCache(options.max_new_tokens)
        self._context = Context(source=self._source, attend=self._cache)
        self._vocab_size = model.geometry.vocab_size
        self._start = torch.full((len(sources), 1), start_id, device=device)

    def greedy(self, eos_ids: tuple[int, ...]) -> list[list[int]]:
        """The most probable token each time. Rows that have ended are no longer computed."""
        found: list[list[int]] = [[] for _ in range(len(self._start))]
        rows, tokens = list(range(len(found))), self._start
        for _ in range(self._options.max_new_tokens):
            chosen = self._logits(tokens).argmax(-1).tolist()
            going = [index for index, token in enumerate(chosen) if token not in eos_ids]
            for index in going:
                found[rows[index]].append(chosen[index])
            if not going:
                break
            if len(going) < len(rows):
                self._select(torch.tensor(going))
            rows = [rows[index] for index in going]
            tokens = torch.tensor([[chosen[index]] for index in going], device=tokens.device)
        return found

    def beams(self, eos_ids: tuple[int, ...]) -> list[list[int]]:
        """Beam search; see `Seq2SeqInference.early_stopping`."""
        finished = [_Finished(self._options) for _ in self._start]
        running = {row: [_Beam(0.0, 0, [])] for row in range(len(finished))}
        tokens = self._start
        for length in range(1, self._options.max_new_tokens + 1):
            # The best of all beams are among the best of each, which alone leave the device.
            best = self._logits(tokens).log_softmax(-1).topk(min(self._num_candidates(eos_ids), self._vocab_size))
            shape = len(running), -1, best.indices.shape[-1]
            logprobs, indices = best.values.double().cpu().view(shape), best.indices.cpu().view(shape)
            going = dict[int, list[_Beam]]()
            kept = list[int]()
            for index, (row, beams) in enumerate(running.items()):
                candidates = self._candidates(beams, logprobs[index], indices[index], eos_ids)
                following = self._following(candidates, eos_ids, finished[row], length)
                # Beams that end because they may not be longer compete with those that end here.
                is_last = length == self._options.max_new_tokens
                if is_last or not finished[row].is_done(following[0].score, length):
                    going[row] = following
                    kept += [index * len(beams) + each.parent for each in following]
            running = going
            if not running:
                break
            self._select(torch.tensor(kept))
            last = [[each.tokens[-1]] for beams in running.values() for each in beams]
            tokens = torch.tensor(last, device=tokens.device)
        for row, beams in running.items():
            for each in beams:
                finished[row].add(each.score, len(each.tokens), each.tokens)
        return [each.best() for each in finished]

    def _num_candidates(self, eos_ids: tuple[int, ...]) -> int:
        """So many that enough of them do not end."""
        return self._options.beams * (1 + len(eos_ids))

    def _following(
        self, candidates: Iterable[_Beam], eos_ids: tuple[int, ...], finished: _Finished, length: int
    ) -> list[_Beam]:
        """The best candidates that go on; those that end are finished, if they are among the best."""
        following = list[_Beam]()
        for rank, each in enumerate(candidates):
            if each.tokens[-1] not in eos_ids:
                following.append(each)
            elif rank < self._options.beams:
                finished.add(each.score, length, each.tokens[:-1])
        return following[: self._options.beams]

    def _candidates(
        self, beams: list[_Beam], logprobs: Tensor, tokens: Tensor, eos_ids: tuple[int, ...]
    ) -> Iterator[_Beam]:
        """The best beams after one more token, best first, from log-probabilities and tokens of candidates [B, K]."""
        totals = (logprobs + torch.tensor([[each.score] for each in beams], dtype=torch.float64)).flatten()
        best = totals.topk(min(self._num_candidates(eos_ids), len(totals)))
        for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, candidate = divmod(index, logprobs.shape[-1])
            yield _Beam(score, parent, [*beams[parent].tokens, int(tokens[parent, candidate])])

    def _logits(self, tokens: Tensor) -> Tensor:
        """Logits [rows, V] of the last of new tokens [rows, 1], in fp32 at least."""
        logits = self._model.head(self._model.hidden(tokens, self._context)[:, -1])
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _select(self, rows: Tensor) -> None:
        """Keep these rows of the cache and of the source, in this order."""
        self._cache.select(rows)
        source = self._source
        source.keys = {layer: (keys[rows], values[rows]) for layer, (keys, values) in source.keys.items()}
        source.documents = None if source.documents is None else source.documents[rows]


@dataclass(frozen=True, slots=True)
class _Beam:
    """A beam that has not ended."""

    score: float  # the sum of its log-probabilities
    parent: int  # the beam that it continues
    tokens: list[int]


@dataclass(slots=True)
class _Finished:
    """The best finished beams of a source, as many as there are running ones."""

    options: Seq2SeqInference
    heap: list[tuple[float, int, list[int]]] = field(default_factory=list)
    count: int = 0  # tells beams of equal scores apart

    @property
    def penalty(self) -> float:
        """The power of a length by which a score is divided."""
        return 1.0 if self.options.length_penalty is None else self.options.length_penalty

    def add(self, score: float, length: int, text: list[int]) -> None:
        """A beam of `length` tokens, its end included, with the sum of their log-probabilities."""
        self.count += 1
        heapq.heappush(self.heap, (score / length**self.penalty, -self.count, text))
        if len(self.heap) > self.options.beams:
            heapq.heappop(self.heap)

    def is_done(self, best_running: float, length: int) -> bool:
        """Whether no running beam of `length` tokens can enter, by the rule of `early_stopping`."""
        if len(self.heap) < self.options.beams or self.options.early_stopping is True:
            return len(self.heap) == self.options.beams
        worst, _, _ = self.heap[0]
        penalty = self.penalty
        is_never = self.options.early_stopping == "never" and penalty > 0.0
        reached = self.options.max_new_tokens if is_never else length
        return bool(worst >= best_running / reached**penalty)

    def best(self) -> list[int]:
        """The tokens of the best one."""
        return max(self.heap)[2] if self.heap else []
