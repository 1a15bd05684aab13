"""Faults, and the command beside each of them: `python planted.py FOLDER OUTPUT NAME...` writes verdicts by fault as
JSON. Each fault has a fork of its own, in which one function has another code."""

import gc
import importlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType

# Once for all ranks of all forks, each of which would import it for two seconds.
import torch._dynamo  # noqa: F401

from kitforge.cli.main import run

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
        line="yield _run_one(parallel, task, micro_batch, weight, autocast)",
        planted="yield _run_one(parallel, task, micro_batch, 1 / len(step) / task.count([micro_batch])['loss'], "
        "autocast)",
        leaves=("packing",),
        # What is right is held in half precision too, and what is wrong is found.
        arguments=(*TEXT, "precision=bf16"),
    ),
    Fault(
        breaks="evaluation",
        file="trainer/metric_means.py",
        line="totals[name] = totals.get(name, 0.0) + float(value)",
        planted='totals[name] = totals.get(name, 0.0) + float(value) / float(counts(batch)["loss"])',
        leaves=("sampler", "foreseen"),
    ),
    Fault(
        breaks="foreseen",
        file="core/parallel/plan/memory.py",
        line="weakref.finalize(storage, self._die, key)",
        planted="weakref.finalize(storage, self._keep_peak)",
        leaves=("evaluation",),
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
        line="return kernels.random_sample(_penalized(logits, options, draws), points, options.temperature or 0.0)",
        planted="return kernels.random_sample(1.01 * logits, points, options.temperature)",
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
        line="kind: reply.rows}",
        planted="kind: [round(score, 2) if query.k is None else score for score in reply.rows]}",
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


def verdicts(folder: Path, fault: Fault) -> dict[str, str]:
    """The status of the contracts that the fault names, in a fork of this process with the fault."""
    output = folder / f"{fault.breaks}.txt"
    if (process := os.fork()) == 0:
        _command(folder, output, fault)
    os.waitpid(process, 0)
    printed = output.read_text(encoding="utf-8")
    try:
        found = json.loads(printed.splitlines()[-1])
        return {each["contract"]: each["status"] for each in found["contracts"]}
    except (ValueError, IndexError):
        return {"printed": printed}


def plant(fault: Fault) -> None:
    """Give the innermost function around the line that is there already the code that it would have with the fault."""
    module = "kitforge." + fault.file.removesuffix(".py").replace("/", ".")
    path = Path(str(importlib.import_module(module).__file__))
    sound = path.read_text(encoding="utf-8")
    assert sound.count(fault.line) == 1, fault
    faulty = sound.replace(fault.line, fault.planted)
    # Objects that were frozen before a fork would not be found.
    gc.unfreeze()
    functions = [each for each in gc.get_objects() if type(each) is FunctionType and each.__module__ == module]
    # Not with the future of this file.
    codes = [compile(text, str(path), "exec", dont_inherit=True) for text in (sound, faulty)]
    for old, new in _changed(*codes):
        found = [each for each in functions if _place(each.__code__) == _place(old)]
        for function in found:
            function.__code__ = new
        if found:
            return
    raise AssertionError(fault)


def _place(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _changed(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Those that differ, the innermost first."""
    # A comprehension of the fault has no counterpart, and is after what has.
    for one, other in zip(_inner(old), _inner(new), strict=False):
        if one != other:
            yield from _changed(one, other)
    yield old, new


def _inner(code: CodeType) -> list[CodeType]:
    return [each for each in code.co_consts if isinstance(each, CodeType)]


def _command(folder: Path, output: Path, fault: Fault) -> None:
    status = 9
    try:
        os.chdir(folder)
        with output.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        names = ",".join((fault.breaks, *fault.leaves))
        plant(fault)
        status = run(["verify", *fault.arguments, "--only", names, f"output_dir=verify-{fault.breaks}"])
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    wanted = [fault for fault in FAULTS if fault.breaks in sys.argv[3:]]
    Path(sys.argv[2]).write_text(json.dumps({fault.breaks: verdicts(root, fault) for fault in wanted}))
