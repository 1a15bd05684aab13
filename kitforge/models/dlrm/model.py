"""DLRM: bottom MLP over numeric features, feature interaction, top MLP (Naumov et al., 2019); with `interaction: cross`
the DLRM-DCNv2 of MLPerf."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.cross_network import CrossNetwork, dot_interaction
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, RecommenderConfig, SampleShape, need, one_width
from kitforge.core.nn.mlp_tower import MLPTower, check_widths
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class DLRMConfig(RecommenderConfig):
    """Sizes and options of a DLRM."""

    family: ClassVar[str] = "dlrm"
    logit: ClassVar[str] = "top"
    dim: int = 16  # embedding dimension, and output width of the bottom MLP
    bottom: tuple[int, ...] = (64, 32)  # hidden widths of the bottom MLP, over numeric features
    top: tuple[int, ...] = (256, 128)  # hidden widths of the top MLP
    interaction: Literal["dot", "cross"] = "dot"
    num_cross_layers: int = 3  # cross
    rank: int | None = None  # cross: of the cross matrices; None: full
    dropout: float = 0.0  # after each hidden layer of the top MLP

    def __post_init__(self) -> None:
        for name in ("dim", "num_cross_layers"):
            check(getattr(self, name) > 0, f"model.{name}", getattr(self, name), "a positive whole number")
        check(self.rank is None or self.rank > 0, "model.rank", self.rank, "a positive whole number")
        check_widths("model.bottom", self.bottom)
        check_widths("model.top", self.top, self.dropout)

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """Embeddings of all categorical features and crosses, and the mean embedding of each sequence."""
        need("DLRM", shape, 1, "numeric")
        features = (*shape.categorical, *shape.crosses, *shape.sequences)
        one_width(shape, features, self.dim)
        return (EmbeddingLookup(name="deep", features=features, dim=self.dim),)


class DLRM(nn.Module):
    """Logits [B] of dense [B, d] and vectors {deep [B, F, dim]}."""

    def __init__(self, config: DLRMConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        (deep,) = config.lookups(shape)
        self.config = config
        num_vectors = len(deep.features) + 1
        dims = (len(shape.numeric), *config.bottom, config.dim)
        self.bottom = MLPTower("bottom", dims, kernels=kernels, ends_in_relu=True)
        wide = num_vectors * config.dim
        is_cross = config.interaction == "cross"
        self.cross = (
            CrossNetwork(wide, config.num_cross_layers, rank=config.rank, kernels=kernels) if is_cross else None
        )
        met = wide if is_cross else config.dim + num_vectors * (num_vectors - 1) // 2
        self.top = MLPTower("top", (met, *config.top, 1), kernels=kernels, dropout=config.dropout)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B]; see the class."""
        numbers = self.bottom(dense)
        deep = vectors["deep"]
        together = torch.cat([numbers.to(deep.dtype).unsqueeze(1), deep], dim=1)
        if self.cross is None:
            met = torch.cat([numbers, dot_interaction(together).to(numbers.dtype)], dim=1)
        else:
            met = self.cross(together.flatten(1))
        logits: Tensor = self.top(met, dropout_key).float().squeeze(1)
        return logits
