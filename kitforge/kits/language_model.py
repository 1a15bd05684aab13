"""What all kits of language models share: resolved options, and export as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from kitforge.core.checkpoint.all_or_none import collective_try
from kitforge.core.checkpoint.gather import GatheredParameters
from kitforge.core.parallel import collectives
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import ALONE
from kitforge.data.gguf_file import GGUF_SUFFIX
from kitforge.data.gguf_tokenizer import tokenizer_metadata
from kitforge.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerConfig
from kitforge.foundation.config import to_dict
from kitforge.foundation.dtype import ExportDtype, export_dtype
from kitforge.foundation.errors import KitforgeError
from kitforge.models import loading
from kitforge.models.catalog import config_of
from kitforge.models.loading import StoredModel
from kitforge.trainer.options import RunOptions


def resolved_options(
    options: RunOptions, checkpoint: str | None, model: Mapping[str, Any], tokenizer: TokenizerConfig
) -> dict[str, Any]:
    """All options, with the defaults of the model unless a checkpoint brings it."""
    values = to_dict(options)
    if checkpoint is not None:
        return values
    network = dict(model)
    if network.get("vocab_size") is None:
        # The size that the tokenizer will have; that of a folder is not read for this.
        network["vocab_size"] = ByteTokenizer.vocab_size if tokenizer.name == "byte" else tokenizer.vocab_size
    config = config_of(network)
    return values | {"model": {"family": config.family, **to_dict(config)}}


def save_language_model(
    model: nn.Module, folder: Path, tokenizer: Tokenizer | None, dtype: ExportDtype | None = None
) -> None:
    """Write a Hugging Face folder that `transformers` and Kitforge load, or a GGUF file where `folder` ends so. `dtype`
    of the weights: by default that of the published ones. For a sharded model all ranks call this, and rank 0 writes
    tensor by tensor."""
    config = loading.exportable_config(model)
    parallel = parallel_model_of(model, ALONE)
    names = loading.exported_names(config)
    weights = GatheredParameters(parallel, names, export_dtype(dtype or config.dtype))

    def write() -> None:
        try:
            if parallel.rank == 0:
                ids = _write_tokenizer(folder, tokenizer, config.decoder().vocab_size)
                loading.save(model, folder, extra=ids, weights=weights, dtype=dtype)
        finally:
            weights.finish()

    group = None if parallel.mesh is None else parallel.mesh.world
    collective_try(write, partial(collectives.all_gather_object, group=group), KitforgeError)


def export_language_model(
    stored: StoredModel, folder: Path, tokenizer: Tokenizer | None, dtype: ExportDtype | None = None
) -> None:
    """The same for a model on disk, with one tensor at a time in memory."""
    ids = _write_tokenizer(folder, tokenizer, stored.config.decoder().vocab_size)
    loading.export(stored, folder, extra=ids, dtype=dtype)


def _write_tokenizer(folder: Path, tokenizer: Tokenizer | None, vocab_size: int) -> dict[str, Any]:
    """What config.json says of its tokens, or the metadata of a GGUF file about them."""
    ids: dict[str, Any] = {}
    if folder.suffix == GGUF_SUFFIX:
        return {} if tokenizer is None else tokenizer_metadata(tokenizer, vocab_size)
    if tokenizer is not None:
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(folder)
        ends = list(tokenizer.eos_ids)
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}
        ids["pad_token_id"] = tokenizer.pad_id if tokenizer.pad_id < vocab_size else None
    return ids
