"""Streams: every document once in a pass, disjoint lanes, bounded memory, and an exact position after any row."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.utils.data import IterableDataset

from kitforge.data.source import SourceConfig, open_source, open_stream
from kitforge.data.text.packing import PackedRows
from kitforge.data.text.streaming import IterableReader, Lane, ShardReader, StreamOptions, TextStream
from kitforge.data.text.token_cache import build_token_cache
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import DataError

TOKENIZER = ByteTokenizer()
DOCUMENTS = [f"{n:02d} " + "word " * (n % 7) for n in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of several formats: plain, compressed, text, Parquet."""
    place = tmp_path_factory.mktemp("shards")
    lines = [json.dumps({"text": text}) + "\n" for text in DOCUMENTS]
    (place / "a.jsonl").write_text("".join(lines[:20]))
    with gzip.open(place / "b.jsonl.gz", "wt") as file:
        file.write("".join(lines[20:35]))
    for number in range(35, 45):
        (place / f"c{number}.txt").write_text(DOCUMENTS[number])
    parquet.write_table(pyarrow.table({"text": DOCUMENTS[45:]}), place / "d.parquet")
    return place


def reader(folder: Path, lane: int = 0, num_lanes: int = 1, **more: Any) -> ShardReader:
    return ShardReader(open_source(folder).shards(), lane, num_lanes, **{"seed": 1, **more})


def lane_of(source: Any, **more: Any) -> Lane:
    options = StreamOptions(**{"batch_size": 1, "length": 16, "buffer": 8, "seed": 1, **more})
    return Lane(source, TOKENIZER, options, 0)


@pytest.mark.parametrize("num_lanes", [1, 2, 5, 13, 20, 60])
def test_lanes_read_every_document_once_in_a_pass(folder: Path, num_lanes: int) -> None:
    found: list[str] = []
    for lane in range(num_lanes):
        source = reader(folder, lane, num_lanes)
        for text in source.documents(None):
            if source.position()[0] > 0:
                break
            found.append(text)
    assert sorted(found) == DOCUMENTS


def test_shards_come_in_another_order_in_each_pass(folder: Path) -> None:
    texts = reader(folder).documents(None)
    passes = [[next(texts) for _ in DOCUMENTS] for _ in range(3)]
    assert len({tuple(each) for each in passes}) == 3
    assert sorted(passes[2]) == DOCUMENTS


def test_rows_are_those_of_packing_without_a_stream(folder: Path, tmp_path: Path) -> None:
    cache = build_token_cache(open_source(folder), TOKENIZER, tmp_path)
    packed = PackedRows(cache, length=16, pad_id=0)
    lane = lane_of(reader(folder, shuffle=False), shuffle=False)
    # The last row of the cache is padded; that of the stream goes on with the next pass.
    wanted = packed.rows(np.arange(packed.num_rows - 1))
    rows = [lane.row() for _ in range(packed.num_rows - 1)]
    for name, column in wanted.items():
        assert np.array_equal(np.stack([row[name] for row in rows]), column.numpy()), name


@pytest.mark.parametrize("buffer", [1, 7, 1000])
def test_a_lane_goes_on_at_any_row(folder: Path, buffer: int) -> None:
    whole = lane_of(reader(folder), buffer=buffer)
    rows, positions = [], []
    for _ in range(150):
        positions.append(whole.position())
        rows.append(whole.row())
    assert whole.position()[0] is None or whole.position()[0][0] >= 1
    for number in range(1, 150, 11):
        again = lane_of(reader(folder), buffer=buffer)
        again.seek(json.loads(json.dumps(positions[number])))
        for wanted in rows[number : number + 9]:
            row = again.row()
            assert all(np.array_equal(row[name], wanted[name]) for name in wanted)


def test_a_lane_shuffles_its_blocks_and_holds_no_more_than_its_buffer(folder: Path) -> None:
    read = []

    class Counting:
        position = staticmethod(lambda: [0, 0, 0])

        def documents(self, position: Any) -> Iterator[str]:
            for number in range(10_000):
                read.append(number)
                yield f"{number:05d}"

    lane = lane_of(Counting(), buffer=50, length=6)
    peak, texts = 0, []
    for row in range(400):
        texts.append(bytes(lane.row()["tokens"][:5].tolist()).decode())
        peak = max(peak, len(lane._texts))
        # A row is one document here: those read and not yet used are never more than the buffer.
        assert len(read) - row <= 50
    assert peak == 50
    numbers = list(map(int, texts))
    assert sorted(numbers) == list(range(400))
    assert max(numbers[:10]) > 25


def test_the_buffers_of_all_lanes_are_bounded_together() -> None:
    options = StreamOptions(batch_size=8, length=4, buffer=100, seed=0)
    assert options.lane_buffer * 8 <= 100
    assert StreamOptions(batch_size=8, length=4, buffer=3, seed=0).lane_buffer == 1


def stream(folder: Path) -> TextStream:
    options = StreamOptions(batch_size=6, length=16, buffer=30, seed=1)
    return TextStream(lambda lane: reader(folder, lane, 6), TOKENIZER, options)


@pytest.mark.parametrize("cuts", [(0, 6), (0, 3, 6), (0, 1, 2, 4, 6), (0, 0, 6)])
def test_any_number_of_ranks_reads_the_same_batches_and_goes_on_with_another(folder: Path, cuts: tuple[int]) -> None:
    whole = [rows for rows, _ in take(stream(folder).batches(slice(0, 6), {}), 12)]
    parts = [slice(*each) for each in zip(cuts, cuts[1:], strict=False)]
    ranks = [take(stream(folder).batches(part, {}), 5) for part in parts]
    for step in range(5):
        joined = torch.cat([rank[step][0]["tokens"].view(-1, 16) for rank in ranks])
        assert joined.equal(whole[step]["tokens"])
    positions = {name: value for rank in ranks for name, value in rank[-1][1].items()}
    assert sorted(positions) == sorted(map(str, range(6)))
    for later in (slice(0, 6), slice(2, 5)):
        again = take(stream(folder).batches(later, positions), 7)
        assert all(rows["tokens"].equal(whole[5 + n]["tokens"][later]) for n, (rows, _) in enumerate(again))


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [next(batches) for _ in range(count)]


class Plain(IterableDataset):  # type: ignore[type-arg]
    """Rows that can be iterated again and again."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"text": text} for text in DOCUMENTS])


class Stateful(IterableDataset):  # type: ignore[type-arg]
    """Counts the rows that it made, so that a test sees whether a resume reads the beginning again."""

    def __init__(self) -> None:
        self.number = self.num_made = 0

    def __iter__(self) -> Iterator[str]:
        while self.number < len(DOCUMENTS):
            self.number += 1
            self.num_made += 1
            yield DOCUMENTS[self.number - 1]
        self.number = 0

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


@pytest.mark.parametrize("kind", [Plain, Stateful])
def test_an_iterable_dataset_goes_on_at_any_row(kind: type[Any]) -> None:
    whole = lane_of(IterableReader(kind(), "text", "strict"))
    rows, positions = [], []
    for _ in range(130):
        positions.append(whole.position())
        rows.append(whole.row())
    for number in (1, 30, 64, 100):
        dataset = kind()
        again = lane_of(IterableReader(dataset, "text", "strict"))
        again.seek(json.loads(json.dumps(positions[number])))
        assert all(np.array_equal(again.row()["tokens"], wanted["tokens"]) for wanted in rows[number : number + 20])
        if isinstance(dataset, Stateful):
            assert dataset.num_made < 40


def test_a_stream_without_documents_and_one_that_ended_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no document"):
        lane_of(IterableReader(iter(["once", "and never again"]), "text", "strict"), buffer=3).row()
    with pytest.raises(DataError, match="no document"):
        lane_of(IterableReader([""], "text", "strict")).row()
    with pytest.raises(DataError, match="shorter than before"):
        lane_of(IterableReader(["a"], "text", "strict")).seek([[0, 5, None], 1, 0, 0])
    with pytest.raises(DataError, match="column"):
        lane_of(IterableReader([{"body": "a"}], "text", "strict")).row()
    (tmp_path / "one.txt").write_text("one document")
    options = StreamOptions(batch_size=2, length=4, buffer=4, seed=0)
    source = TextStream(lambda lane: reader(tmp_path, lane, 2), TOKENIZER, options)
    with pytest.raises(DataError, match=r"no documents in the stream[^!]*data.batch_size=2"):
        next(source.batches(slice(0, 2), {}))


def test_opening_a_stream_reads_nothing() -> None:
    def never() -> Iterator[str]:
        raise AssertionError("read")
        yield ""

    source = open_stream(never(), SourceConfig())
    assert source.iterable is not None and source.shards() == []
    assert open_stream(["a", "b"], SourceConfig()).iterable is None
