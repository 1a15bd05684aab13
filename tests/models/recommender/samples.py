"""Samples of every shape for the recommender's networks."""

from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import REFERENCE
from kitforge.core.nn.embedding_spec import SampleShape
from kitforge.models.catalog import build_recommender, recommender_of

SHAPE = SampleShape(
    numeric=("age", "price"),
    categorical=("user", "item", "place", "device"),
    crosses=("item_x_place",),
    sequences=("history",),
    tables={"history": "items", "item": "items"},
)
# What each family needs besides its name.
FAMILIES: dict[str, dict[str, Any]] = {
    "wide_deep": {"hidden": [12, 6]},
    "deepfm": {"hidden": [12, 6]},
    "dcn_v2": {"hidden": [12, 6], "num_cross_layers": 2},
    "dlrm": {"bottom": [6], "top": [12]},
    "din": {"attention": [6], "hidden": [12]},
    "two_tower": {"user": ["user", "history", "age"], "item": ["item", "place"], "hidden": [12], "output_dim": 6},
}


def config_of(family: str, **options: Any) -> Any:
    return recommender_of({"family": family, "dim": 4, **FAMILIES.get(family, {}), **options})


def network_of(config: Any, shape: SampleShape = SHAPE, seed: int = 0) -> nn.Module:
    """In float64, with weights large enough that nothing is hidden by rounding."""
    network: nn.Module = build_recommender(config, shape, REFERENCE).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return network


def inputs_of(
    config: Any, num_samples: int = 5, shape: SampleShape = SHAPE, length: int = 3, seed: int = 1
) -> tuple[Tensor, dict[str, Tensor]]:
    """Numbers and vectors as a network wants them, in float64; histories are of lengths 0, 1, 2, ..."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64, requires_grad=True)

    vectors = {}
    for lookup in config.lookups(shape):
        if lookup.pooling == "each":
            vectors[lookup.name] = draw(num_samples, len(lookup.features), lookup.dim)
        elif lookup.pooling == "sum":
            vectors[lookup.name] = draw(num_samples, lookup.dim)
        else:
            vectors[lookup.name] = draw(num_samples, length, lookup.dim)
            vectors[f"{lookup.name}.lengths"] = torch.arange(num_samples) % (length + 1)
    return draw(num_samples, len(shape.numeric)), vectors
