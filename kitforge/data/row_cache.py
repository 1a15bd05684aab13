"""Rows of dialogues as tokens on the disk, built once by several processes and mapped into memory.

A cache is a folder named by the rows, the tokenizer, its chat template and how rows are read. `tokens.bin` and
`loss_mask.bin` hold all responses end to end, `offsets.npy` where each begins, `values.npy` and `sources.npy` what else
a row holds; a row of pairs is two responses. While it is built, `parts` holds a file for each finished shard.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import CacheFolder
from kitforge.data.dialogues import DialogueReader, Judged, Pair, ReadReport, Response, RowKind
from kitforge.data.shard import RowShard, digest
from kitforge.data.source import open_rows
from kitforge.data.template import template_of
from kitforge.data.tokenise import token_dtype, tokenise
from kitforge.data.tokens import Tokenizer
from kitforge.foundation.files import atomic_file

FORMAT = 1
_PARTS = "parts"
# The arrays beside tokens and masks, each in a file of its own.
_ARRAYS = ("offsets", "values", "sources")
Row = TypeVar("Row", Response, Pair, Judged)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowJob:
    """A shard of rows and the file that will hold its responses: an npz of arrays, without pickle."""

    shard: RowShard
    path: Path
    kind: RowKind
    columns: dict[str, str]
    unusable: str

    @property
    def size(self) -> int:
        """Roughly the bytes of the rows."""
        return self.shard.size

    def write(self, tokenizer: Tokenizer) -> None:
        """Read and tokenise the rows."""
        reader = DialogueReader(tokenizer, template_of(tokenizer), self.columns, cast(Any, self.unusable))
        report, dtype = ReadReport(), token_dtype(tokenizer.vocab_size)
        names: dict[str, int] = {}
        tokens, masks = [np.zeros(0, dtype)], [np.zeros(0, np.bool_)]
        values: list[float] = []
        sources: list[int] = []
        for row in reader.shard(self.kind, self.shard, report):
            tokens += [np.array(each.tokens, dtype) for each in _responses(row)]
            masks += [np.array(each.learnt, np.bool_) for each in _responses(row)]
            values.append(_value(row))
            sources.append(names.setdefault(_source(row), len(names)))
        told = json.dumps({"report": asdict(report), "names": list(names)}).encode()
        with atomic_file(self.path) as file:
            np.savez(
                file,
                lengths=np.array([len(each) for each in tokens[1:]], np.int64),
                tokens=np.concatenate(tokens),
                loss_mask=np.concatenate(masks),
                values=np.array(values, np.float64),
                sources=np.array(sources, np.int32),
                told=np.frombuffer(told, np.uint8),
            )


@final
class RowCache(Sequence[Row], Generic[Row]):
    """The rows of a finished cache; `fingerprint` is of what they hold, wherever the rows lay."""

    def __init__(self, folder: Path) -> None:
        place = _place(folder)
        manifest = place.manifest()
        num_tokens, self._kind = manifest["num_tokens"], manifest["kind"]
        self.fingerprint: str = manifest["fingerprint"]
        self.report = ReadReport(**manifest["report"])
        self._names: list[str] = manifest["names"]
        # Views of plain arrays are made faster than those of mapped ones.
        self._tokens = np.asarray(place.mapped("tokens.bin", np.dtype(manifest["dtype"]), (num_tokens,)))
        self._loss_mask = np.asarray(place.mapped("loss_mask.bin", np.bool_, (num_tokens,)))
        try:
            found = [np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS]
        except (OSError, ValueError) as error:
            raise place.damaged("offsets.npy", error, "whole files") from None
        self._offsets, self._values, self._sources = map(np.asarray, found)
        self._per_row = 2 if self._kind == "pairs" else 1
        if len(self._offsets) != self._per_row * len(self) + 1 or self._offsets[-1] != num_tokens:
            raise place.damaged("offsets.npy", len(self._offsets), f"{self._per_row} responses of {len(self)} rows")

    def __len__(self) -> int:
        return len(self._values)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, of the longer response of a pair, [rows]."""
        found: NDArray[np.int64] = np.diff(self._offsets).reshape(-1, self._per_row).max(1)
        return found

    def __getitem__(self, row: Any) -> Any:
        """A row whose tokens are views of the cache."""
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        responses = [self._response(number * self._per_row + each) for each in range(self._per_row)]
        value, source = float(self._values[number]), self._names[self._sources[number]]
        if self._kind == "pairs":
            return Pair(chosen=responses[0], rejected=responses[1], margin=value, source=source)
        return Judged(response=responses[0], is_desirable=bool(value)) if self._kind == "judged" else responses[0]

    def _response(self, number: int) -> Response:
        part = slice(int(self._offsets[number]), int(self._offsets[number + 1]))
        return Response(tokens=self._tokens[part], learnt=self._loss_mask[part])


def build_rows(
    reader: DialogueReader,
    tokenizer: Tokenizer,
    kind: RowKind,
    spec: object,
    root: Path,
    *,
    num_workers: int | None = None,
) -> RowCache[Any]:
    """The rows that `spec` names, tokenised below `root` if they are not there yet; the files do not depend on
    `num_workers`. Raises DataError for rows that cannot be used, and warns of those that are left out."""
    shards = list(open_rows(spec))
    key = digest("row_cache", FORMAT, reader.fingerprint(kind), [shard.fingerprint for shard in shards])
    folder = root / key

    def fill() -> dict[str, Any]:
        parts = folder / _PARTS
        parts.mkdir(exist_ok=True)
        jobs = [
            RowJob(
                shard=shard,
                path=parts / f"{number:06d}.npz",
                kind=kind,
                columns=reader.columns,
                unusable=reader.unusable,
            )
            for number, shard in enumerate(shards)
        ]
        tokenise([job for job in jobs if not job.path.exists()], tokenizer, num_workers, lambda _size: None)
        manifest = _assemble(jobs, folder, kind, token_dtype(tokenizer.vocab_size), spec)
        shutil.rmtree(parts)
        return manifest

    was_there = (folder / "cache.json").exists()
    _place(folder).build(fill)
    cache: RowCache[Any] = RowCache(folder)
    if was_there:
        cache.report.check(spec)
    return cache


def _place(folder: Path) -> CacheFolder:
    elsewhere = " with the environment variable KITFORGE_CACHE"
    return CacheFolder(path=folder, what="row cache", manifest_name="cache.json", format=FORMAT, elsewhere=elsewhere)


def _assemble(
    jobs: Sequence[RowJob], folder: Path, kind: RowKind, dtype: np.dtype[Any], spec: object
) -> dict[str, Any]:
    """Write the files out of the parts; gives what the manifest says about them."""
    report = ReadReport()
    names: dict[str, int] = {}
    lengths, values, sources = [np.zeros(0, np.int64)], [np.zeros(0)], [np.zeros(0, np.int32)]
    # One of each file, so that where shards end does not count.
    content, masks = (hashlib.blake2b(f"{kind} {dtype.name}".encode(), digest_size=16) for _ in range(2))
    with atomic_file(folder / "tokens.bin") as tokens, atomic_file(folder / "loss_mask.bin") as mask:
        for job in jobs:
            with np.load(job.path, allow_pickle=False) as part:
                told = json.loads(part["told"].tobytes())
                report += ReadReport(**told["report"])
                numbers = [names.setdefault(name, len(names)) for name in told["names"]]
                lengths.append(part["lengths"])
                values.append(part["values"])
                sources.append(np.array(numbers, np.int32)[part["sources"]] if numbers else part["sources"])
                for file, hashed, array in ((tokens, content, part["tokens"]), (mask, masks, part["loss_mask"])):
                    hashed.update(array.data)
                    file.write(array.data)
    report.check(spec)
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


def _responses(row: Response | Pair | Judged) -> tuple[Response, ...]:
    if isinstance(row, Pair):
        return row.chosen, row.rejected
    return (row.response,) if isinstance(row, Judged) else (row,)


def _value(row: Response | Pair | Judged) -> float:
    """The number that a row holds beside its responses."""
    if isinstance(row, Pair):
        return row.margin
    return float(row.is_desirable) if isinstance(row, Judged) else 0.0


def _source(row: Response | Pair | Judged) -> str:
    return row.source if isinstance(row, Pair) else ""
