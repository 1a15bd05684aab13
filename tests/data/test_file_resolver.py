"""Files of a path, a folder or a pattern: in one order, without hidden ones, and with words for what is not there."""

import os
from pathlib import Path

import pytest

from kitforge.data.file_resolver import resolve_files
from kitforge.data.source import open_source
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import DataError

FILES = ("b/x.csv", "a-b/x.csv", "a/x.csv", "z.csv", "A.csv", ".hidden.csv", ".cache/x.csv", "a/.tmp/y.csv", "notes.md")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text,label\n{name},1\n")
    (tmp_path / "folder.csv").mkdir()
    return tmp_path


def names(folder: Path, spec: str | Path) -> list[str]:
    files = resolve_files(spec, lambda path: path.suffix == ".csv", ".csv", ["preset"])
    return [file.relative_to(folder).as_posix() for file in files]


def test_a_folder_gives_its_visible_files_by_relative_path(folder: Path) -> None:
    assert names(folder, folder) == ["A.csv", "a-b/x.csv", "a/x.csv", "b/x.csv", "z.csv"]


def test_a_file_is_itself_whatever_its_suffix(folder: Path) -> None:
    assert names(folder, folder / "notes.md") == ["notes.md"]
    assert names(folder, folder / ".hidden.csv") == [".hidden.csv"]


def test_a_pattern_gives_the_files_that_match(folder: Path) -> None:
    assert names(folder, folder / "**" / "x.csv") == ["a/x.csv", "a-b/x.csv", "b/x.csv"]
    (folder / "[1].csv").write_text("text\nx\n")
    assert names(folder, folder / "[1].csv") == ["[1].csv"]


def test_what_is_not_there_is_said(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    for spec, words in {
        folder / "presett": r"(?s)does not exist.*did you mean preset",
        folder / "*.tsv": r"(?s)no file matches.*quote it in a shell",
        folder / "folder.csv": r"(?s)holds no readable files.*got: +nothing.*\.csv, at any depth",
        folder / "pipe": "neither a file nor a folder",
    }.items():
        with pytest.raises(DataError, match=words):
            names(folder, spec)


def test_texts_and_tables_read_the_same_files(folder: Path) -> None:
    (folder / "notes.md").unlink()
    texts = list(open_source(str(folder)).documents())
    assert texts == ["A.csv", "a-b/x.csv", "a/x.csv", "b/x.csv", "z.csv"]
    assert [path.relative_to(folder).as_posix() for path, _ in open_table(str(folder)).stamps] == texts
