"""Text tables: what a file holds, and the file and line that are named when a row cannot be used."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from kitforge.data import file_bytes
from kitforge.data.tables import csv_files
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, LabelColumn, ListColumn
from kitforge.foundation.errors import DataError
from tests.data.tables.reading_rows import columns_of, equal
from tests.text_keys import hash_text

LAYOUT = ColumnLayout(numbers=("price",), keys=(KeyColumn(name="site"),), label=LabelColumn(name="click"))
TABLE = 'click,price,site\n1,2.5,news\n0,,"a, ""b"""\n\n1,-3,\n0,1e3,"two\nlines"\n'


def write(path: Path, content: str | bytes) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(gzip.compress(raw, mtime=0) if path.suffix == ".gz" else raw)
    return path


def criteo(label: str, number: str = "1", category: str = "68fd1e64") -> str:
    return "\t".join([label, *[number] * 13, *[category] * 26]) + "\n"


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "A.CSV"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_csv_gives_numbers_keys_and_labels(tmp_path: Path, name: str, mark: str) -> None:
    found = columns_of(write(tmp_path / name, mark + TABLE), LAYOUT)
    assert np.array_equal(found.numbers[:, 0], [2.5, np.nan, -3, 1000], equal_nan=True)
    assert found.labels is not None and found.labels.tolist() == [1, 0, 1, 0]
    assert found.absent[:, 0].tolist() == [False, False, True, False]
    assert found.keys[:, 0].tolist() == [hash_text("news"), hash_text('a, "b"'), 0, hash_text("two\nlines")]


def test_a_tsv_has_a_header_unless_it_is_criteos(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", TABLE.replace(",", "\t").replace("a\t", "a,"))
    assert len(columns_of(path, LAYOUT)) == 4
    path = write(tmp_path / "c.tsv", criteo("1") + criteo("0", number="", category=""))
    layout = ColumnLayout(numbers=("I1", "I13"), keys=(KeyColumn(name="C26"),), label=LabelColumn(name="label"))
    found = columns_of(path, layout)
    assert found.labels is not None and found.labels.tolist() == [1, 0]
    assert found.keys[:, 0].tolist() == [hash_text("68fd1e64"), 0]
    assert np.isnan(found.numbers[1]).all()


def test_blanks_around_a_name_are_no_part_of_it(tmp_path: Path) -> None:
    found = columns_of(write(tmp_path / "a.csv", TABLE.replace("price,", " price , ", 1)), LAYOUT)
    assert np.array_equal(found.numbers[:, 0], [2.5, np.nan, -3, 1000], equal_nan=True)


def test_a_file_without_a_header_is_given_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "1,2.5,x\n0,3,y\n")
    assert len(columns_of(path, LAYOUT, columns=("click", "price", "site"))) == 2
    with pytest.raises(DataError, match=r"(?s)not a header.*data\.columns"):
        columns_of(path, LAYOUT)


def test_texts_that_stand_for_no_value_are_absent(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "click,price,site\n1,NA,?\n")
    found = columns_of(path, LAYOUT, missing_values=("?", "NA"))
    assert np.isnan(found.numbers).all() and found.absent.all()


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_small_blocks_give_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, ending: str
) -> None:
    path = write(tmp_path / "a.csv", (TABLE + TABLE.split("\n", 1)[1] * 3).replace("\n", ending))
    whole = columns_of(path, LAYOUT)
    monkeypatch.setattr(file_bytes, "_BLOCK_BYTES", size)
    assert equal(columns_of(path, LAYOUT), whole)
    assert len(whole) == 16


BAD = [
    ("1,x,news", r"a\.csv:5 holds no number in column 'price'", "holds no number in column 'price'"),
    ("1,1_0,news", r"a\.csv:5 holds no number", "holds no number in column 'price'"),
    ("1,inf,news", r"a\.csv:5 holds no finite number", "holds no finite number in column 'price'"),
    ("2,1,news", r"(?s)a\.csv:5 holds no label.*got: +2.*0 or 1", "holds no label in column 'click'"),
    (",1,news", r"a\.csv:5 holds no label", "holds no label in column 'click'"),
    ("yes,1,news", r"a\.csv:5 holds no number in column 'click'", "holds no number in column 'click'"),
    ("1,1", r"(?s)a\.csv:5 has the wrong number of cells.*got: +2.*3 cells", "has the wrong number of cells"),
    ("1,1,a,b", r"a\.csv:5 has the wrong number of cells", "has the wrong number of cells"),
    (b"1,1,caf\xe9", r"(?s)a\.csv:5 is not UTF-8.*byte 0xe9 at place 7", "is not UTF-8"),
]


@pytest.mark.parametrize(("row", "message", "reason"), BAD)
@pytest.mark.parametrize("size", [30, 2**20])
def test_a_bad_row_is_named_by_its_line_or_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str | bytes, message: str, reason: str, size: int
) -> None:
    monkeypatch.setattr(file_bytes, "_BLOCK_BYTES", size)
    raw = row if isinstance(row, bytes) else row.encode()
    good = b"click,price,site\n1,2,a\n\n0,3,b\n"
    path = write(tmp_path / "a.csv", good + raw + b"\n0,4,c\n" + raw + b"\n")
    with pytest.raises(DataError, match=message):
        columns_of(path, LAYOUT)
    bad = BadRows(policy="skip")
    found = columns_of(path, LAYOUT, bad)
    assert dict(bad.counts) == {reason: 2}
    assert found.numbers[:, 0].tolist() == [2, 3, 4]


def test_the_line_is_right_behind_cells_with_line_breaks_and_rows_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'click,price,site\n1,2,"a\n\nb"\n0,1\n1,3,c\n0,x,d\n')
    with pytest.raises(DataError, match=r"a\.csv:5 has the wrong number"):
        columns_of(path, LAYOUT)
    path = write(tmp_path / "a.csv", 'click,price,site\n1,2,"a\n\nb"\n1,3,c\n0,x,d\n')
    with pytest.raises(DataError, match=r"a\.csv:6 holds no number"):
        columns_of(path, LAYOUT)


def test_a_warning_says_once_what_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.csv", "click,price,site\n" + "1,x,a\n" * 5 + "1,1,a\n")
    columns_of(path, LAYOUT, BadRows(policy="skip"))
    assert [record.getMessage().count("a.csv:2 holds no number") for record in caplog.records] == [1]


IDS = ColumnLayout(keys=(KeyColumn(name="id", kind="integer", is_required=True),))


def test_ids_reach_from_the_smallest_to_the_largest_int64(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", f"id,x\n{-(2**63)},a\n{2**63 - 1},a\n0,a\n")
    assert columns_of(path, IDS).keys[:, 0].tolist() == [-(2**63), 2**63 - 1, 0]


@pytest.mark.parametrize("value", [str(2**63), str(-(2**63) - 1), "1.5", "abc", "1_0"])
def test_an_id_beyond_int64_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(DataError, match=r"(?s)a\.csv:3 holds no 64-bit id.*kind: text"):
        columns_of(write(tmp_path / "a.csv", f"id,x\n1,a\n{value},a\n"), IDS)


def test_a_value_that_must_be_there_is_missed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv:3 has no value in column 'id'"):
        columns_of(write(tmp_path / "a.csv", "id,x\n1,a\n,a\n"), IDS)


def test_labels_may_be_two_texts(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "income,x\n>50K,1\n<=50K,2\n50K,3\n")
    label = LabelColumn(name="income", positive=">50K", negative="<=50K")
    with pytest.raises(DataError, match=r"(?s)a\.csv:4 holds no label.*'>50K' or '<=50K'"):
        columns_of(path, ColumnLayout(numbers=("x",), label=label))
    found = columns_of(path, ColumnLayout(numbers=("x",), label=LabelColumn(name="income", positive=">50K")))
    assert found.labels is not None and found.labels.tolist() == [1, 0, 0]


def test_a_text_is_cut_into_a_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,tags\n1,x|y\n2,\n3,|z|\n")
    tags = columns_of(path, ColumnLayout(lists=(ListColumn(name="tags", separator="|"),))).lists["tags"]
    assert tags.offsets.tolist() == [0, 2, 2, 3]
    assert tags.values.tolist() == [hash_text(text) for text in "xyz"]


def test_an_item_of_a_list_that_is_no_id_is_named_by_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id,tags\n1,5 6\n2,7 x\n")
    with pytest.raises(DataError, match=r"a\.csv:3 holds no 64-bit id in column 'tags'"):
        columns_of(path, ColumnLayout(lists=(ListColumn(name="tags", kind="integer"),)))


def test_a_quote_that_is_never_closed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.csv", 'click,price,site\n1,2,a\n1,2,"b\n' + "0,1,c\n" * 50)
    with pytest.raises(DataError, match="a quote that is never closed"):
        columns_of(path, LAYOUT)
    monkeypatch.setattr(file_bytes, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(csv_files, "RECORD_BYTES", 100)
    with pytest.raises(DataError, match=r"(?s)a\.csv:3 begins a record that does not end.*never closed"):
        columns_of(path, LAYOUT)
    # A last line of the longest size is one, and a longer one is not.
    assert len(columns_of(write(tmp_path / "b.csv", "click,price,site\n1,2," + "a" * 96), LAYOUT)) == 1
    with pytest.raises(DataError, match="does not end"):
        columns_of(write(tmp_path / "b.csv", "click,price,site\n1,2," + "a" * 97), LAYOUT)


def test_a_gzip_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    packed = gzip.compress((TABLE * 500).encode(), mtime=0)
    (tmp_path / "a.csv.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"(?s)cannot read .*a\.csv\.gz.*complete"):
        columns_of(tmp_path / "a.csv.gz", LAYOUT)


@pytest.mark.parametrize("content", ["", "\n", "click,price,site\n", "click,price,site\n\n\n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match="is empty|there are no rows"):
        columns_of(write(tmp_path / "a.csv", content), LAYOUT)


def test_a_file_of_bad_rows_alone_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "click,price,site\n5,1,a\n")
    with pytest.raises(DataError, match=r"(?s)there are no rows.*1 bad ones left out"):
        columns_of(path, LAYOUT, BadRows(policy="skip"))
