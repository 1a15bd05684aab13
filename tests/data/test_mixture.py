"""Weighted sources: the source of a sample is a function of its number, and the fractions are exact in the long run."""

import json
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data.mixture import weighted_sources
from kitforge.data.schedule import BatchSchedule, Mixture, shuffled_indices
from kitforge.data.source import open_rows, open_source
from kitforge.data.text.packing import ConcatenatedRows, PackedRows
from kitforge.data.text.token_cache import build_token_cache
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, DataError

WEIGHTS = st.lists(st.floats(1e-3, 1e3) | st.integers(1, 50), min_size=1, max_size=7)


def mixture(weights: Any, sizes: Any = None, **more: Any) -> Mixture:
    sizes = [10] * len(weights) if sizes is None else sizes
    names = tuple("abcdefgh"[: len(weights)])
    return Mixture(names=names, weights=tuple(weights), num_rows=tuple(sizes), **{"seed": 0, **more})


def sources_of(mixed: Mixture, rows: np.ndarray) -> list[int]:
    return (np.cumsum(mixed.num_rows).searchsorted(rows, side="right")).tolist()


@given(WEIGHTS, st.integers(0, 10**18))
def test_counts_differ_from_the_weights_by_a_bounded_number_of_samples(weights: list[float], samples: int) -> None:
    counts = mixture(weights).counts(samples)
    exact = [samples * Fraction(str(weight)) / sum(Fraction(str(each)) for each in weights) for weight in weights]
    assert sum(counts) == samples
    bound = Fraction(math.ceil(math.log2(len(weights))), 2)
    assert max(abs(count - wanted) for count, wanted in zip(counts, exact, strict=True)) <= bound


@given(WEIGHTS, st.integers(0, 10**9), st.lists(st.integers(0, 40), max_size=5), st.booleans())
def test_how_the_samples_are_asked_for_does_not_matter(
    weights: list[float], start: int, counts: list[int], shuffle: bool
) -> None:
    mixed = mixture(weights, range(1, len(weights) + 1), seed=4, shuffle=shuffle)
    whole = mixed.rows(start, sum(counts)).tolist()
    chunks: list[int] = []
    for count in counts:
        chunks += mixed.rows(start + len(chunks), count).tolist()
    assert chunks == whole


def test_the_sources_of_a_mixture_are_the_same_in_every_version() -> None:
    """Runs of earlier versions resume into this order."""
    mixed = mixture([0.5, 0.2, 0.3], [2, 3, 4], seed=3)
    assert sources_of(mixed, mixed.rows(0, 10)) == SOURCES
    assert mixed.rows(0, 10).tolist() == ROWS


def test_each_source_is_read_in_the_order_of_its_own_passes() -> None:
    mixed = mixture([3, 1], [4, 100])
    rows = mixed.rows(0, 64)
    first = rows[rows < 4]
    assert len(first) == 48
    passes = first.reshape(-1, 4)
    assert np.array_equal(np.sort(passes), np.tile(np.arange(4), (12, 1)))
    assert len({tuple(each) for each in passes.tolist()}) > 1
    # A source is read as far as it is drawn from: no row is skipped while another source is read.
    assert len(set(rows[rows >= 4].tolist())) == 16


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    rows = mixture([1, 1], [50, 50]).rows(0, 100)
    assert rows[0::2].tolist() != (rows[1::2] - 50).tolist()
    without = mixture([1, 1], [3, 3], shuffle=False).rows(0, 8).tolist()
    assert Counter(without) == {0: 2, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}


def test_restart_passes_end_when_every_source_was_read() -> None:
    mixed = mixture([0.5, 0.5], [4, 10])
    assert mixed.num_samples(1.0) in (19, 20)
    assert min(mixed.counts(mixed.num_samples(1.0))[1:]) == 10
    assert mixed.counts(mixed.num_samples(1.0) - 1)[1] == 9
    assert mixed.counts(mixed.num_samples(0.5))[1] == 5


def test_stop_ends_before_a_row_comes_twice() -> None:
    mixed = mixture([0.5, 0.5], [4, 10], on_source_end="stop")
    samples = mixed.num_samples(1.0)
    assert mixed.counts(samples)[0] == 4
    assert mixed.counts(samples + 1)[0] == 5
    rows = mixed.rows(0, samples)
    assert len(set(rows.tolist())) == len(rows)
    schedule = BatchSchedule(num_rows=14, batch_size=3, seed=0, max_steps=100, mixture=mixed)
    assert sum(len(batch.rows) for batch in schedule.batches(0)) == samples
    assert not schedule.is_endless


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 7, 26])
def test_any_number_of_ranks_shares_the_same_samples(replicas: int, start: int) -> None:
    mixed = mixture([0.7, 0.2, 0.1], [5, 6, 7], seed=9)
    wanted = mixed.rows(start, 4 * 7).tolist()
    found: list[list[int]] = [[] for _ in range(4)]
    for replica in range(replicas):
        schedule = BatchSchedule(
            num_rows=18, batch_size=7, seed=9, max_steps=1, mixture=mixed, replica=replica, num_replicas=replicas
        )
        for step, batch in zip(range(4), schedule.batches(start), strict=False):
            found[step] += batch.rows[schedule.shard(len(batch.rows))].tolist()
    assert [row for step in found for row in step] == wanted


def test_one_source_is_the_source_itself_in_an_order_of_its_own() -> None:
    mixed = mixture([2.5], [13])
    assert sorted(mixed.rows(0, 13).tolist()) == list(range(13))
    assert mixed.num_samples(2.0) == 26
    assert mixed.rows(0, 13).tolist() != shuffled_indices(0, 13, 0, 13).tolist()


def entry(**more: Any) -> dict[str, Any]:
    return {"source": "a.txt", "weight": 1} | more


BAD: dict[str, tuple[list[Any], str]] = {
    "zero": ([entry(weight=0)], "weight.*\n.*got: +0\n.*above 0\n.*leave the source out"),
    "negative": ([entry(weight=-0.5)], "got: +-0.5"),
    "nan": ([entry(weight=float("nan"))], "got: +nan"),
    "infinite": ([entry(weight=float("inf"))], "got: +inf"),
    "text": ([entry(weight="0.5")], "got: +'0.5'"),
    "bool": ([entry(weight=True)], "got: +True"),
    "missing": ([entry(), {"source": "b.txt"}], r"data.train\[1\] has no weight"),
    "no source": ([entry(), {"weight": 1}], r"data.train\[1\] has no source"),
    "unknown": ([entry(), entry(source="b", wieght=2)], "unknown option.*wieght[^!]*'?weight'?"),
    "twice": ([entry(), entry(source="b"), entry(source="./a.txt", weight=2)], r"twice[^!]*\[0\] and data.train\[2\]"),
    "nested": ([entry(source=[entry()])], "is a mixture"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mixture_that_cannot_be_is_refused(name: str) -> None:
    spec, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        weighted_sources(spec, ("column",))


@pytest.mark.parametrize(
    "spec",
    [
        "a.txt",
        ["a.txt", "b.txt"],
        [{"text": "a"}],
        [{"source": "en", "target": "de"}],
        [{"source": "web", "weight": 2, "text": "a document"}],
        [],
        iter([{"source": "a", "weight": 1}]),
        None,
    ],
)
def test_rows_and_paths_are_no_mixture(spec: object) -> None:
    assert weighted_sources(spec, ("column",)) is None


def test_one_file_may_be_two_sources_by_its_columns() -> None:
    found = weighted_sources([entry(column="title"), entry(column="body")], ("column",))
    assert found is not None
    assert [each.options for each in found] == [{"column": "title"}, {"column": "body"}]


def test_each_source_has_its_own_options(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "one"}) + "\n")
    (tmp_path / "b.txt").write_text("two---three")
    spec = [
        {"source": str(tmp_path / "a.jsonl"), "weight": 1, "column": "body"},
        {"source": str(tmp_path / "b.txt"), "weight": 1, "separator": "---"},
    ]
    source = open_source(spec)
    assert list(source.documents()) == ["one", "two", "three"]
    assert [list(each.documents()) for each, _ in source.weighted] == [["one"], ["two", "three"]]
    with pytest.raises(ConfigError, match="unknown option"):
        open_source([spec[0], {**spec[1], "seperator": "-"}])


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("")
    spec = [{"source": str(tmp_path / name), "weight": 1} for name in ("a.txt", "empty.txt")]
    with pytest.raises(DataError, match=r"source .*empty\.txt of the mixture.*is empty"):
        open_source(spec)


def test_rows_of_other_tasks_are_not_mixed_in_silence() -> None:
    with pytest.raises(ConfigError, match="mixture of sources cannot be read here"):
        list(open_rows([entry(), entry(source="b")]))


def test_rows_of_several_corpora_are_those_of_each(tmp_path: Path) -> None:
    parts = []
    for text in ("abcdefgh" * 5, "0123456789" * 9, "xyz" * 4):
        cache = build_token_cache(open_source([text]), ByteTokenizer(), tmp_path)
        parts.append(PackedRows(cache, length=8, pad_id=0))
    rows = ConcatenatedRows(parts)
    assert rows.num_rows == sum(part.num_rows for part in parts)
    indices = np.random.default_rng(0).permutation(rows.num_rows)
    starts = np.cumsum([0, *(part.num_rows for part in parts)])
    found = rows.rows(indices)
    for position, index in enumerate(indices):
        number = int(starts.searchsorted(index, side="right")) - 1
        wanted = parts[number].rows(np.array([index - starts[number]]))
        for name, column in wanted.items():
            assert found[name][position].equal(column[0])
    assert {name: len(column) for name, column in rows.rows(indices[:0]).items()} == dict.fromkeys(found, 0)


SOURCES = [0, 2, 0, 1, 0, 2, 0, 1, 0, 2]
ROWS = [1, 6, 0, 2, 1, 8, 0, 3, 0, 7]
