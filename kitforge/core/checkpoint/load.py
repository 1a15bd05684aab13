"""Loading of checkpoints: verification, then memory-mapped reads of tensors or regions of them.

The layout at saving does not matter to the reader. Nothing is written.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitforge.core.checkpoint.all_or_none import collective_try
from kitforge.core.checkpoint.cleanup import restore_folders
from kitforge.core.checkpoint.manifest import (
    MANIFEST,
    PARTS,
    STATE,
    STATE_TENSORS,
    FileEntry,
    Manifest,
    Part,
    Slice,
    TensorEntry,
    read_json,
    read_manifest,
    step_folder,
    steps,
)
from kitforge.core.checkpoint.regions import num_elements, overlap, region_of, within
from kitforge.core.checkpoint.safetensors_file import DTYPE_NAMES, DTYPES, TensorFile, crc32, step_of
from kitforge.core.checkpoint.state_tensors import attach_tensors
from kitforge.core.checkpoint.table_reader import ALL, Increment, StoredTable, increment_chain, load_tables
from kitforge.core.optim.table_protocols import RowShard, RowTable
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.errors import CheckpointError, ModelError
from kitforge.foundation.files import sha256
from kitforge.foundation.log import logger
from kitforge.foundation.types import Region

_log = logger(__name__)


class Checkpoint:
    """One published step. Tensors are mapped from their files, so opening it costs no memory.

    Raises CheckpointError, when it is made and later, for slices that do not make up a tensor and for files that are
    not what the manifest says.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, state: dict[str, Any], links: Sequence[Increment] = ()
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.state = state
        # The step and its parents, newest first.
        self.increments = tuple(links) or (Increment(folder=folder, manifest=manifest),)
        self._entries = {entry.name: entry for part in PARTS for entry in manifest.entries(part)}
        self._files: dict[str, TensorFile] = {}

    @property
    def step(self) -> int:
        """The step of the checkpoint."""
        return self.manifest.step

    def names(self, part: Part) -> list[str]:
        """Tensor names of model or optimizer in saved order, aliases included."""
        return [entry.name for entry in self.manifest.entries(part)]

    def shapes(self, part: Part) -> dict[str, tuple[int, ...]]:
        """Global shapes of model or optimizer tensors by name."""
        return {entry.name: entry.shape for entry in self.manifest.entries(part)}

    def model(self, regions: Mapping[str, Region] = {}, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model but those `without`, in the order in which they were saved, aliases included.

        Of a tensor in `regions`, or tied to one that is, only that part; of the others the whole.
        """
        return self._stream("model", regions, without)

    def optimizer(
        self, regions: Mapping[str, Region] = {}, without: Collection[str] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the optimizer, or parts of them, like `model`."""
        return self._stream("optimizer", regions, without)

    @property
    def tables(self) -> list[str]:
        """Names of the embedding tables."""
        return [table.name for table in self.manifest.tables]

    def table(self, name: str, shard: RowShard = ALL) -> StoredTable:
        """The rows of a table, mapped; those of other shares may be left out. Raises CheckpointError for none such."""
        return StoredTable(name, self.increments, shard)

    def load_tables(self, tables: Mapping[str, RowTable]) -> None:
        """Load every table by name; names and schemas must be exactly those of the checkpoint.

        Raises CheckpointError before any row is changed if they differ.
        """
        load_tables(tables, self.increments)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor of that name. Raises CheckpointError for an unknown name."""
        return self.read(name, Region.full(self.entry(name).shape))

    def entry(self, name: str) -> TensorEntry:
        """The manifest entry of a tensor. Raises CheckpointError for an unknown name."""
        if name not in self._entries:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        return self._entries[name]

    def read(self, name: str, region: Region) -> Tensor:
        """A part of a tensor, put together from the slices that it overlaps; nothing else of them is read.

        A part of a single slice shares the file's memory where it is contiguous there.
        """
        entry = self.entry(name)
        if region.global_shape != entry.shape:
            raise CheckpointError(
                f"tensor {name!r} in {self.folder} is of another shape",
                got=list(entry.shape),
                expected=list(region.global_shape),
                fix="open a checkpoint of this very model",
            )
        slices = list(entry.slices(region))
        for each in slices:
            if (each.offset, each.shape) == (region.offset, region.shape):
                return self._stored(each)
        found = [(each, shared) for each in slices if (shared := overlap(region_of(each), region)) is not None]
        if sum(num_elements(shared) for _, shared in found) != num_elements(region):
            raise CheckpointError(f"tensor {name!r} has no such part", got=region)
        if len(found) == 1:
            return within(region, region_of(found[0][0])).of(self._stored(found[0][0])).contiguous()
        result = torch.empty(region.shape, dtype=DTYPES[entry.dtype])
        for each, shared in found:
            within(shared, region).of(result).copy_(within(shared, region_of(each)).of(self._stored(each)))
        return result

    def _stream(
        self, part: Part, regions: Mapping[str, Region], without: Collection[str]
    ) -> Iterator[tuple[str, Tensor]]:
        for name in (name for name in self.names(part) if name not in without):
            region = regions.get(name) or regions.get(self._entries[name].alias_of or name)
            yield name, self.tensor(name) if region is None else self.read(name, region)

    def _stored(self, entry: Slice) -> Tensor:
        if entry.file not in self._files:
            path = self.folder / entry.file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing", expected=f"a part of tensor {entry.name!r} in it")
            file = TensorFile(path, CheckpointError)
            if file.step not in (None, self.step):
                raise CheckpointError(
                    f"{path}, which holds a part of tensor {entry.name!r}, is of another step",
                    got=file.step,
                    expected=self.step,
                )
            self._files[entry.file] = file
        tensor = self._files[entry.file].tensor(entry.alias_of or entry.name)
        got = (DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape))
        if got != (entry.dtype, entry.shape):
            raise CheckpointError(
                f"tensor {entry.name!r} in {self.folder / entry.file} is not what the manifest says",
                got=got,
                expected=(entry.dtype, entry.shape),
            )
        return tensor


def open_checkpoint(
    folder: Path,
    *,
    verify: bool = True,
    parts: Sequence[Part] = PARTS,
    world: World = ALONE,
    verified: Collection[Path] = (),
) -> Checkpoint:
    """Open the checkpoint in `folder`; `verify` reads every file once and compares sizes and checksums, but for files
    that hold nothing else than tensors of parts which are not asked for, and for those of steps that it builds on which
    are known to be `verified`.

    In a world of many ranks, all of them call it: each verifies its share of the files, and all get the checkpoint or
    the same error. Raises CheckpointError that names what is missing, truncated, changed or of an unknown version.
    """
    opened: list[Checkpoint] = []

    def work() -> str:
        opened.append(_open(folder, parts if verify else None, world, verified))
        return "" if world.mesh is None else sha256(folder / MANIFEST)

    manifests = collective_try(work, world.all_gather_object)
    if len(set(manifests)) > 1:
        raise CheckpointError(f"ranks see different checkpoints in {folder}", expected="a folder that all ranks share")
    return opened[0]


def newest(
    root: Path,
    *,
    on_damaged: Callable[[CheckpointError], None],
    world: World = ALONE,
    opened: Callable[[Path], Checkpoint] | None = None,
) -> Checkpoint | None:
    """The newest valid checkpoint below `root`, or None. Damaged ones are reported to `on_damaged`.

    In a world of many ranks, all of them call it, and all get the same step and are told the same. `opened` opens a
    step; by default all of it is verified.
    """

    def work() -> list[int]:
        if world.rank != 0:
            return []
        restore_folders(root)
        return steps(root)

    for step in reversed(collective_try(work, world.all_gather_object)[0]):
        try:
            folder = step_folder(root, step)
            return open_checkpoint(folder, world=world) if opened is None else opened(folder)
        except CheckpointError as damage:
            on_damaged(damage)
    return None


def find_checkpoint(folder: Path, *, verify: bool = True, world: World = ALONE) -> Checkpoint | None:
    """The checkpoint of a run folder (its newest good one, or the best of a run that stopped early) or of a step
    folder, for its weights and tables; None for any other folder. In a world of many ranks, all of them call it."""

    def opened(step: Path) -> Checkpoint:
        return open_checkpoint(step, verify=verify, parts=("model",), world=world)

    if (folder / MANIFEST).exists():
        return opened(folder)
    root = folder / "checkpoints"
    if not root.is_dir():
        return None
    found = newest(root, on_damaged=lambda error: _log.warning("%s", error), world=world, opened=opened)
    if found is None:
        raise ModelError("the run has no checkpoint", got=folder, fix="train it first, or name another folder")
    result = found.state["training"]["result_step"]
    return found if result in (None, found.step) else opened(step_folder(root, result))


def load_tensors(targets: Mapping[str, Tensor], source: Iterable[tuple[str, Tensor]], *, what: str) -> None:
    """Copy each source tensor into the target of its name, in place. Floating dtypes are converted to the target's.

    Raises ModelError that lists what is missing, unexpected and misshapen; what fits has been copied by then, because
    the source is a stream.
    """
    missing = dict.fromkeys(targets)
    unexpected: list[str] = []
    misshapen: list[str] = []
    with torch.no_grad():
        for name, tensor in source:
            if name not in missing:
                unexpected.append(f"{name} (again)" if name in targets else name)
                continue
            del missing[name]
            problem = _misfit(targets[name], tensor)
            if problem:
                misshapen.append(f"{name}: {problem}")
            else:
                targets[name].copy_(tensor)
    _check_fit(what, len(targets), missing=list(missing), unexpected=unexpected, misshapen=misshapen)


def check_shapes(targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, what: str) -> None:
    """Raise ModelError unless the shapes are those of the targets, which need no memory yet: a file that speaks of
    other sizes than its tensors have is refused before any are made."""
    misshapen = [
        f"{name}: got {list(shapes[name])}, expected {list(target.shape)}"
        for name, target in targets.items()
        if name in shapes and tuple(target.shape) != shapes[name]
    ]
    missing = [name for name in targets if name not in shapes]
    unexpected = [name for name in shapes if name not in targets]
    _check_fit(what, len(targets), missing=missing, unexpected=unexpected, misshapen=misshapen)


def _check_fit(what: str, num_targets: int, *, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
    lists = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(lists.values()):
        raise ModelError(
            f"{what} does not fit",
            got="; ".join(
                f"{len(names)} {word} ({', '.join(names[:10])}{', ...' if len(names) > 10 else ''})"
                for word, names in lists.items()
                if names
            ),
            expected=f"exactly the {num_targets} tensors of the target, in their shapes",
            fix="check that the configuration belongs to these weights, and that all files of them are there",
        )


def _open(folder: Path, parts: Sequence[Part] | None, world: World, verified: Collection[Path]) -> Checkpoint:
    try:
        step = Increment(folder=folder, manifest=read_manifest(folder))
        links = increment_chain(step)
        if parts is not None:
            used = {part: {file for entry in step.manifest.entries(part) for file in entry.files} for part in PARTS}
            # Files that hold only tensors of other parts.
            unread = set().union(*used.values()) - set().union(*(used[part] for part in parts))
            files = [file for file in step.manifest.files if file.name not in unread]
            _verify(folder, step.manifest, _files_to_verify(files, world))
            # Of the steps that it builds on, only rows are read.
            for link in (each for each in links[1:] if each.folder not in verified):
                tables = link.manifest.tables
                names = {rows.file for table in tables for rows in table.rows} | {table.state for table in tables}
                files = [file for file in link.manifest.files if file.name in names]
                _verify(link.folder, link.manifest, _files_to_verify(files, world))
        state = read_json(folder / STATE)
        if any(file.name == STATE_TENSORS for file in step.manifest.files):
            state = attach_tensors(state, TensorFile(folder / STATE_TENSORS, CheckpointError))
        return Checkpoint(folder, step.manifest, state, links)
    except OSError as cause:
        raise CheckpointError(f"{folder} cannot be read", got=cause) from cause


def _files_to_verify(files: Sequence[FileEntry], world: World) -> Sequence[FileEntry]:
    """The files that this rank verifies: about as many bytes as every other."""
    if world.mesh is None:
        return files
    shard: list[FileEntry] = []
    loads = [0] * world.mesh.size
    for file in sorted(files, key=lambda file: (-file.bytes, file.name)):
        rank = loads.index(min(loads))
        loads[rank] += file.bytes
        if rank == world.rank:
            shard.append(file)
    return shard


def _verify(folder: Path, manifest: Manifest, files: Sequence[FileEntry]) -> None:
    # Sizes first: they are free to check, and most damaged files are truncated.
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing")
        if path.stat().st_size != file.bytes:
            word = "truncated" if path.stat().st_size < file.bytes else "too long"
            raise CheckpointError(
                f"{path} is {word}", got=f"{path.stat().st_size:,} bytes", expected=f"{file.bytes:,} bytes"
            )
    with ThreadPoolExecutor() as threads:
        checksums = threads.map(lambda file: (crc32 if file.crc32 else sha256)(folder / file.name), files)
        for file, checksum in zip(files, checksums, strict=True):
            if checksum == (file.crc32 or file.sha256):
                continue
            path = folder / file.name
            if (step := step_of(path)) not in (None, manifest.step):
                raise CheckpointError(f"{path} is of another step", got=step, expected=manifest.step)
            raise CheckpointError(
                f"{path} is damaged", got=f"checksum {checksum}", expected=f"checksum {file.crc32 or file.sha256}"
            )


def _misfit(target: Tensor, tensor: Tensor) -> str | None:
    """Why `tensor` cannot be copied to `target` without a silent change, or None."""
    if target.shape != tensor.shape:
        return f"got {list(tensor.shape)}, expected {list(target.shape)}"
    # A copy into a meta tensor does nothing and raises nothing.
    if target.is_meta:
        return "the target has no memory yet"
    if target.dtype != tensor.dtype and not (target.is_floating_point() and tensor.is_floating_point()):
        return f"got {tensor.dtype}, expected {target.dtype}"
    return None
