"""Tensors in the state of a run, stored in a safetensors file next to state.json."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.safetensors_file import TensorFile
from kitforge.foundation.errors import CheckpointError

# In state.json a tensor is a dict with this key; the value is its name in the safetensors file.
_KEY = "state_tensor"


def detach_tensors(value: Any, tensors: dict[str, Tensor], path: str = "state") -> Any:
    """The state with a name in the place of each tensor, which is copied into `tensors`. Raises CheckpointError for
    tensors that safetensors cannot hold."""
    if isinstance(value, Tensor):
        safetensors_file.check_storable(path, value)
        tensors[path] = value.detach().cpu().clone()
        return {_KEY: path}
    if isinstance(value, Mapping):
        if _KEY in value:
            raise CheckpointError(f"{path} cannot be stored", got=f"the key {_KEY!r}", expected="another key")
        return {key: detach_tensors(each, tensors, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [detach_tensors(each, tensors, f"{path}[{index}]") for index, each in enumerate(value)]
    return value


def attach_tensors(value: Any, file: TensorFile) -> Any:
    """What `detach_tensors` was given; the tensors are mapped from the file. Raises CheckpointError for one that is not
    there."""
    if isinstance(value, dict):
        if value.keys() == {_KEY}:
            return file.tensor(value[_KEY])
        return {key: attach_tensors(each, file) for key, each in value.items()}
    return [attach_tensors(each, file) for each in value] if isinstance(value, list) else value
