"""Reading and writing of Hugging Face folders: config.json and safetensors files, for any architecture.

Layout: https://huggingface.co/docs/huggingface_hub/package_reference/serialization. Pickle is refused.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.cleanup import clean
from kitforge.core.checkpoint.safetensors_file import TensorFile
from kitforge.foundation.errors import CheckpointError, ModelError
from kitforge.foundation.files import process_name, sync_folder, write_text
from kitforge.foundation.untrusted import parse_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


class HuggingFaceFolder:
    """A folder whose files are complete; tensors are memory-mapped on first access."""

    def __init__(self, folder: Path, config: dict[str, Any], files: list[TensorFile]) -> None:
        self.path = folder
        self.config = config
        self._files: dict[str, TensorFile] = {}
        for file in files:
            for name in file.names():
                if name in self._files:
                    raise ModelError(f"two shards of {folder} hold the tensor {name!r}", expected="one")
                self._files[name] = file

    def names(self) -> list[str]:
        """The names of all tensors, shard by shard."""
        return list(self._files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors, from the headers alone."""
        return {name: file.shape(name) for name, file in self._files.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is stored; None for one that torch does not have."""
        return self._file(name).dtype(name)

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; its memory is the file's. Raises ModelError when there is none."""
        return self._file(name).tensor(name)

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            raise ModelError(f"{self.path} holds no tensor {name!r}")
        return self._files[name]


def read_folder(folder: Path) -> HuggingFaceFolder:
    """Open a folder with config.json and model.safetensors, or shards and their index.

    Raises ModelError that names the file which is missing, damaged or pickled.
    """
    if not folder.is_dir():
        raise ModelError(f"there is no model folder {folder}")
    config = _read_json(folder / CONFIG)
    if (folder / WEIGHTS).is_file():
        files = [TensorFile(folder / WEIGHTS, ModelError)]
    elif (folder / INDEX).is_file():
        files = _read_shards(folder)
    else:
        raise _no_weights(folder)
    return HuggingFaceFolder(folder, config, files)


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    outline: Iterable[tuple[str, Tensor]] | None = None,
    shard_bytes: int = 5 * 10**9,
    generation_config: Mapping[str, Any] | None = None,
) -> None:
    """Write a folder that `transformers` opens. Weights and configuration that were there are replaced, nothing else.

    `outline` is the same names with tensors of the same shapes and one dtype that need no values: with it, tensors that
    are made on the way are written one by one; without it, those of a shard are held.

    Everything is written aside first; a reader meets the old model, no model, or the new one, never a mixture.
    Raises CheckpointError for a tensor that cannot be stored, a name given twice, or a disk that is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        clean(folder)
        draft = folder / f".export.{process_name()}.draft"
        draft.mkdir()
        try:
            _write_weights(draft, tensors, outline, shard_bytes)
            if generation_config is not None:
                _write_json(draft / GENERATION_CONFIG, generation_config)
            _write_json(draft / CONFIG, config)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft)
    except OSError as cause:
        raise CheckpointError(
            f"{folder} could not be written: {cause}", fix="make room, or choose another folder"
        ) from cause


def _read_shards(folder: Path) -> list[TensorFile]:
    file_names = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(file_names, dict):
        raise ModelError(f"{folder / INDEX} has no weight_map", expected="a mapping of tensor names to files")
    files: dict[str, TensorFile] = {}
    for name in sorted(set(map(str, file_names.values()))):
        if Path(name).name != name:
            raise ModelError(f"{folder / INDEX} names a file outside of its folder", got=name)
        if not (folder / name).is_file():
            raise ModelError(f"shard {folder / name} is missing", fix="fetch the whole folder again")
        files[name] = TensorFile(folder / name, ModelError)
    held = {name: set(file.names()) for name, file in files.items()}
    for tensor, name in file_names.items():
        if tensor not in held[name]:
            raise ModelError(f"{folder / name} lacks the tensor {tensor!r} that {INDEX} puts there")
    return list(files.values())


def _no_weights(folder: Path) -> ModelError:
    present = sorted(path.name for path in folder.iterdir())
    pickled = [name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if not pickled:
        return ModelError(f"{folder} holds no weights", got=", ".join(present), expected=f"{WEIGHTS} or {INDEX}")
    return ModelError(
        f"{folder} holds pickled weights only, which are refused: loading a pickle can run any code that is in it",
        got=", ".join(pickled),
        expected=f"{WEIGHTS} or {INDEX}",
        fix="if you trust the file, load it with the library it came from and write it again with "
        "save_pretrained(folder, safe_serialization=True)",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{path.parent} has no {path.name}",
            got=", ".join(sorted(each.name for each in path.parent.glob("*"))[:9]) or "nothing",
            expected="a run, a step or a Hugging Face folder",
        ) from None
    except OSError as cause:
        raise ModelError(f"{path} cannot be read", got=cause) from cause
    except ValueError as cause:
        raise ModelError(f"{path} is damaged", got=cause, expected="JSON") from cause
    if not isinstance(values, dict):
        raise ModelError(f"{path} is damaged", got=type(values).__name__, expected="a JSON object")
    return values


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(dict(values), indent=2, sort_keys=True) + "\n")


def _write_weights(
    draft: Path, tensors: Iterable[tuple[str, Tensor]], outline: Iterable[tuple[str, Tensor]] | None, shard_bytes: int
) -> None:
    """Write shards as the stream yields them; their names carry their count, so they are named when it ends."""
    shards: list[Path] = []
    file_names: dict[str, int] = {}
    total = 0
    stream = iter(tensors)
    for shard in safetensors_file.split(stream if outline is None else outline, shard_bytes):
        for name, tensor in shard:
            if outline is None:
                safetensors_file.check_storable(name, tensor)
            if name in file_names:
                raise CheckpointError(f"two tensors are called {name!r}", expected="distinct names")
            file_names[name] = len(shards)
            total += tensor.nbytes
        shards.append(draft / f"shard-{len(shards)}")
        if outline is None:
            safetensors_file.write(shards[-1], shard)
        else:
            safetensors_file.write_stream(shards[-1], shard, stream)
    if len(shards) == 1:
        os.replace(shards[0], draft / WEIGHTS)
        return
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for path, final_name in zip(shards, names, strict=True):
        os.replace(path, draft / final_name)
    _write_json(
        draft / INDEX,
        {"metadata": {"total_size": total}, "weight_map": {name: names[number] for name, number in file_names.items()}},
    )


def _publish(draft: Path, folder: Path) -> None:
    """Move a whole draft into place. Without config.json a folder is not a model, so it goes first and comes last."""
    (folder / CONFIG).unlink(missing_ok=True)
    stale = [path for path in folder.glob("model*.safetensors*") if path.is_file()]
    for path in [folder / GENERATION_CONFIG, *stale]:
        path.unlink(missing_ok=True)
    sync_folder(folder)
    for path in sorted(draft.iterdir(), key=lambda path: path.name == CONFIG):
        os.replace(path, folder / path.name)
    sync_folder(folder)
