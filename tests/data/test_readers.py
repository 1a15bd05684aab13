"""Every file format: what it holds, and the file, line or byte that is named when it cannot be read."""

import gzip
import json
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kitforge.data import optional_imports, readers
from kitforge.data.readers import FileShard, file_shards
from kitforge.data.tables.columns import ColumnLayout
from kitforge.foundation.errors import DataError, DependencyError
from tests.data.tables.reading_rows import columns_of


def read(path: Path, column: str = "text", separator: str | None = None, errors: str = "strict") -> list[str]:
    shards = file_shards(path, column, separator, errors)  # type: ignore[arg-type]
    return [text for shard in shards for text in shard.documents()]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ROWS = [{"id": 1, "text": "one, 1"}, {"id": 2, "text": 'two\n"2"'}, {"id": 3, "text": "трі 三 😀"}]
WANTED = [str(row["text"]) for row in ROWS]
CONTENT = {
    ".jsonl": "".join(json.dumps(row) + "\r\n" for row in ROWS),
    ".json": json.dumps(ROWS),
    ".csv": 'id,text\n1,"one, 1"\r\n2,"two\n""2"""\n\n3,трі 三 😀\n',
    ".tsv": 'id\ttext\n1\tone, 1\n2\t"two\n""2"""\n3\tтрі 三 😀\n',
}


@pytest.mark.parametrize("suffix", CONTENT)
@pytest.mark.parametrize("is_packed", [False, True])
def test_a_table_gives_the_texts_of_its_column(tmp_path: Path, suffix: str, is_packed: bool) -> None:
    content = CONTENT[suffix].encode()
    path = tmp_path / f"a{suffix}{'.gz' if is_packed else ''}"
    assert read(write(path, gzip.compress(content, mtime=0) if is_packed else content)) == WANTED


def test_parquet_gives_the_texts_of_its_column(tmp_path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet") == WANTED


@pytest.mark.parametrize("suffix", [".txt", ".py", ".md", ".TXT"])
def test_plain_text_is_one_document_to_the_letter(tmp_path: Path, suffix: str) -> None:
    text = " one\r\n\n\ttwo\x00 三\n"
    assert read(write(tmp_path / f"a{suffix}", text)) == [text]


@pytest.mark.parametrize("suffix", [".txt", *CONTENT])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, suffix: str) -> None:
    content = CONTENT.get(suffix, "one")
    assert read(write(tmp_path / f"a{suffix}", b"\xef\xbb\xbf" + content.encode()))[0] in ("one", WANTED[0])


def test_a_separator_is_taken_literally(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "one.*two.*.*three\n"), separator=".*") == ["one", "two", "three\n"]


def test_a_jsonl_line_may_be_a_text_itself(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.jsonl", '"one"\n\n"two"')) == ["one", "two"]


@given(st.text(alphabet="ab|", min_size=15, max_size=60), st.sampled_from(["|", "||", "ab", "a|a"]))
def test_small_blocks_and_shards_cut_a_text_as_one_split_does(
    tmp_path_factory: pytest.TempPathFactory, text: str, separator: str
) -> None:
    path = write(tmp_path_factory.mktemp("cut") / "a.txt", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "_BLOCK_BYTES", 3)
        patch.setattr(readers, "SHARD_BYTES", 7)
        assert read(path, separator=separator) == [piece for piece in text.split(separator) if piece]


def test_a_big_jsonl_file_is_cut_into_shards_between_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SHARD_BYTES", 50)
    wanted = [f"document {number}" * (number % 5) for number in range(40)]
    path = write(tmp_path / "a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in wanted))
    shards = file_shards(path, "text", None, "strict")
    assert len(shards) > 5
    assert len({shard.fingerprint for shard in shards}) == len(shards)
    assert sum(shard.size for shard in shards) == path.stat().st_size
    assert [text for shard in shards for text in shard.documents()] == [text for text in wanted if text]


def test_a_bad_line_is_named_by_its_number_in_the_file_though_a_shard_begins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SHARD_BYTES", 50)
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n' * 30 + "{broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl:31 is not JSON"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": \n', r"a\.jsonl:3 is not JSON"),
        ("a.jsonl", '{"text": "a"}\n{"txt": "b", "id": 1}\n', r"(?s)a\.jsonl:2 has no column.*id, txt.*'txt'"),
        ("a.jsonl", '{"text": "a"}\n{"text": null}\n', r"(?s)a\.jsonl:2 holds no text.*NoneType"),
        ("a.jsonl", '{"text": "a"}\n{"text": 5}\n', r"(?s)a\.jsonl:2 holds no text.*int"),
        ("a.jsonl", "[1]\n", r"(?s)a\.jsonl:1 holds no text.*list"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", '{"text": "\\ud83d"}\n', r"a\.jsonl:1 holds half of a surrogate pair"),
        ("a.json", "[1, ", r"a\.json is not JSON"),
        ("a.json", '[{"text": "a"}, {"body": "b"}]', r"(?s)a\.json, row 2 has no column.*body"),
        ("a.json", '{"rows": []}', r"(?s)a\.json, row 1 has no column.*rows"),
        ("a.csv", "id,body\n1,x\n", r"(?s)a\.csv:1 has no column 'text'.*body, id"),
        ("a.csv", "id,text\n1,x\n2,y,z\n", r"(?s)a\.csv:3 has the wrong number of cells.*3.*2"),
        ("a.csv", "id,text\n1,x\n2\n", r"a\.csv:3 has the wrong number of cells"),
        ("a.csv", 'text\n"x" y\n', r"a\.csv:2 is not a row"),
        ("a.txt", b"abc\xffdef", r"(?s)a\.txt is not UTF-8.*0xff at offset 3.*strict.*replace"),
        ("a.txt", b"\xef\xbb\xbfabc\xff", r"0xff at offset 6"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8\n.*0xff at place 11"),
        ("a.csv", b"text\nabc\n\xfe\n", r"0xfe at offset 9"),
        ("a.txt.gz", b"not gzip", r"cannot read .*a\.txt\.gz"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-12], r"cannot read .*a\.jsonl\.gz"),
        ("a.parquet", b"not parquet", r"cannot read .*a\.parquet"),
        ("a.pdf", b"x", r"(?s)a\.pdf is of no format.*'\.pdf'.*\.txt .*\.parquet"),
        ("a", b"x", r"(?s)no format.*no suffix"),
        ("a.parquet.gz", b"x", r"no format"),
        ("a.gz", b"x", r"no format"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, content))


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"(?s)no column 'text'.*body, n"):
        read(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 1 holds no text"):
        read(tmp_path / "a.parquet", column="n")


@pytest.mark.parametrize(("errors", "wanted"), [("replace", "a\ufffdb"), ("ignore", "ab")])
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".jsonl"])
def test_undecodable_bytes_obey_the_policy(tmp_path: Path, suffix: str, errors: str, wanted: str) -> None:
    content = {".txt": b"a\xffb", ".csv": b"text\na\xffb\n", ".jsonl": b'"a\xffb"'}[suffix]
    assert read(write(tmp_path / f"a{suffix}", content), errors=errors) == [wanted]


def test_a_csv_cell_may_be_longer_than_the_modules_own_limit(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.csv", f"text\n{'x' * 200_000}\n")) == ["x" * 200_000]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one")
    shard = file_shards(path, "text", None, "strict")[0]
    path.unlink()
    with pytest.raises(DataError, match="cannot read"):
        list(shard.documents())


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(optional_imports.importlib, "import_module", absent)
    with pytest.raises(DependencyError, match=r"(?s)'pyarrow'.*kitforge\[transformers\]"):
        read(write(tmp_path / "a.parquet", "x"))


def test_a_package_that_a_present_one_misses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import absent_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DependencyError, match=r"(?s)'absent_package'.*kitforge\[serve\]"):
        optional_imports.import_optional("half_installed", needed_for="it", extra="serve")


CONLL = """-DOCSTART- -X- O O

EU NNP I-NP B-ORG
rejects VBZ I-VP O

# id 7 of 9
# HASH I-NP O
Ann\tNNP\tI-NP\tB-PER
"""


def test_json_lines_under_the_name_of_json_are_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"text": "a\u2028b"}\n\n{"text": "c"}\n')
    (shard,) = file_shards(path, "text", None, "strict")
    assert [(str(at), row["text"]) for at, row in shard.rows()] == [(f"{path}:1", "a\u2028b"), (f"{path}:3", "c")]
    (torn,) = file_shards(write(tmp_path / "b.json", '{"text": "a"}\n{"text"\n'), "text", None, "strict")
    with pytest.raises(DataError, match=r"b\.json:2 is not JSON"):
        list(torn.rows())


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        # As GLUE: a quote is a letter, whether or not another one follows.
        (['"so he said\t1', "b\t0"], [('"so he said', "1"), ("b", "0")]),
        (['"so\t1', 'b"\t0'], [('"so', "1"), ('b"', "0")]),
        (['"so" he said\t1'], [('"so" he said', "1")]),
        # Cells that are enclosed in quotes stay so.
        (['"a\tb"\t1'], [("a\tb", "1")]),
        (['"a\nb"\t1', '"c ""d"""\t0'], [("a\nb", "1"), ('c "d"', "0")]),
        (['"a"\t1'], [("a", "1")]),
    ],
)
def test_a_quote_of_a_tsv_encloses_a_cell_only_where_it_closes(tmp_path: Path, lines: Any, rows: Any) -> None:
    (shard,) = file_shards(write(tmp_path / "a.tsv", "\n".join(["text\tlabel", *lines])), "text", None, "strict")
    assert [(row["text"], row["label"]) for _, row in shard.rows()] == rows


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\n\n"])
def test_a_conll_file_is_a_row_for_each_sentence(tmp_path: Path, ends: str) -> None:
    text = CONLL if ends == "\n\n" else CONLL.replace("\n", ends)
    found = list(file_shards(write(tmp_path / "a.conll", text + ends), "text", None, "strict")[0].rows())
    assert [row for _, row in found] == [
        {"tokens": ["EU", "rejects"], "ner_tags": ["B-ORG", "O"]},
        {"tokens": ["#", "Ann"], "ner_tags": ["O", "B-PER"]},
    ]
    assert [str(location) for location, _ in found] == [f"{tmp_path / 'a.conll'}:{line}" for line in (3, 7)]


@pytest.mark.parametrize(
    ("text", "words", "tags"),
    [
        # As MultiCoNER: a note has as many fields as the columns.
        ("# id 0a9c\tdomain=en\nAnn _ _ B-PER\nsaw _ _ O\n", ["Ann", "saw"], ["B-PER", "O"]),
        ("# newdoc\nAnn B-PER\n# O\n", ["Ann", "#"], ["B-PER", "O"]),
        ("#\tO\nAnn\tB-PER\nsaw\tO\n", ["#", "Ann", "saw"], ["O", "B-PER", "O"]),
        # As GermEval 2014 and CoNLL-U: the first column counts the words.
        ("# text = Ann\n1\tAnn\tB-PER\n2\tsaw\tO\n", ["Ann", "saw"], ["B-PER", "O"]),
        ("1\tAnn\tB-ORG\tB-PER\n2\tAG\tI-ORG\tO\n", ["Ann", "AG"], ["B-ORG", "I-ORG"]),
        ("1\tAnn\tB-NP\tB-PER\n2\tAG\tI-NP\tO\n", ["Ann", "AG"], ["B-PER", "O"]),
        ("1\tAnn\tO\tB-PER\n2\tsaw\tO\tO\n", ["Ann", "saw"], ["B-PER", "O"]),
        ("Ann\tNE\tB-NP\tB-PER\n1\tCD\tI-NP\tO\n", ["Ann", "1"], ["B-PER", "O"]),
        ("1-2\tdel\t_\n1\tde\tO\n2\tel\tO\n2.1\tx\tO\n", ["de", "el"], ["O", "O"]),
        ("1 O\n2 B-NUM\n", ["1", "2"], ["O", "B-NUM"]),
        ("1 CD O\n3 CD O\n", ["1", "3"], ["O", "O"]),
        ("1\xa0000\tB-NUM\nNew York\tB-LOC\n", ["1\xa0000", "New York"], ["B-NUM", "B-LOC"]),
    ],
)
def test_dialects_of_conll_are_told_by_their_lines(tmp_path: Path, text: str, words: Any, tags: Any) -> None:
    ((_, row),) = file_shards(write(tmp_path / "a.conll", text), "text", None, "strict")[0].rows()
    assert row == {"tokens": words, "ner_tags": tags}


@pytest.mark.parametrize(("text", "line"), [("Ann\n", 1), ("Ann B-PER\nsaw O\nBob\n", 3), ("a b O\n\nc d e O\n", 3)])
def test_a_conll_line_without_a_word_and_its_tag_is_named(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(DataError, match=rf"a\.conll:{line} is not a word with its tag"):
        list(file_shards(write(tmp_path / "a.conll", text), "text", None, "strict")[0].rows())


def test_a_shard_of_a_file_knows_its_size(tmp_path: Path) -> None:
    shard = FileShard(
        path=tmp_path, column="text", separator=None, encoding_errors="strict", stamp=(10, 0), start=2, stop=7
    )
    assert shard.size == 5


_CELLS = st.lists(st.sampled_from(["a", ",", "\t", '"', "\n", "\r\n", "é"]), max_size=5).map("".join)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(_CELLS, st.booleans()), min_size=1, max_size=6), st.sampled_from(["\n", "\r\n"]), st.data())
def test_a_row_is_named_by_the_line_that_it_begins_on(
    tmp_path: Path, rows: list[tuple[str, bool]], end: str, draws: st.DataObject
) -> None:
    lines, text = [], f"id,text{end}"
    for cell, has_blank in rows:
        text += end if has_blank else ""
        lines.append(text.count("\n") + 1)
        text += f'1,"{cell.replace(chr(34), chr(34) * 2)}"{end}'
    path = write(tmp_path / "a.csv", text)
    (shard,) = file_shards(path, "text", None, "strict")
    assert [str(at) for at, _ in shard.rows()] == [f"{path}:{line}" for line in lines]
    assert pandas.read_csv(path, keep_default_na=False)["text"].tolist() == [cell for cell, _ in rows]
    # The same of a table for a recommender, by its one row without a number.
    chosen = draws.draw(st.sampled_from(range(len(rows))))
    broken = text.splitlines(keepends=True)
    broken[lines[chosen] - 1] = "x" + broken[lines[chosen] - 1][1:]
    write(path, "".join(broken))
    with pytest.raises(DataError, match=rf"a\.csv:{lines[chosen]} holds no number"):
        columns_of(path, ColumnLayout(numbers=("id",)))
    # And a row that is none, by its own first line.
    write(path, f'{text}1,"two{end}lines"x{end}')
    with pytest.raises(DataError, match=rf"(?s)a\.csv:{text.count(chr(10)) + 1} is not a row.*expected:.*do:"):
        list(shard_rows(path))


def shard_rows(path: Path) -> Any:
    return [row for shard in file_shards(path, "text", None, "strict") for row in shard.rows()]
