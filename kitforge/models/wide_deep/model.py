"""Wide & Deep: a linear model over sparse features plus an MLP over their embeddings (Cheng et al., 2016)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, SampleShape, concat_features, deep_lookups, width
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.mlp_tower import MLPTower, TowerConfig
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class WideDeepConfig(TowerConfig):
    """Sizes and options of a Wide & Deep."""

    family: ClassVar[str] = "wide_deep"
    wide: tuple[str, ...] | None = None  # features of the wide part; None: all categorical ones and the crosses
    # dense: numeric features are inputs of the tower. rows: each scales an embedding of its own.
    numeric: Literal["dense", "rows"] = "dense"

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """The sum of the wide weights, then the embeddings of the deep part; a sequence is its mean."""
        known = (*shape.categorical, *shape.crosses)
        chosen = known if self.wide is None else self.wide
        for name in chosen:
            check(name in known, "model.wide", name, f"categorical features or crosses: {', '.join(known)}")
        wide = EmbeddingLookup(name="wide", features=chosen, dim=1, pooling="sum", kind="wide")
        return (*([wide] if chosen else []), *deep_lookups(shape, self.dim, (*shape.categorical, *shape.sequences)))


class WideDeep(nn.Module):
    """`wide weights + linear(dense) + tower(dense and vectors)`: logits [B] of dense [B, d] and
    vectors {wide [B, 1], deep [B, F, dim], ...}."""

    def __init__(self, config: WideDeepConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        lookups = config.lookups(shape)
        self.config = config
        self._has_wide = any(lookup.kind == "wide" for lookup in lookups)
        self._deep = [lookup for lookup in lookups if lookup.kind == "deep"]
        num_numeric = len(shape.numeric)
        as_rows = config.numeric == "rows"
        self.rows = nn.Parameter(torch.empty(num_numeric, config.dim)) if as_rows else None
        self.linear = Linear(num_numeric, 1, bias=False, kernels=kernels) if num_numeric else None
        dims = (num_numeric * (config.dim if as_rows else 1) + width(self._deep), *config.hidden, 1)
        self.tower = MLPTower("tower", dims, kernels=kernels, dropout=config.dropout)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B]; see the class."""
        numbers = dense if self.rows is None else (dense.unsqueeze(2) * self.rows).flatten(1)
        logits: Tensor = self.tower(concat_features(numbers, vectors, self._deep), dropout_key).float()
        if self.linear is not None:
            logits = logits + self.linear(dense).float()
        if self._has_wide:
            logits = logits + vectors["wide"]
        return logits.squeeze(1)
