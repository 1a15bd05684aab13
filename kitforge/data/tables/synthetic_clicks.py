"""A click log made up row by row: Zipf ids, effects that are known, and so the AUC that no model can pass.

Every row is a pure function of (seed, number), so any row is had in constant time and there is no end to them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.splitmix64 import hash_array
from kitforge.data.tables.columns import ColumnLayout, Columns, KeyColumn, LabelColumn, ListColumn, ListValues
from kitforge.foundation.config import check
from kitforge.foundation.seed import key

# Effects shrink with an id's rank, so rare ids, which cannot be learned, matter little.
_FADING_RANK = 10.0
_NUM_TASTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticClicksConfig:
    """Options of the synthetic click log. With the defaults, training reaches the best AUC less 0.001 in a minute."""

    num_rows: int = 400_000
    seed: int = 0
    # Ids per field; the most frequent id of a field is rank 0.
    fields: tuple[int, ...] = (10_000, 2_000, 300, 50, 24, 8)
    zipf: float = 1.1  # id of rank r is drawn about as often as (r + 1) ** -zipf
    crosses: tuple[tuple[int, ...], ...] = ((3, 4), (2, 5))  # pairs of fields that act together
    num_dense: int = 4
    missing: float = 0.05  # share of dense numbers that are missing
    history: int = 0  # up to so many ids of field 1 a row, which act by what they have in common with the row's own
    click_rate: float = 0.2  # about

    def __post_init__(self) -> None:
        check(self.num_rows >= 1, "click_log.num_rows", self.num_rows, "at least 1")
        check(bool(self.fields) and min(self.fields) >= 1, "click_log.fields", self.fields, "sizes of at least 1")
        check(self.zipf > 0 and self.zipf != 1, "click_log.zipf", self.zipf, "above 0 and not 1, such as 1.05")
        pairs = all(len(pair) == 2 and max(pair) < len(self.fields) for pair in self.crosses)
        check(pairs, "click_log.crosses", self.crosses, "pairs of places in fields")
        check(self.history == 0 or len(self.fields) >= 2, "click_log.history", self.history, "0, or a second field")
        check(0 <= self.missing < 1, "click_log.missing", self.missing, "at least 0, below 1")
        check(0 < self.click_rate < 1, "click_log.click_rate", self.click_rate, "above 0, below 1")


class SyntheticClicks:
    """The rows of the log that the options describe."""

    def __init__(self, config: SyntheticClicksConfig) -> None:
        self.config = config
        self.num_rows = config.num_rows
        self.layout = ColumnLayout(
            numbers=tuple(f"d{number}" for number in range(1, config.num_dense + 1)),
            keys=tuple(KeyColumn(name=f"c{number}", kind="integer") for number in range(1, len(config.fields) + 1)),
            lists=(ListColumn(name="history", kind="integer"),) if config.history else (),
            label=LabelColumn(name="click"),
        )
        self.fingerprint = fingerprint_of("click_log", config, 0)

    def rows(self, indices: NDArray[np.int64]) -> Columns:
        """The rows of these numbers, in this order."""
        draws = _SyntheticDraws(self.config, indices)
        keys = [_keys_of(self.config, field, ranks) for field, ranks in enumerate(draws.ranks)]
        lists = {}
        if self.config.history:
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(draws.history_lengths)])
            values = _keys_of(self.config, 1, draws.history_ranks[draws.is_history])
            lists["history"] = ListValues(values=values, offsets=offsets)
        return Columns(
            numbers=draws.dense,
            keys=np.stack(keys, axis=1),
            absent=np.zeros((len(indices), len(keys)), bool),
            lists=lists,
            labels=(draws.uniform("label") < draws.probabilities()).astype(np.float32),
        )

    def probabilities(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """The true chance of a click of each row [n]."""
        return _SyntheticDraws(self.config, indices).probabilities()


class _SyntheticDraws:
    """All that is random about some rows, and what follows from it."""

    def __init__(self, config: SyntheticClicksConfig, numbers: NDArray[np.int64]) -> None:
        self._config = config
        self._numbers = numbers.astype(np.uint64)
        self.ranks = [
            _ranks(self.uniform(f"field {field}"), size, config.zipf) for field, size in enumerate(config.fields)
        ]
        normals = [_normal(self._raw(f"dense {number}")) for number in range(config.num_dense)]
        # As prices and counts are: skewed, never negative.
        dense = np.exp(np.stack(normals, axis=1)) if normals else np.zeros((len(numbers), 0))
        for number in range(config.num_dense):
            dense[self.uniform(f"missing {number}") < config.missing, number] = np.nan
        self.dense: NDArray[np.float64] = dense
        if config.history:
            self._draw_history(config)

    def _draw_history(self, config: SyntheticClicksConfig) -> None:
        lengths = (self.uniform("history") * (config.history + 1)).astype(np.int64)
        draws = [self.uniform(f"history {index}") for index in range(config.history)]
        self.history_ranks = np.stack([_ranks(draw, config.fields[1], config.zipf) for draw in draws], axis=1)
        self.history_lengths = lengths
        self.is_history = np.arange(config.history) < lengths[:, None]

    def probabilities(self) -> NDArray[np.float64]:
        """The chance of a click of each row."""
        config = self._config
        odds = np.full(len(self._numbers), np.log(config.click_rate / (1 - config.click_rate)) - 0.3)
        for field, ranks in enumerate(self.ranks):
            effects = _normal(hash_array(ranks.astype(np.uint64), key(config.seed, "effect", f"field {field}")))
            odds += 0.8 * (effects * (1 + ranks / _FADING_RANK) ** -0.75)
        for one, other in config.crosses:
            pairs = self.ranks[one] * config.fields[other] + self.ranks[other]
            fading = np.sqrt((1 + self.ranks[one] / _FADING_RANK) * (1 + self.ranks[other] / _FADING_RANK))
            odds += _normal(hash_array(pairs.astype(np.uint64), key(config.seed, "cross", one, other))) / fading
        for number in range(config.num_dense):
            # A missing number has the median value.
            logs = np.nan_to_num(np.log(self.dense[:, number]), nan=0.0)
            odds += 0.4 * np.sin(1.5 * logs + number) if number % 2 else 0.4 * logs
        if config.history:
            own = self.ranks[1] % _NUM_TASTES
            same = ((self.history_ranks % _NUM_TASTES == own[:, None]) & self.is_history).sum(axis=1)
            odds += 2.0 * same / np.maximum(self.history_lengths, 1)
        chances: NDArray[np.float64] = 1 / (1 + np.exp(-odds))
        return chances

    def uniform(self, name: str) -> NDArray[np.float64]:
        """A number from 0 up to 1 for each row."""
        return (self._raw(name) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _raw(self, name: str) -> NDArray[np.uint64]:
        return hash_array(self._numbers, key(self._config.seed, "click_log", name))


def _normal(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """A normal number out of the two halves of each word (Box and Muller 1958)."""
    one = ((raw >> np.uint64(32)).astype(np.float64) + 1) * 2.0**-32
    other = (raw & np.uint64(2**32 - 1)).astype(np.float64) * 2.0**-32
    normal: NDArray[np.float64] = np.sqrt(-2 * np.log(one)) * np.cos(2 * np.pi * other)
    return normal


def _ranks(uniform: NDArray[np.float64], size: int, zipf: float) -> NDArray[np.int64]:
    """Zipf's law over 0 .. size - 1, as the inverse of its continuous form."""
    power = 1 - zipf
    ranks = ((size + 1) ** power * uniform + (1 - uniform)) ** (1 / power) - 1
    integer_ranks: NDArray[np.int64] = np.minimum(ranks.astype(np.int64), size - 1)
    return integer_ranks


def _keys_of(config: SyntheticClicksConfig, field: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ids as they come in life: any 64 bits, and not in order."""
    return hash_array(ranks.astype(np.uint64), key(config.seed, "id", field)).view(np.int64)
