"""Table sources: files of several formats, glob patterns, lists, or rows in Python."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

from kitforge.data import named_dataset
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.file_bytes import FileStamp, check_unchanged, format_suffix, opened, stamp_of, text_blocks
from kitforge.data.file_resolver import folder_values, resolve_files
from kitforge.data.in_memory import is_dataset
from kitforge.data.tables.bad_rows import ArrowChunk, DecimalMark
from kitforge.data.tables.cells import CellRules, pyarrow
from kitforge.data.tables.csv_files import CRITEO_COLUMNS, RECORD_BYTES, TextFile, first_line
from kitforge.data.tables.frames import open_frame
from kitforge.data.tables.interactions import open_interactions
from kitforge.data.tables.json_files import open_json_lines
from kitforge.data.tables.parquet_files import open_parquet
from kitforge.data.tables.part import Job, TablePart
from kitforge.data.tables.python_rows import open_dataset, open_python_rows
from kitforge.data.tables.times import as_times, without_order
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, nearest
from kitforge.foundation.log import logger
from kitforge.foundation.types import OnInvalid

_log = logger(__name__)

TableFormat = Literal["auto", "criteo", "csv", "tsv", "parquet", "jsonl", "interactions"]
_SUFFIXES = (".csv", ".tsv", ".txt", ".inter", ".parquet", ".jsonl")
# What pandas calls a column without a name.
UNNAMED = "Unnamed: "
# What it calls an index without a name in tables of Arrow and in Parquet files.
_ROW_NUMBERS = re.compile(r"__index_level_\d+__")
# What a number with a decimal comma alone in its cell looks like, in a file that ; delimits.
_COMMA_CELL = re.compile(rb"(?:^|[;\n\"])[ ]*[+-]?(?:\d*|\d{1,3}(?:\.\d{3})+),\d+[ ]*(?=[;\r\n\"]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSourceConfig:
    """How rows are read out of files."""

    format: TableFormat = "auto"  # auto: by the suffix and the first line
    # Names of the columns of a csv or tsv file without a header.
    columns: tuple[str, ...] | None = None
    # Between the cells of a csv or tsv file; None: what cuts the first line of a csv file into most cells, of , ; | and
    # tabs; a tab in a tsv file.
    delimiter: str | None = None
    # Texts that mean a missing value, besides an empty cell.
    missing_values: tuple[str, ...] = ()
    # Decimal mark of numbers written as text. auto: a comma in a csv file with ; that has one; else what a cell
    # shows (1.5, 12,5, 1,250.5), and a cell that shows neither (1,250) is a bad row.
    decimal: DecimalMark = "auto"
    on_invalid: OnInvalid = "refuse"

    def __post_init__(self) -> None:
        is_one = self.delimiter is None or (len(self.delimiter) == 1 and self.delimiter not in '"\r\n')
        check(is_one, "data.delimiter", self.delimiter, "one character, and no quote or line break")

    @property
    def cells(self) -> CellRules:
        """How cells are read."""
        return CellRules(missing_values=self.missing_values, decimal=self.decimal)


_DEFAULT = TableSourceConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """Parts that are read one after the other."""

    name: str
    parts: tuple[TablePart, ...]
    # Changes whenever the rows may have changed; None for rows that were handed over and have no name.
    fingerprint: str | None
    is_once: bool = False  # an iterator, which cannot be read a second time and may have no end
    stamps: tuple[tuple[Path, FileStamp], ...] = ()  # of files, when the table was opened
    cells: CellRules = CellRules()
    times: tuple[str, ...] = ()  # columns of numbers or dates, of which dates become seconds since 1970
    known: frozenset[str] = frozenset()  # names of columns that a mapping may not misspell

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the first part, without the row numbers that pandas leaves in a table."""
        return tuple(name for name in self.parts[0].names if not _ROW_NUMBERS.fullmatch(name))

    def with_known(self, names: Iterable[str]) -> TableSource:
        """The table, in which a mapping that misspells one of `names` is a bad row."""
        return replace(self, known=frozenset(names))

    def check_unchanged(self) -> None:
        """Raise DataError when a file is no longer the one that was opened."""
        for path, stamp in self.stamps:
            check_unchanged(path, stamp, "table")

    def jobs(self, columns: Sequence[str]) -> Iterator[Job]:
        """Chunks of all parts in order. DataError for a column that a part lacks; the nearest one is named."""
        columns = without_order(columns, self.times)
        for part in self.parts:
            for column in columns:
                if column not in part.names:
                    raise DataError(
                        f"{part.name} has no column {column!r}",
                        got=f"columns {', '.join(part.names[:40])}",
                        expected=f"a column {column!r}",
                        fix=nearest(column, part.names),
                    )
            for job in part.jobs(columns, self.known):
                yield partial(_ruled, job, self.cells, self.times)


def open_table(spec: object, config: TableSourceConfig = _DEFAULT) -> TableSource:
    """The rows that `spec` names.

    A spec is a file (.tsv of Criteo or with a header, .csv, .inter, .parquet, .jsonl, .txt of interactions; all but
    Parquet also as .gz), a folder or a pattern of such files, a list of these, a datasets.Dataset, a DataFrame of
    pandas or polars or another table of Arrow, a mapping from column to array, or an iterable of mappings; an iterator
    is read once.
    Raises DataError for what is missing, empty or unreadable.
    """
    spec = named_dataset.load_named(spec)
    if isinstance(spec, (str, os.PathLike)):
        return _of_files(str(spec), [(file, spec) for file in _table_files(spec)], config)
    if is_dataset(spec):
        mark = fingerprint_of("dataset", spec._fingerprint)  # type: ignore[attr-defined]
        mark = fingerprint_of(mark, config.cells)
        return TableSource(name="the dataset", parts=(open_dataset(spec),), fingerprint=mark, cells=config.cells)
    # The Arrow PyCapsule interface: pandas, polars and others give their columns by it.
    if hasattr(spec, "__arrow_c_stream__") or isinstance(spec, Mapping):
        return TableSource(name="the data", parts=(open_frame(spec),), fingerprint=None, cells=config.cells)
    if isinstance(spec, (list, tuple)) and spec and all(isinstance(item, (str, os.PathLike)) for item in spec):
        files = [(file, item) for item in spec for file in _table_files(item)]
        return _of_files(", ".join(map(str, spec)), files, config)
    if isinstance(spec, Iterable) and not isinstance(spec, (bytes, bytearray)):
        return TableSource(
            name="the rows",
            parts=(open_python_rows(spec),),
            fingerprint=None,
            is_once=iter(spec) is spec,
            cells=config.cells,
        )
    raise DataError(
        "this is not a table",
        got=type(spec).__name__,
        expected="click_log, files, a folder, a pattern, a DataFrame, arrays by column, or rows as mappings",
    )


def _of_files(
    name: str, files: Sequence[tuple[Path, str | os.PathLike[str]]], config: TableSourceConfig
) -> TableSource:
    """The table of files, each with the folder or pattern that it is from."""
    stamps = tuple((file.absolute(), stamp_of(file.absolute())) for file, _ in files)
    full = [(file, spec) for file, spec in files if len(files) == 1 or not _is_empty(file)] or files[:1]
    paths = [file.absolute() for file, _ in full]
    forms = [_format(path) if config.format == "auto" else config.format for path in paths]
    # Each file of JSON Lines has the columns of all of them.
    lines = tuple((path, stamp_of(path)) for path, form in zip(paths, forms, strict=True) if form == "jsonl")
    parts = [_open_file(path, form, config, lines) for path, form in zip(paths, forms, strict=True)]
    cells = config.cells
    if cells.decimal == "auto" and any(map(_has_decimal_commas, paths, parts)):
        cells = replace(cells, decimal=",")
    parts = [_in_folders(part, folder_values(spec, file)) for part, (file, spec) in zip(parts, full, strict=True)]
    mark = fingerprint_of("table", [(str(path), *stamp) for path, stamp in stamps])
    fingerprint = fingerprint_of(mark, config.format, config.columns, config.delimiter, cells)
    return TableSource(name=name, parts=tuple(parts), fingerprint=fingerprint, stamps=stamps, cells=cells)


def _is_empty(path: Path) -> bool:
    """Whether a file of text has nothing in it, as a writer leaves it that had no rows; this is logged."""
    if format_suffix(path) == ".parquet":
        return False
    with opened(path) as stream:
        is_empty = not stream.read(1)
    if is_empty:
        _log.warning("%s is empty and left out", path)
    return is_empty


def _has_decimal_commas(path: Path, part: TablePart) -> bool:
    """Whether the first rows of a file that ; delimits show a decimal comma: then points are between thousands."""
    blocks = text_blocks(path, longest=RECORD_BYTES) if part.delimiter == ";" else iter(())
    return any(_COMMA_CELL.search(raw) for _, raw in islice(blocks, 1))


def _in_folders(part: TablePart, values: Mapping[str, str | None]) -> TablePart:
    """The part with the values that its folders give to all of its rows; a column of its own goes before one of
    these."""
    others = {name: value for name, value in values.items() if name not in part.names}
    if not others:
        return part
    return replace(part, find_names=lambda: (*part.names, *others), chunks=partial(_chunks_in_folders, part, others))


def _chunks_in_folders(
    part: TablePart, values: Mapping[str, str | None], columns: tuple[str, ...], known: frozenset[str]
) -> Iterator[Job]:
    # A chunk without columns would have no rows.
    own = [name for name in columns if name not in values] or list(part.names[:1])
    for job in part.jobs(own, known):
        yield partial(_with_values, job, values, columns)


def _with_values(job: Job, values: Mapping[str, str | None], columns: tuple[str, ...]) -> ArrowChunk:
    arrow, chunk = pyarrow(), job()
    table, text = chunk.table, pyarrow().string()
    for name in columns:
        if name in values:
            table = table.append_column(name, arrow.repeat(arrow.scalar(values[name], text), table.num_rows))
    return replace(chunk, table=table.select(list(columns)))


def _ruled(job: Job, cells: CellRules, times: tuple[str, ...]) -> ArrowChunk:
    chunk = cells.apply(job())
    return as_times(chunk, times) if times else chunk


def _table_files(spec: str | os.PathLike[str]) -> list[Path]:
    return resolve_files(spec, lambda path: format_suffix(path) in _SUFFIXES, " ".join(_SUFFIXES), is_hidden=_is_hidden)


def _is_hidden(part: str) -> bool:
    """Whether a name below a folder is left out of its table, as Spark and Arrow have it: _temporary, _SUCCESS."""
    return part.startswith(".") or (part.startswith("_") and "=" not in part)


def _open_file(
    path: Path, form: TableFormat, config: TableSourceConfig, lines: tuple[tuple[Path, FileStamp], ...]
) -> TablePart:
    if form == "parquet":
        return open_parquet(path)
    if form == "jsonl":
        return open_json_lines(path, lines)
    line = first_line(path)
    if form == "interactions":
        return open_interactions(path, "\t" if "\t" in line else " ")
    missing = ("", *config.missing_values)
    if form == "criteo":
        return TextFile(
            path=path, names=CRITEO_COLUMNS, delimiter="\t", has_header=False, has_quotes=False, missing=missing
        ).part
    delimiter = config.delimiter or ("\t" if form == "tsv" else "")
    if not delimiter:  # the one that splits the first line into the most cells; a comma if all are equal
        delimiter = max((",", ";", "\t", "|"), key=lambda each: len(_cells(path, line, each)))
    # Blanks around a name are no part of it, as around any other cell.
    names = tuple(cell.strip() for cell in _cells(path, line, delimiter)) if config.columns is None else config.columns
    if config.columns is None and names[0] == "" and len(names) > 1:
        # The row numbers that pandas writes.
        names = (f"{UNNAMED}0", *names[1:])
    _check_header(path, names)
    return TextFile(
        path=path, names=names, delimiter=delimiter, has_header=config.columns is None, has_quotes=True, missing=missing
    ).part


def _cells(path: Path, line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter))
    except csv.Error as error:
        raise DataError(
            f"{path}:1 cannot be divided into cells",
            got=error,
            expected="lines that end in \\n or \\r\\n, and cells of at most 128 KiB",
            fix="convert the line ends: tr '\\r' '\\n'" if "\r" in line else "repair the first line",
        ) from None


def _format(path: Path) -> TableFormat:
    """The format of a file by its suffix; for .tsv and .txt by the first line too."""
    suffix = format_suffix(path)
    if suffix in (".csv", ".parquet", ".jsonl"):
        return {".csv": "csv", ".parquet": "parquet", ".jsonl": "jsonl"}[suffix]  # type: ignore[return-value]
    cells = first_line(path).split("\t") if suffix in (".tsv", ".txt") else []
    if len(cells) == len(CRITEO_COLUMNS) and cells[0] in ("0", "1"):
        return "criteo"
    if suffix in (".tsv", ".inter"):
        return "tsv"
    pair = first_line(path).split() if suffix == ".txt" else []
    if len(pair) == 2 and all(cell.lstrip("-").isdigit() for cell in pair):
        return "interactions"
    raise DataError(
        f"{path} is of no format that is known",
        got=f"suffix {suffix!r}" if suffix not in _SUFFIXES else f"a first line {first_line(path)[:60]!r}",
        expected="a .tsv as Criteo has it or with a header, .csv, .inter, .parquet, .jsonl, or a .txt of `user item`",
        fix="rename the file, or name its format: data.format=criteo, csv, tsv, parquet, jsonl or interactions",
    )


def _check_header(path: Path, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    numbers = [name for name in names if name.replace(".", "", 1).lstrip("-").isdigit()]
    if twice or numbers or "" in names:
        got = f"columns {', '.join(twice)} twice" if twice else f"a column named {numbers[0] if numbers else ''!r}"
        raise DataError(
            f"the first line of {path} is not a header",
            got=got,
            expected="a different name for every column",
            fix="name the columns of a file without a header: data.columns=[label,user,...]",
        )
