"""What features need to know of the training rows: means, edges, vocabularies, collisions. Plain data, kept as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from kitforge.foundation.config import from_dict, to_dict
from kitforge.foundation.errors import DataError
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json
from kitforge.kits.recommender.schema import FeatureSchema

FORMAT = 1
# Tables that are named where values share buckets.
_MAX_TABLES = 4


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of a numeric feature over the training rows, after its logarithm."""

    mean: float
    deviation: float  # 0 where all values are equal
    num_missing: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CollisionStats:
    """How the distinct values of a hashed table share its buckets."""

    num_values: int  # distinct ones
    num_colliding: int  # that share a bucket with another
    num_buckets: int
    is_estimated: bool = False  # from a sample of the values, where there were too many to be counted

    def __str__(self) -> str:
        about = "about " if self.is_estimated else ""
        return f"{about}{self.num_colliding:,} of {self.num_values:,} values in {self.num_buckets:,} buckets"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """All of it, by feature or by table."""

    num_rows: int
    moments: dict[str, Moments] = field(default_factory=dict)
    edges: dict[str, tuple[float, ...]] = field(default_factory=dict)
    vocabularies: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by table: keys by falling frequency
    num_rare: dict[str, int] = field(default_factory=dict)  # by table: distinct values left out of the vocabulary
    collision_stats: dict[str, CollisionStats] = field(default_factory=dict)  # by table
    positive_rate: float | None = None  # share of labels that are 1

    def collisions(self) -> str | None:
        """The tables whose values share buckets, in words, those with the largest share of such values first."""
        crowded = [(name, each) for name, each in self.collision_stats.items() if each.num_colliding]
        crowded.sort(key=lambda item: -item[1].num_colliding / item[1].num_values)
        words = [f"{name} {each}" for name, each in crowded[:_MAX_TABLES]]
        left = len(crowded) - len(words)
        return "; ".join(words + ([f"fewer in {left} other tables"] if left else [])) or None


def save_features(path: Path, schema: FeatureSchema, statistics: FeatureStatistics) -> None:
    """Write schema and statistics to one JSON file, whole or not at all."""
    content = {"format": FORMAT, "schema": to_dict(schema), "statistics": to_dict(statistics)}
    write_text(path, json.dumps(content, separators=(",", ":")))


def load_features(path: Path) -> tuple[FeatureSchema, FeatureStatistics]:
    """What `save_features` wrote. Raises DataError for anything else."""
    try:
        content: Any = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the features {path}", got=error, fix="name a run of the recommender") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path} holds no features", got=f"format {got}", expected=f"format {FORMAT}")
    return from_dict(FeatureSchema, content["schema"], "schema"), from_dict(
        FeatureStatistics, content["statistics"], "statistics"
    )
