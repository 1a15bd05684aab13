"""Runs of the recommender kit that take a second, on one rank or on those of a test."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kitforge.composition import compose_config
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.tables.synthetic_clicks import SyntheticClicksConfig
from kitforge.kits.kit import RunAssembly
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.trainer.run_folder import train
from tests.distributed.training import Losses, TestRendezvous

KIT = TASKS["recommendation"]

LOG = SyntheticClicksConfig(num_rows=1200, fields=(60, 30, 20, 10), crosses=((2, 3),), num_dense=2, history=4)
OPTIONS: dict[str, Any] = {
    "data.batch_size": 100,
    "trainer.max_steps": 8,
    "trainer.progress": False,
    "model.dim": 4,
    "device": "cpu",
}
# What makes each family small.
FAMILIES: dict[str, dict[str, Any]] = {
    "wide_deep": {"model.hidden": [8], "model.dropout": 0.1},
    "deepfm": {"model.hidden": [8]},
    "dcn_v2": {"model.hidden": [8], "model.num_cross_layers": 2},
    "dlrm": {"model.bottom": [4], "model.top": [8]},
    "din": {"model.hidden": [8], "model.attention": [4], "model.dropout": 0.1},
    "two_tower": {
        "model.user": ["c1", "history", "d1"],
        "model.item": ["c2", "c3"],
        "model.hidden": [8],
        "model.output_dim": 4,
        "model.dropout": 0.1,
    },
    "sasrec": {"model.num_layers": 1, "model.max_length": 12, "retrieval.num_negatives": 12},
}
# Sequences for the family that wants nothing else.
SEQUENCES: dict[str, Any] = {
    "data.schema": {"sequences": {"items": {"kind": "integer", "encoding": "vocabulary", "max_length": 9}}}
}


def rows_of(family: str) -> Any:
    """What a family is trained on here."""
    if family != "sasrec":
        return LOG
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 12, (300,), generator=generator).tolist()
    starts = torch.randint(0, 30, (300,), generator=generator).tolist()
    # Everybody goes through the items in a circle.
    rows = zip(starts, lengths, strict=True)
    return [{"items": [(start + place) % 30 for place in range(length)]} for start, length in rows]


def ready(
    folder: Path, family: str, choices: Mapping[str, Any], rows: Any = None
) -> tuple[RunAssembly[Any, Any], Losses]:
    """A run that is about to start in `folder`, on rows of its own or on those that its family has here."""
    told = Losses()
    given = {**OPTIONS, **FAMILIES[family], **(SEQUENCES if family == "sasrec" else {})}
    model = {} if "checkpoint" in choices else {"model": family}
    if "checkpoint" in choices:
        given = {name: value for name, value in given.items() if not name.startswith("model")}
    values = compose_config("recommendation", {**model, **given, "output_dir": str(folder), **choices}).values
    options = KIT.read_options(values)
    degrees: ParallelConfig = options.parallel
    return KIT.assemble(
        options,
        Inputs(callbacks=[told], train_dataset=rows_of(family) if rows is None else rows),
        TestRendezvous(degrees, options.device),
    ), told


def run(
    folder: Path,
    family: str = "wide_deep",
    choices: Mapping[str, Any] | None = None,
    stop_at: int | None = None,
    rows: Any = None,
) -> tuple[Losses, dict[str, torch.Tensor]]:
    """Train; the lines of the log, and every weight and row of this rank."""
    torch.set_num_threads(1)
    assembly, told = ready(folder, family, choices or {}, rows)
    told.stop_at = stop_at
    try:
        train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
        return told, state_of(assembly)
    finally:
        assembly.loop.model.tables.close()


def by_default(folder: Path, family: str, rows: list[dict[str, Any]], num_trained: int) -> dict[str, float]:
    """The metrics of a run with nothing said of how it learns, held to the rows behind those that it is trained on."""
    torch.set_num_threads(1)
    chosen = {"model": family, "output_dir": str(folder), "device": "cpu", "trainer.progress": False}
    inputs = Inputs(train_dataset=rows[:num_trained], eval_dataset=rows[num_trained:])
    options = KIT.read_options(compose_config("recommendation", chosen).values)
    assembly = KIT.assemble(options, inputs, TestRendezvous(ParallelConfig()))
    return train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def state_of(assembly: RunAssembly[Any, Any]) -> dict[str, torch.Tensor]:
    """Weights by name, and of every table the ids and whole records in the order of the ids."""
    model: Any = assembly.loop.model
    state = {name: piece.detach().clone() for name, piece in assembly.loop.state.parallel.parameters().items()}
    for name, table in assembly.loop.state.tables().items():
        source = table.begin_snapshot()
        chunks = [(ids.clone(), rows.clone()) for ids, rows in source.chunks()]
        source.close()
        if not chunks:
            # Another rank has them all.
            continue
        ids, rows = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        order = ids.argsort()
        state |= {f"{name} ids": ids[order], f"{name} rows": rows[order]}
    assert model.tables is not None
    return state


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit; records hold whole numbers too, whose bits need not be a float."""
    return one.keys() == other.keys() and all(torch.equal(_bits(one[name]), _bits(other[name])) for name in one)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32) if tensor.dtype == torch.float32 else tensor


def numbers(told: Losses, name: str) -> list[float]:
    """The values of one metric."""
    return [line[name] for line in told.lines if name in line]


def in_folder(rank: int, folder: Path, family: str, choices: Mapping[str, Any]) -> Losses:
    """`run` on a rank of a test."""
    told, _ = run(folder, family, choices)
    return told
