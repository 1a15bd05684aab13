"""A process that has imported everything, and carries out each command in a copy of itself.

The tests start `kitforge` dozens of times, and each start would import torch for several seconds. A copy has the
caller's arguments, folder, environment and streams, and gives back its status; no command sees another one. Ranks that
a command starts are copies as well. A copy gets its client's signals, and ends with it.

`python -m tests.warm.server SOCKET [MODULE ...]` serves, and has imported these modules too;
`python -S client.py SOCKET [-m MODULE | FILE] ...` calls.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

# What a run and a script of the pages would import.
import kitforge.cli.options_help
import kitforge.cli.sweep
import kitforge.inference.pipeline
import kitforge.kits.recommender.build
import kitforge.kits.rlhf.build
import kitforge.kits.transformers.build
from kitforge.cli.command import imported
from kitforge.cli.main import COMMANDS
from kitforge.composition import compose_config
from kitforge.core.kernels.linear.numba import linear
from kitforge.core.parallel.rendezvous import code_version
from kitforge.data import standard_library
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.inference.engine import Engine
from kitforge.inference.sampling import SamplingOptions
from kitforge.kits.transformers.generation_samples import GenerationSamples
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from kitforge.trainer import loop

__all__ = ["kitforge", "shorten"]
for verb in COMMANDS.values():
    for function in filter(None, (verb.compose, verb.run, verb.run_plain)):
        imported(function)
SHORT_STEPS, MOST_STEPS, SHORT_TEXT = 3, 20, 8
# Of so many a page says what is in the folder afterwards.
COUNTED_STEPS = 8
# Set in the environment of what may end before its last step; elsewhere a long run is an error.
MAY_SHORTEN = "KITFORGE_TEST_MAY_SHORTEN"
SHORT_CORPUS = ("json/", "logging/")
SHORT_LOG = 20_000
SECONDS_BETWEEN_LOOKS = 0.02
NETWORK = {"family": "llama", "dim": 8, "num_layers": 1, "num_heads": 2, "mlp_dim": 8, "vocab_size": 9, "max_length": 9}


def shorten() -> None:
    """Let runs without a length, long ones of pages and benchmarks, and those on the standard library or the click log
    be just long enough to show that they train."""
    all_files = standard_library._source_files
    standard_library._source_files = lambda folder: filter(
        lambda name: name.startswith(SHORT_CORPUS), all_files(folder)
    )
    loop.DEFAULT_MAX_STEPS = SHORT_STEPS
    max_steps = loop._max_steps

    def few_steps(task: Any, options: Any) -> int:
        steps = max_steps(task, options)
        if steps > MOST_STEPS and MAY_SHORTEN not in os.environ:
            raise RuntimeError(f"{steps} steps are more than the {MOST_STEPS} of a test, and {MAY_SHORTEN} is not set")
        may_end = MAY_SHORTEN in os.environ and steps > COUNTED_STEPS
        return SHORT_STEPS if may_end else min(steps, MOST_STEPS)

    loop._max_steps = few_steps
    begin = loop.Loop.__init__

    def evaluated_at_its_end(run: loop.Loop, task: Any, options: Any, *given: Any, **named: Any) -> None:
        begin(run, task, options, *given, **named)
        if MAY_SHORTEN in os.environ:
            # Ten evaluations, each with texts, take as long as the steps, and a text as long as three of them.
            run._eval_every = run.options.eval_every
            for each in (each for each in run.callbacks if isinstance(each, GenerationSamples)):
                few = min(each._options.max_new_tokens, SHORT_TEXT)
                each._options = replace(each._options, max_new_tokens=few)

    setattr(loop.Loop, "__init__", evaluated_at_its_end)  # noqa: B010
    make_log = SyntheticClicks.__init__

    def make_short(log: SyntheticClicks, config: SyntheticClicksConfig, *start: int) -> None:
        make_log(log, replace(config, num_rows=min(config.num_rows, SHORT_LOG)), *start)

    setattr(SyntheticClicks, "__init__", make_short)  # noqa: B010


def serve(path: Path) -> dict[str, Any]:
    """Answer calls until standard input ends; returns in the copy that is to carry a call out, with what is asked."""
    draft = path.with_suffix(".draft")
    with socket.create_server(str(draft), family=socket.AF_UNIX) as server:
        # Whoever sees the path finds somebody who listens.
        draft.rename(path)
        while True:
            if sys.stdin in select.select([server, sys.stdin], [], [])[0]:
                sys.exit()
            caller, _ = server.accept()
            # Whoever has ended since the last call is buried, so that nobody's status is missed later.
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if os.fork() == 0:
                server.close()
                return _answer(caller)
            caller.close()


def _answer(caller: socket.socket) -> dict[str, Any]:
    """Become the copy that carries the call out; its parent tells the caller its number, and its status at the end."""
    # A message comes whole or in pieces, the streams with its first byte.
    start, streams, _, _ = socket.recv_fds(caller, 2**20, 3)
    message = bytearray(start)
    while not message.endswith(b"\n"):
        message += (part := caller.recv(2**20))
        if not part:
            os._exit(0)
    process = os.fork()
    if process:
        for stream in streams:
            os.close(stream)
        with contextlib.suppress(BrokenPipeError):
            caller.sendall(f"{process}\n".encode())
            caller.sendall(str(_status(process, caller)).encode())
        os._exit(0)
    caller.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    asked: dict[str, Any] = json.loads(message)
    return asked


def _status(process: int, caller: socket.socket) -> int:
    """With which it ends; it is killed if the caller was."""
    while not (ended := os.waitpid(process, os.WNOHANG))[0]:
        if select.select([caller], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            os.kill(process, signal.SIGKILL)
            ended = os.waitpid(process, 0)
            break
    return os.waitstatus_to_exitcode(ended[1])


def carry_out(asked: dict[str, Any]) -> None:
    """Run the module or the script, as Python would."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.executable = shutil.which("python") or sys.executable
    first, *rest = asked["arguments"]
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def end(status: object) -> None:
    """End as Python does, but leave all objects where they are: to free those that the copies share costs each of them
    half a second of a core."""
    if status is not None and not isinstance(status, int):
        sys.stderr.write(f"{status}\n")
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # One whose reader has left early is none.
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit((status or 0) & 0xFF)


if __name__ == "__main__":
    # `make prove` lets them have the whole.
    if "KITFORGE_PROVE" not in os.environ:
        shorten()
    # So does the first configuration that Hydra composes.
    for task in ("text_generation", "recommendation"):
        compose_config(task, {})
    # And so does the hash of the code, which ranks compare.
    code_version()
    # The first compiled loop of a process takes longer than all the steps of a page together.
    linear(torch.ones(1, 1), torch.ones(1, 1))
    Engine(build(config_of(NETWORK), device=torch.device("cpu"), seed=0)).generate(
        [[1, 2]], SamplingOptions(max_new_tokens=2)
    )
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # A copy that looks for garbage would make all of this memory its own.
    gc.freeze()
    gc.set_threshold(20_000)
    try:
        carry_out(serve(Path(sys.argv[1])))
        end(0)
    except SystemExit as ended:
        end(ended.code)
