"""What the server adds to its engine, and how many streams it holds.

    python -m benchmarks.inference.server                            # writes server.md
    python -m benchmarks.inference.server --streams 50 --table some.md

A request of 16 tokens over a connection that stays, beside the same request handed to the engine in the same process;
they take turns. Then so many streams at once, each of which must come to its own last token. GPT-2 6 x 384.
"""

import asyncio
import contextlib
import datetime
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.inference.engine_claims import SMALL, SMALLEST, network, reached, seconds
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.app import create_app
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.server.serve import build_server
from kitforge.inference.server.service import Service
from kitforge.inference.text_engine import InferenceOptions, TextEngine

TABLE = Path(__file__).with_suffix(".md")
PROMPT, NEW = "The quick brown fox jumps over", 16
SMOKE = {"SMALL": SMALLEST, "NEW": 2, "rounds": 1, "streams": 2}


def texts(slots: int) -> TextEngine:
    tokenizer = ByteTokenizer()
    model = network("gpt2", SMALL | {"vocab_size": tokenizer.vocab_size})
    return TextEngine(Engine(model, EngineOptions(max_num_seqs=slots, prefix_cache=False)), tokenizer)


@contextlib.contextmanager
def serving(slots: int) -> Iterator[str]:
    service = Service(texts(slots), "small", InferenceOptions(), ServeOptions(max_requests=10_000))
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    server = build_server(service, create_app(service))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def added(rounds: int) -> list[str]:
    alone = texts(1)

    def direct() -> None:
        alone.submit(PROMPT, InferenceOptions(max_new_tokens=NEW))
        while alone.has_work:
            alone.step()

    with serving(1) as url, httpx.Client(base_url=url, timeout=60) as client:

        def asked() -> None:
            client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": NEW, "temperature": 0})

        direct()
        asked()
        pairs = [(seconds(direct), seconds(asked)) for _ in range(rounds)]
    extra = statistics.median(other - one for one, other in pairs)
    middle = statistics.median(one for one, _ in pairs)
    return [
        f"| {NEW} tokens from the engine | {1000 * middle:.1f} ms | |",
        f"| overhead of the server, median of {rounds} | {1000 * extra:.2f} ms | {reached(extra < 0.005)}: 5 ms |",
    ]


async def stream(client: httpx.AsyncClient, place: int) -> tuple[float, float, int]:
    """Seconds to the first event and to the end, and how many tokens came."""
    begun, first, count = time.perf_counter(), 0.0, 0
    body = {"prompt": f"{place:03} {PROMPT}", "max_tokens": NEW, "stream": True, "logprobs": 0}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - begun
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    count += len(choice["logprobs"]["tokens"])
    return first, time.perf_counter() - begun, count


def streams(number: int) -> list[str]:
    async def all_at_once(url: str) -> list[tuple[float, float, int]]:
        limits = httpx.Limits(max_connections=number)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
            return await asyncio.gather(*(stream(client, place) for place in range(number)))

    with serving(64) as url:
        begun = time.perf_counter()
        found = asyncio.run(all_at_once(url))
        spent = time.perf_counter() - begun
    whole = sum(count == NEW for _, _, count in found)
    first, last = (statistics.median(times) for times in list(zip(*found, strict=True))[:2])
    return [
        f"| {number} streams at once, 64 slots | {sum(count for *_, count in found) / spent:.0f} tokens/s, first token "
        f"{first:.2f} s, last {last:.2f} s at the median | {whole} whole; {reached(whole == number)}: all |"
    ]


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse(SMOKE, globals())
    torch.set_num_threads(arguments.threads)
    lines = [
        "# Overhead of the server",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, Python {platform.python_version()}, torch "
        f"{torch.__version__}; server, engine and clients in one process; load average at the start "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        "| what | measured | against |",
        "|---|---|---|",
        *added(arguments.rounds),
        *streams(arguments.streams),
    ]
    print("\n".join(lines[4:]))
    write_result(arguments.table, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
