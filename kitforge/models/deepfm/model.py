"""DeepFM: a factorisation machine and an MLP tower over the same embeddings (Guo et al., 2017)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.dropout import SampleDropout
from kitforge.core.nn.embedding_spec import EmbeddingLookup, SampleShape, concat_features, need, one_width, width
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.mlp_tower import MLPTower, TowerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepFMConfig(TowerConfig):
    """Sizes and options of a DeepFM."""

    family: ClassVar[str] = "deepfm"

    def lookups(self, shape: SampleShape) -> tuple[EmbeddingLookup, ...]:
        """The sum of the first-order weights, and the embeddings that both parts share; a sequence is its mean."""
        second = (*shape.categorical, *shape.sequences)
        need("DeepFM", shape, 2, "categorical", "sequences")
        one_width(shape, second, self.dim)
        first = (*shape.categorical, *shape.crosses, *shape.sequences)
        return (
            EmbeddingLookup(name="wide", features=first, dim=1, pooling="sum", kind="wide"),
            EmbeddingLookup(name="deep", features=second, dim=self.dim),
        )


class DeepFM(nn.Module):
    """`first order + second order + tower`: logits [B] of dense [B, d] and vectors {wide [B, 1], deep [B, F, dim]}."""

    def __init__(self, config: DeepFMConfig, shape: SampleShape, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        _, deep = config.lookups(shape)
        self.config = config
        self._deep = deep
        self.linear = Linear(len(shape.numeric), 1, bias=False, kernels=kernels) if shape.numeric else None
        dims = (len(shape.numeric) + width([deep]), *config.hidden, 1)
        self.tower = MLPTower("tower", dims, kernels=kernels, dropout=config.dropout)

    def forward(self, dense: Tensor, vectors: Mapping[str, Tensor], dropout_key: SampleDropout | None = None) -> Tensor:
        """Logits [B]; see the class."""
        logits = self.tower(concat_features(dense, vectors, [self._deep]), dropout_key).float() + vectors["wide"]
        if self.linear is not None:
            logits = logits + self.linear(dense).float()
        first: Tensor = logits.squeeze(1)
        return first + pairwise(vectors["deep"])


def pairwise(vectors: Tensor) -> Tensor:
    """The sum over all pairs of features of the product of their vectors, [B, F, dim] -> [B], in linear time:
    ((sum v)^2 - sum v^2) / 2 (Rendle, 2010)."""
    total = vectors.sum(1).square() - vectors.square().sum(1)
    pairs: Tensor = total.sum(1) * 0.5
    return pairs
