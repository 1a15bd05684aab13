"""Cached rows are those that the reader gives, mapped from the disk and the same whoever tokenises them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kitforge.data.chat import example_cache
from kitforge.data.chat.datasets import (
    ChatDatasetReader,
    ExampleKind,
    PreferencePair,
    TokenizedExample,
    UnpairedExample,
)
from kitforge.data.chat.example_cache import ExampleCache, ExampleJob, build_example_cache
from kitforge.data.chat.template import ChatTemplate, template_of
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import DataError

TOKENIZER = ByteTokenizer()
ROWS: dict[ExampleKind, list[dict[str, Any]]] = {
    "demonstrations": [{"prompt": "ä" * n, "completion": "b" * (n + 1)} for n in range(7)] + [{"text": "c"}],
    "pairs": [
        {"prompt": "a", "chosen": "b" * n, "rejected": "c", "margin": n / 3, "source": "xy"[n % 2]} for n in (1, 2, 3)
    ],
    "unpaired": [{"prompt": "a", "completion": "b" * n, "label": n % 2 == 0} for n in (1, 2, 3)],
}


def reader(**more: Any) -> ChatDatasetReader:
    return ChatDatasetReader(TOKENIZER, template_of(TOKENIZER), **more)


def cached(kind: ExampleKind, spec: object, root: Path, **more: Any) -> ExampleCache[Any]:
    num_workers = more.pop("num_workers", None)
    return build_example_cache(reader(**more), TOKENIZER, kind, spec, root, num_workers=num_workers)


def plain(row: Any) -> Any:
    """The row with tuples in place of arrays."""
    if isinstance(row, PreferencePair):
        return (plain(row.chosen), plain(row.rejected), row.margin, row.source)
    if isinstance(row, UnpairedExample):
        return (plain(row.completion), row.is_desirable)
    return ([int(token) for token in row.tokens], [bool(each) for each in row.loss_mask])


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(cache_root: Path) -> dict[str, bytes]:
    (folder,) = cache_root.iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("kind", ROWS)
def test_cached_rows_are_those_of_the_reader(kind: ExampleKind, tmp_path: Path) -> None:
    file = written(tmp_path / "rows.jsonl", ROWS[kind])
    wanted = [plain(row) for row in getattr(reader(), kind)(ROWS[kind])]
    for spec in (ROWS[kind], file, (row for row in ROWS[kind])):
        cache = cached(kind, spec, tmp_path / "cache")
        assert [plain(row) for row in cache] == wanted
        assert [plain(row) for row in cache[-2:]] == wanted[-2:]
    lengths = [max(len(each.tokens) for each in example_cache._completions(row)) for row in cache]
    assert cache.lengths.tolist() == lengths


def test_tokens_are_views_of_mapped_files(tmp_path: Path) -> None:
    cache = cached("demonstrations", ROWS["demonstrations"], tmp_path)
    row: TokenizedExample = cache[3]
    for array in (row.tokens, row.loss_mask):
        assert isinstance(array, np.ndarray) and array.base is not None and not array.flags.writeable
    assert row.tokens.dtype == np.uint16


@pytest.mark.slow
def test_processes_and_shards_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitforge.data.readers.SHARD_BYTES", 200)
    file = written(tmp_path / "rows.jsonl", ROWS["pairs"] * 40)
    one, two = (cached("pairs", file, tmp_path / str(count), num_workers=count) for count in (1, 2))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    in_memory = cached("pairs", ROWS["pairs"] * 40, tmp_path / "memory")
    assert one.fingerprint == two.fingerprint == in_memory.fingerprint


def test_a_finished_cache_is_not_built_again_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "a", "completion": "b", "text": "c"}, {"prompt": "a", "completion": ""}]
    first = cached("demonstrations", rows, tmp_path, on_invalid="skip")
    said = caplog.text
    assert "1 of 2 rows" in said and "text beside prompt" in said and len(first) == 1
    monkeypatch.setattr(ExampleJob, "write", None)
    caplog.clear()
    assert cached("demonstrations", rows, tmp_path, on_invalid="skip").fingerprint == first.fingerprint
    assert caplog.text == said


def test_parts_that_are_done_are_not_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kitforge.data.in_memory._MEMORY_ROWS", 2)
    write, done = ExampleJob.write, list[str]()

    def fails_at_the_third(job: ExampleJob, tokenizer: ByteTokenizer) -> None:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(job.path.name)
        write(job, tokenizer)

    monkeypatch.setattr(ExampleJob, "write", fails_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        cached("demonstrations", ROWS["demonstrations"], tmp_path)
    monkeypatch.setattr(ExampleJob, "write", lambda job, tokenizer: (done.append(job.path.name), write(job, tokenizer)))
    cached("demonstrations", ROWS["demonstrations"], tmp_path)
    assert done == [f"{number:06d}.npz" for number in range(4)]


def test_whatever_changes_tokens_changes_the_cache(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "other": "c"}]
    template = ChatTemplate(TOKENIZER, "{% generation %}x{% endgeneration %}", {})
    readers = [
        reader(),
        reader(columns={"prompt": "other"}),
        reader(on_invalid="skip"),
        ChatDatasetReader(TOKENIZER, template),
    ]
    for each in readers:
        build_example_cache(each, TOKENIZER, "demonstrations", rows, tmp_path)
    cached("demonstrations", [{**rows[0], "prompt": "b"}], tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize(
    ("rows", "words"),
    [([{"prompt": "a", "completion": ""}], "empty completion"), ([], "no rows"), ([3], "not a row")],
)
def test_rows_that_cannot_be_used_are_refused(rows: list[Any], words: str, tmp_path: Path) -> None:
    for unusable in ("refuse", "skip"):
        with pytest.raises(DataError, match=words):
            cached("demonstrations", rows, tmp_path, on_invalid=unusable)


@pytest.mark.parametrize("name", ["tokens.bin", "loss_mask.bin", "offsets.npy", "values.npy"])
def test_damage_is_told(name: str, tmp_path: Path) -> None:
    cached("pairs", ROWS["pairs"], tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged"):
        cached("pairs", ROWS["pairs"], tmp_path)
