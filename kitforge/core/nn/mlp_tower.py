"""A multilayer perceptron of linear layers with ReLU and dropout, and the options of networks that end in one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.dropout import SampleDropout, sample_dropout
from kitforge.core.nn.embedding_spec import RecommenderConfig
from kitforge.core.nn.linear import Linear
from kitforge.foundation.config import check


class MLPTower(nn.Module):
    """`input [B, dims[0]] -> [B, dims[-1]]`. Every layer but the last, or every one with `ends_in_relu`, is
    followed by ReLU and dropout. With a single width it is the identity."""

    def __init__(
        self, name: str, dims: Sequence[int], *, kernels: Kernels, dropout: float = 0.0, ends_in_relu: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Linear(narrow, wide, bias=True, kernels=kernels) for narrow, wide in zip(dims[:-1], dims[1:], strict=True)
        )
        self._names = [f"{name}.{layer}" for layer in range(len(self.layers))]
        self._dropout = dropout
        self._num_activated = len(self.layers) if ends_in_relu else len(self.layers) - 1

    def forward(self, input: Tensor, dropout_key: SampleDropout | None = None) -> Tensor:
        """See the class."""
        for number, layer in enumerate(self.layers):
            input = layer(input)
            if number < self._num_activated:
                # In place: a linear layer saves its input for the backward pass, not its output.
                input = sample_dropout(input.relu_(), self._dropout, self._names[number], dropout_key)
        return input


def check_widths(path: str, widths: Sequence[int], dropout: float = 0.0) -> None:
    """Raise ConfigError for invalid widths or dropout of hidden layers."""
    check(all(width > 0 for width in widths), path, list(widths), "positive whole numbers")
    check(0 <= dropout < 1, "model.dropout", dropout, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig(RecommenderConfig):
    """Options of a recommender that ends in a tower over embeddings of one dimension."""

    logit: ClassVar[str] = "tower"
    dim: int = 16  # embedding dimension, unless the schema gives a feature its own
    hidden: tuple[int, ...] = (256, 128, 64)
    dropout: float = 0.0  # after each hidden layer

    def __post_init__(self) -> None:
        check(self.dim > 0, "model.dim", self.dim, "a positive whole number")
        check_widths("model.hidden", self.hidden, self.dropout)
