"""Quantizes the tables of a checkpoint for serving: sorted ids, and embeddings without optimizer state.

The output is a checkpoint folder without model and optimizer, so it is verified and opened like one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitforge.core.checkpoint.load import Checkpoint
from kitforge.core.checkpoint.manifest import FORMAT_VERSION, Manifest, write_manifest
from kitforge.core.checkpoint.shard_writer import package_version, write_state
from kitforge.core.checkpoint.table_writer import TableWriter
from kitforge.core.optim.table_protocols import ROWS, Chunk, RowShard
from kitforge.embedding_cache.serving.table import SCALES, SERVED, ServedTable, ServingDtype
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import atomic_folder, check_own, mark_own

# Rows quantized at a time.
CHUNK_ROWS = 2**15
MAX_INT8 = 127
MAX_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationResult:
    """The size and the error of a quantized table."""

    num_rows: int
    num_bytes: int  # of its files
    largest_error: float  # of any number of any row, measured


def quantize_tables(
    checkpoint: Checkpoint, folder: Path, dtype: ServingDtype = "int8", *, overwrite: bool = False
) -> dict[str, QuantizationResult]:
    """Write all tables of a checkpoint to `folder`, atomically; the results by table.

    fp16 rounds to nearest: an error of at most 2^-11 of the number, or 2^-25. int8 stores a scale for each
    row, its largest absolute number over 127, and integer multiples of it: an error of at most half the scale. Raises
    DataError for a row that is not finite or out of range, ConfigError where `folder` is the checkpoint itself
    or, without `overwrite`, holds what was not quantized here.
    """
    if folder.resolve() == checkpoint.folder.resolve():
        raise ConfigError("a checkpoint cannot be quantized in place", got=folder, expected="another folder")
    check_own(folder, "quantize_tables", overwrite=overwrite)
    made: dict[str, QuantizationResult] = {}
    with atomic_folder(folder) as draft:
        state = write_state(draft, b"{}")
        files = TableWriter(draft, checkpoint.step)
        for name in checkpoint.tables:
            num_before = len(files.files)
            source = _QuantizedRows(checkpoint, name, dtype)
            files.write({name: source})
            num_bytes = sum(file.bytes for file in files.files[num_before:])
            made[name] = QuantizationResult(
                num_rows=source.num_rows, num_bytes=num_bytes, largest_error=source.largest_error
            )
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            package_version=package_version(),
            kind="serving",
            step=checkpoint.step,
            model=(),
            optimizer=(),
            files=(state, *files.files),
            tables=tuple(files.tables),
        )
        write_manifest(draft, manifest)
        mark_own(draft, "quantize_tables")
    return made


class _QuantizedRows:
    """A `RowSource` of quantized rows in the order of their ids."""

    def __init__(self, checkpoint: Checkpoint, name: str, dtype: ServingDtype) -> None:
        stored = checkpoint.table(name)
        self._table = ServedTable(stored, mode=None)
        self._dtype = dtype
        self._plain = stored.schema
        self._ids = self._table.ids()
        self._scales: list[Tensor] = []
        self.version = stored.version
        self.since: int | None = None
        self.shard: RowShard = (0, 1)
        self.state: Mapping[str, Tensor] = {}
        self.largest_error = 0.0
        self.num_rows = len(self._ids)
        self.parts = (ROWS, SCALES) if dtype == "int8" else (ROWS,)

    @property
    def schema(self) -> dict[str, Any]:
        """See `RowSource`; with the measured error, once all rows were read."""
        return {**self._plain, SERVED: {"dtype": self._dtype, "largest_error": self.largest_error}}

    def chunks(self, part: str = ROWS) -> Iterator[Chunk]:
        """See `RowSource`. The scales are known when the rows were read."""
        portions = torch.split(self._ids, CHUNK_ROWS) if len(self._ids) else ()
        if part == SCALES:
            yield from zip(portions, self._scales, strict=True)
            return
        for ids in portions:
            rows = self._table.vectors(ids)
            largest, is_half = rows.abs().amax(1, keepdim=True), self._dtype == "fp16"
            # NaN compares as too large.
            fits = largest[:, 0] <= (MAX_FP16 if is_half else torch.finfo(torch.float32).max)
            if not bool(fits.all()):
                row = int((~fits).nonzero()[0])
                raise DataError(
                    f"a row of table {self._plain['name']!r} cannot be served as {self._dtype}",
                    got=f"id {int(ids[row])} with {float(largest[row])}",
                    expected=f"finite numbers of at most {MAX_FP16:g}" if is_half else "finite numbers",
                )
            if self._dtype == "int8":
                self._scales.append(largest / MAX_INT8)
                # Rows so small that their scale is zero become zero.
                multiples = (rows / self._scales[-1]).nan_to_num_(0.0).round_().clamp_(-MAX_INT8, MAX_INT8)
                stored = multiples.to(torch.int8)
                decoded = stored.float() * self._scales[-1]
            else:
                stored = rows.half() if is_half else rows
                decoded = stored.float()
            self.largest_error = max(self.largest_error, float((decoded - rows).abs().max()))
            yield ids, stored

    def removed(self) -> Iterator[Tensor]:
        """See `RowSource`."""
        return iter(())

    def close(self) -> None:
        """See `RowSource`."""
