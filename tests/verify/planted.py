"""Faults in a copy of the package, and the command in that copy: `python planted.py COPY OUTPUT` prints verdicts by
fault into OUTPUT as JSON. The process imports no line of ours but in forks, each of which finds another copy."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

# What forks would import anew.
PACKAGES = (
    *("torch.distributed.fsdp", "torch.fx.experimental.symbolic_shapes", "numba", "hydra", "rich.console"),
    *("safetensors.torch", "pyarrow.csv", "fastapi", "uvicorn"),
)
TEXT = (
    "task=text_generation",
    "model=llama_tiny",
    *("model.dim=32", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2", "model.mlp_dim=48"),
    "device=cpu",
)
CLICKS = ("task=recommendation", "model.dim=4", "model.hidden=[8]", "device=cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One change of a line, the contract that it breaks, and others that it leaves alone."""

    breaks: str
    file: str
    line: str
    planted: str
    leaves: tuple[str, ...]
    arguments: tuple[str, ...] = field(default=TEXT)


FAULTS = (
    Fault(
        breaks="micro_batches",
        file="core/parallel/micro_batches.py",
        line='torch.autograd.backward(sums["loss"] * own_weight)',
        planted='torch.autograd.backward(sums["loss"] / float(task.count([micro_batch])["loss"]) / len(step))',
        leaves=("packing",),
    ),
    Fault(
        breaks="evaluation",
        file="trainer/metric_means.py",
        line="totals[name] = totals.get(name, 0.0) + float(value)",
        planted='totals[name] = totals.get(name, 0.0) + float(value) / float(counts(batch)["loss"])',
        leaves=("sampler",),
    ),
    Fault(
        breaks="packing",
        file="kits/language_model.py",
        line='micro_batch.get("documents")',
        planted="None",
        leaves=("damage",),
    ),
    Fault(
        breaks="resume",
        file="trainer/state.py",
        line="self.optimizer.load(dict(checkpoint.optimizer(regions, elsewhere)))",
        planted="dict(checkpoint.optimizer(regions, elsewhere))",
        leaves=("evaluation",),
    ),
    Fault(
        breaks="layouts",
        file="core/checkpoint/load.py",
        line=".of(self._stored(found[0][0])).contiguous()",
        planted=".of(self._stored(found[0][0])).flip(0).contiguous()",
        leaves=("resume",),
        arguments=CLICKS,
    ),
    Fault(
        breaks="damage",
        file="core/checkpoint/load.py",
        line="if checksum == (file.crc32 or file.sha256):",
        planted="if checksum:",
        leaves=("batching",),
    ),
    Fault(
        breaks="ranks",
        file="core/parallel/world.py",
        line="collectives.all_reduce_(torch.cat(flats), self.mesh.replicas).cpu()",
        planted="torch.cat(flats).cpu()",
        leaves=("micro_batches",),
        arguments=CLICKS,
    ),
    Fault(
        breaks="cache",
        file="embedding_cache/tiers/device.py",
        line="return self.index.remove(slots), rows, dirty",
        planted="return self.index.remove(slots), rows * 0, dirty",
        leaves=("scores", "layouts"),
        arguments=CLICKS,
    ),
    Fault(
        breaks="sampler",
        file="inference/sampling.py",
        line="logprobs = torch.log_softmax(scores, dim=-1).gather",
        planted="logprobs = torch.log_softmax(1.01 * scores, dim=-1).gather",
        leaves=("kernels",),
    ),
    Fault(
        breaks="batching",
        file="inference/engine.py",
        line="key = request if key is None else key",
        planted="key = request",
        leaves=("sampler",),
    ),
    Fault(
        breaks="scores",
        file="kits/recommender/server/app.py",
        line='"scores": reply.rows}',
        planted='"scores": [round(score, 2) for score in reply.rows]}',
        leaves=("cache", "ranks"),
        arguments=CLICKS,
    ),
    Fault(
        breaks="kernels",
        file="core/kernels/swiglu/fused.py",
        line="return activation_backward(grad * up, gate)",
        planted="return activation_backward(grad, gate)",
        leaves=("damage",),
    ),
)


def verdicts(copy: Path, fault: Fault) -> dict[str, str]:
    """The status of the contracts that the fault names, in a copy with the fault, which then is sound again."""
    file = copy / "kitforge" / fault.file
    sound, times = file.read_text(encoding="utf-8"), file.stat()
    assert sound.count(fault.line) == 1, fault
    output = copy / f"{fault.breaks}.txt"
    file.write_text(sound.replace(fault.line, fault.planted), encoding="utf-8")
    try:
        if (process := os.fork()) == 0:
            _command(copy, output, fault)
        os.waitpid(process, 0)
    finally:
        file.write_text(sound, encoding="utf-8")
        # Compiled loops of the file are cached by its time.
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    printed = output.read_text(encoding="utf-8")
    try:
        found = json.loads(printed.splitlines()[-1])
        return {each["contract"]: each["status"] for each in found["contracts"]}
    except (ValueError, IndexError):
        return {"printed": printed}


def _command(copy: Path, output: Path, fault: Fault) -> None:
    status = 9
    try:
        os.chdir(copy)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.path.insert(0, str(copy))
        names = ",".join((fault.breaks, *fault.leaves))
        sys.argv = ["kitforge", "verify", *fault.arguments, "--only", names, f"output_dir=verify-{fault.breaks}"]
        importlib.import_module("kitforge.cli.main").main()
    except SystemExit as end:
        status = int(str(end.code or 0))
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    for package in PACKAGES:
        importlib.import_module(package)
    assert not any(name.startswith("kitforge") for name in sys.modules)
    root = Path(sys.argv[1])
    wanted = [fault for fault in FAULTS if len(sys.argv) == 3 or fault.breaks in sys.argv[3:]]
    Path(sys.argv[2]).write_text(json.dumps({fault.breaks: verdicts(root, fault) for fault in wanted}))
