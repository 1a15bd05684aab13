"""ARCHITECTURE.md lists the frames of a training step and of a served prompt; here they are counted."""

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import kitforge
from kitforge.cli import main as cli
from kitforge.inference.model_runner import ModelRunner
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.worker import Worker
from kitforge.kits.transformers.task import TextGenerationTask
from kitforge.trainer.loop import Loop
from tests.inference.server.conftest import make_service, serving, small_model
from tests.patience import PATIENCE
from tests.trainer.tiny import write_corpus

pytestmark = pytest.mark.slow

PACKAGE = Path(kitforge.__file__).parent
PAGE = (PACKAGE.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
# A compiled loop is one call, as wide as its compiler makes it.
KERNELS = "core/kernels/"


def listed(name: str) -> str:
    """The block of the page below `<!-- frames: NAME -->`."""
    _, marker, rest = PAGE.partition(f"<!-- frames: {name} -->\n")
    assert marker, f"ARCHITECTURE.md has no frames of {name}"
    return rest.partition("```text\n")[2].partition("```")[0]


def place(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else None


def stack() -> list[str]:
    """Our frames below the caller, the outermost first."""
    frames, frame = [], sys._getframe(2)
    while frame is not None:
        if (file := place(frame)) is not None:
            frames.append(f"{file:<34}{frame.f_code.co_qualname}")
        frame = frame.f_back  # type: ignore[assignment]
    return frames[::-1]


@contextmanager
def counted(calls: Counter[str], *, threads: bool = False) -> Iterator[None]:
    """Calls by file; of this thread, or of those that start within the block."""

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (file := place(frame)) is not None and not file.startswith(KERNELS):
            calls[file] += 1

    before = sys.getprofile()
    threading.setprofile(count) if threads else sys.setprofile(count)
    try:
        yield
    finally:
        threading.setprofile(None) if threads else sys.setprofile(before)


def test_the_frames_of_a_training_step_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path)
    monkeypatch.chdir(tmp_path)
    frames: list[str] = []
    steps: list[Counter[str]] = []
    inputs, step = TextGenerationTask.inputs, Loop._step

    def seen(self: Any, micro_batch: Any) -> Any:
        if not frames:
            frames.extend(stack())
        return inputs(self, micro_batch)

    def counting(self: Any, micro_batches: Any) -> Any:
        steps.append(Counter())
        with counted(steps[-1]):
            return step(self, micro_batches)

    monkeypatch.setattr(TextGenerationTask, "inputs", seen)
    monkeypatch.setattr(Loop, "_step", counting)
    options = ["model=llama_tiny", "data.train=corpus.txt", "data.sequence_length=32", "data.batch_size=4"]
    assert cli.run(["train", *options, "trainer.max_steps=4", "device=cpu"]) == 0
    assert "\n".join(frames) + "\n" == listed("a training step, down to the network")
    # The first steps allocate what later ones reuse.
    last = steps[-1]
    summary = f"{sum(last.values())} calls in {len(last)} files\n"
    assert summary + "".join(f"{file}\n" for file in sorted(last)) == listed("the calls of that step")


def test_the_frames_of_a_served_prompt_are_those_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    frames: dict[str, list[str]] = {}
    calls: Counter[str] = Counter()
    before_network: list[set[str]] = []
    submit, run = Worker.submit, ModelRunner.run

    def submitted(self: Any, *arguments: Any) -> Any:
        frames["event loop"] = stack()
        return submit(self, *arguments)

    def ran(self: Any, *arguments: Any) -> Any:
        frames.setdefault("worker", stack())
        before_network.append(set(calls))
        return run(self, *arguments)

    body = {"model": "tiny", "prompt": "once upon", "max_tokens": 2}
    with (
        counted(calls, threads=True),
        serving(make_service(small_model(), ServeOptions(), EngineOptions())) as served,
    ):
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
        monkeypatch.setattr(Worker, "submit", submitted)
        monkeypatch.setattr(ModelRunner, "run", ran)
        calls.clear()
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE).status_code == 200
    lines = [line for name in ("event loop", "worker") for line in (f"{name}:", *frames[name])]
    assert "\n".join(lines) + "\n" == listed("a served prompt, down to the network")
    assert "".join(f"{file}\n" for file in sorted(before_network[0])) == listed("the files of that prompt")
