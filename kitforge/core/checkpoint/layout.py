"""What a checkpoint folder holds and how its manifest is spelled. Knows names and numbers, no tensor's values.

checkpoints/
└── step_120/
    ├── model-00001-of-00001.safetensors
    ├── optimizer-00001-of-00001.safetensors
    ├── table-users-rows-00001.safetensors      ids and rows of a table; as many files as it takes
    ├── state.json
    └── manifest.json          what the others must hold; written last, and signed by its own checksum

Many ranks write side by side, each its own files: model-r00002-00001.safetensors is the first of rank 2. A step that
has a base holds only those rows of tables that changed after the base was saved; everything else is whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kitforge.foundation.config import from_dict, to_dict
from kitforge.foundation.errors import CheckpointError, ConfigError
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
STATE = "state.json"
# An empty file beside the manifest: this step is not deleted when newer ones come.
KEEP = "keep"
# The part of a table's files that holds ids which went away.
REMOVED = "removed"

Part = Literal["model", "optimizer"]
PARTS: tuple[Part, ...] = ("model", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One stored slice of a named global tensor."""

    name: str
    dtype: str  # as safetensors spells it, e.g. "BF16"
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # where the slice starts in the global tensor, one number a dim
    shape: tuple[int, ...]  # of the slice
    file: str
    alias_of: str | None = None  # the name under which the same memory is stored, for tied tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the folder, as it was written. It has one checksum: files of many ranks have the quick one."""

    name: str
    bytes: int
    sha256: str = ""
    crc32: str = ""  # see tensor_file.Crc32


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsEntry:
    """One file of rows of a table."""

    file: str
    part: str  # see core.optim.rows; REMOVED: ids without rows
    num_rows: int
    share: tuple[int, ...]  # (index, count): which share of all ids may be in it


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """One table of a step."""

    name: str
    schema: dict[str, Any]  # what makes its rows no other table's
    version: int  # the table's own count of changes
    since: int | None = None  # None: all rows are here; a version of the base: those that changed after it
    state: str = ""  # the file of what belongs to no row; none where there is nothing
    rows: tuple[RowsEntry, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The step beside this one whose rows of tables this one goes on from."""

    step: int
    sha256: str  # of its manifest, which vouches for its files


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a reader must know before it opens a tensor."""

    format_version: int
    package_version: str
    kind: str  # what was saved, in words for people, e.g. "training"
    step: int
    model: tuple[TensorEntry, ...]
    optimizer: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    tables: tuple[TableEntry, ...] = ()
    base: Base | None = None

    def entries(self, part: Part) -> tuple[TensorEntry, ...]:
        """The tensors of one part, in the order in which they were saved."""
        return self.model if part == "model" else self.optimizer


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of `step` is published."""
    return root / f"step_{step}"


def steps(root: Path) -> list[int]:
    """The steps with a published folder below `root`, ascending; none when `root` is absent."""
    if not root.is_dir():
        return []
    matches = (re.fullmatch(r"step_(0|[1-9]\d*)", path.name) for path in root.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in matches if match)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, signed so that a change of any of its values is noticed."""
    values = _flat(manifest) | {part: list(map(_flat, manifest.entries(part))) for part in PARTS}
    values["tables"] = list(map(to_dict, manifest.tables))
    values["base"] = None if manifest.base is None else to_dict(manifest.base)
    # What is not there is not spelled, so that a run without tables writes what every version reads.
    values = {key: value for key, value in values.items() if value or key not in ("tables", "base")}
    values["files"] = [{key: value for key, value in _flat(file).items() if value != ""} for file in manifest.files]
    # Indented for people to read; of many ranks, whose slices are many, packed for speed.
    indent = None if any(file.crc32 for file in manifest.files) else 1
    write_text(folder / MANIFEST, json.dumps({**values, "sha256": _signature(values)}, indent=indent) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json strictly. Raises CheckpointError when it is absent, damaged or of another version."""
    path = folder / MANIFEST
    values = _read_json(path)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} is of an unknown format version",
            got=version,
            expected=FORMAT_VERSION,
            fix="open it with the version of kitforge that wrote it",
        )
    if values.pop("sha256", None) != _signature(values):
        raise CheckpointError(f"{path} is damaged", got="values that do not match their checksum")
    try:
        manifest = from_dict(Manifest, values)
    except ConfigError as cause:
        raise CheckpointError(f"{path} is not a manifest of this format", got=cause) from cause
    _check_file_names(path, manifest)
    return manifest


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The bytes of state.json. Raises CheckpointError for what JSON would give back as something else."""
    return json.dumps(plain(state, "state"), indent=1).encode()


def read_state(folder: Path) -> dict[str, Any]:
    """The state as it was saved, tuples as lists. Raises CheckpointError when it is absent or damaged."""
    return _read_json(folder / STATE)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {path.parent}")
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing", expected=f"a checkpoint folder with {MANIFEST} and {STATE}"
        ) from None
    # A flipped byte can break the UTF-8 as well as the JSON; both are a ValueError.
    except ValueError as cause:
        raise CheckpointError(f"{path} is damaged", got=cause, expected="JSON") from cause
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} is damaged", got=type(values).__name__, expected="a JSON object")
    return values


def _check_file_names(path: Path, manifest: Manifest) -> None:
    """A manifest speaks of files beside it and of no others on the machine."""
    listed = {file.name for file in manifest.files}
    used: set[str] = {entry.file for part in PARTS for entry in manifest.entries(part)}
    for table in manifest.tables:
        used.update(rows.file for rows in table.rows)
        used.update([table.state] if table.state else [])
    for name in sorted(listed.union(used)):
        if name not in listed or Path(name).name != name:
            raise CheckpointError(f"{path} names a file that is not its own", got=name, expected=sorted(listed))


def _flat(record: Manifest | TensorEntry | FileEntry) -> dict[str, Any]:
    """Fields by name, as JSON takes them: `to_dict` in a fraction of its time, for values that are plain already."""
    return {name: getattr(record, name) for name in record.__slots__}


def _signature(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def plain(value: Any, path: str) -> Any:
    """Lists for tuples, dicts for mappings; `path` names the value in the message when it is something else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{place}]") for place, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise CheckpointError(f"{path} cannot be stored", got=f"the key {key!r}", expected="keys that are text")
        return {key: plain(item, f"{path}.{key}") for key, item in value.items()}
    raise CheckpointError(
        f"{path} cannot be stored",
        got=type(value).__name__,
        expected="numbers, text, true, false, None, lists and mappings; tensors go with the optimizer's",
    )
