"""Labelled images: folders and zips with a folder for each label, and rows; decoded to one size. Needs Pillow.

N images, C channels, S pixels of a side.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.labels import Label
from kitforge.data.optional_imports import import_optional
from kitforge.data.source import open_rows
from kitforge.foundation.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
Split = Literal["train", "eval"]
Resample = Literal["none", "nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
# In the order of Pillow's numbers.
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
# Names of folders of splits, above those of the labels.
_SPLITS: dict[Split, tuple[str, ...]] = {"train": ("train", "training"), "eval": ("test", "val", "valid", "validation")}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageEntry:
    """An image that is not decoded yet."""

    location: str  # for messages
    label: Label | None
    read: Callable[[], Any]  # bytes, a path, an image of Pillow, or an array [H, W] or [H, W, C] of bytes


def find_images(spec: object, split: Split = "train", image: str = "image", label: str = "label") -> list[ImageEntry]:
    """The images of a folder or a .zip file, whose folders are the labels, or of rows with these columns. Where the
    first folders are named train and test (or val), those of the split. Raises DataError where there are none."""
    found: list[ImageEntry]
    path = Path(str(spec)).expanduser() if isinstance(spec, (str, Path)) else None
    if path is not None and path.suffix.lower() == ".zip":
        archive = _open_zip(path)
        # Kept open: its list of names is read once.
        names = sorted(name for name in archive.namelist() if not name.endswith("/"))
        found = _of_names(names, split, lambda name: partial(archive.read, name), str(path))
    elif path is not None and path.is_dir():
        names = sorted(str(each.relative_to(path).as_posix()) for each in path.rglob("*") if each.is_file())
        found = _of_names(names, split, lambda name: partial(Path.read_bytes, path / name), str(path))
    else:
        home = path.parent if path is not None else None
        found = [
            _of_row(row, str(location), image, label, home)
            for shard in open_rows(spec)
            for location, row in shard.rows()
        ]
    if not found:
        expected = f"folders of images named by their labels ({', '.join(SUFFIXES[:3])}, ...), or rows"
        raise DataError("there are no images", got=str(spec)[:200], expected=expected)
    return found


def _open_zip(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as a zip", got=error) from None


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


def _of_row(row: object, location: str, image: str, label: str, home: Path | None) -> ImageEntry:
    values = row if isinstance(row, Mapping) else {}
    if image not in values:
        raise DataError(f"{location} has no column {image!r}", got=", ".join(map(str, values)) or type(row).__name__)
    value, name = values[image], values.get(label)
    if isinstance(name, float) and name.is_integer():
        name = int(name)
    is_list = isinstance(name, list) and all(isinstance(each, (str, int, float)) for each in name)
    if name is not None and (not (is_list or isinstance(name, (str, int, float))) or name == ""):
        expected = "a text, a number, or a list of them"
        raise DataError(f"{location} has no label", got=f"{label}={name!r}", expected=expected)
    if isinstance(value, str) and home is not None:
        value = home / value
    return ImageEntry(location=location, label=name, read=lambda: value)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """How an image becomes a square: it is resized, then cropped in its middle, or padded with black."""

    target: tuple[int, ...] = ()  # (height, width), or the shorter side alone; empty: the square
    resample: Resample = "bilinear"  # none: an image is cropped only

    def square(self, image: Any, size: int) -> Any:
        """An image of Pillow of `size` x `size` pixels."""
        if self.resample != "none":
            target = self.target[::-1] or (size, size)
            if len(self.target) == 1:
                shorter, longer = sorted(image.size)
                edge = self.target[0], int(self.target[0] * longer / shorter)
                target = edge if image.width <= image.height else edge[::-1]
            image = image if image.size == target else image.resize(target, _FILTERS.index(self.resample))
        elif not self.target and image.size != (size, size):
            expected = f"{size} x {size}, as the model's images are not resized"
            raise ValueError(f"an image of {image.width} x {image.height} pixels instead of {expected}")
        if image.size == (size, size):
            return image
        left, top = ((side - size) // 2 for side in image.size)
        return image.crop((left, top, left + size, top + size))


_TO_SQUARE = Resizing()


def decode(entry: ImageEntry, size: int, channels: int, resizing: Resizing = _TO_SQUARE) -> Tensor:
    """The image as bytes [C, S, S], upright. Raises DataError naming one that is no image of bytes."""
    pillow: Any = import_optional("PIL.Image", needed_for="reading images", extra="vision")
    upright: Any = import_optional("PIL.ImageOps", needed_for="reading images", extra="vision").exif_transpose
    try:
        found = entry.read()
        if isinstance(found, Mapping):
            # As a datasets.Dataset holds images that are not decoded.
            found = found.get("bytes") or found.get("path")
        if isinstance(found, bytes):
            found = io.BytesIO(found)
        if isinstance(found, (np.ndarray, Tensor)):
            found = pillow.fromarray(_bytes_of(np.asarray(found)))
        opened = upright(found if hasattr(found, "convert") else pillow.open(found))
        if opened.mode.startswith("I;16") or (opened.mode == "I" and getattr(found, "format", None) == "PNG"):
            # Pillow would cut 16 bits off at 255.
            opened = pillow.fromarray((np.asarray(opened).astype(np.float64) / 257).round().astype(np.uint8))
        elif opened.mode in ("I", "F"):
            opened = pillow.fromarray(_bytes_of(np.asarray(opened)))
        opened = resizing.square(opened.convert("L" if channels == 1 else "RGB"), size)
        pixels = torch.from_numpy(np.array(opened, dtype=np.uint8))
    except (OSError, ValueError, TypeError, SyntaxError, zipfile.BadZipFile, pillow.DecompressionBombError) as error:
        raise DataError(
            f"{entry.location} cannot be read as an image", got=f"{type(error).__name__}: {error}"
        ) from None
    return pixels.view(size, size, -1).permute(2, 0, 1).contiguous()


def _bytes_of(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """The pixels as bytes. Raises ValueError for numbers that are none, such as those from 0 to 1."""
    if pixels.dtype == np.uint8:
        return pixels
    are_bytes = bool(((pixels >= 0) & (pixels <= 255) & (pixels == pixels.astype(np.int64))).all())
    if not are_bytes or (pixels.dtype.kind not in {"i", "u"} and pixels.max(initial=0) <= 1):
        span = f"{pixels.min(initial=0):g} to {pixels.max(initial=0):g}"
        raise ValueError(f"an array of {pixels.dtype} from {span} instead of bytes from 0 to 255")
    return pixels.astype(np.uint8)
