"""Labelled images, not decoded yet: folders and zips with a folder for each label, and rows."""

import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from kitforge.data import named_dataset
from kitforge.data.document_shard import python_value
from kitforge.data.features import class_names, named
from kitforge.data.labels import Label
from kitforge.data.source import open_rows
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import user_path
from kitforge.foundation.types import IGNORED

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
Split = Literal["train", "eval"]
# Names of folders of splits, above those of the labels.
_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train", "training"), "eval": ("test", "val", "valid", "validation")}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """An image that is not decoded yet."""

    location: str  # for messages
    label: Label | None
    names: tuple[str, ...] = ()  # of the numbers of a ClassLabel, if the label is one of them
    read: Callable[[], Any]  # bytes, a path, an image of Pillow, or an array [H, W] or [H, W, C] of bytes


def find_images(spec: object, split: Split = "train", image: str = "image", label: str = "label") -> list[ImageEntry]:
    """The images of a folder or a .zip file, whose folders are the labels, or of rows with these columns. Where the
    first folders are named train and test (or val), those of the split. Raises DataError where there are none."""
    found: list[ImageEntry]
    spec = named_dataset.load_named(spec)
    path = user_path(spec) if isinstance(spec, (str, Path)) else None
    if path is not None and path.suffix.lower() == ".zip":
        try:
            archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} cannot be read as a zip", got=error) from None
        # Kept open: its list of names is read once.
        names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        found = _of_names(names, split, lambda name: partial(archive.read, name), str(path))
    elif path is not None and path.is_dir():
        names = sorted(str(each.relative_to(path).as_posix()) for each in path.rglob("*") if each.is_file())
        found = _of_names(names, split, lambda name: partial(Path.read_bytes, path / name), str(path))
    else:
        home = path.parent if path is not None else None
        found = [
            _of_row(row, str(location), (image, label), home, class_names(shard.features, (label,))[1])
            for shard in open_rows(spec)
            for location, row in shard.rows()
        ]
    if not found:
        expected = f"folders of images named by their labels ({', '.join(SUFFIXES[:3])}, ...), or rows"
        raise DataError("there are no images", got=str(spec)[:200], expected=expected)
    return found


def _of_names(
    names: Iterable[str], split: Split, reader: Callable[[str], Callable[[], bytes]], root: str
) -> list[ImageEntry]:
    """Images by their names below a root, label/name or split/label/name; a single folder around all is left out."""
    parts = {name: PurePosixPath(name).parts for name in names if name.lower().endswith(SUFFIXES)}
    while parts and all(len(each) > 2 for each in parts.values()) and len({each[0] for each in parts.values()}) == 1:
        if any(each[0].lower() in splits for each in parts.values() for splits in _SPLITS.values()):
            break
        parts = {name: each[1:] for name, each in parts.items()}
    tops = {each[0].lower() for each in parts.values()}
    if any(top in splits for top in tops for splits in _SPLITS.values()):
        chosen = next((name for name in _SPLITS[split] if name in tops), None)
        parts = {name: each[1:] for name, each in parts.items() if each[0].lower() == chosen}
    for name, each in parts.items():
        if len(each) < 2:
            expected = "a folder for each label: LABEL/IMAGE"
            raise DataError(f"an image of {root} has no label", got=name, expected=expected)
    return [ImageEntry(location=f"{root}: {name}", label=each[-2], read=reader(name)) for name, each in parts.items()]


def _of_row(
    row: object, location: str, columns: tuple[str, str], home: Path | None, names: tuple[str, ...]
) -> ImageEntry:
    values, (image, label) = row if isinstance(row, Mapping) else {}, columns
    if image not in values:
        raise DataError(f"{location} has no column {image!r}", got=", ".join(map(str, values)) or type(row).__name__)
    value, name = values[image], named(values.get(label), names, location) if names else python_value(values.get(label))
    if isinstance(name, float) and name.is_integer():
        name = int(name)
    is_list = isinstance(name, list) and all(isinstance(each, (str, int, float)) for each in name)
    if name is not None and (not (is_list or isinstance(name, (str, int, float))) or name in ("", IGNORED)):
        expected = "a text, a number, or a list of them"
        raise DataError(f"{location} has no label", got=f"{label}={name!r}", expected=expected)
    if isinstance(value, str) and home is not None:
        value = home / value
    return ImageEntry(location=location, label=name, names=names, read=lambda: value)
