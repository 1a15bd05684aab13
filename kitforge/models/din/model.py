"""Deep Interest Network: attention of the target item over the history (Zhou et al., 2018)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import (
    EmbeddingLookup,
    SampleShape,
    concat_features,
    need,
    one_width,
    sequence_lookup,
    width,
)
from kitforge.core.nn.mlp_tower import MLPTower, TowerConfig, check_widths
from kitforge.core.nn.named_modules import NamedModules
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class DINConfig(TowerConfig):
    """Sizes and options of a DIN."""

    family: ClassVar[str] = "din"
    attention: tuple[int, ...] = (36,)  # hidden widths of the attention MLP
    hidden: tuple[int, ...] = (200, 80)
    softmax: bool = False  # normalize the weights; the paper does not, which keeps the intensity of interests
    targets: dict[str, str] = field(default_factory=dict)  # target of each sequence; {}: what shares its table

    def __post_init__(self) -> None:
        TowerConfig.__post_init__(self)
        check_widths("model.attention", self.attention)

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """Embeddings of all categorical features and crosses, and of every item of each sequence."""
        need("DIN", shape, 1, "sequences")
        for name, target in self.pairs(shape).items():
            fix = (
                f"name it: model.targets={{{name}: FEATURE}}, or give the two features one table: `table: items` in "
                f"data.schema, under {name} and under the feature of the item"
            )
            expected = f"the categorical feature that {name} is a history of: {', '.join(shape.categorical)}"
            check(target in shape.categorical, f"model.targets.{name}", target, expected, fix)
        one_width(shape, (*shape.categorical, *shape.crosses, *shape.sequences), self.dim)
        sequences = (sequence_lookup(name, self.dim, ("deep",), shape) for name in shape.sequences)
        return (EmbeddingLookup(name="deep", features=(*shape.categorical, *shape.crosses), dim=self.dim), *sequences)

    def pairs(self, shape: SampleShape) -> dict[str, str]:
        """The target feature of each sequence."""

        def partner(sequence: str) -> str:
            table = shape.table_of(sequence)
            return next((name for name in shape.categorical if shape.table_of(name) == table), "none")

        return {name: self.targets.get(name) or partner(name) for name in shape.sequences}


class InterestAttention(nn.Module):
    """`sum over the history of weight(target, item) * item`, with weights from an MLP."""

    def __init__(self, config: DINConfig, name: str, kernels: Kernels) -> None:
        super().__init__()
        self.tower = MLPTower(name, (4 * config.dim, *config.attention, 1), kernels=kernels)
        self._softmax = config.softmax

    def forward(self, target: Tensor, history: Tensor, lengths: Tensor) -> Tensor:
        """target [B, dim], history [B, L, dim], lengths [B] -> [B, dim]; positions beyond a length are masked."""
        padding = torch.arange(history.shape[1], device=history.device) >= lengths.unsqueeze(1)
        history = history.masked_fill(padding.unsqueeze(2), 0.0)
        query = target.unsqueeze(1).expand_as(history)
        pairs = torch.cat([query, history, query - history, query * history], dim=2)
        # Two dims: of more, a sharded layer returns a view, which may not be changed in place.
        scores = self.tower(pairs.flatten(0, 1)).float().view(padding.shape)
        if self._softmax:
            # The most negative finite number instead of -inf keeps the softmax of an empty history finite.
            scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min).softmax(1)
        weights = scores.masked_fill(padding, 0.0)
        return torch.einsum("bl,bld->bd", weights.to(history.dtype), history)


class DIN(nn.Module):
    """Logits [B] of dense [B, d] and vectors {deep [B, F, dim], <sequence> [B, L, dim], <sequence>.lengths [B]}."""

    def __init__(self, config: DINConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        deep, *sequences = config.lookups(shape)
        self.config = config
        self._deep = deep
        self._keys = [each.name for each in sequences]
        self._targets = {name: deep.features.index(target) for name, target in config.pairs(shape).items()}
        names = [each.features[0] for each in sequences]
        self.interests = NamedModules({name: InterestAttention(config, name, kernels) for name in names})
        dims = (len(shape.numeric) + width([deep, *sequences]), *config.hidden, 1)
        self.tower = MLPTower("tower", dims, kernels=kernels, dropout=config.dropout)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B]; see the class."""
        interests = [
            self.interests[name](vectors["deep"][:, index], vectors[key], vectors[f"{key}.lengths"])
            for (name, index), key in zip(self._targets.items(), self._keys, strict=True)
        ]
        input = torch.cat([concat_features(dense, vectors, [self._deep]), *interests], dim=1)
        logits: Tensor = self.tower(input, dropout_key).float().squeeze(1)
        return logits
