"""A recommender that only reads. Its rows stay in the files of the checkpoint, or in smaller ones made for serving.

What is made for serving lies in RUN/serving, in a folder named by the step and the checksum of what the step holds, so
that nothing is taken for what another training left there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitforge.core.checkpoint.load import Checkpoint, load_tensors, open_checkpoint
from kitforge.core.checkpoint.manifest import MANIFEST
from kitforge.core.checkpoint.table_reader import StoredTable
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.data.document_shard import fingerprint_of
from kitforge.embedding_cache.serving.quantize import quantize_tables
from kitforge.embedding_cache.serving.table import ServedTable, ServingDtype
from kitforge.foundation.errors import ConfigError, DependencyError, ModelError
from kitforge.foundation.files import atomic_file, file_lock
from kitforge.foundation.log import logger
from kitforge.kits.recommender.artifacts import find_features, find_item_catalog
from kitforge.kits.recommender.factory import open_run_checkpoint, recorded_options
from kitforge.kits.recommender.model import EmbeddingRequestPlan, ReadOnlyTables, Recommender, build_request_plan
from kitforge.models.catalog import recommender_of

_log = logger(__name__)


def open_served(folder: Path, device: torch.device, level: CompileLevel) -> Recommender:
    """The read-only model of a run or a step, with rows as trained."""
    checkpoint = open_run_checkpoint(folder)
    encoder = find_features(folder)
    config = recommender_of(recorded_options(checkpoint).model)
    tables = _served_tables(checkpoint, build_request_plan(config, encoder), {}, 0)
    model = Recommender(config, encoder, tables, level)
    load_tensors(dict(model.named_parameters()), checkpoint.model(), what="model")
    model.item_catalog = find_item_catalog(checkpoint)
    model.checkpoint_folder = checkpoint.folder
    return model.to(device)


def refreshed(model: Recommender, checkpoint: Checkpoint, num_newer: int, level: CompileLevel) -> Recommender:
    """The recommender of a newer checkpoint of the same run; `model` stays as it is. Of the checkpoint's links the
    first `num_newer` came after the step of `model`: where that is not all of them, only rows that changed are read.
    Raises CheckpointError or ModelError where it is another network's."""
    config = recommender_of(recorded_options(checkpoint).model)
    if config != model.config:
        raise ModelError("the newer checkpoint is of another network", got=config, expected=model.config)
    assert isinstance(model.tables, ReadOnlyTables)
    older = {name: table for name, table in model.tables.tables.items() if isinstance(table, ServedTable)}
    tables = _served_tables(checkpoint, model.requests, older, num_newer)
    newer = Recommender(config, model.encoder, tables, level)
    load_tensors(dict(newer.named_parameters()), checkpoint.model(), what="model")
    newer.item_catalog = find_item_catalog(checkpoint)
    return newer.to(next(model.parameters()).device)


def _served_tables(
    checkpoint: Checkpoint, plan: EmbeddingRequestPlan, older: Mapping[str, ServedTable], num_newer: int
) -> ReadOnlyTables:
    pooling = recorded_options(checkpoint).tables.pooling
    links = checkpoint.increments[:num_newer] or checkpoint.increments
    tables: dict[str, nn.Module] = {
        name: ServedTable(
            StoredTable(name, links), mode="sum" if table.kind == "wide" else pooling, older=older.get(name)
        )
        for name, table in plan.tables.items()
    }
    return ReadOnlyTables(tables, plan.features)


def serve_quantized(model: Recommender, dtype: ServingDtype) -> None:
    """Replace the rows of a read-only model by quantized ones, converted once into files. Raises ConfigError for a
    model in training."""
    if model.checkpoint_folder is None or not isinstance(model.tables, ReadOnlyTables):
        raise ConfigError(
            "the rows of a model that is trained are not made smaller",
            got=f"tables.serving_dtype={dtype} for a model in memory",
            expected="a run folder",
            fix="name the folder: model=RUN",
        )
    folder = serving_folder(model.checkpoint_folder) / dtype
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(folder, _log, f"making {dtype} tables"):
        if not (folder / "tables" / MANIFEST).exists():
            quantize_tables(open_checkpoint(model.checkpoint_folder), folder / "tables", dtype)
    smaller: Checkpoint = open_checkpoint(folder / "tables")
    for name, table in model.tables.tables.items():
        assert isinstance(table, ServedTable)
        model.tables.tables[name] = ServedTable(smaller.table(name), mode=table.options.mode)


def serving_folder(step: Path) -> Path:
    """The folder of serving files derived from a step."""
    mark = fingerprint_of("serving", (step / MANIFEST).read_bytes())[:12]
    return step.resolve().parent.parent / "serving" / f"{step.name}-{mark}"


def save_index(path: Path, index: Any) -> None:
    """Write a faiss index, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        file.write(faiss().serialize_index(index).tobytes())


def faiss() -> Any:
    """The module faiss. Raises DependencyError if it is not installed."""
    try:
        import faiss
    except ImportError:
        raise DependencyError("faiss-cpu", needed_for="finding items", extra="recommender") from None
    return faiss
