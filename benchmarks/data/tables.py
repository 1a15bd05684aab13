"""Rows a second that click logs are read, cached, encoded and drawn in shuffled order, beside pyarrow and pandas.

Run from the checkout: `python -m benchmarks.data.tables [--date 2026-11-22]`; it writes its table to
benchmarks/data/tables.md.
"""

import gzip
import importlib.metadata
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from pyarrow import csv, parquet

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge.data.schedule import shuffled_indices
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, KeyKind, LabelColumn
from kitforge.data.tables.csv_files import CRITEO_COLUMNS
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import open_table
from kitforge.data.tables.split import RowRange
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.foundation.device import describe, keep_malloc_arenas
from kitforge.foundation.log import console
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.feature_fitting import fit_features
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.schema import CategoricalFeature, Encoding, FeatureSchema, NumericFeature

TEXT_ROWS, PARQUET_ROWS, GROUP_ROWS = 300_000, 1_000_000, 100_000
BATCH = 16_000
REPEATS = 5
SMOKE = {"TEXT_ROWS": 50, "PARQUET_ROWS": 200, "GROUP_ROWS": 50, "BATCH": 16, "REPEATS": 1}
NUMBERS, CATEGORIES = CRITEO_COLUMNS[1:14], CRITEO_COLUMNS[14:]
LABEL = LabelColumn(name="label")


def layout(kind: KeyKind) -> ColumnLayout:
    return ColumnLayout(
        numbers=NUMBERS, keys=tuple(KeyColumn(name=name, kind=kind) for name in CATEGORIES), label=LABEL
    )


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    date = parser.parse(SMOKE, globals()).date
    torch.set_num_threads(os.cpu_count() or 1)
    # As the trainer does.
    keep_malloc_arenas()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = _write(folder)
        lines = [*_readers(folder), *_epochs(folder)]
    text = _page(lines, sizes, date)
    console.print(text, markup=False, soft_wrap=True)
    write_result(Path(__file__).with_suffix(".md"), text)


def _write(folder: Path) -> dict[str, float]:
    """A log with the columns, the share of missing values and the skew of Criteo's, in every format."""
    random = np.random.default_rng(0)
    size = PARQUET_ROWS
    numbers = np.floor(random.lognormal(2, 2, (size, 13))).astype(np.float32)
    ids = np.minimum(random.zipf(1.2, (size, 26)), 10**6).astype(np.int64) * 2654435761 % 2**32
    labels = (random.random(size) < 0.25).astype(np.int8)
    columns: dict[str, Any] = {"label": labels}
    columns |= {
        name: pyarrow.array(numbers[:, place], mask=random.random(size) < 0.2) for place, name in enumerate(NUMBERS)
    }
    columns |= {name: ids[:, place] for place, name in enumerate(CATEGORIES)}
    table = pyarrow.table(columns)
    parquet.write_table(table, folder / "ids.parquet", row_group_size=GROUP_ROWS)
    texts = {
        name: pyarrow.array([f"{value:08x}" for value in ids[:TEXT_ROWS, place]])
        for place, name in enumerate(CATEGORIES)
    }
    whole = {name: table[name].slice(0, TEXT_ROWS).cast(pyarrow.int64()) for name in NUMBERS}
    small = pyarrow.table({"label": labels[:TEXT_ROWS], **whole, **texts})
    parquet.write_table(small, folder / "texts.parquet", row_group_size=GROUP_ROWS)
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(small, folder / "criteo.tsv", options)
    (folder / "packed.tsv.gz").write_bytes(gzip.compress((folder / "criteo.tsv").read_bytes(), 6, mtime=0))
    return {path.name: path.stat().st_size / 1e6 for path in folder.iterdir()}


def _readers(folder: Path) -> Iterator[str]:
    """Ours and the peers to the same columns."""
    files: tuple[tuple[str, str, KeyKind, int], ...] = (
        ("criteo.tsv", "Criteo TSV", "text", TEXT_ROWS),
        ("packed.tsv.gz", "Criteo TSV, packed", "text", TEXT_ROWS),
        ("texts.parquet", "Parquet, categories as text", "text", TEXT_ROWS),
        ("ids.parquet", "Parquet, categories as 64-bit ids", "integer", PARQUET_ROWS),
    )
    for name, title, kind, rows in files:
        peers = [] if is_smoke() else _peers(folder / name)
        yield _line(title, rows, [partial(_read, folder / name, kind), *peers])


def _peers(path: Path) -> list[Callable[[], object]]:
    """pyarrow and pandas; they read by default, and texts are hashed by pandas."""
    import pandas

    if path.suffix == ".parquet":
        return [
            lambda: _same_columns(parquet.read_table(path).to_pandas()),
            lambda: _same_columns(pandas.read_parquet(path)),
        ]
    converted = csv.ConvertOptions(
        column_types={name: pyarrow.float32() for name in NUMBERS} | dict.fromkeys(CATEGORIES, pyarrow.string())
    )
    named = csv.ReadOptions(column_names=CRITEO_COLUMNS)
    tabs = csv.ParseOptions(delimiter="\t", quote_char=False)
    types = dict.fromkeys(CATEGORIES, "str")
    return [
        lambda: _same_columns(csv.read_csv(path, named, tabs, converted).to_pandas()),
        lambda: _same_columns(pandas.read_csv(path, sep="\t", names=list(CRITEO_COLUMNS), dtype=types)),
    ]


def _same_columns(frame: Any) -> tuple[Any, Any, Any]:
    """A peer's table as numbers [n, 13], 64-bit keys [n, 26] and labels [n]."""
    import pandas

    texts = [pandas.util.hash_array(frame[name].array) for name in CATEGORIES if frame[name].dtype != "int64"]
    keys = np.stack(texts, axis=1) if texts else frame[list(CATEGORIES)].to_numpy()
    return frame[list(NUMBERS)].to_numpy(np.float64), keys, frame["label"].to_numpy(np.float32)


def _read(path: Path, kind: KeyKind) -> None:
    for _ in read_columns(open_table(path), layout(kind), BadRows()):
        pass


def _epochs(folder: Path) -> Iterator[str]:
    source, bad = open_table(folder / "ids.parquet"), BadRows()
    begin = time.perf_counter()
    table = load_table(source, layout("integer"), folder / "cache", bad)
    built = time.perf_counter() - begin
    bytes_a_row = sum(path.stat().st_size for path in (folder / "cache").rglob("*.bin")) / PARQUET_ROWS
    yield f"| building the column cache ({bytes_a_row:.0f} bytes a row) | {_thousands(PARQUET_ROWS / built)} | | |"
    encodings: tuple[Encoding, ...] = ("hash", "vocabulary")
    for encoding in encodings:
        schema = FeatureSchema(
            label=LABEL,
            numeric={name: NumericFeature(log=True) for name in NUMBERS},
            categorical={name: CategoricalFeature(kind="integer", encoding=encoding) for name in CATEGORIES},
        )
        begin = time.perf_counter()
        encoder = FeatureEncoder(schema, fit_features(schema, table, RowRange(0, PARQUET_ROWS)))
        yield f"| fitting the features ({encoding}) | {_thousands(PARQUET_ROWS / (time.perf_counter() - begin))} | | |"
        samples = ClickDataset(table, RowRange(0, PARQUET_ROWS), encoder)
        yield _line(f"shuffled batches of {BATCH:,}, encoded ({encoding})", 10 * BATCH, [partial(_draw, samples)])
    log = SyntheticClicks(SyntheticClicksConfig())
    yield _line("the synthetic click log", BATCH, [lambda: log.rows(np.arange(BATCH))])


def _draw(samples: ClickDataset) -> None:
    for start in range(0, 10 * BATCH, BATCH):
        samples.batch(shuffled_indices(0, samples.num_rows, start, BATCH))


def _line(name: str, rows: int, runs: list[Callable[[], object]]) -> str:
    """Medians of runs in turn, so that whatever else the machine does meets all of them."""
    times: list[list[tuple[float, float]]] = [[] for _ in runs]
    for _ in range(REPEATS):
        for place, run in enumerate(runs):
            begin, busy = time.perf_counter(), time.process_time()
            run()
            times[place].append((time.perf_counter() - begin, time.process_time() - busy))
    cells = [""] * 3
    for place, each in enumerate(times):
        whole, busy = (statistics.median(column) for column in zip(*each, strict=True))
        cells[place] = f"{_thousands(rows / whole)} ({busy / rows * 1e6:.2f})"
    return f"| {name} | {' | '.join(cells)} |"


def _thousands(speed: float) -> str:
    return f"{speed / 1000:,.0f}"


def _page(lines: list[str], sizes: dict[str, float], date: str) -> str:
    packages = ("numpy", "pyarrow", *([] if is_smoke() else ["pandas"]), "torch")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    files = ", ".join(f"{name} {size:.0f} MB" for name, size in sorted(sizes.items()))
    return "\n".join(
        [
            "# Click logs, read and drawn",
            "",
            f"Thousand rows a second (in brackets: microseconds of processor time a row), medians of {REPEATS} runs,",
            "ours and the peers in turn. All rows have 40 columns: a label, 13 numbers of which a fifth is missing, 26",
            "categories. All become numbers and 64-bit keys; texts are hashed, in the peers' columns by pandas.",
            "Files: " + files + ".",
            "",
            f"{describe(torch.device('cpu'))}; Python {platform.python_version()}, {versions}; {date}.",
            f"Largest memory {peak:.1f} GiB, the peers' whole tables among it.",
            "Made by `python -m benchmarks.data.tables`.",
            "",
            "| | ours | pyarrow | pandas |",
            "|---|---|---|---|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
