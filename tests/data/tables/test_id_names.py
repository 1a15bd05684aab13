"""Keys of texts get their texts back, whatever the column holds them in, and the table is read for that once."""

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from kitforge.data.tables import id_names
from kitforge.data.tables.columns import KeyColumn, ListColumn
from kitforge.data.tables.id_names import TextArray, load_id_names
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import DataError
from tests.text_keys import hash_text

TEXTS = ["b", "ß and more", "c", "7", "a longer name than others", "一"]


def keys_of(texts: list[str]) -> np.ndarray:
    return np.array([hash_text(text) for text in texts], np.int64)


def listed(texts: TextArray) -> list[str]:
    return [texts[place] for place in range(len(texts))]


def test_texts_lie_end_to_end() -> None:
    assert listed(TextArray.of(TEXTS)) == TEXTS
    assert listed(TextArray.of([])) == []


@pytest.mark.parametrize("kind", ["plain", "large", "dictionary", "binary"])
def test_a_column_of_texts_names_its_keys(tmp_path: Path, kind: str) -> None:
    column = pyarrow.array([*TEXTS, None, "", "b"], pyarrow.large_string() if kind == "large" else pyarrow.string())
    if kind == "dictionary":
        column = column.dictionary_encode()
    if kind == "binary":
        column = column.cast(pyarrow.binary())
    parquet.write_table(pyarrow.table({"x": column}), tmp_path / "a.parquet", row_group_size=2)
    wanted = TEXTS[::-1]
    found = load_id_names(open_table(tmp_path / "a.parquet"), KeyColumn(name="x"), keys_of(wanted), tmp_path)
    assert listed(found) == wanted


def test_whole_numbers_that_are_read_as_texts_have_names_too(tmp_path: Path) -> None:
    rows = [{"x": 3.0}, {"x": None}, {"x": 40.0}]
    assert listed(load_id_names(open_table(rows), KeyColumn(name="x"), keys_of(["40", "3"]), tmp_path)) == ["40", "3"]
    assert not list(tmp_path.iterdir())


def test_a_name_is_the_text_of_the_data_where_other_spellings_share_its_key(tmp_path: Path) -> None:
    rows = [{"x": "1984.0"}, {"x": "1984"}, {"x": "TRUE"}, {"x": "1e+05"}, {"x": " true"}]
    wanted = load_id_names(open_table(rows), KeyColumn(name="x"), keys_of(["true", "1984", "100000"]), tmp_path)
    assert listed(wanted) == ["TRUE", "1984.0", "1e+05"]


def test_lists_name_their_items(tmp_path: Path) -> None:
    rows = [{"x": TEXTS[:2]}, {"x": []}, {"x": None}, {"x": TEXTS[2:]}]
    column = ListColumn(name="x")
    assert listed(load_id_names(open_table(rows), column, keys_of(TEXTS), tmp_path)) == TEXTS
    (tmp_path / "a.csv").write_text('x\nb|c\n""\n7||b\n')
    cut = ListColumn(name="x", separator="|")
    assert listed(load_id_names(open_table(tmp_path / "a.csv"), cut, keys_of(["7", "c", "b"]), tmp_path)) == [
        "7",
        "c",
        "b",
    ]


def test_a_file_is_read_once_for_its_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("x,y\nb,1\nc,2\n")
    source, column, keys = open_table(tmp_path / "a.csv"), KeyColumn(name="x"), keys_of(["c", "b"])
    first = listed(load_id_names(source, column, keys, tmp_path / "cache"))
    with monkeypatch.context() as patch:
        patch.setattr(id_names, "texts_of_column", None)
        assert listed(load_id_names(source, column, keys, tmp_path / "cache")) == first == ["c", "b"]
    assert listed(load_id_names(source, column, keys[:1], tmp_path / "cache")) == ["c"]
    (kept,) = [path.parent for path in (tmp_path / "cache").rglob("data.bin") if path.stat().st_size == 2]
    (kept / "data.bin").write_bytes(b"c")
    with pytest.raises(DataError, match=r"(?s)data\.bin is damaged.*delete the folder"):
        load_id_names(source, column, keys, tmp_path / "cache")
