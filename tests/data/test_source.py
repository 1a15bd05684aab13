"""Where text comes from: what can be named, in which order it is read, and what is said about what cannot."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import datasets
import pandas
import pyarrow as pa
import pytest

from kitforge.data.source import Source, SourceConfig, open_rows, open_source, open_stream
from kitforge.foundation.errors import ConfigError, DataError


def texts(spec: object, **options: str) -> list[str]:
    return list(open_source(spec, SourceConfig(**options)).documents())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "b.txt": "two",
        "a/z.md": "one",
        "c.jsonl": '{"text": "three"}\n',
        "notes.xyz": "not read",
        ".git/x.txt": "nor this",
        "d.txt": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_folder_is_read_to_any_depth_in_the_order_of_its_names(folder: Path) -> None:
    assert texts(folder) == ["one", "two", "three"]


def test_a_pattern_is_read_in_the_order_of_names(folder: Path) -> None:
    assert texts(str(folder / "*.[tj]*")) == ["two", "three"]


def test_a_recursive_pattern_reaches_below(folder: Path) -> None:
    assert texts(str(folder / "**" / "*.md")) == ["one"]


def test_a_list_of_paths_is_read_in_its_own_order(folder: Path) -> None:
    assert texts([str(folder / "c.jsonl"), folder / "b.txt", str(folder / "a")]) == ["three", "two", "one"]


def test_a_file_whose_name_is_a_pattern_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("brackets")
    assert texts(tmp_path / "a[1].txt") == ["brackets"]


@pytest.mark.parametrize(
    "rows",
    [
        ["first document", "", "second"],
        ({"text": text} for text in ("first document", "", "second")),
        [MappingProxyType({"text": text}) for text in ("first document", "", "second")],
    ],
    ids=["texts", "dicts", "mappings"],
)
def test_rows_in_memory_are_documents_without_the_empty_ones(rows: object) -> None:
    source = open_source(rows)
    assert list(source.documents()) == ["first document", "second"]
    assert list(source.documents()) == ["first document", "second"], "an iterator must be readable more than once"


def test_the_shards_together_are_the_documents(folder: Path) -> None:
    source = open_source(folder)
    assert [text for shard in source.shards() for text in shard.documents()] == list(source.documents())


def test_opening_twice_gives_one_fingerprint(folder: Path) -> None:
    assert open_source(folder).fingerprint == open_source(folder).fingerprint


@pytest.mark.parametrize("options", [{"column": "other"}, {"separator": "|"}, {"encoding_errors": "replace"}])
def test_every_option_is_in_the_fingerprint(folder: Path, options: dict[str, str]) -> None:
    assert open_source(folder, SourceConfig(**options)).fingerprint != open_source(folder).fingerprint


def test_a_changed_file_has_another_fingerprint(folder: Path) -> None:
    before = open_source(folder).fingerprint
    os.utime(folder / "b.txt", ns=(1, 1))
    assert open_source(folder).fingerprint != before


def test_a_file_that_changes_after_opening_is_refused(folder: Path) -> None:
    source = open_source(folder / "b.txt")
    (folder / "b.txt").write_text("other")
    with pytest.raises(DataError, match="has changed"):
        list(source.documents())


def test_other_rows_have_another_fingerprint() -> None:
    assert open_source(["ab", "c"]).fingerprint != open_source(["a", "bc"]).fingerprint


def test_files_with_nothing_but_empty_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n\n')
    with pytest.raises(DataError, match="there is no text in"):
        list(open_source(tmp_path / "a.jsonl").documents())


def below(folder: Path, name: str, text: str) -> Path:
    """A folder with one file."""
    (folder / "below").mkdir()
    (folder / "below" / name).write_text(text)
    return folder / "below"


SPLIT = datasets.Dataset.from_dict({"text": ["a"]})
REFUSED: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: folder / "bb.txt", r"bb\.txt does not exist.*did you mean .*b\.txt"),
    (lambda folder: below(folder, "b.txt", "a").with_name("belov") / "b.txt", r"did you mean .*below\?"),
    (lambda _: "python_stdlb", r"did you mean python_stdlib\?"),
    (lambda folder: str(folder / "*.csv"), "no file matches"),
    (lambda folder: below(folder, "a.xyz", "text"), r"holds no readable files.*a\.xyz.*\.jsonl"),
    (lambda folder: folder / "d.txt", "is empty"),
    (lambda _: [], "there is no text"),
    (lambda _: ["", ""], "there is no text"),
    *((lambda _, given=given: given, "this is not a corpus") for given in (None, 3, b"bytes", {"text": "a"}, {})),
    (lambda _: {"train": ["a"], "test": ["b"]}, "train, test"),
    (lambda _: datasets.DatasetDict({"train": SPLIT, "test": SPLIT}), "train, test"),
    (lambda folder: [str(folder / "b.txt"), "corpus of mine"], r"both paths and texts.*b\.txt.*corpus of mine"),
    *(
        (lambda _, text=text: text, r"not a path.*in a list")
        for text in ("", "a line\nand another", "x" * 5000, "a\0b")
    ),
    (lambda _: "/dev/null", "neither a file nor a folder"),
    (lambda _: iter(["a", 2]), "row 2 of the data holds no text.*int"),
    (lambda _: datasets.Dataset.from_dict({"body": ["one"]}), "no column 'text'.*columns body"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_is_no_source_is_refused(make: Callable[[Path], object], words: str, folder: Path) -> None:
    with pytest.raises(DataError, match=f"(?s){words}"):
        open_source(make(folder))


def test_texts_too_long_for_a_name_are_documents() -> None:
    assert texts(["x" * 500, "y" * 5000]) == ["x" * 500, "y" * 5000]


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(ConfigError, match="data.separator"):
        SourceConfig(separator="")


def test_half_a_surrogate_pair_is_refused_or_marked() -> None:
    with pytest.raises(DataError, match=r"(?s)row 1 of the data.*U\+D83D at character 1"):
        open_source([{"text": "a\ud83d"}])
    config = SourceConfig(encoding_errors="ignore")
    assert list(open_source([{"text": "a\ud83db"}], config).documents()) == ["ab"]


def test_a_dataset_is_read_by_column() -> None:
    rows = datasets.Dataset.from_dict({"body": ["one", "", "two"], "label": [1, 2, 3]})
    assert texts(rows, column="body") == ["one", "two"]


def test_a_dataset_of_numbers_is_refused_by_row() -> None:
    source = open_source(datasets.Dataset.from_dict({"text": [1, 2]}))
    with pytest.raises(DataError, match="the dataset's row 1 holds no text"):
        list(source.documents())


def test_equal_datasets_have_one_fingerprint_and_others_another() -> None:
    one, same, other = (open_source(datasets.Dataset.from_dict({"text": [text]})) for text in "aab")
    assert one.fingerprint == same.fingerprint != other.fingerprint


def test_the_standard_library_reads_the_same_every_time() -> None:
    first, second = open_source("python_stdlib"), open_source("python_stdlib")
    assert first.fingerprint == second.fingerprint
    assert sum(shard.size for shard in first.shards()) > 2_000_000


def test_the_standard_library_has_its_modules_and_no_tests() -> None:
    names = [name for shard in open_source("python_stdlib").shards() for name, _ in shard.files]  # type: ignore[attr-defined]
    assert "argparse.py" in names
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]


def test_files_of_the_standard_library_that_are_not_utf8_are_left_out(tmp_path: Path) -> None:
    from kitforge.data.standard_library import StandardLibraryShard

    (tmp_path / "good.py").write_text("x = 1")
    (tmp_path / "old.py").write_bytes(b"# \xe9")
    shard = StandardLibraryShard(folder=tmp_path, files=(("good.py", 5), ("old.py", 3)))
    assert list(shard.documents()) == ["x = 1"]


def test_tiny_shakespeare_is_one_document() -> None:
    path = Path(__file__).parents[3] / "shared/data/tinyshakespeare/input.txt"
    if not path.exists():
        pytest.skip("the corpus is not here")
    assert [text[:14] for text in open_source(path).documents()] == ["First Citizen:"]


def test_a_source_can_be_made_of_any_shards() -> None:
    first, second = open_source(["a"]).shards(), open_source(["b"]).shards()
    assert list(Source("both", [*first, *second]).documents()) == ["a", "b"]


TABLE = {"text": ["one", "two"], "label": [1, None]}


class Stream:
    """A table that gives its columns as Arrow arrays alone, as polars does."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._table, self.columns = pa.table(values), list(values)

    def __arrow_c_stream__(self, schema: object = None) -> object:
        return self._table.__arrow_c_stream__(schema)

    def __iter__(self) -> Iterator[object]:
        return iter(self._table.columns)


TABLES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "pandas": pandas.DataFrame,
    "columns of Arrow": Stream,
    "arrow": pa.table,
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_its_rows_and_never_the_names_of_its_columns(kind: str) -> None:
    table = TABLES[kind](TABLE)
    for opened in (open_source(table), open_stream(table, SourceConfig())):
        found = opened.iterable if opened.iterable is not None else opened.documents()
        assert [each["text"] if isinstance(each, Mapping) else each for each in found] == ["one", "two"]
    (shard,) = open_rows(table)
    assert [row for _, row in shard.rows()] == [{"text": "one", "label": 1}, {"text": "two", "label": None}]
    with pytest.raises(DataError, match="row 1 of the data has no column 'text'"):
        open_source(TABLES[kind]({"body": ["one"]}))


def test_a_series_is_its_texts() -> None:
    assert list(open_source(pandas.Series(["one", "two"])).documents()) == ["one", "two"]
