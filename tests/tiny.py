"""Small networks, which several rooms begin with."""

from pathlib import Path
from typing import Any

import torch
import transformers

from kitforge.models.catalog import config_of
from kitforge.models.loading import build

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


def built(sizes: dict[str, Any], vocab_size: int, **changes: Any) -> Any:
    """A network of ours with drawn weights, as one generates with it."""
    config = config_of({**sizes, "vocab_size": vocab_size, **changes})
    return build(config, device=torch.device("cpu"), seed=3).eval()


def published(folder: Path, name: str, *, moved: float = 0.1, sizes: dict[str, int] = SIZES, **options: Any) -> Any:
    """The network of `transformers` of that class and its folder; norms and biases are moved off their first values."""
    torch.manual_seed(0)
    config = getattr(transformers, name.partition("For")[0] + "Config")(**sizes | options)
    theirs = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * moved)
    theirs.save_pretrained(folder)
    return theirs
