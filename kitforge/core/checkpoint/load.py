"""Opening a checkpoint: checked first, then read tensor by tensor through a memory map. Writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from kitforge.core.checkpoint.layout import (
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    read_manifest,
    read_state,
    step_folder,
    steps,
)
from kitforge.core.checkpoint.leftovers import restore
from kitforge.core.checkpoint.tensor_file import DTYPE_NAMES, TensorFile
from kitforge.foundation.errors import CheckpointError, ModelError
from kitforge.foundation.files import sha256


@final
class Checkpoint:
    """One published step. Tensors are mapped from their files, so opening it costs no memory."""

    def __init__(self, folder: Path, manifest: Manifest, state: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest
        self.state = state
        self._entries = {entry.name: entry for entry in (*manifest.model, *manifest.optimizer)}
        self._files: dict[str, TensorFile] = {}

    @property
    def step(self) -> int:
        """The step after which it was saved."""
        return self.manifest.step

    def names(self, part: Part) -> list[str]:
        """The names of one part's tensors, in the order in which they were saved, aliases included."""
        return [entry.name for entry in self.manifest.entries(part)]

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model, in the order in which they were saved, aliases included."""
        return ((name, self.tensor(name)) for name in self.names("model"))

    def optimizer(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the optimizer, in the order in which they were saved."""
        return ((name, self.tensor(name)) for name in self.names("optimizer"))

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name, of either part. Raises CheckpointError for no such tensor or a damaged file."""
        if name not in self._entries:
            raise CheckpointError(f"{self.folder} holds no tensor {name!r}")
        entry = self._entries[name]
        if entry.file not in self._files:
            self._files[entry.file] = TensorFile(self.folder / entry.file, CheckpointError)
        tensor = self._files[entry.file].tensor(entry.alias_of or name)
        _check_entry(self.folder, entry, tensor)
        return tensor


def open_checkpoint(folder: Path, *, verify: bool = True) -> Checkpoint:
    """Open the checkpoint in `folder`; `verify` reads every file once and compares sizes and checksums.

    Raises CheckpointError that names the file which is missing, truncated, changed or of an unknown version.
    """
    try:
        manifest = read_manifest(folder)
        if verify:
            _verify(folder, manifest.files)
        return Checkpoint(folder, manifest, read_state(folder))
    except OSError as cause:
        raise CheckpointError(f"{folder} cannot be read", got=cause) from cause


def newest(root: Path, *, on_damaged: Callable[[CheckpointError], None]) -> Checkpoint | None:
    """The newest checkpoint below `root` that verifies, or None. Each damaged one before it is told to `on_damaged`."""
    restore(root)
    for step in reversed(steps(root)):
        try:
            return open_checkpoint(step_folder(root, step))
        except CheckpointError as damage:
            on_damaged(damage)
    return None


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
    lists = {"missing": list(missing), "unexpected": unexpected, "misshapen": misshapen}
    if any(lists.values()):
        raise ModelError(
            f"{what} does not fit",
            got="; ".join(_listed(word, names) for word, names in lists.items() if names),
            expected=f"exactly the {len(targets)} tensors of the target, in their shapes",
        )


def _verify(folder: Path, files: Iterable[FileEntry]) -> None:
    # Sizes come first because they cost nothing, and most damage is a file cut short.
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
        checksums = threads.map(lambda file: sha256(folder / file.name), files)
        for file, checksum in zip(files, checksums, strict=True):
            if checksum != file.sha256:
                raise CheckpointError(
                    f"{folder / file.name} is damaged", got=f"checksum {checksum}", expected=f"checksum {file.sha256}"
                )


def _check_entry(folder: Path, entry: TensorEntry, tensor: Tensor) -> None:
    got = (DTYPE_NAMES.get(tensor.dtype), tuple(tensor.shape))
    if got != (entry.dtype, entry.shape):
        raise CheckpointError(
            f"tensor {entry.name!r} in {folder / entry.file} is not what the manifest says",
            got=got,
            expected=(entry.dtype, entry.shape),
        )
    if entry.shape != entry.global_shape:
        raise CheckpointError(
            f"{folder / entry.file} holds only a slice of tensor {entry.name!r}",
            got=list(entry.shape),
            expected=list(entry.global_shape),
        )


def _misfit(target: Tensor, tensor: Tensor) -> str | None:
    """Why `tensor` cannot become `target` without a silent change, or None when it can."""
    if target.shape != tensor.shape:
        return f"got {list(tensor.shape)}, expected {list(target.shape)}"
    # A copy into a tensor without memory does nothing, and says nothing.
    if target.is_meta:
        return "the target has no memory yet"
    if target.dtype != tensor.dtype and not (target.is_floating_point() and tensor.is_floating_point()):
        return f"got {tensor.dtype}, expected {target.dtype}"
    return None


def _listed(word: str, names: list[str]) -> str:
    more = ", ..." if len(names) > 10 else ""
    return f"{len(names)} {word} ({', '.join(names[:10])}{more})"
