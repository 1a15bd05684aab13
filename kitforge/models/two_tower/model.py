"""Two-tower retrieval: the score is the dot product of a user and an item vector (Yi et al., 2019)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, RecommenderConfig, SampleShape, one_width, sequence_lookup
from kitforge.core.nn.mlp_tower import MLPTower, check_widths
from kitforge.foundation.config import check

SIDES = ("user", "item")


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoTowerConfig(RecommenderConfig):
    """Sizes and options of a two-tower model."""

    family: ClassVar[str] = "two_tower"
    logit: ClassVar[None] = None
    objective: ClassVar[str] = "in_batch_softmax"
    user: tuple[str, ...] = ()  # user features: numeric, categorical, or sequences (mean-pooled)
    item: tuple[str, ...] = ()  # item features; the first is the item id
    dim: int = 32  # embedding dimension
    hidden: tuple[int, ...] = (128,)  # hidden widths of both towers
    output_dim: int = 32  # width of the user and item vectors
    temperature: float = 0.1  # divides the dot product
    dropout: float = 0.0  # after each hidden layer

    def __post_init__(self) -> None:
        for name in ("dim", "output_dim"):
            check(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a positive whole number")
        check(self.temperature > 0, "model.temperature", self.temperature, "a number above 0")
        check_widths("model.hidden", self.hidden, self.dropout)

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """Embeddings of the categorical features of each side, and of its sequences."""
        one_width(shape, (*shape.categorical, *shape.sequences), self.dim)
        known = (*shape.numeric, *shape.categorical, *shape.sequences)
        for side in SIDES:
            names = getattr(self, side)
            expected, fix = f"the features of the {side}, of {', '.join(known)}", f"model.{side}=[FEATURE,...]"
            check(len(names) > 0, f"model.{side}", list(names), expected, fix)
            for name in names:
                kinds = "features of the data other than crosses" if name in shape.crosses else "features of the data"
                check(name in known, f"model.{side}", name, f"{kinds}: {', '.join(known)}")
        check(self.item[0] in shape.categorical, "model.item", self.item[0], "first the categorical item id")
        lookups = []
        for side in SIDES:
            names = tuple(name for name in getattr(self, side) if name in shape.categorical)
            lookups += [EmbeddingLookup(name=side, features=names, dim=self.dim)] if names else []
        sequences = (name for name in (*self.user, *self.item) if name in shape.sequences)
        return (*lookups, *(sequence_lookup(name, self.dim, SIDES, shape) for name in sequences))

    def items(self, shape: SampleShape) -> str:
        """The categorical item id. Raises ConfigError for features that the data do not have."""
        self.lookups(shape)
        return self.item[0]

    def is_of(self, part: str, lookup: EmbeddingLookup) -> bool:
        return lookup.name == part if lookup.pooling != "sequence" else lookup.features[0] in getattr(self, part)

    def dense_features(self, shape: SampleShape) -> tuple[str, ...]:
        """The numeric features of both sides."""
        return tuple(name for name in shape.numeric if name in (*self.user, *self.item))


class TowerSide(nn.Module):
    """One tower over the features of its side: unit vectors [B, output_dim]."""

    def __init__(self, config: TwoTowerConfig, side: str, shape: SampleShape, kernels: Kernels) -> None:
        super().__init__()
        names = getattr(config, side)
        self._side = side
        self._numeric = [shape.numeric.index(name) for name in names if name in shape.numeric]
        self._sequences = [sequence_lookup(name, 0, SIDES, shape).name for name in names if name in shape.sequences]
        self._num_categorical = sum(name in shape.categorical for name in names)
        num_vectors = self._num_categorical + len(self._sequences)
        dims = (len(self._numeric) + num_vectors * config.dim, *config.hidden, config.output_dim)
        self.tower = MLPTower(side, dims, kernels=kernels, dropout=config.dropout)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Unit vectors [B, output_dim]."""
        parts = [dense[:, self._numeric]]
        if self._num_categorical:
            parts.append(vectors[self._side].flatten(1))
        for name in self._sequences:
            # The mean of the vectors [B, L, dim] that are not padding; zero for an empty sequence.
            sequence, lengths = vectors[name], vectors[f"{name}.lengths"].unsqueeze(1)
            padding = torch.arange(sequence.shape[1], device=sequence.device) >= lengths
            parts.append(sequence.masked_fill(padding.unsqueeze(2), 0.0).sum(1) / lengths.clamp(min=1))
        output: Tensor = self.tower(torch.cat(parts, dim=1), dropout_key)
        return functional.normalize(output.float(), dim=1)


class TwoTower(nn.Module):
    """Logits [B] of each user with its own item; `user` and `item` are the two towers."""

    def __init__(self, config: TwoTowerConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        config.lookups(shape)
        self.config = config
        self.user = TowerSide(config, "user", shape, kernels)
        self.item = TowerSide(config, "item", shape, kernels)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B]; see the class."""
        users: Tensor = self.user(dense, vectors, dropout_key)
        items: Tensor = self.item(dense, vectors, dropout_key)
        return (users * items).sum(1) / self.config.temperature

    def scores(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits [B, K] of user vectors [B, output_dim] with item vectors [K, output_dim]."""
        return users @ items.t() / self.config.temperature
