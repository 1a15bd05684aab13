"""What the rows of a table call the things whose texts became keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import CacheFolder
from kitforge.data.shard import digest
from kitforge.data.tables.canonical import texts_of
from kitforge.data.tables.columns import KeyColumn, ListColumn
from kitforge.data.tables.hashing import hash_texts
from kitforge.data.tables.key_index import KeyIndex
from kitforge.data.tables.source import TableSource
from kitforge.foundation.files import atomic_file

FORMAT = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Texts:
    """Texts end to end, as UTF-8: text i is data[offsets[i] : offsets[i + 1]]."""

    data: NDArray[np.uint8]  # [total]
    offsets: NDArray[np.int64]  # [n + 1], from 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, place: int) -> str:
        return bytes(self.data[self.offsets[place] : self.offsets[place + 1]]).decode()

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """These texts."""
        raw = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        return cls(data=np.frombuffer(b"".join(raw), np.uint8), offsets=offsets)


def names_of(source: TableSource, column: KeyColumn | ListColumn, keys: NDArray[np.int64], root: Path) -> Texts:
    """The texts whose keys [n] a column of texts gave. The column is read once, and what was found is kept below
    `root`, where the source has a fingerprint. Raises DataError for what is wrong with the rows or the disk."""
    if source.fingerprint is None:
        return Texts.of(_found(source, column, keys))
    mark = digest("names", FORMAT, source.fingerprint, column, keys.tobytes())
    folder = CacheFolder(
        path=root / mark,
        what="cache of names",
        manifest_name="names.json",
        format=FORMAT,
        elsewhere=": data.cache=FOLDER",
    )

    def fill() -> dict[str, Any]:
        texts = Texts.of(_found(source, column, keys))
        for name, array in (("data.bin", texts.data), ("offsets.bin", texts.offsets)):
            with atomic_file(folder.path / name) as file:
                file.write(array.tobytes())
        return {"num_bytes": len(texts.data)}

    folder.build(fill)
    data = folder.mapped("data.bin", np.uint8, (folder.manifest()["num_bytes"],))
    return Texts(data=data, offsets=folder.mapped("offsets.bin", np.int64, (len(keys) + 1,)))


def _found(source: TableSource, column: KeyColumn | ListColumn, keys: NDArray[np.int64]) -> Sequence[str]:
    """The text of each key, the first one in the table where several have the same key."""
    index, names, num_left = KeyIndex(keys), [""] * len(keys), len(keys)
    is_open = np.ones(len(keys), bool)
    for job in source.jobs([column.name]):
        texts = texts_of(job().table, column)
        places = index.find(hash_texts(texts))
        rows = np.flatnonzero((places >= 0) & is_open[places])
        for row, place in zip(rows.tolist(), places[rows].tolist(), strict=True):
            if is_open[place]:
                names[place], is_open[place] = texts[row].as_py(), False
                num_left -= 1
        if num_left == 0:
            break
    return names
