"""Tables in checkpoints: how long training stands still, how fast rows are written and read, and what serving takes.

Run from the checkout: `python -m benchmarks.recommender.checkpoints --only snapshot serving remote`; each of them
writes its own part of benchmarks/recommender/checkpoints.md. Rows are 16 numbers with element-wise Adagrad's sums.

snapshot: a save between steps of 60,000 Zipf-distributed ids, for a table in memory, with a host tier and with a file
tier. The plain copy is one `copy_` of a slab of as many bytes into warm memory. Steps while the files are being written
are compared with steps before. serving: the same rows looked up in the training's table, in the checkpoint's files, and
in files of fp16 and int8. remote: the rows of one table to a Redis server of this machine and back.
"""

import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.embedding_cache.options import RemoteOptions
from kitforge.embedding_cache.serving.quantize import quantize_tables
from kitforge.embedding_cache.serving.table import ServedTable
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.redis import RedisStore
from kitforge.foundation.device import describe, pick
from tests.sharded_table import HeldRows

TABLE = Path(__file__).with_suffix(".md")
DIM = 16
NUM_IDS = 60_000
# What was measured, beside the table, so that its parts can be measured one by one.
RESULTS = TABLE.with_suffix(".json")
SMOKE = {"NUM_IDS": 64, "rows": 1000, "rounds": 1, "only": ["snapshot", "serving", "remote"]}


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def new_table(folder: Path, tiers: str, num_rows: int) -> CachedEmbedding:
    few = num_rows // 10
    options: dict[str, dict[str, Any]] = {
        "memory": {},
        "memory + host": {"device_rows": max(few, NUM_IDS)},
        "memory + file": {"device_rows": max(few, NUM_IDS), "path": str(folder / "tier")},
    }
    return CachedEmbedding(None, DIM, optimizer="adagrad", mode=None, **options[tiers])


def fill(table: CachedEmbedding, num_rows: int) -> None:
    """All rows, as after their first step."""
    width = table.rows.layout.width
    records = torch.randn(num_rows, width)
    counters = table.rows.layout.as_integers(records)
    counters[:, -3:] = 1
    ids = torch.randperm(num_rows) * 7919
    state = {"steps": torch.tensor(1)}
    table.load_rows(HeldRows(schema=table.schema, version=1, state=state, chunks_by_part={"rows": (ids, records)}))


def batches(num_rows: int) -> Iterator[Tensor]:
    """Zipf-distributed ids of the table."""
    generator = torch.Generator().manual_seed(0)
    while True:
        unit = torch.rand(NUM_IDS, generator=generator, dtype=torch.float64)
        yield (num_rows**unit).long() * 7919


def train(table: CachedEmbedding, ids: Tensor) -> None:
    vectors = table(ids)
    vectors.backward(vectors.detach())
    table.step(0.01)


def measure_snapshot(root: Path, tiers: str, num_rows: int, rounds: int) -> dict[str, Any]:
    got: dict[str, list[float]] = {name: [] for name in ("copy", "stall", "before", "during", "write", "delta")}
    with new_table(root, tiers, num_rows) as table, closing(CheckpointWriter(root / "run", keep_last=1)) as writer:
        fill(table, num_rows)
        slab = torch.ones(num_rows, table.rows.layout.width)
        target, ids = slab.clone(), batches(num_rows)
        delta_bytes = 0
        for number in range(1, rounds + 1):
            got["copy"] += [seconds(lambda: target.copy_(slab)) for _ in range(3)]
            writer.attach({"table": table}, num_deltas=1)
            got["before"] += [seconds(lambda: train(table, next(ids))) for _ in range(10)]
            start = time.perf_counter()
            got["stall"].append(seconds(partial(save, writer, 2 * number)))
            while writer._pending is not None and not writer._pending.done():
                got["during"].append(seconds(lambda: train(table, next(ids))))
            writer.wait()
            got["write"].append(time.perf_counter() - start)
            train(table, next(ids))
            got["delta"].append(seconds(partial(save_and_wait, writer, 2 * number + 1)))
            delta_bytes = sum(path.stat().st_size for path in (root / "run" / f"step_{2 * number + 1}").iterdir())
        opening = seconds(lambda: open_checkpoint(root / "run" / f"step_{2 * rounds}"))
        checkpoint = open_checkpoint(root / "run" / f"step_{2 * rounds}", verify=False)
        with new_table(root / "other", tiers, num_rows) as other:
            loading = seconds(lambda: checkpoint.load_tables({"table": other}))
        return {
            "rows": num_rows,
            "megabytes": slab.nbytes / 1e6,
            # A small table is written before a step begins.
            **{name: statistics.median(values or [math.nan]) for name, values in got.items()},
            "steps": len(got["during"]) / rounds,
            "slowest": max(got["during"], default=math.nan),
            "slowest before": max(got["before"]),
            "delta megabytes": delta_bytes / 1e6,
            "opening": opening,
            "loading": loading,
        }


def save(writer: CheckpointWriter, step: int) -> None:
    writer.save(step, model=[], optimizer=[], state={})


def save_and_wait(writer: CheckpointWriter, step: int) -> None:
    save(writer, step)
    writer.wait()


def measure_serving(root: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    with new_table(root, "memory", num_rows) as table:
        fill(table, num_rows)
        with closing(CheckpointWriter(root / "run")) as writer:
            writer.attach({"table": table})
            writer.save(1, model=[], optimizer=[], state={})
        checkpoint = open_checkpoint(root / "run" / "step_1")
        tables: dict[str, Any] = {"training's table": table.eval()}
        got: dict[str, Any] = {name: {} for name in ("training's table", "checkpoint, fp32", "fp32", "fp16", "int8")}
        got["training's table"]["megabytes"] = num_rows * table.rows.layout.width * 4 / 1e6
        serve(tables, got, "checkpoint, fp32", checkpoint, root / "run" / "step_1")
        for dtype in ("fp32", "fp16", "int8"):
            start = time.perf_counter()
            made = quantize_tables(checkpoint, root / dtype, dtype)["table"]
            got[dtype] = {"rows/s": num_rows / (time.perf_counter() - start), "error": made.largest_error}
            serve(tables, got, dtype, open_checkpoint(root / dtype), root / dtype)
        ids = batches(num_rows)
        times: dict[str, list[float]] = {name: [] for name in tables}
        with torch.no_grad():
            for _ in range(rounds + 1):
                asked = next(ids)
                for name, each in tables.items():
                    times[name].append(seconds(partial(each, asked)))
        for name, values in times.items():
            got[name]["lookup"] = statistics.median(values[1:])
        return got


def serve(tables: dict[str, Any], got: dict[str, Any], name: str, checkpoint: Checkpoint, folder: Path) -> None:
    start = time.perf_counter()
    tables[name] = ServedTable(checkpoint.table("table"), mode=None)
    got[name]["opening"] = time.perf_counter() - start
    got[name]["megabytes"] = sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def measure_remote(root: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    with redis_server(root) as url:
        width = 2 * DIM + 3
        store = RedisStore(RemoteOptions(url=url), {"name": "table", "dim": DIM}, width)
        keys, rows = torch.randperm(num_rows), torch.randn(num_rows, width)
        got: dict[str, list[float]] = {name: [] for name in ("write", "read", "take", "scan")}
        for _ in range(rounds):
            got["write"].append(seconds(lambda: store.write(keys, rows)))
            got["read"].append(seconds(lambda: store.read(keys, torch.empty_like(rows))))
            got["scan"].append(seconds(lambda: list(store.scan(4096))))
            got["take"].append(seconds(lambda: take(store, keys, torch.empty_like(rows))))
        store.close()
    return {"rows": num_rows, **{name: num_rows / statistics.median(values) for name, values in got.items()}}


def take(store: RedisStore, keys: Tensor, out: Tensor) -> None:
    store.read(keys, out)
    store.delete(keys)


@contextmanager
def redis_server(root: Path) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(root)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def snapshot_lines(got: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "## Saving and loading",
        "",
        "| Tiers | Rows | MB | One copy, ms | Stall of save, ms | Stall / copy (target 1.2) "
        "| Step before, ms | Step meanwhile, ms | Slowest before, ms | Slowest meanwhile, ms | Steps meanwhile "
        "| Written, k rows/s | Delta, ms | Delta, MB | Checked, k rows/s | Loaded, k rows/s |",
        "|---|" + "---:|" * 15,
    ]
    for tiers, row in got.items():
        k = row["rows"] / 1e3
        lines.append(
            f"| {tiers} | {row['rows']:,} | {row['megabytes']:.0f} | {row['copy'] * 1e3:.1f} "
            f"| {row['stall'] * 1e3:.1f} | {row['stall'] / row['copy']:.2f} "
            f"| {row['before'] * 1e3:.1f} | {row['during'] * 1e3:.1f} | {row['slowest before'] * 1e3:.0f} "
            f"| {row['slowest'] * 1e3:.0f} | {row['steps']:.0f} "
            f"| {k / row['write']:.0f} | {row['delta'] * 1e3:.0f} | {row['delta megabytes']:.1f} "
            f"| {k / row['opening']:.0f} | {k / row['loading']:.0f} |"
        )
    return lines


def serving_lines(got: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "## Serving",
        "",
        f"| Rows in | MB | Opened, ms | {NUM_IDS:,} ids, ms | Converted, k rows/s | Largest error |",
        "|---|" + "---:|" * 5,
    ]
    for name, row in got.items():
        opening = f"{row['opening'] * 1e3:.0f}" if "opening" in row else ""
        made = f"{row['rows/s'] / 1e3:.0f} | {row['error']:.2g}" if "error" in row else " | "
        lines.append(f"| {name} | {row['megabytes']:.0f} | {opening} | {row['lookup'] * 1e3:.1f} | {made} |")
    return lines


def remote_lines(got: dict[str, Any]) -> list[str]:
    rates = " | ".join(f"{got[name] / 1e3:.0f}" for name in ("write", "read", "take", "scan"))
    return [
        "## Redis on this machine",
        "",
        "| Rows | Written, k rows/s | Read, k rows/s | Taken, k rows/s | Scanned, k rows/s |",
        "|---:|---:|---:|---:|---:|",
        f"| {got['rows']:,} | {rates} |",
    ]


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--only", choices=("snapshot", "serving", "remote"), nargs="+", required=True)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse(SMOKE, globals())
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() and not is_smoke() else {}
    for part in chosen.only:
        if is_smoke() and part == "remote" and shutil.which("redis-server") is None:
            print("remote is left out: there is no redis-server on the path")
            continue
        with tempfile.TemporaryDirectory() as folder:
            results[part] = measure(part, Path(folder), chosen.rows, chosen.rounds)
    write_result(RESULTS, json.dumps(results, indent=1) + "\n")
    text = page(results, chosen.rounds)
    print(text)
    write_result(TABLE, text)


def measure(part: str, root: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    """What a part says of tables of so many rows."""
    if part == "serving":
        return measure_serving(root, num_rows, 4 * rounds)
    if part == "remote":
        return measure_remote(root, num_rows // 10, rounds)
    found = {}
    for tiers in ("memory", "memory + host", "memory + file"):
        found[tiers] = measure_snapshot(root / "one", tiers, num_rows, rounds)
        shutil.rmtree(root / "one")
    return found


def page(results: dict[str, Any], rounds: int) -> str:
    """The parts that were measured, now or before."""
    lines = [
        "# Tables in checkpoints",
        "",
        f"{describe(pick('cpu'))}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; medians of {rounds} "
        f"rounds; load average {os.getloadavg()[0]:.0f} at the end (1 is ours).",
        "The stall is the duration of the save call. The files are written during the following steps, which share CPU",
        "and disk with the writes; other load on the machine is included.",
    ]
    makers: dict[str, Callable[[Any], list[str]]] = {
        "snapshot": snapshot_lines,
        "serving": serving_lines,
        "remote": remote_lines,
    }
    for name, make in makers.items():
        if name in results:
            lines += ["", *make(results[name])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
