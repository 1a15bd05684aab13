"""preprocessor_config.json: how a published vision model wants its images, read, written and done."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.data.images.labelled import ImageEntry
from kitforge.data.images.pixels import Resample, Resizing, decode
from kitforge.foundation import seed as seeds
from kitforge.foundation.errors import ModelError
from kitforge.foundation.known_keys import KnownKeys
from kitforge.foundation.untrusted import parse_json
from kitforge.models.vit.model import ViTConfig
from kitforge.models.weight_mapping import ConfigFile

PREPROCESSOR = "preprocessor_config.json"
_CLASSES = ("ViTImageProcessor", "ViTImageProcessorFast", "ViTImageProcessorPil", "ViTFeatureExtractor")
_DEIT = ("DeiTImageProcessor", "DeiTImageProcessorFast", "DeiTImageProcessorPil", "DeiTFeatureExtractor")
_DEIT_DEFAULTS = {"size": 256, "crop_size": 224, "resample": 3, "do_center_crop": True}
_KEYS = KnownKeys(
    file=PREPROCESSOR,
    refusal="images of another preparation",
    obeyed=frozenset(
        {
            "crop_size",
            "do_center_crop",
            "do_normalize",
            "do_rescale",
            "do_resize",
            "image_mean",
            "image_std",
            "resample",
            "rescale_factor",
            "size",
        }
    ),
    accepted={
        "image_processor_type": (*_CLASSES, *_DEIT, None),
        "feature_extractor_type": (*_CLASSES, *_DEIT, None),
        "default_to_square": (True, None),
        "do_pad": (False, None),
        "data_format": ("channels_first", None),
    },
    # All images become RGB, as `load_image` of transformers makes them.
    unused=frozenset(
        {"device", "disable_grouping", "do_convert_rgb", "input_data_format", "processor_class", "return_tensors"}
    ),
    unused_names=re.compile(r"_.*|.*_version"),
)


def read_preprocessor(path: Path, config: ViTConfig) -> ViTConfig:
    """The options of a network with those of its images. Raises ModelError for what we do not compute, or for images of
    another size than the network's."""
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read", got=error) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} cannot be read", got=type(values).__name__, expected="a JSON object")
    _KEYS.check(values, ModelError)
    kind = values.get("image_processor_type") or values.get("feature_extractor_type")
    side = config.image_size
    plain = {"size": side, "crop_size": side, "resample": 2, "do_center_crop": False}
    defaults: dict[str, Any] = _DEIT_DEFAULTS if kind in _DEIT else plain
    file = ConfigFile(defaults | {name: value for name, value in values.items() if value is not None})
    file.name = PREPROCESSOR
    target: tuple[int, ...] = ()
    resample, final = "none", None
    if file.flag("do_resize", True):
        number, filters = file["resample"], get_args(Resample)[1:]
        file.check(number in range(len(filters)), "resample", "one of Pillow's filters, 0 to 5")
        resample, target = filters[number], _sides(file, "size")
        final = target
    if file.flag("do_center_crop", False):
        final = _sides(file, "crop_size")
        target = target or (config.image_size,)
    if final is not None and final != (config.image_size,) * 2:
        message, got = f"{path}: images of another size than the network's", " x ".join(map(str, final))
        raise ModelError(message, got=got, expected=f"{config.image_size} x {config.image_size}, by config.json")
    # The network is given (byte / 255 - mean) / std: another factor is one in mean and std.
    factor = 255 * file.number("rescale_factor", 1 / 255) if file.flag("do_rescale", True) else 255.0
    file.check(factor > 0, "rescale_factor", "a number above 0")
    means, deviations = [0.0] * config.num_channels, [1.0] * config.num_channels
    if file.flag("do_normalize", True):
        means, deviations = (_numbers(file, name, config) for name in ("image_mean", "image_std"))
    return replace(
        config,
        image_mean=tuple(each / factor for each in means) if factor != 1 else tuple(means),
        image_std=tuple(each / factor for each in deviations) if factor != 1 else tuple(deviations),
        image_resize=() if target == (config.image_size,) * 2 else target,
        image_resample=resample,  # type: ignore[arg-type]
    )


def _numbers(file: ConfigFile, key: str, config: ViTConfig) -> list[float]:
    """Of each channel; one number is that of all."""
    value = file.given(key, list(getattr(config, key)))
    value = value if isinstance(value, (list, tuple)) else [value] * config.num_channels
    are_numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in value)
    file.check(are_numbers and len(value) == config.num_channels, key, f"{config.num_channels} numbers")
    return [float(each) for each in value]


def _sides(file: ConfigFile, key: str) -> tuple[int, ...]:
    """Height and width, or the shorter side alone."""
    value = file[key]
    if isinstance(value, int):
        value = [value, value]
    if isinstance(value, dict):
        names = ("shortest_edge",) if set(value) == {"shortest_edge"} else ("height", "width")
        value = [value[name] for name in names] if set(value) == set(names) else []
    are_sides = (
        isinstance(value, (list, tuple)) and len(value) in (1, 2) and all(isinstance(each, int) for each in value)
    )
    file.check(are_sides and all(each > 0 for each in value), key, "height and width, or shortest_edge")
    return tuple(value)


def write_preprocessor(config: ViTConfig) -> dict[str, Any]:
    """What transformers' image processor needs to prepare images as ours are."""
    square = {"height": config.image_size, "width": config.image_size}
    target = config.image_resize or (config.image_size, config.image_size)
    size = {"shortest_edge": target[0]} if len(target) == 1 else dict(zip(("height", "width"), target, strict=True))
    values = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": config.image_resample != "none",
        "size": size,
        "resample": max(0, get_args(Resample).index(config.image_resample) - 1),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(config.image_mean),
        "image_std": list(config.image_std),
    }
    return values | ({"do_center_crop": True, "crop_size": square} if config.image_resize else {})


def decode_for(config: ViTConfig, entry: ImageEntry) -> Tensor:
    """The image as bytes [C, S, S], as a network wants it."""
    resizing = Resizing(target=config.image_resize, resample=config.image_resample)
    return decode(entry, config.image_size, config.num_channels, resizing)


def normalized(images: Tensor, config: ViTConfig) -> Tensor:
    """Bytes [B, C, S, S] as numbers that the network was trained with."""
    mean, deviation = (
        torch.tensor(each, device=images.device).view(-1, 1, 1) for each in (config.image_mean, config.image_std)
    )
    return (images.float() / 255 - mean) / deviation


def augmented(images: Tensor, kinds: Sequence[str], seed: int, step: int, samples: Sequence[int]) -> Tensor:
    """Bytes [B, C, S, S], each mirrored at random and moved by up to an eighth of its side over black; a function of
    seed, step and the number of the sample, not of the batch around it."""
    size = images.shape[-1]
    reach = size // 8 if "crop" in kinds else 0
    padded = functional.pad(images, (reach,) * 4)
    found = torch.empty_like(images)
    for row, sample in enumerate(samples):
        draw = torch.randint(0, 2**31, (3,), generator=seeds.generator(seed, "augment", step, sample)).tolist()
        top, left = (number % (2 * reach + 1) for number in draw[:2])
        image = padded[row, :, top : top + size, left : left + size]
        found[row] = image.flip(-1) if "flip" in kinds and draw[2] % 2 else image
    return found
