"""The base that adapters are trained on in a smoke run, in place of the pretrained model."""

from pathlib import Path

import torch

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.models.catalog import config_of
from kitforge.models.loading import build, save


def write_small_model(folder: Path) -> Path:
    """A stored LLaMA of one layer over bytes; its folder."""
    shape = {"vocab_size": ByteTokenizer.vocab_size, "dim": 64, "num_layers": 1, "num_heads": 2, "mlp_dim": 64}
    config = config_of({"family": "llama", "max_length": 256, **shape})
    save(build(config, device=torch.device("cpu"), seed=0), folder / "model")
    ByteTokenizer().save(folder / "model")
    return folder / "model"
