"""The features of a sample and the embedding lookups that a recommender's network needs. It holds no table.

B samples, F features of a lookup, L positions of a sequence.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError

# each: [B, F, dim], the sum or mean of a bag, the mean of a sequence. sum: [B, dim] over all features.
# sequence: [B, L, dim] of one feature, in order, padded at the end.
Pooling = Literal["each", "sum", "sequence"]
# wide: rows start at zero and use the wide optimizer. deep: rows start at random and use the deep one.
TableKind = Literal["wide", "deep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShape:
    """The features of a sample by name."""

    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()  # one id or a bag of them
    crosses: tuple[str, ...] = ()  # products of categorical features; for wide parts, or as one more vector
    sequences: tuple[str, ...] = ()
    # The tables of features that share one, such as an item and the history of items.
    tables: Mapping[str, str] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)  # features with an embedding dim of their own

    def table_of(self, feature: str) -> str:
        """The table of the feature; by default one of its own name."""
        return self.tables.get(feature, feature)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingLookup:
    """Rows that a network looks up for each sample; it gets the vectors under `name`."""

    name: str
    features: tuple[str, ...]
    dim: int
    pooling: Pooling = "each"
    kind: TableKind = "deep"


def sequence_lookup(feature: str, dim: int, others: Collection[str], shape: SampleShape) -> EmbeddingLookup:
    """Every vector of a sequence, under the name of its feature unless one of the `others` has that name."""
    name, lengths = feature, {f"{each}.lengths" for each in shape.sequences}
    while name in others or name in lengths or (name != feature and name in shape.sequences):
        name += "'"
    return EmbeddingLookup(name=name, features=(feature,), dim=dim, pooling="sequence")


class RecommenderConfig(Protocol):
    """A family's own dataclass of options."""

    @property
    def family(self) -> str:
        """The family's name in the catalog."""

    @property
    def logit(self) -> str | None:
        """The module whose last bias is that of the logit; None: the family retrieves items."""

    @property
    def objective(self) -> str:
        """The training objective, by its name in the recommender kit."""
        return "pointwise"

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """The lookups for samples of that shape. Raises ConfigError for a missing feature."""

    def is_of(self, part: str, lookup: EmbeddingLookup) -> bool:
        """Whether a part of the network reads a lookup."""
        return True

    def items(self, shape: SampleShape) -> str | None:
        """The feature whose values are the items that are found; None: the network scores rows."""
        return None

    def dense_features(self, shape: SampleShape) -> tuple[str, ...]:
        """The numeric features that the network reads; by default all."""
        return shape.numeric


def used_features(config: RecommenderConfig, shape: SampleShape) -> str:
    """One sentence for log and report: the features that a network uses, how it uses sequences, and the unused ones."""
    lookups = config.lookups(shape)
    looked_up = {name for lookup in lookups for name in lookup.features}
    as_mean = {name for lookup in lookups if lookup.pooling != "sequence" for name in lookup.features}
    kinds = {
        "numeric": (shape.numeric, set(config.dense_features(shape))),
        "categorical": (shape.categorical, looked_up),
        "crosses": (shape.crosses, looked_up),
        "sequences": (shape.sequences, looked_up),
    }
    parts = []
    for kind, (names, used) in kinds.items():
        found = [
            f"{name} (mean of its vectors)" if name in shape.sequences and name in as_mean else name
            for name in names
            if name in used
        ]
        parts += [f"{kind} {', '.join(found)}"] if found else []
    unused = [name for names, used in kinds.values() for name in names if name not in used]
    end = f"; not used: {', '.join(unused)}" if unused else ""
    return f"{config.family} uses {'; '.join(parts)}{end}"


def deep_lookups(shape: SampleShape, dim: int, features: Sequence[str]) -> tuple[EmbeddingLookup, ...]:
    """Lookups of these features, one for each embedding dim; `dim` unless the shape has another."""
    widths: dict[int, list[str]] = {dim: []}
    for name in features:
        widths.setdefault(shape.dims.get(name, dim), []).append(name)
    return tuple(
        EmbeddingLookup(name="deep" if width == dim else f"deep_{width}", features=tuple(names), dim=width)
        for width, names in widths.items()
        if names
    )


def need(network: str, shape: SampleShape, least: int, *kinds: str) -> None:
    """Raise ConfigError for data with too few features of these kinds, which are sections of data.schema."""
    if sum(len(getattr(shape, kind)) for kind in kinds) < least:
        known = {kind: ", ".join(getattr(shape, kind)) for kind in ("numeric", "categorical", "crosses", "sequences")}
        got = "; ".join(f"{kind}: {names}" for kind, names in known.items() if names) or "no feature"
        fix = "name it there (kitforge inspect FILE output=schema.yaml writes what to begin with)"
        if kinds == ("sequences",):
            fix += "; rows of events become sequences by `events: {user: COLUMN, item: COLUMN, time: COLUMN}`"
        what = f"{least} or more features under {' or '.join(kinds)}"
        raise ConfigError(f"{network} needs {what}", got=got, expected=f"{what} of data.schema", fix=fix)


def one_width(shape: SampleShape, features: Sequence[str], dim: int) -> None:
    """Raise ConfigError unless the vectors of these features have one dim, which this family needs."""
    for name in features:
        found = shape.dims.get(name, dim)
        check(found == dim, f"data.schema {name}.dim", found, f"model.dim={dim}, as their vectors meet in products")


def concat_features(dense: Tensor, vectors: Mapping[str, Tensor], lookups: Sequence[EmbeddingLookup]) -> Tensor:
    """dense [B, d] and the vectors of the lookups, concatenated: [B, d + sum of F * dim]."""
    return torch.cat([dense, *(vectors[lookup.name].flatten(1) for lookup in lookups)], dim=1)


def width(lookups: Sequence[EmbeddingLookup]) -> int:
    """The total size of the vectors of these lookups for one sample."""
    return sum(len(lookup.features) * lookup.dim for lookup in lookups)
