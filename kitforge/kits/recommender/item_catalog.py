"""The items that can be found: their keys, the ids that the model knows them by, and how often they were taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.data.tables.id_names import TextArray
from kitforge.foundation.config import check
from kitforge.foundation.errors import ModelError
from kitforge.kits.recommender.batch import FeatureBatch, IdBag
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.features import UNKNOWN
from kitforge.kits.recommender.schema import Encoding

_CHUNK_ROWS = 65_536


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCatalog:
    """Every item of the training rows once, by rising id."""

    ids: NDArray[np.int64]  # [I]
    keys: NDArray[np.int64]  # [I] what the data call it: a whole number itself, or the hash of a text
    counts: NDArray[np.int64]  # [I] how often it was taken
    names: TextArray | None = None  # [I] the texts, where keys are hashes
    samples: FeatureBatch | None = None  # [I] the features of a row with the item, where a network asks for them

    def __len__(self) -> int:
        return len(self.ids)

    def item(self, index: int) -> int | str:
        """What the data call the item at a place."""
        return int(self.keys[index]) if self.names is None else self.names[index]

    def indices_of(self, ids: torch.Tensor) -> NDArray[np.int64]:
        """Where in the catalogue ids [n] are; -1 for one that is not there."""
        wanted = ids.cpu().numpy()
        nearest = np.minimum(np.searchsorted(self.ids, wanted), max(len(self.ids) - 1, 0))
        return np.where(self.ids[nearest] == wanted, nearest, -1) if len(self.ids) else np.full(len(wanted), -1)

    def history_indices(self, batch: FeatureBatch, features: Sequence[str], held_out: int = 0) -> NDArray[np.int64]:
        """The places [B, L] of the items of sequences but the last `held_out` of each; -1 where there is none."""
        columns = []
        for name in features:
            sequence = batch.sequences[name]
            is_there = torch.arange(sequence.ids.shape[1]) < (sequence.lengths - held_out).unsqueeze(1)
            indices = self.indices_of(sequence.ids.reshape(-1)).reshape(tuple(sequence.ids.shape))
            columns.append(np.where(is_there.numpy(), indices, -1))
        return np.concatenate(columns, axis=1)

    def popularity_ranks(self) -> NDArray[np.int64]:
        """The rank [I] of each item by how often it was taken, 0 for the most popular one."""
        ranks = np.empty(len(self), np.int64)
        ranks[np.argsort(-self.counts, kind="stable")] = np.arange(len(self))
        return ranks

    def log_frequencies(self, ids: torch.Tensor) -> torch.Tensor:
        """The logarithm of each item's share of all that was taken [n]; one that was never taken counts as once."""
        indices = self.indices_of(ids)
        counts = np.where(indices < 0, 1, self.counts[indices])
        return torch.from_numpy(np.log(counts / self.counts.sum()))


def build_item_catalog(rows: ClickDataset, feature: str, held_out: int = 0) -> ItemCatalog:
    """The items that a categorical feature or a sequence of these rows names; of a sequence without its last
    `held_out` items. Those of a categorical feature come with the features of the first row that has them."""
    is_sequence = feature in rows.encoder.schema.sequences
    read = _of_lists if is_sequence else _of_column
    chunks = []
    for start in range(0, rows.num_rows, _CHUNK_ROWS):
        numbers = np.arange(start, min(start + _CHUNK_ROWS, rows.num_rows))
        keys, owners = read(rows, feature, numbers, held_out)
        keys, firsts, counts = np.unique(keys, return_index=True, return_counts=True)
        chunks.append((keys, owners[firsts], counts))
    keys, owners, counts = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    keys, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    totals = np.bincount(inverse, weights=counts, minlength=len(keys)).astype(np.int64)
    ids = rows.encoder.ids_of(feature, keys)
    if _encoding(rows, feature) == "vocabulary":
        # What is left out of a vocabulary cannot be told apart, and so not be found.
        known = ids != UNKNOWN
        keys, ids, firsts, totals = keys[known], ids[known], firsts[known], totals[known]
    order = np.argsort(ids)
    ids = ids[order]
    samples = None if is_sequence else rows.batch(owners[firsts][order])
    return ItemCatalog(ids=ids, keys=keys[order], counts=totals[order], samples=samples)


def _encoding(rows: ClickDataset, feature: str) -> Encoding:
    """How the items become ids; raises ConfigError where several might become one."""
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
    """Write it to one file, whole or not at all."""
    tensors = {name: torch.from_numpy(getattr(catalogue, name)) for name in ("ids", "keys", "counts")}
    if catalogue.names is not None:
        # A view of what lies mapped on the disk cannot be written to, which torch dislikes.
        tensors["names"] = torch.from_numpy(np.array(catalogue.names.data))
        tensors["name_offsets"] = torch.from_numpy(np.array(catalogue.names.offsets))
    if (samples := catalogue.samples) is not None:
        tensors["dense"] = samples.dense
        tensors |= {f"ids.{name}": ids for name, ids in samples.ids.items()}
        for name, bag in samples.bags.items():
            tensors |= {f"bag.{name}": bag.ids, f"offsets.{name}": bag.offsets}
    write(path, list(tensors.items()))


def load_item_catalog(path: Path) -> ItemCatalog:
    """What `save_catalogue` wrote."""
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


def _of_column(
    rows: ClickDataset, feature: str, numbers: NDArray[np.int64], _held_out: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    column = rows.encoder.schema.categorical[feature].column or feature
    keys, absent = rows.columns(numbers).keys(column)
    return keys[~absent], numbers[~absent]


def _of_lists(
    rows: ClickDataset, feature: str, numbers: NDArray[np.int64], held_out: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    lists = rows.columns(numbers).lists(rows.encoder.schema.sequences[feature].column or feature)
    kept = np.repeat(lists.offsets[1:], lists.lengths) - np.arange(len(lists.values)) > held_out
    return lists.values[kept], np.repeat(numbers, lists.lengths)[kept]
