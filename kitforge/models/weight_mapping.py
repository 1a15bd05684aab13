"""How the tensors of one of our models lie inside a foreign checkpoint, as data that works in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from kitforge.core.nn.decoder import FamilyConfig
from kitforge.foundation.errors import ModelError

# What the head is called where a checkpoint holds one.
HEADS = ("lm_head.weight", "transformer.output_layer.weight")


MAX_COUNT = 2**31 - 1


@final
class ConfigFile(dict[str, Any]):
    """A config.json, read with types and ranges. A key without a default must be there; null is as good as absent,
    but where None has a meaning. Raises ModelError naming the key."""

    def __missing__(self, key: str) -> Any:
        raise ModelError("config.json lacks a key that this architecture needs", got=", ".join(self), expected=key)

    def count(self, key: str, default: int | None = None, *, largest: int = MAX_COUNT) -> int:
        """A whole number from 1 to `largest`; without a default it must be given."""
        value = self[key] if default is None else self.given(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        self.check(is_integer and 1 <= value <= largest, key, f"a whole number from 1 to {largest}")
        return int(value)

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """The same, or None where the file says null."""
        return None if self.get(key, default) is None else self.count(key, default)

    def number(self, key: str, default: float, *, least: float = 0.0, below: float = math.inf) -> float:
        """A number of at least `least` and less than `below`."""
        value = self.given(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self.check(
            is_number and least <= value < below, key, f"a number from {least:g} up to, not including, {below:g}"
        )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.given(key, default)
        self.check(isinstance(value, bool), key, "true or false")
        return bool(value)

    def group(self, key: str) -> dict[str, Any]:
        """A mapping of its own; empty where there is none."""
        value = self.given(key, {})
        self.check(isinstance(value, Mapping), key, "a JSON object")
        return dict(value)

    def given(self, key: str, default: Any) -> Any:
        """The value, or the default for one that is absent or null."""
        value = self.get(key)
        return default if value is None else value

    def check(self, condition: bool, key: str, expected: str) -> None:
        """Raise ModelError about the value of the key unless the condition holds."""
        if not condition:
            got = f"{key}={self.get(key)!r}"
            raise ModelError("config.json has a value that no network has", got=got[:200], expected=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMapping:
    """Our tensor is `rows` rows from `start` of their tensor, which is transposed first if `transpose`."""

    ours: str
    theirs: str
    transpose: bool = False
    start: int = 0
    rows: int | None = None  # None: all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Converter:
    """The conversion of one family's options and tensors to and from Hugging Face folders."""

    model_types: tuple[str, ...]  # of config.json
    read_config: Callable[[Mapping[str, Any]], FamilyConfig]
    write_config: Callable[[Any], dict[str, Any]]
    tensor_mappings: Callable[[Any, str], list[TensorMapping]]  # (config, model_type of the folder)
    prefixes: tuple[str, ...]  # which a bare model's tensors lack
    ignored_suffixes: tuple[str, ...]  # endings of tensors that hold nothing to learn


def import_tensors(
    converter: Converter, mappings: Sequence[TensorMapping], names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors from a checkpoint that holds `names`. Raises ModelError listing what is missing or left
    over; a head beside the embedding that it is tied to is left over unless they are equal."""
    wanted = {mapping.theirs for mapping in mappings}
    held = {
        _full_name(name, converter, wanted): name for name in names if not name.endswith(converter.ignored_suffixes)
    }
    missing, surplus = sorted(wanted - held.keys()), sorted(held.keys() - wanted)
    unexpected = [name for name in surplus if name not in HEADS or not _is_embedding(name, mappings, held, read)]
    if missing or unexpected:
        raise ModelError(
            "the checkpoint does not hold this architecture",
            got=f"{len(missing)} missing {missing[:5]}, {len(unexpected)} unexpected {unexpected[:5]}",
            expected=f"{len(wanted)} tensors",
            fix="check that config.json belongs to these weights",
        )
    ends: dict[str, int] = {}
    for mapping in mappings:
        if mapping.rows is not None:
            ends[mapping.theirs] = max(ends.get(mapping.theirs, 0), mapping.start + mapping.rows)
    for mapping in mappings:
        tensor = read(held[mapping.theirs])
        tensor = tensor.t() if mapping.transpose else tensor
        rows = ends.get(mapping.theirs, tensor.shape[0])
        if rows != tensor.shape[0]:
            raise ModelError(
                f"tensor {mapping.theirs!r} is of another size",
                got=f"{tensor.shape[0]} rows",
                expected=f"{rows} rows, by config.json",
                fix="check that config.json belongs to these weights",
            )
        yield mapping.ours, tensor if mapping.rows is None else tensor[mapping.start : mapping.start + mapping.rows]


def _is_embedding(
    name: str, mappings: Sequence[TensorMapping], held: Mapping[str, str], read: Callable[[str], Tensor]
) -> bool:
    """Whether a tensor is the embedding once more."""
    theirs = next(mapping.theirs for mapping in mappings if mapping.ours == "embedding.weight")
    return theirs in held and torch.equal(read(held[name]), read(held[theirs]))


def export_tensors(mappings: Sequence[TensorMapping], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, pieces of one tensor joined in order; ours are asked for in `export_order`."""
    for name, members in _by_theirs(mappings).items():
        yield name, _joined(members, ours)


def _joined(members: Sequence[TensorMapping], ours: Mapping[str, Tensor]) -> Tensor:
    first = members[0].ours
    tensor = (ours[first] if len(members) == 1 else torch.cat([ours[mapping.ours] for mapping in members])).detach()
    return (tensor.t() if members[0].transpose else tensor).contiguous()


def export_order(mappings: Sequence[TensorMapping]) -> list[str]:
    """Our names, in the order in which an export asks for them."""
    return [mapping.ours for members in _by_theirs(mappings).values() for mapping in members]


def held_shapes(
    converter: Converter, mappings: Sequence[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a foreign checkpoint's tensors by the names that the pieces have for them, others left out."""
    wanted = {mapping.theirs for mapping in mappings}
    full = {_full_name(name, converter, wanted): shape for name, shape in shapes.items()}
    return {name: shape for name, shape in full.items() if name in wanted}


def _by_theirs(mappings: Sequence[TensorMapping]) -> dict[str, list[TensorMapping]]:
    """The pieces of each of their tensors, in the order of its rows."""
    groups: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        groups.setdefault(mapping.theirs, []).append(mapping)
    return {name: sorted(members, key=lambda mapping: mapping.start) for name, members in groups.items()}


def require(config: Mapping[str, Any], expected: Mapping[str, Any], network: str) -> None:
    """Raise ModelError where a config.json sets one of the keys of `expected` to another value: we have no such
    network. An absent key counts as expected."""
    for name, value in expected.items():
        if config.get(name, value) != value:
            raise ModelError(
                f"a {network} of another architecture", got=f"{name}={config[name]}", expected=f"{name}={value}"
            )


def _full_name(name: str, converter: Converter, wanted: Collection[str]) -> str:
    """A tensor's name as a model with a head has it; checkpoints of the bare model lack the prefix."""
    candidates = [name, *(prefix + name for prefix in converter.prefixes)]
    return next((candidate for candidate in candidates if candidate in wanted), name)


def read_rope(config: ConfigFile) -> dict[str, Any]:
    """Rope's options of a config.json of either generation: `rope_parameters`, or `rope_scaling` with top-level keys.

    Returns theta, fraction and scaling (the options of `RopeScaling`, or None), absent keys left out.
    """
    nested = config.group("rope_parameters") or config.group("rope_scaling")
    result: dict[str, Any] = {}
    inner = {name: nested.pop(name, None) for name in ("rope_theta", "partial_rotary_factor")}
    plain = ConfigFile(config | {name: value for name, value in inner.items() if value is not None})
    if plain.get("rope_theta") is not None:
        result["theta"] = plain.number("rope_theta", 0.0, least=1.0, below=1e12)
    if plain.get("partial_rotary_factor") is not None:
        result["fraction"] = plain.number("partial_rotary_factor", 0.0, below=1.0 + 1e-9)
    # A note about the training of a YaRN checkpoint, which changes nothing computed.
    nested.pop("finetuned", None)
    kind = nested.pop("rope_type", None) or nested.get("type") or "default"
    nested.pop("type", None)
    if kind != "default":
        original = config.optional_count("original_max_position_embeddings") or nested.pop(
            "original_max_position_embeddings", None
        )
        nested.pop("original_max_position_embeddings", None)
        result["scaling"] = {"kind": kind, **_renamed(nested, SCALING_NAMES)} | (
            {"original_length": original} if original else {}
        )
    return result


SCALING_NAMES = {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}


def write_rope(theta: float, fraction: float | None, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `rope_parameters` of config.json."""
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if fraction is not None:
        result["partial_rotary_factor"] = fraction
    if scaling is not None:
        back = {ours: theirs for theirs, ours in SCALING_NAMES.items()} | {
            "kind": "rope_type",
            "original_length": "original_max_position_embeddings",
        }
        used = {name: value for name, value in scaling.items() if value is not None and _applies(name, scaling["kind"])}
        result |= _renamed(used, back)
    return result


def _applies(name: str, kind: str) -> bool:
    """Whether a scaling of this kind has this option."""
    only = {
        "low_frequency_factor": ("llama3",),
        "high_frequency_factor": ("llama3",),
        "beta_fast": ("yarn",),
        "beta_slow": ("yarn",),
        "truncate": ("yarn",),
    }
    return kind in only.get(name, (kind,))


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}
