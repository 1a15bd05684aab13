"""The item catalogue of retrieval families: keys, model ids, counts, names and features of all items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.data.tables.id_names import TextArray
from kitforge.data.tables.times import Times
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, ModelError
from kitforge.kits.recommender.batch import FeatureBatch, IdBag
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.features import UNKNOWN
from kitforge.kits.recommender.schema import Encoding

_CHUNK_ROWS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCatalog:
    """The distinct items of the training rows, by ascending id."""

    ids: NDArray[np.int64]  # [I]
    keys: NDArray[np.int64]  # [I] item as in the data: an integer, or the hash of a text
    counts: NDArray[np.int64]  # [I] interactions with the item
    names: TextArray | None = None  # [I] texts, if keys are hashes
    samples: FeatureBatch | None = None  # [I] features of the item, if the network needs them

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, index: int) -> int | str:
        """The item at `index`, as in the data."""
        return int(self.keys[index]) if self.names is None else self.names[index]

    def indices_of(self, ids: torch.Tensor) -> NDArray[np.int64]:
        """The catalogue indices of ids [n]; -1 if absent."""
        wanted = ids.cpu().numpy()
        nearest = np.minimum(np.searchsorted(self.ids, wanted), max(len(self.ids) - 1, 0))
        return np.where(self.ids[nearest] == wanted, nearest, -1) if len(self.ids) else np.full(len(wanted), -1)

    def history_indices(self, batch: FeatureBatch, features: Sequence[str], held_out: int = 0) -> NDArray[np.int64]:
        """Catalogue indices [B, L] of the items of sequences without the last `held_out`; -1 for padding."""
        columns = []
        for name in features:
            sequence = batch.sequences[name]
            is_there = torch.arange(sequence.ids.shape[1]) < (sequence.lengths - held_out).unsqueeze(1)
            indices = self.indices_of(sequence.ids.reshape(-1)).reshape(tuple(sequence.ids.shape))
            columns.append(np.where(is_there.numpy(), indices, -1))
        return np.concatenate(columns, axis=1)

    def popularity_ranks(self) -> NDArray[np.int64]:
        """The popularity rank [I] of each item, 0 for the most popular."""
        ranks = np.empty(len(self), np.int64)
        ranks[np.argsort(-self.counts, kind="stable")] = np.arange(len(self))
        return ranks

    def log_frequencies(self, ids: torch.Tensor) -> torch.Tensor:
        """The log frequency [n] of items by id; unseen items count once."""
        indices = self.indices_of(ids)
        counts = np.where(indices < 0, 1, self.counts[indices])
        return torch.from_numpy(np.log(counts / self.counts.sum()))


def joined_catalog(older: ItemCatalog, newer: ItemCatalog, *, is_summed: bool) -> ItemCatalog:
    """The items of both, with the names and features of `newer` where it has them. `is_summed`: items of both count as
    often as they occur in either; else as in `newer`."""
    _, mine, theirs = np.intersect1d(older.ids, newer.ids, assume_unique=True, return_indices=True)
    alone = np.setdiff1d(np.arange(len(older)), mine)
    again = newer.counts.copy()
    again[theirs] += older.counts[mine] * is_summed
    newer = replace(newer, counts=again)
    if len(alone) == 0:
        return newer
    ids = np.concatenate([older.ids[alone], newer.ids])
    order = np.argsort(ids)
    keys, counts = (
        np.concatenate([one[alone], other])[order]
        for one, other in ((older.keys, newer.keys), (older.counts, newer.counts))
    )
    names = samples = None
    if older.names is not None and newer.names is not None:
        texts = [older.names[int(index)] for index in alone] + [newer.names[index] for index in range(len(newer))]
        names = TextArray.of(texts[index] for index in order)
    if older.samples is not None and newer.samples is not None:
        both = FeatureBatch.concatenate([older.samples, newer.samples])
        rows = np.concatenate([alone, np.arange(len(older), len(both))])[order]
        samples = both.take(torch.from_numpy(rows))
    return ItemCatalog(ids=ids[order], keys=keys, counts=counts, names=names, samples=samples)


def build_item_catalog(rows: ClickDataset, feature: str, held_out: int = 0, time: str | None = None) -> ItemCatalog:
    """The items of a categorical feature, with the features of their newest row (the last one, or by the column `time`
    of rows that were read with it), or of a sequence, without its last `held_out` items."""
    is_sequence = feature in rows.encoder.schema.sequences
    chunks, order = [], _by_age(rows, time)
    # Newest first: of several rows, numpy gives the first.
    for start in range(0, rows.num_rows, _CHUNK_ROWS):
        keys, owners = _items_of(rows, feature, order[start : start + _CHUNK_ROWS], held_out)
        keys, firsts, counts = np.unique(keys, return_index=True, return_counts=True)
        chunks.append((keys, owners[firsts], counts))
    keys, owners, counts = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    if len(keys) == 0:
        raise DataError(
            "there is nothing to train on",
            got=f"no item in column {rows.encoder.schema.source_column(feature)!r}"
            + (f" but the last {held_out} of each sequence, which are evaluated" if held_out else ""),
            expected=f"rows with {held_out + 2} items or more" if is_sequence else "rows with an item",
        )
    keys, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=counts, minlength=len(keys)).astype(np.int64)
    ids = rows.encoder.ids_of(feature, keys)
    if _encoding(rows, feature) == "vocabulary":
        # Items outside the vocabulary share one id and cannot be retrieved.
        known = ids != UNKNOWN
        keys, ids, firsts, totals = keys[known], ids[known], firsts[known], totals[known]
    order = np.argsort(ids)
    ids = ids[order]
    samples = None if is_sequence else rows.batch(owners[firsts][order])
    return ItemCatalog(ids=ids, keys=keys[order], counts=totals[order], samples=samples)


def _by_age(rows: ClickDataset, time: str | None) -> NDArray[np.int64]:
    """The rows, newest first; of rows of one time, the last in the table first."""
    numbers = np.arange(rows.num_rows)
    if time is None:
        return numbers[::-1]
    starts = range(0, rows.num_rows, _CHUNK_ROWS)
    times = Times.joined([Times.of(rows.columns(numbers[start : start + _CHUNK_ROWS]), time) for start in starts])
    return np.lexsort((times.fraction, times.whole))[::-1]


def _encoding(rows: ClickDataset, feature: str) -> Encoding:
    """The encoding of the items. Raises ConfigError for hashing, where items may collide."""
    schema = rows.encoder.schema
    encoding = (schema.categorical.get(feature) or schema.sequences[feature]).encoding
    check(
        encoding != "hash",
        f"data.schema {feature}.encoding",
        encoding,
        "exact or vocabulary: items that share a bucket could not be told apart",
        f"under {feature} and under all features of its table: `encoding: vocabulary` keeps the items of the training "
        "rows, `encoding: exact` any 64-bit id",
    )
    return encoding


def save_item_catalog(path: Path, catalogue: ItemCatalog) -> None:
    """Write the catalogue to one file, atomically."""
    tensors = {name: torch.from_numpy(getattr(catalogue, name)) for name in ("ids", "keys", "counts")}
    if catalogue.names is not None:
        # Copied: torch warns of read-only memory maps.
        tensors["names"] = torch.from_numpy(np.array(catalogue.names.data))
        tensors["name_offsets"] = torch.from_numpy(np.array(catalogue.names.offsets))
    if (samples := catalogue.samples) is not None:
        tensors["dense"] = samples.dense
        tensors |= {f"ids.{name}": ids for name, ids in samples.ids.items()}
        for name, bag in samples.bags.items():
            tensors |= {f"bag.{name}": bag.ids, f"offsets.{name}": bag.offsets}
    write(path, list(tensors.items()))


def load_item_catalog(path: Path) -> ItemCatalog:
    """Read a file of `save_item_catalog`."""
    file = TensorFile(path, ModelError)
    tensors = {name: file.tensor(name) for name in file.names()}
    ids, keys, counts = (tensors[name].numpy() for name in ("ids", "keys", "counts"))
    samples = _samples(tensors) if "dense" in tensors else None
    names = None
    if "names" in tensors:
        names = TextArray(data=tensors["names"].numpy(), offsets=tensors["name_offsets"].numpy())
    return ItemCatalog(ids=ids, keys=keys, counts=counts, names=names, samples=samples)


def _samples(tensors: Mapping[str, torch.Tensor]) -> FeatureBatch:
    ids = {name.removeprefix("ids."): each for name, each in tensors.items() if name.startswith("ids.")}
    bags = {
        name.removeprefix("bag."): IdBag(ids=each, offsets=tensors[f"offsets.{name.removeprefix('bag.')}"])
        for name, each in tensors.items()
        if name.startswith("bag.")
    }
    return FeatureBatch(dense=tensors["dense"], ids=ids, bags=bags, sequences={})


def _items_of(
    rows: ClickDataset, feature: str, numbers: NDArray[np.int64], held_out: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    columns, schema = rows.columns(numbers), rows.encoder.schema
    if feature in schema.categorical:
        keys, absent = columns.keys(schema.source_column(feature))
        return keys[~absent], numbers[~absent]
    lists = columns.lists(schema.source_column(feature))
    kept = np.repeat(lists.offsets[1:], lists.lengths) - np.arange(len(lists.values)) > held_out
    return lists.values[kept], np.repeat(numbers, lists.lengths)[kept]
