"""DCN V2: a cross network, parallel to an MLP tower or stacked below it (Wang et al., 2021)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.cross_network import CrossNetwork
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, SampleShape, concat_features, deep_lookups, width
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.mlp_tower import MLPTower, TowerConfig
from kitforge.foundation.config import check_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class DCNV2Config(TowerConfig):
    """Sizes and options of a DCN V2."""

    family: ClassVar[str] = "dcn_v2"
    logit: ClassVar[str] = "head"
    num_cross_layers: int = 3
    rank: int | None = None  # of the cross matrices; None: full
    hidden: tuple[int, ...] = (256, 128)
    structure: Literal["parallel", "stacked"] = "parallel"  # stacked: the tower reads the cross output

    def __post_init__(self) -> None:
        TowerConfig.__post_init__(self)
        check_counts("model", {"num_cross_layers": self.num_cross_layers, "rank": self.rank})

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """Embeddings of all categorical features and crosses, and the mean embedding of each sequence."""
        return deep_lookups(shape, self.dim, (*shape.categorical, *shape.crosses, *shape.sequences))


class DCNV2(nn.Module):
    """Logits [B] of dense [B, d] and vectors {deep [B, F, dim], ...}."""

    def __init__(self, config: DCNV2Config, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        self.config = config
        self._deep = config.lookups(shape)
        dim = len(shape.numeric) + width(self._deep)
        dims = (dim, *config.hidden)
        self.cross = CrossNetwork(dim, config.num_cross_layers, rank=config.rank, kernels=kernels)
        self.tower = MLPTower("tower", dims, kernels=kernels, dropout=config.dropout, ends_in_relu=True)
        head_dim = dims[-1] if config.structure == "stacked" else dim + dims[-1]
        self.head = Linear(head_dim, 1, bias=True, kernels=kernels)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B]; see the class."""
        input = concat_features(dense, vectors, self._deep)
        crossed = self.cross(input)
        if self.config.structure == "stacked":
            features = self.tower(crossed, dropout_key)
        else:
            features = torch.cat([crossed, self.tower(input, dropout_key).to(crossed.dtype)], dim=1)
        logits: Tensor = self.head(features).float().squeeze(1)
        return logits
