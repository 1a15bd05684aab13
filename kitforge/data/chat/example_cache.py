"""Rows of dialogues as tokens on the disk, built once by several processes and mapped into memory.

A cache is a folder named by the rows, the tokenizer, its chat template and how rows are read. `tokens.bin` and
`loss_mask.bin` hold all completions end to end, `offsets.npy` where each begins, `values.npy` and `sources.npy` what
else a row holds; a row of pairs is two completions. While it is built, `parts` has a file for each finished shard.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import CacheFolder
from kitforge.data.chat.datasets import (
    ChatDatasetReader,
    ExampleKind,
    PreferencePair,
    ReadReport,
    TokenizedExample,
    UnpairedExample,
)
from kitforge.data.chat.template import template_of
from kitforge.data.document_shard import RecordShard, fingerprint_of
from kitforge.data.source import open_rows
from kitforge.data.text.tokenize_documents import ShardJob, run_tokenize_jobs, token_dtype
from kitforge.data.tokenizers.protocol import Tokenizer
from kitforge.foundation.files import atomic_file

FORMAT = 2
# The arrays beside tokens and masks, each in a file of its own.
_ARRAYS = ("offsets", "values", "sources")
Row = TypeVar("Row", TokenizedExample, PreferencePair, UnpairedExample)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleJob(ShardJob):
    """A shard of rows and the file that will hold its completions: an npz of arrays, without pickle."""

    shard: RecordShard
    kind: ExampleKind
    columns: dict[str, str]
    unusable: str

    def write(self, tokenizer: Tokenizer) -> None:
        reader = ChatDatasetReader(tokenizer, template_of(tokenizer), self.columns, cast(Any, self.unusable))
        report, dtype = ReadReport(), token_dtype(tokenizer.vocab_size)
        names: dict[str, int] = {}
        tokens, masks = [np.zeros(0, dtype)], [np.zeros(0, np.bool_)]
        values: list[float] = []
        sources: list[int] = []
        for row in reader.shard(self.kind, self.shard, report):
            tokens += [np.array(each.tokens, dtype) for each in _completions(row)]
            masks += [np.array(each.loss_mask, np.bool_) for each in _completions(row)]
            margin, source = (row.margin, row.source) if isinstance(row, PreferencePair) else (0.0, "")
            values.append(float(row.is_desirable) if isinstance(row, UnpairedExample) else margin)
            sources.append(names.setdefault(source, len(names)))
        metadata = json.dumps({"report": asdict(report), "names": list(names)}).encode()
        with atomic_file(self.path) as file:
            np.savez(
                file,
                lengths=np.array([len(each) for each in tokens[1:]], np.int64),
                tokens=np.concatenate(tokens),
                loss_mask=np.concatenate(masks),
                values=np.array(values, np.float64),
                sources=np.array(sources, np.int32),
                metadata=np.frombuffer(metadata, np.uint8),
            )


class ExampleCache(Sequence[Row], Generic[Row]):
    """The rows of a finished cache; `fingerprint` depends on their contents only, not on their source."""

    def __init__(self, folder: Path) -> None:
        cache_folder = _cache_folder(folder)
        manifest = cache_folder.manifest()
        num_tokens, self._kind = manifest["num_tokens"], manifest["kind"]
        self.fingerprint: str = manifest["fingerprint"]
        self.report = ReadReport(**manifest["report"])
        self._names: list[str] = manifest["names"]
        # Views of plain arrays are made faster than those of mapped ones.
        self._tokens = np.asarray(cache_folder.mapped("tokens.bin", np.dtype(manifest["dtype"]), (num_tokens,)))
        self._loss_mask = np.asarray(cache_folder.mapped("loss_mask.bin", np.bool_, (num_tokens,)))
        try:
            arrays = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
        except (OSError, ValueError) as error:
            raise cache_folder.damaged("offsets.npy", error, "whole files") from None
        self._offsets, self._values, self._sources = map(np.asarray, arrays)
        self._per_row = 2 if self._kind == "pairs" else 1
        if len(self._offsets) != self._per_row * len(self) + 1 or self._offsets[-1] != num_tokens:
            raise cache_folder.damaged(
                "offsets.npy", len(self._offsets), f"{self._per_row} completions of {len(self)} rows"
            )

    def __len__(self) -> int:
        return len(self._values)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, of the longer completion of a pair, [rows]."""
        lengths: NDArray[np.int64] = np.diff(self._offsets).reshape(-1, self._per_row).max(1)
        return lengths

    def __getitem__(self, row: Any) -> Any:
        """A row whose tokens are views of the cache."""
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        completions = []
        for each in range(number * self._per_row, (number + 1) * self._per_row):
            part = slice(int(self._offsets[each]), int(self._offsets[each + 1]))
            completions.append(TokenizedExample(tokens=self._tokens[part], loss_mask=self._loss_mask[part]))
        value, source = float(self._values[number]), self._names[self._sources[number]]
        if self._kind == "pairs":
            return PreferencePair(chosen=completions[0], rejected=completions[1], margin=value, source=source)
        if self._kind == "unpaired":
            return UnpairedExample(completion=completions[0], is_desirable=bool(value))
        return completions[0]


def build_example_cache(
    reader: ChatDatasetReader,
    tokenizer: Tokenizer,
    kind: ExampleKind,
    spec: object,
    root: Path,
    *,
    num_workers: int | None = None,
) -> ExampleCache[Any]:
    """The rows that `spec` names, tokenised below `root` if they are not there yet; the files do not depend on
    `num_workers`. Raises DataError for rows that cannot be used, and warns of those that are left out."""
    shards = list(open_rows(spec))
    key = fingerprint_of("row_cache", FORMAT, reader.fingerprint(kind), [shard.fingerprint for shard in shards])
    folder = root / key

    def fill() -> dict[str, Any]:
        parts = folder / "parts"
        parts.mkdir(exist_ok=True)
        jobs = [
            ExampleJob(
                shard=shard,
                path=parts / f"{number:06d}.npz",
                kind=kind,
                columns=reader.columns,
                unusable=reader.on_invalid,
            )
            for number, shard in enumerate(shards)
        ]
        run_tokenize_jobs([job for job in jobs if not job.path.exists()], tokenizer, num_workers, lambda _size: None)
        manifest = _assemble(
            jobs, folder, kind, token_dtype(tokenizer.vocab_size), lambda report: report.check(spec, reader.columns)
        )
        shutil.rmtree(parts)
        return manifest

    was_there = (folder / "cache.json").exists()
    _cache_folder(folder).build(fill)
    cache: ExampleCache[Any] = ExampleCache(folder)
    if was_there:
        cache.report.check(spec, reader.columns)
    return cache


def _cache_folder(folder: Path) -> CacheFolder:
    elsewhere = " with the environment variable KITFORGE_CACHE"
    return CacheFolder(path=folder, what="row cache", manifest_name="cache.json", format=FORMAT, elsewhere=elsewhere)


def _assemble(
    jobs: Sequence[ExampleJob],
    folder: Path,
    kind: ExampleKind,
    dtype: np.dtype[Any],
    check: Callable[[ReadReport], None],
) -> dict[str, Any]:
    """Join the parts into the cache's files; returns their manifest entries."""
    report = ReadReport()
    names: dict[str, int] = {}
    lengths, values, sources = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0, np.int32)]
    # One of each file, so that where shards end does not count.
    content, masks = (hashlib.blake2b(f"{kind} {dtype.name}".encode(), digest_size=16) for _ in range(2))
    with atomic_file(folder / "tokens.bin") as tokens, atomic_file(folder / "loss_mask.bin") as mask:
        for job in jobs:
            with np.load(job.path, allow_pickle=False) as part:
                metadata = json.loads(part["metadata"].tobytes())
                report += ReadReport(**metadata["report"])
                numbers = [names.setdefault(name, len(names)) for name in metadata["names"]]
                lengths.append(part["lengths"])
                values.append(part["values"])
                sources.append(np.array(numbers, np.int32)[part["sources"]] if numbers else part["sources"])
                for file, hashed, array in ((tokens, content, part["tokens"]), (mask, masks, part["loss_mask"])):
                    hashed.update(array.data)
                    file.write(array.data)
    check(report)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    arrays: list[NDArray[Any]] = [offsets, np.concatenate(values), np.concatenate(sources)]
    for name, array in zip(_ARRAYS, arrays, strict=True):
        content.update(array.tobytes())
        with atomic_file(folder / f"{name}.npy") as file:
            np.save(file, array, allow_pickle=False)
    content.update(repr((list(names), masks.digest())).encode())
    return {
        "fingerprint": content.hexdigest(),
        "kind": kind,
        "dtype": dtype.name,
        "num_tokens": int(offsets[-1]),
        "names": list(names),
        "report": asdict(report),
    }


def _completions(row: TokenizedExample | PreferencePair | UnpairedExample) -> tuple[TokenizedExample, ...]:
    if isinstance(row, PreferencePair):
        return row.chosen, row.rejected
    return (row.completion,) if isinstance(row, UnpairedExample) else (row,)
