"""Text sources: files and rows, as documents in a fixed order."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kitforge.data import named_dataset
from kitforge.data.document_shard import DocumentShard, EncodingErrors, RecordShard, fingerprint_of
from kitforge.data.file_resolver import resolve_files
from kitforge.data.in_memory import dataset_shards, is_dataset, memory_rows, memory_shards, rows_of_table
from kitforge.data.mixture import WeightedSource, source_error, weighted_sources
from kitforge.data.readers import file_shards, is_known, row_file_shards
from kitforge.data.standard_library import standard_library_shards
from kitforge.foundation.config import check, from_dict
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import user_path

STANDARD_LIBRARY = "python_stdlib"

# A longer text, or one of several lines, is a document and never a path.
_PATH_CHARACTERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceConfig:
    """How documents are read out of files and rows."""

    # Of jsonl, json, csv, tsv, parquet, datasets and mappings: the column that holds the text.
    column: str = "text"
    # The literal separator between two documents of a text file; None makes a file one document.
    separator: str | None = None
    # What to do about bytes that are not UTF-8: refuse, mark with U+FFFD, or leave out.
    encoding_errors: EncodingErrors = "strict"

    def __post_init__(self) -> None:
        check(self.separator != "", "data.separator", "empty text", "text between documents, or null")


_DEFAULT = SourceConfig()


class Source:
    """A corpus: shards of documents in a fixed order. `weighted` holds the sources of a mixture with their weights;
    the shards are those of all of them. `iterable` is a user's iterable that is streamed, without shards."""

    def __init__(
        self,
        name: str,
        shards: Sequence[DocumentShard],
        weighted: Sequence[tuple[Source, float]] = (),
        iterable: Iterable[object] | None = None,
    ) -> None:
        self.name = name
        self.weighted = list(weighted)
        self.iterable = iterable
        self._shards = list(shards)
        self.fingerprint = fingerprint_of("source", *(shard.fingerprint for shard in shards))

    def shards(self) -> list[DocumentShard]:
        """The parts that can be read apart; together, and in this order, they are the corpus."""
        return list(self._shards)

    def documents(self) -> Iterator[str]:
        """Every document that is not empty. Raises DataError when there is none, or when one cannot be read."""
        is_empty = True
        for shard in self._shards:
            for text in shard.documents():
                is_empty = False
                yield text
        if is_empty:
            raise empty_source_error(self.name)


def empty_source_error(name: str) -> DataError:
    """The error about a corpus without text."""
    return DataError(f"there is no text in {name}", got="no documents", expected="at least one that is not empty")


def open_source(spec: object, config: SourceConfig = _DEFAULT) -> Source:
    """The corpus that `spec` names.

    A spec is "python_stdlib" (the sources of this Python's standard library), a file, a folder (all files below it of
    a known format, hidden ones left out, sorted), a pattern such as "data/*.jsonl", a list of these, a
    datasets.Dataset, a table (DataFrame, Arrow), or an iterable of texts or of rows (mappings), which is read once and
    kept in memory. A list of texts is a list of paths when they look like paths. A list of {source, weight} with
    options of SourceConfig is a mixture. Raises DataError for what is missing, empty or unreadable, ConfigError for a
    mixture that cannot be.
    """
    spec = rows_of_table(named_dataset.load_named(spec))
    if (entries := weighted_sources(spec, SourceConfig.__dataclass_fields__)) is not None:
        return _open_mixture(entries, config)
    if isinstance(spec, (str, os.PathLike)):
        return Source(str(spec), _path_shards(spec, config))
    if is_dataset(spec):
        return Source("dataset", dataset_shards(spec, config.column, config.encoding_errors))
    if isinstance(spec, Mapping) or not isinstance(spec, Iterable) or isinstance(spec, (bytes, bytearray)):
        raise _unusable(spec)
    if isinstance(spec, (list, tuple)) and _are_paths(spec):
        shards = [shard for item in spec for shard in _path_shards(item, config)]
        return Source(", ".join(map(str, spec)), shards)
    shards = list(memory_shards(spec, config.column, config.encoding_errors))
    if not shards:
        raise empty_source_error("the rows that were given")
    return Source("rows", shards)


def open_stream(spec: object, config: SourceConfig) -> Source:
    """The corpus that `spec` names, of which nothing is read yet: shards of files or a dataset, or an iterable of texts
    or rows."""
    spec = rows_of_table(named_dataset.load_named(spec, streaming=True))
    is_known = spec is None or isinstance(spec, (str, os.PathLike, list, tuple, Mapping)) or is_dataset(spec)
    if is_known or not isinstance(spec, Iterable) or isinstance(spec, (bytes, bytearray)):
        return open_source(spec, config)
    return Source(f"stream of {type(spec).__name__}", [], iterable=spec)


def _open_mixture(entries: Sequence[WeightedSource], config: SourceConfig) -> Source:
    weighted = []
    for number, entry in enumerate(entries):
        own = from_dict(SourceConfig, asdict(config) | dict(entry.options), f"data.train[{number}]")
        try:
            source = open_source(entry.source, own)
        except DataError as error:
            raise source_error(entry.name, error) from None
        source.name = entry.name
        weighted.append((source, entry.weight))
    names = ", ".join(source.name for source, _ in weighted)
    return Source(names, [shard for source, _ in weighted for shard in source.shards()], weighted)


def open_rows(spec: object) -> Iterator[RecordShard]:
    """The shards of a file of rows, a folder, a pattern, a list of these, a datasets.Dataset, a table, or an iterable
    of rows, in order."""
    spec = rows_of_table(named_dataset.load_named(spec))
    if weighted_sources(spec, ()) is not None:
        raise ConfigError(
            "a mixture of sources cannot be read here",
            got="a list of {source, weight}",
            expected="files or rows; data.train of text_generation, sft, reward, kto and preference losses may mix",
            fix="name the files in a list: [a.jsonl,b.jsonl]",
        )
    if isinstance(spec, (str, os.PathLike)):
        for file in _text_files(spec):
            yield from row_file_shards(file)
    elif isinstance(spec, Mapping) or not isinstance(spec, Iterable):
        raise _unusable(spec)
    elif isinstance(spec, (list, tuple)) and spec and all(isinstance(item, (str, os.PathLike)) for item in spec):
        for item in spec:
            yield from open_rows(item)
    else:
        yield from dataset_shards(spec) if is_dataset(spec) else memory_rows(spec)


def _unusable(spec: object) -> DataError:
    fix = None
    if isinstance(spec, Mapping):
        fix = f"hand over one of its values, named {', '.join(map(str, list(spec)[:8]))}, or a list of rows"
    return DataError(
        "this is not a corpus",
        got=type(spec).__name__,
        expected=f"{STANDARD_LIBRARY}, a file, a folder, a pattern, a list of these, a datasets.Dataset, or rows",
        fix=fix,
    )


def _are_paths(items: Sequence[object]) -> bool:
    """Whether a list holds paths rather than documents. A list that holds both is refused: one is a slip."""
    flags = [_is_path_like(item) for item in items]
    if any(flags) and not all(flags):
        raise DataError(
            "the list holds both paths and texts",
            got=f"path {items[flags.index(True)]!r} beside {str(items[flags.index(False)])[:60]!r}",
            expected="paths that exist, or documents",
            fix="correct the path; or pass documents as rows: [{'text': ...}, ...]",
        )
    return bool(flags) and all(flags)


def _is_path_like(item: object) -> bool:
    if isinstance(item, os.PathLike) or item == STANDARD_LIBRARY:
        return True
    # pathlib raises about a name that is too long; os.path says that there is no such file.
    return isinstance(item, str) and _may_be_path(item) and (is_known(Path(item)) or os.path.exists(item))


def _may_be_path(text: str) -> bool:
    return 0 < len(text) <= _PATH_CHARACTERS and "\n" not in text and "\0" not in text


def _path_shards(spec: str | os.PathLike[str], config: SourceConfig) -> list[DocumentShard]:
    if spec == STANDARD_LIBRARY:
        return list(standard_library_shards())
    if not _may_be_path(os.fspath(spec)):
        raise DataError(
            "this text is not a path", got=f"{os.fspath(spec)[:60]!r}", fix="pass a document in a list: [text]"
        )
    path = user_path(spec)
    shards = [
        shard
        for file in _text_files(spec)
        for shard in file_shards(file, config.column, config.separator, config.encoding_errors)
        if shard.size > 0
    ]
    if not shards:
        raise DataError(f"{path} is empty", got="0 bytes", expected="text")
    return list(shards)


def _text_files(spec: str | os.PathLike[str]) -> list[Path]:
    return resolve_files(spec, is_known, ".txt .py .md .jsonl .json .csv .tsv .parquet .conll", [STANDARD_LIBRARY])
