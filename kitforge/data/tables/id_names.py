"""The original texts of hashed ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import CacheFolder
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.tables.arrow_to_columns import texts_of_column
from kitforge.data.tables.columns import KeyColumn, ListColumn
from kitforge.data.tables.hashing import hash_texts
from kitforge.data.tables.id_index import IdIndex
from kitforge.data.tables.source import TableSource
from kitforge.foundation.files import atomic_file

FORMAT = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextArray:
    """Texts in one UTF-8 buffer: text i is data[offsets[i] : offsets[i + 1]]."""

    data: NDArray[np.uint8]  # [total]
    offsets: NDArray[np.int64]  # [n + 1], from 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> str:
        return bytes(self.data[self.offsets[index] : self.offsets[index + 1]]).decode()

    @classmethod
    def of(cls, texts: Iterable[str]) -> TextArray:
        """A TextArray of texts."""
        raw = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, raw)], dtype=np.int64)
        return cls(data=np.frombuffer(b"".join(raw), np.uint8), offsets=offsets)


def load_id_names(
    source: TableSource, column: KeyColumn | ListColumn, keys: NDArray[np.int64], root: Path
) -> TextArray:
    """The texts of keys [n] of a text column. The column is read once and the result is cached below `root` if the
    source has a fingerprint. Raises DataError for invalid rows and disk errors."""
    if source.fingerprint is None:
        return TextArray.of(_find_names(source, column, keys))
    mark = fingerprint_of("names", FORMAT, source.fingerprint, column, keys.tobytes())
    folder = CacheFolder(
        path=root / mark,
        what="cache of names",
        manifest_name="names.json",
        format=FORMAT,
        elsewhere=": data.cache=FOLDER",
    )

    def fill() -> dict[str, Any]:
        texts = TextArray.of(_find_names(source, column, keys))
        for name, array in (("data.bin", texts.data), ("offsets.bin", texts.offsets)):
            with atomic_file(folder.path / name) as file:
                file.write(array.tobytes())
        return {"num_bytes": len(texts.data)}

    folder.build(fill)
    data = folder.mapped("data.bin", np.uint8, (folder.manifest()["num_bytes"],))
    return TextArray(data=data, offsets=folder.mapped("offsets.bin", np.int64, (len(keys) + 1,)))


def _find_names(source: TableSource, column: KeyColumn | ListColumn, keys: NDArray[np.int64]) -> Sequence[str]:
    """The text of each key; of several texts with one key, the first in the table."""
    index, names, num_left = IdIndex(keys), [""] * len(keys), len(keys)
    is_open = np.ones(len(keys), bool)
    for job in source.jobs([column.name]):
        texts, forms = texts_of_column(job().table, column)
        positions = index.find(hash_texts(forms))
        rows = np.flatnonzero((positions >= 0) & is_open[positions])
        for row, position in zip(rows.tolist(), positions[rows].tolist(), strict=True):
            if is_open[position]:
                names[position], is_open[position] = texts[row].as_py(), False
                num_left -= 1
        if num_left == 0:
            break
    return names
