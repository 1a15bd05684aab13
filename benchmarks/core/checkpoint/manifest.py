"""How long the manifest of a model of 70 billion parameters takes, by the number of ranks that have saved it.

The names and shapes are those of llama3_70b with the two moments of AdamW; every tensor is cut over all ranks of
`shard`. No tensor is made. Joined: rank 0 makes entries of the slices that all ranks have told. Read: what every rank
does when it opens the step.

Run from the checkout: `python -m benchmarks.core.checkpoint.manifest`; it writes its table to
benchmarks/core/checkpoint/manifest.md.
"""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.checkpoint.load import Checkpoint
from kitforge.core.checkpoint.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    PARTS,
    FileEntry,
    Manifest,
    Part,
    Slice,
    read_manifest,
    write_manifest,
)
from kitforge.core.checkpoint.regions import by_name, entry_of
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.device import describe
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta

LLAMA3_70B = LlamaConfig(
    vocab_size=128256, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, mlp_dim=28672, max_length=8192
)
RANKS = (1, 16, 64, 256)
SMOKE = {"RANKS": (1, 2)}
STATES: dict[Part, tuple[str, ...]] = {"model": ("",), "optimizer": (".exp_avg", ".exp_avg_sq")}


def slices(part: Part, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> Iterator[Slice]:
    for name, shape in shapes.items():
        layout = Layout(shape=shape).split("shard", 0, num_ranks)
        regions = [layout.held_region({"shard": rank}) for rank in range(num_ranks)]
        for suffix in STATES[part]:
            for rank, region in enumerate(regions):
                if region.shape[0]:
                    yield Slice(
                        name=name + suffix,
                        dtype="F32",
                        global_shape=shape,
                        offset=region.offset,
                        shape=region.shape,
                        file=f"{part}-r{rank:05}-00001.safetensors",
                    )


def measure(folder: Path, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> list[str]:
    given = {part: list(slices(part, shapes, num_ranks)) for part in PARTS}
    started = time.perf_counter()
    entries = {part: tuple(entry_of(folder, each) for each in by_name(given[part]).values()) for part in PARTS}
    joined = time.perf_counter() - started
    files = [f"{part}-r{rank:05}-00001.safetensors" for part in PARTS for rank in range(num_ranks)]
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        package_version="0",
        kind="training",
        step=1,
        model=entries["model"],
        optimizer=entries["optimizer"],
        files=tuple(FileEntry(name=name, bytes=1, crc32="0" * 64) for name in files),
    )
    started = time.perf_counter()
    write_manifest(folder, manifest)
    written = time.perf_counter() - started
    started = time.perf_counter()
    Checkpoint(folder, read_manifest(folder), {})
    read = time.perf_counter() - started
    size = (folder / MANIFEST).stat().st_size
    num_slices = sum(map(len, given.values()))
    return [f"{num_ranks}", f"{num_slices:,}", f"{size / 1e6:.1f}", f"{joined:.2f}", f"{written:.2f}", f"{read:.2f}"]


def main() -> None:
    CommandLine(__doc__).parse(SMOKE, globals())
    shapes = {name: tuple(each.shape) for name, each in build_on_meta(LLAMA3_70B).named_parameters()}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in RANKS:
            rows.append(measure(Path(folder), shapes, num_ranks))
    table = [
        "# The manifest of a 70B model\n",
        f"{describe(torch.device('cpu'))}, torch {torch.__version__}; seconds, one process.\n",
        "| ranks | slices | MB | joined | written | read |",
        "|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    write_result(Path(__file__).with_suffix(".md"), "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
