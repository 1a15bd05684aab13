"""Our checkpoints under torch.distributed.checkpoint: its planners decide what goes where, our files hold it.

`save(state_dict, storage_writer=KitforgeWriter(folder, step=...))` writes a checkpoint that everything here opens, and
`load(state_dict, storage_reader=KitforgeReader(folder))` fills tensors or DTensors of any placement from ours. torch's
protocol: https://docs.pytorch.org/docs/stable/distributed.checkpoint.html. Nothing is pickled into a file: what torch
keeps in its .metadata is made from our manifest, and values that are no tensors are plain state or refused.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from kitforge.core.checkpoint import tensor_file
from kitforge.core.checkpoint.layout import (
    FORMAT_VERSION,
    MANIFEST,
    PARTS,
    FileEntry,
    Manifest,
    Part,
    Slice,
    TensorEntry,
    encode_state,
    write_manifest,
)
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.slices import by_name, entry_of
from kitforge.core.checkpoint.write import package_version, share_name, write_state
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.files import atomic_folder, process_name
from kitforge.foundation.types import Region


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """What a rank is told: its number, and where to write."""

    rank: int
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What a rank tells of a piece that it has written."""

    part: Part
    entry: Slice
    file: FileEntry


@final
class KitforgeWriter(StorageWriter):
    """Writes what torch's planner hands out as the checkpoint of `step` in `folder`, which appears whole or not at all.

    Tensors whose names begin with `optimizer_prefix` are the optimizer's. `state` is the plain state beside them.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int,
        state: Mapping[str, Any] | None = None,
        optimizer_prefix: str = "optimizer.",
        kind: str = "training",
        shard_bytes: int = 2 * 2**30,
    ) -> None:
        self._folder = Path(folder)
        self._step = step
        self._state = encode_state(state or {})
        self._optimizer_prefix = optimizer_prefix
        self._kind = kind
        self._shard_bytes = shard_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, elsewhere if so named."""
        if checkpoint_id is not None:
            self._folder = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any) -> None:
        """Nothing has to be set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what would have to be pickled, and more than one piece of a tensor on a rank."""
        plain = sorted(item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
        if plain:
            raise CheckpointError(
                "only tensors can be saved among tensors",
                got=", ".join(plain[:10]),
                fix="give plain values as the writer's state",
            )
        names = [item.index.fqn for item in plan.items]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise CheckpointError("a rank has several pieces of a tensor", got=", ".join(twice[:10]), expected="one")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder that all ranks write to, and tell them."""
        shutil.rmtree(self._parts, ignore_errors=True)
        self._parts.mkdir(parents=True)
        return [
            dataclasses.replace(plan, storage_data=_Share(rank=rank, folder=self._parts))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces into its own files."""
        share: _Share = plan.storage_data
        results: list[WriteResult] = []
        for part in PARTS:
            items = {item.index.fqn: item for item in plan.items if self._part(item) == part and _is_stored(item)}
            pieces = ((name, _resolve(planner, item)) for name, item in items.items())
            for number, shard in enumerate(tensor_file.split(pieces, self._shard_bytes), start=1):
                path = share.folder / share_name(part, share.rank, number)
                file = tensor_file.write_share(path, shard, self._step)
                for name, tensor in shard:
                    stored = _Stored(part=part, entry=_entry(items[name], path.name), file=file)
                    results.append(WriteResult(items[name].index, tensor.nbytes, stored))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest of what all ranks have written, and publish."""
        written: list[_Stored] = [result.storage_data for each in results for result in each]
        entries = {part: self._entries(part, written) for part in PARTS}
        files = {each.file.name: each.file for each in written}
        with atomic_folder(self._folder) as draft:
            for name in files:
                os.replace(self._parts / name, draft / name)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                package_version=package_version(),
                kind=self._kind,
                step=self._step,
                model=entries["model"],
                optimizer=entries["optimizer"],
                files=(write_state(draft, self._state), *files.values()),
            )
            write_manifest(draft, manifest)
        shutil.rmtree(self._parts)

    def _entries(self, part: Part, written: Sequence[_Stored]) -> tuple[TensorEntry, ...]:
        slices = by_name(each.entry for each in written if each.part == part)
        return tuple(entry_of(self._folder, each) for each in slices.values())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint can be called so: any path with a name."""
        return bool(Path(checkpoint_id).name)

    @property
    def _parts(self) -> Path:
        return self._folder.with_name(f".{self._folder.name}.{process_name()}.parts")

    def _part(self, item: WriteItem) -> Part:
        return "optimizer" if item.index.fqn.startswith(self._optimizer_prefix) else "model"


@final
class KitforgeReader(StorageReader):
    """Reads a checkpoint of ours, saved by whatever ranks, into what torch's planner asks for.

    The checkpoint is opened, and by default verified, at once; in a `world` of many ranks by all of them together.
    """

    def __init__(self, folder: str | os.PathLike[str], *, verify: bool = True, world: World = ALONE) -> None:
        self._verify = verify
        self._world = world
        self._checkpoint = open_checkpoint(Path(folder), verify=verify, world=world)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, with another checkpoint if one is named."""
        if checkpoint_id is not None and Path(checkpoint_id) != self._checkpoint.folder:
            self._checkpoint = open_checkpoint(Path(checkpoint_id), verify=self._verify, world=self._world)

    def read_metadata(self, *_: Any) -> Metadata:
        """Our manifest, in torch's words."""
        manifest = self._checkpoint.manifest
        return Metadata({entry.name: _metadata(entry) for part in PARTS for entry in manifest.entries(part)})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any) -> None:
        """Nothing has to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan is carried out as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans are carried out as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what is asked for into the tensors that the planner names."""
        for item in plan.items:
            name = item.storage_index.fqn
            first = item.storage_index.offset or (0,) * len(item.lengths)
            region = Region(
                global_shape=self._checkpoint.entry(name).shape,
                offset=tuple(map(int.__add__, first, item.storage_offsets)),
                shape=tuple(item.lengths),
            )
            target: Tensor = planner.resolve_tensor(item).detach()
            target.copy_(self._checkpoint.read(name, region))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a checkpoint of ours."""
        return (Path(checkpoint_id) / MANIFEST).is_file()


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(each.offset), torch.Size(each.shape)) for each in entry.slices()]
    properties = TensorProperties(dtype=tensor_file.DTYPES[entry.dtype])
    return TensorStorageMetadata(properties=properties, size=torch.Size(entry.shape), chunks=chunks)


def _is_stored(item: WriteItem) -> bool:
    """An empty piece says nothing, unless all of the tensor is empty."""
    data = _data(item)
    return data.chunk.sizes.numel() > 0 or data.size.numel() == 0


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    tensor_file.check_storable(item.index.fqn, tensor)
    return tensor.detach().cpu()


def _entry(item: WriteItem, file: str) -> Slice:
    data = _data(item)
    return Slice(
        name=item.index.fqn,
        dtype=tensor_file.DTYPE_NAMES[data.properties.dtype],
        global_shape=tuple(data.size),
        offset=tuple(data.chunk.offsets),
        shape=tuple(data.chunk.sizes),
        file=file,
    )


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data
