"""Exports the scoring network or the user tower by torch.export: ids in, probabilities or vectors out.

The program needs torch only. A JSON file beside it describes the inputs and how values become ids.

Legend: B rows, d numbers, N ids of a bag in all rows, L places of a sequence.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import load_tensors
from kitforge.core.nn.embedding_spec import EmbeddingLookup
from kitforge.embedding_cache.serving.table import ServedTable
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import atomic_file
from kitforge.kits.recommender.factory import OBJECTIVES
from kitforge.kits.recommender.model import MISSING_SUFFIX, ReadOnlyTables, Recommender, sample_shape
from kitforge.kits.recommender.schema import FeatureSchema
from kitforge.models.catalog import build_recommender


class ScoringProgram(nn.Module):
    """Named inputs, as in the description of the program -> probabilities [B]; for two towers, user vectors [B, dim].
    All rows of each table are a weight."""

    def __init__(self, model: Recommender, pooling: str, max_lengths: Mapping[str, int]) -> None:
        super().__init__()
        network = build_recommender(model.config, sample_shape(model.encoder))
        load_tensors(dict(network.named_parameters()), model.network.named_parameters(), what="network")
        part = exported_part(model)
        self.network = network.get_submodule(part)
        self._is_user = bool(part)
        self._lookups = [each for each in model.requests.lookups if model.config.is_of(part, each)]
        self._plan = model.requests
        self._pooling = pooling
        self._max_lengths = dict(max_lengths)
        self._bags = frozenset(model.encoder.schema.bags)
        used = {self._plan.table_of(lookup, feature)[0] for lookup in self._lookups for feature in lookup.features}
        assert isinstance(model.tables, ReadOnlyTables)
        self._positions = {name: f"table_{number}" for number, name in enumerate(sorted(used))}
        for name, position in self._positions.items():
            self.register_buffer(position, _all_rows(model.tables.tables[name]))

    @property
    def features(self) -> list[str]:
        """The features with ids in this program."""
        return list(dict.fromkeys(feature for lookup in self._lookups for feature in lookup.features))

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """See the class."""
        vectors: dict[str, Tensor] = {}
        for lookup in self._lookups:
            if lookup.pooling == "sequence":
                (feature,) = lookup.features
                vectors[lookup.name] = self._rows(lookup, feature, inputs[f"sequences.{feature}.ids"])
                vectors[f"{lookup.name}.lengths"] = inputs[f"sequences.{feature}.lengths"]
                continue
            parts = [self._pooled(lookup, feature, inputs) for feature in lookup.features]
            stacked = torch.stack(parts, dim=1)
            vectors[lookup.name] = stacked.sum(1) if lookup.pooling == "sum" else stacked
        output: Tensor = self.network(inputs["dense"], vectors)
        return output.float() if self._is_user else output.float().sigmoid()

    def _rows(self, lookup: EmbeddingLookup, feature: str, ids: Tensor) -> Tensor:
        table, start = self._plan.table_of(lookup, feature)
        return nn.functional.embedding(ids + start, getattr(self, self._positions[table]))

    def _pooled(self, lookup: EmbeddingLookup, feature: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """The vector of a feature for each row [B, dim]."""
        if feature in self._bags:
            rows = self._rows(lookup, feature, inputs[f"bags.{feature}.ids"])
            lengths = inputs[f"bags.{feature}.lengths"]
            # The bag of each id: the number of bags that end before it, counted with what ONNX has too.
            ends = lengths.new_zeros(rows.shape[0] + 1).index_add(0, lengths.cumsum(0), torch.ones_like(lengths))
            owners = ends.cumsum(0)[:-1]
            total = rows.new_zeros(lengths.shape[0], rows.shape[1]).index_add(0, owners, rows)
            is_sum = lookup.kind == "wide" or self._pooling == "sum"
            return total if is_sum else total / lengths.clamp(min=1).unsqueeze(1)
        if feature in self._max_lengths:
            rows, lengths = (
                self._rows(lookup, feature, inputs[f"sequences.{feature}.ids"]),
                inputs[f"sequences.{feature}.lengths"],
            )
            is_there = torch.arange(rows.shape[1], device=rows.device) < lengths.unsqueeze(1)
            total = (rows * is_there.unsqueeze(2)).sum(1)
            return total / lengths.clamp(min=1).unsqueeze(1)
        return self._rows(lookup, feature, inputs[f"ids.{feature}"])


def export_program(model: Recommender, pooling: str, step: int, target: Path) -> None:
    """Write the program to `target`, and the description of its inputs to the same name with `.json`. Raises ModelError
    for a network that cannot be exported, and ConfigError for an unbounded table."""
    check(target.suffix == ".pt2", "output", target, "a file .pt2")
    exported_part(model)
    lengths = {name: feature.max_length for name, feature in model.encoder.schema.sequences.items()}
    program = ScoringProgram(model, pooling, lengths).eval().requires_grad_(False)
    example = _example(model, program.features)
    batch, shapes = torch.export.Dim("batch", min=1), dict[str, Any]()
    for number, name in enumerate(example):
        is_ragged = name.startswith("bags.") and name.endswith(".ids")
        shapes[name] = {0: torch.export.Dim(f"values_{number}", min=0) if is_ragged else batch}
    with torch.no_grad():
        exported = torch.export.export(program, (example,), dynamic_shapes=(shapes,))
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(target) as file:
        torch.export.save(exported, file)
    with atomic_file(target.with_suffix(".json")) as file:
        file.write(json.dumps(_description(model, program, example, step), indent=1, ensure_ascii=False).encode())


def exported_part(model: Recommender) -> str:
    """The part of the network that is exported. Raises ModelError for a network that cannot be."""
    if (part := OBJECTIVES[model.config.objective].exported_part) is None:
        expected = "a family that scores, or a two_tower"
        raise ModelError("this family is not exported", got=model.config.family, expected=expected)
    return part


def _all_rows(table: nn.Module) -> Tensor:
    """All rows [n, dim] of a table; rows that training never saw have their initial values."""
    assert isinstance(table, ServedTable)
    num_rows = table.options.num_embeddings
    if num_rows is None:
        raise ConfigError(
            "an unbounded table cannot be exported: its ids are any 64-bit integers",
            got=f"encoding: exact, table {table.options.name}",
            expected="encoding hash or vocabulary",
            fix="train with another encoding, or serve the run: kitforge serve checkpoint=RUN",
        )
    return table.vectors(torch.arange(num_rows))


def _example(model: Recommender, features: list[str]) -> dict[str, Tensor]:
    """Example inputs for tracing. No size is 0 or 1, which torch.export would specialise."""
    schema, rows = model.encoder.schema, 3
    inputs = {"dense": torch.zeros(rows, model.encoder.num_dense)}
    for name in features:
        if name in schema.bags:
            inputs[f"bags.{name}.ids"] = torch.zeros(5, dtype=torch.int64)
            inputs[f"bags.{name}.lengths"] = torch.tensor([2, 0, 3])
        elif name in schema.sequences:
            length = schema.sequences[name].max_length
            inputs[f"sequences.{name}.ids"] = torch.zeros(rows, length, dtype=torch.int64)
            inputs[f"sequences.{name}.lengths"] = torch.tensor([0, 1, length])
        else:
            inputs[f"ids.{name}"] = torch.zeros(rows, dtype=torch.int64)
    return inputs


def _description(model: Recommender, program: ScoringProgram, example: Mapping[str, Tensor], step: int) -> Any:
    statistics = model.encoder.statistics
    return {
        "format_version": 1,
        "family": model.config.family,
        "step": step,
        "output": "user vectors [batch, dim]" if program._is_user else "probabilities [batch]",
        "inputs": [_input(name, tensor, model.encoder.schema) for name, tensor in example.items()],
        # The content of the run's features.json.
        "features": {"schema": to_dict(model.encoder.schema), "statistics": to_dict(statistics)},
    }


def _input(name: str, tensor: Tensor, schema: FeatureSchema) -> dict[str, Any]:
    kind, _, feature = name.partition(".")
    shape: list[Any] = ["batch", *tensor.shape[1:]]
    found: dict[str, Any] = {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
    if kind == "dense":
        holds = []
        for each, number in schema.numeric.items():
            holds.append({"name": each, **dataclasses.asdict(number)})
            holds += [{"name": f"{each}{MISSING_SUFFIX}"}] if number.indicator else []
        return found | {"holds": holds}
    feature, _, part = (feature, "", "ids") if kind == "ids" else feature.rpartition(".")
    if part == "lengths":
        return found | {"feature": feature, "holds": "number of ids of each row"}
    if kind == "bags":
        found["shape"] = ["all ids of the batch"]
    features: dict[str, Any] = {
        **schema.bucketed, **schema.categorical, **schema.bags, **schema.sequences, **schema.crosses
    }  # fmt: skip
    return found | {"feature": feature, "holds": "ids", "encoding": to_dict(features[feature])}
