"""Images as bytes of one size. Needs Pillow.

C channels, S pixels of a side.
"""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.images.labelled import ImageEntry
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import DataError

Resample = Literal["none", "nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
# In the order of Pillow's numbers.
_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


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
    """The image as bytes [C, S, S], upright. Raises DataError naming one that is not an image of bytes."""
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
