"""The files of a checkpoint folder and the format of its manifest.

checkpoints/
└── step_120/
    ├── model-00001-of-00001.safetensors
    ├── optimizer-00001-of-00001.safetensors
    ├── table-users-rows-00001.safetensors      ids and rows of a table; as many files as it takes
    ├── state.json
    ├── state.safetensors      tensors among the state, where there are any
    └── manifest.json          names, sizes and checksums of the others; written last, with its own checksum

Many ranks write side by side, each its own files: model-r00002-00001.safetensors is the first of rank 2. A step that
has a base holds only those rows of tables that changed after the base was saved; everything else is whole.
"""

import hashlib
import itertools
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kitforge.foundation.config import from_dict, to_dict
from kitforge.foundation.errors import CheckpointError, ConfigError
from kitforge.foundation.files import write_text
from kitforge.foundation.types import Region
from kitforge.foundation.untrusted import parse_json

# 1 had an entry for each slice.
FORMAT_VERSION = 3
MANIFEST = "manifest.json"
STATE = "state.json"
STATE_TENSORS = "state.safetensors"
# An empty file beside the manifest: this step is not deleted when newer ones come.
KEEP = "keep"
# The part of a table's files that holds ids which went away.
REMOVED = "removed"

Part = Literal["model", "optimizer"]
PARTS: tuple[Part, ...] = ("model", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """One stored slice of a named global tensor."""

    name: str
    dtype: str  # as safetensors spells it, e.g. "BF16"
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]  # where the slice starts in the global tensor, one number a dim
    shape: tuple[int, ...]  # of the slice
    file: str
    alias_of: str | None = None  # the name under which the same memory is stored, for tied tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor, and the grid of slices in which it is stored."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]  # by dim, where slices begin; their product is where each slice begins
    files: tuple[str, ...]  # of each slice, the last dim fastest
    alias_of: str | None = None  # the name under which the same memory is stored, for tied tensors

    def __post_init__(self) -> None:
        is_grid = len(self.starts) == len(self.shape) and len(self.files) == math.prod(map(len, self.starts))
        for starts, size in zip(self.starts, self.shape, strict=is_grid):
            is_grid &= starts[:1] == (0,) and all(map(int.__lt__, starts, (*starts[1:], max(size, 1))))
        if not is_grid:
            raise CheckpointError(
                f"the slices of tensor {self.name!r} do not make up the tensor",
                got=f"{len(self.files)} files, slices from {self.starts}",
                expected=f"every element of {list(self.shape)} once",
            )

    def slices(self, part: Region | None = None) -> Iterator[Slice]:
        """The slices; with a part of the tensor, those that may hold elements of it."""
        ends = [(*starts[1:], size) for starts, size in zip(self.starts, self.shape, strict=True)]
        chosen = [range(len(starts)) for starts in self.starts]
        if part is not None:
            stops = map(int.__add__, part.offset, part.shape)
            chosen = [
                range(bisect_right(starts, begin) - 1, bisect_left(starts, stop))
                for starts, begin, stop in zip(self.starts, part.offset, stops, strict=True)
            ]
        for indices in itertools.product(*chosen):
            number = 0
            for starts, index in zip(self.starts, indices, strict=True):
                number = number * len(starts) + index
            offset = tuple(starts[index] for starts, index in zip(self.starts, indices, strict=True))
            stop = (each[index] for each, index in zip(ends, indices, strict=True))
            yield Slice(
                name=self.name,
                dtype=self.dtype,
                global_shape=self.shape,
                offset=offset,
                shape=tuple(map(int.__sub__, stop, offset)),
                file=self.files[number],
                alias_of=self.alias_of,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of the folder as written. It has one checksum: CRC-32 for files of many ranks, else SHA-256."""

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
    shard: tuple[int, ...]  # (index, count): which share of all ids may be in it


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
class ParentStep:
    """The step that an incremental step builds on."""

    step: int
    sha256: str  # of its manifest, which vouches for its files


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    format_version: int
    package_version: str
    kind: str  # what was saved, for people, e.g. "training"
    step: int
    model: tuple[TensorEntry, ...]
    optimizer: tuple[TensorEntry, ...]
    files: tuple[FileEntry, ...]
    tables: tuple[TableEntry, ...] = ()
    parent: ParentStep | None = None

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
    indices = {file.name: index for index, file in enumerate(manifest.files)}
    # Tensors with the same sharding share one layout entry.
    layouts: dict[tuple[Any, Any], int] = {}
    values = _flat(manifest)
    for part in PARTS:
        values[part] = []
        for entry in manifest.entries(part):
            layout = layouts.setdefault((entry.starts, entry.files), len(layouts))
            plain_entry = {"name": entry.name, "dtype": entry.dtype, "shape": entry.shape, "layout": layout}
            values[part].append(plain_entry if entry.alias_of is None else {**plain_entry, "alias_of": entry.alias_of})
    # An unknown dtype is written as it is, and readers refuse it.
    values["layouts"] = [
        {"starts": starts, "files": [indices.get(file, file) for file in files]} for starts, files in layouts
    ]
    values["tables"] = list(map(to_dict, manifest.tables))
    values["parent"] = None if manifest.parent is None else to_dict(manifest.parent)
    # Empty fields are left out, so every version can read a run without tables.
    values = {key: value for key, value in values.items() if value or key not in ("tables", "parent")}
    values["files"] = [{key: value for key, value in _flat(file).items() if value != ""} for file in manifest.files]
    # Indented for people to read; of many ranks, whose files are many, packed for speed.
    indent = None if any(file.crc32 for file in manifest.files) else 1
    write_text(folder / MANIFEST, json.dumps({**values, "sha256": _signature(values)}, indent=indent) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read manifest.json strictly. Raises CheckpointError when it is absent, damaged or of another version."""
    path = folder / MANIFEST
    values = read_json(path)
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
        names = [str(file["name"]) for file in values["files"]]
        layouts = [_read_layout(layout, names) for layout in values.pop("layouts")]
        entries: dict[str, Any] = {part: tuple(_read_entry(entry, layouts) for entry in values[part]) for part in PARTS}
        manifest = from_dict(Manifest, {**values, **entries})
    except (ConfigError, AttributeError, LookupError, TypeError, ValueError) as cause:
        raise CheckpointError(f"{path} is not a manifest of this format", got=cause) from cause
    except CheckpointError as cause:
        raise CheckpointError(f"{path} cannot be: {cause}") from None
    _check_names(path, manifest)
    return manifest


def read_json(path: Path) -> dict[str, Any]:
    """An object of a checkpoint, tuples as lists. Raises CheckpointError if it is missing or damaged."""
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


def _check_names(path: Path, manifest: Manifest) -> None:
    """Check that a manifest names only files in its folder, and each tensor once."""
    names = [entry.name for part in PARTS for entry in manifest.entries(part)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path} has two entries for the tensor {twice!r}", expected="one")
    listed = {file.name for file in manifest.files}
    used: set[str] = {file for part in PARTS for entry in manifest.entries(part) for file in entry.files}
    for table in manifest.tables:
        used.update(rows.file for rows in table.rows)
        used.update([table.state] if table.state else [])
    for name in sorted(listed.union(used)):
        # The name of ".." is itself.
        if name not in listed or Path(name).name != name or name == "..":
            raise CheckpointError(f"{path} names a file that is not its own", got=name, expected=sorted(listed))


def _read_layout(values: Any, names: Sequence[str]) -> tuple[Any, Any]:
    if values.keys() != {"starts", "files"}:
        raise ValueError(f"a layout with the keys {sorted(values)}")
    files = [names[index] for index in _numbers(values["files"])]
    return tuple(map(_numbers, values["starts"])), tuple(files)


def _read_entry(values: Any, layouts: Sequence[tuple[Any, Any]]) -> TensorEntry:
    """`from_dict` in a fraction of its time. Raises ValueError or TypeError for a key or value of another kind."""
    if not {"name", "dtype", "shape", "layout"} <= values.keys() <= {"name", "dtype", "shape", "layout", "alias_of"}:
        raise ValueError(f"an entry with the keys {sorted(values)}")
    name, dtype, alias = values["name"], values["dtype"], values.get("alias_of", "")
    if not (type(name) is type(dtype) is type(alias) is str):
        raise TypeError(f"an entry with the name {name!r}, the dtype {dtype!r} and the alias {alias!r}")
    (layout,) = _numbers([values["layout"]])
    starts, files = layouts[layout]
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=_numbers(values["shape"]),
        starts=starts,
        files=files,
        alias_of=values.get("alias_of"),
    )


def _numbers(values: Any) -> tuple[int, ...]:
    """A list of whole numbers that are not negative."""
    if type(values) is not list or not set(map(type, values)) <= {int} or min(values, default=0) < 0:
        raise ValueError(f"{str(values)[:60]} in the place of whole numbers")
    return tuple(values)


def _flat(record: Manifest | FileEntry) -> dict[str, Any]:
    """Fields by name, as JSON takes them: `to_dict` in a fraction of its time, for values that are plain already."""
    return {name: getattr(record, name) for name in record.__slots__}


def _signature(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def plain(value: Any, path: str) -> Any:
    """Lists for tuples, dicts for mappings; `path` names the value in the message when it is something else."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
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
