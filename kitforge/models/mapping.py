"""How the tensors of one of our models lie inside a foreign checkpoint, as data that works in both directions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.core.nn.decoder import FamilyConfig
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Our tensor is `rows` rows from `start` of their tensor, which is transposed first if `transpose`."""

    ours: str
    theirs: str
    transpose: bool = False
    start: int = 0
    rows: int | None = None  # None: all of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All that the outside of a family needs: its options, and the way to and from Hugging Face folders."""

    config: type[Any]
    model_types: tuple[str, ...]  # of config.json
    read_config: Callable[[Mapping[str, Any]], FamilyConfig]
    write_config: Callable[[Any], dict[str, Any]]
    pieces: Callable[[Any, str], list[Piece]]  # (config, model_type of the folder)
    prefixes: tuple[str, ...]  # which a bare model's tensors lack
    ignored: tuple[str, ...]  # endings of tensors that hold nothing to learn


def import_tensors(
    family: Family, pieces: Sequence[Piece], names: Iterable[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Our names and tensors from a checkpoint that holds `names`. Raises ModelError listing what is missing or left
    over."""
    held = {_full_name(name, family, pieces): name for name in names if not name.endswith(family.ignored)}
    wanted = {piece.theirs for piece in pieces}
    missing, unexpected = sorted(wanted - held.keys()), sorted(held.keys() - wanted)
    if missing or unexpected:
        raise ModelError(
            "the checkpoint does not hold this architecture",
            got=f"{len(missing)} missing {missing[:5]}, {len(unexpected)} unexpected {unexpected[:5]}",
            expected=f"{len(wanted)} tensors",
            fix="check that config.json belongs to these weights",
        )
    for piece in pieces:
        whole = read(held[piece.theirs])
        whole = whole.t() if piece.transpose else whole
        rows = whole.shape[0] - piece.start if piece.rows is None else piece.rows
        if piece.start + rows > whole.shape[0]:
            raise ModelError(
                f"tensor {piece.theirs!r} is too small",
                got=tuple(whole.shape),
                expected=f">= {piece.start + rows} rows",
            )
        yield piece.ours, whole[piece.start : piece.start + rows]


def export_tensors(pieces: Sequence[Piece], ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, pieces of one tensor joined in order."""
    parts: dict[str, list[Piece]] = {}
    for piece in pieces:
        parts.setdefault(piece.theirs, []).append(piece)
    for name, members in parts.items():
        ordered = sorted(members, key=lambda piece: piece.start)
        tensors = [ours[piece.ours].detach() for piece in ordered]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        yield name, (whole.t() if members[0].transpose else whole).contiguous()


def _full_name(name: str, family: Family, pieces: Sequence[Piece]) -> str:
    """A tensor's name as a model with a head has it; checkpoints of the bare model lack the prefix."""
    wanted = {piece.theirs for piece in pieces}
    candidates = [name, *(prefix + name for prefix in family.prefixes)]
    return next((candidate for candidate in candidates if candidate in wanted), name)


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rope's options of a config.json of either generation: `rope_parameters`, or `rope_scaling` with top-level keys.

    Returns theta, fraction and scaling (the options of `RopeScaling`, or None), absent keys left out.
    """
    nested = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    result: dict[str, Any] = {}
    theta = nested.pop("rope_theta", None) or config.get("rope_theta")
    fraction = nested.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    if theta is not None:
        result["theta"] = float(theta)
    if fraction is not None:
        result["fraction"] = float(fraction)
    kind = nested.pop("rope_type", None) or nested.get("type") or "default"
    nested.pop("type", None)
    if kind != "default":
        original = config.get("original_max_position_embeddings") or nested.pop(
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
