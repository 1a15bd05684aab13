"""Writing of a snapshot to files, and the manifest of all ranks."""

import hashlib
import importlib.metadata
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.manifest import (
    FORMAT_VERSION,
    PARTS,
    STATE,
    STATE_TENSORS,
    FileEntry,
    Manifest,
    ParentStep,
    Slice,
    TableEntry,
    TensorEntry,
    write_manifest,
)
from kitforge.core.checkpoint.regions import by_name, entry_of
from kitforge.core.checkpoint.snapshot import Snapshot
from kitforge.core.checkpoint.table_writer import merge_entries
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.files import atomic_file

MAX_CONCURRENT_WRITES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files that one rank has written and the slices in them, without aliases."""

    files: tuple[FileEntry, ...]
    slices: tuple[Slice, ...]
    signature: str  # of the values that must be equal on all ranks; empty for one rank
    tables: tuple[TableEntry, ...] = ()


def write_files(draft: Path, snapshot: Snapshot, shard_bytes: int, rank: int | None) -> Written:
    """Write a snapshot's tensors, and its state where it has one. `rank` is None for a process that saves alone."""
    state = [write_state(draft, snapshot.state)] if snapshot.state else []
    if snapshot.state_tensors:
        state.append(safetensors_file.write(draft / STATE_TENSORS, list(snapshot.state_tensors.items())))
    shards: list[tuple[Path, list[tuple[str, Tensor]]]] = []
    for part in PARTS:
        stored = [(name, snapshot.buffers[name]) for name in snapshot.names[part] if name in snapshot.buffers]
        divided = list(safetensors_file.split(stored, shard_bytes))
        for number, shard in enumerate(divided, start=1):
            alone = f"{part}-{number:05}-of-{len(divided):05}.safetensors"
            shards.append((draft / (alone if rank is None else f"{part}-r{rank:05}-{number:05}.safetensors"), shard))
    slices = [_slice(name, snapshot, path.name) for path, shard in shards for name, _ in shard]
    if rank is None:
        files = [safetensors_file.write(path, shard) for path, shard in shards]
        return Written(files=(*state, *files), slices=tuple(slices), signature="")
    # While one waits for the disk to finish, the next one is under way.
    with ThreadPoolExecutor(MAX_CONCURRENT_WRITES) as threads:
        shares = threads.map(lambda shard: safetensors_file.write_shard(shard[0], shard[1], snapshot.step), shards)
        wholes = [(name, layout, str(dtype)) for name, (layout, dtype) in snapshot.wholes.items()]
        signed = repr((snapshot.step, wholes, snapshot.names, snapshot.aliases))
        signature = hashlib.sha256(signed.encode()).hexdigest()
        return Written(files=(*state, *shares), slices=tuple(slices), signature=signature)


def write_state(draft: Path, state: bytes) -> FileEntry:
    """Write state.json."""
    with atomic_file(draft / STATE) as file:
        file.write(state)
    return FileEntry(name=STATE, bytes=len(state), sha256=safetensors_file.checksum(state))


def write_manifest_of(
    draft: Path, snapshot: Snapshot, written: Sequence[Written], base: ParentStep | None = None
) -> None:
    """Write the manifest of all ranks' files. `base` is the parent of an incremental step.

    Raises CheckpointError when they were not given the same tensors, or when a tensor is not there exactly once.
    """
    for rank, part_written in enumerate(written):
        if part_written.signature != written[0].signature:
            raise CheckpointError(
                f"rank {rank} saves other tensors than rank 0",
                expected="the same names, dtypes, whole shapes, layouts and ties on all ranks",
            )
    stored = by_name(entry for part_written in written for entry in part_written.slices)
    entries = {part: tuple(_entry_of(draft, name, snapshot, stored) for name in snapshot.names[part]) for part in PARTS}
    publishable = Manifest(
        format_version=FORMAT_VERSION,
        package_version=package_version(),
        kind="training",
        step=snapshot.step,
        model=entries["model"],
        optimizer=entries["optimizer"],
        files=tuple(file for part_written in written for file in part_written.files),
        tables=merge_entries([part_written.tables for part_written in written]),
        parent=base,
    )
    write_manifest(draft, publishable)


def package_version() -> str:
    """The version of the installed package, for people who read a manifest."""
    try:
        return importlib.metadata.version("kitforge")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _slice(name: str, snapshot: Snapshot, file: str) -> Slice:
    region = snapshot.region(name)
    return Slice(
        name=name,
        dtype=safetensors_file.DTYPE_NAMES[snapshot.buffers[name].dtype],
        global_shape=tuple(region.global_shape),
        offset=region.offset,
        shape=tuple(region.shape),
        file=file,
    )


def _entry_of(draft: Path, name: str, snapshot: Snapshot, stored: dict[str, list[Slice]]) -> TensorEntry:
    """A tensor's entry from the slices of all ranks; an alias has those of the tensor whose memory it shares."""
    owner = snapshot.aliases.get(name)
    slices = stored.get(owner or name, [])
    if not slices:
        raise CheckpointError(f"no rank has written tensor {name!r} of {draft}")
    found = entry_of(draft, slices)
    return found if owner is None else replace(found, name=name, alias_of=owner)
