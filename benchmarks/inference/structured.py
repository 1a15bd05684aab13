"""What a grammar costs a decoding step, and what tokens that must follow save: a LLaMA of SmolLM2-135M's shape, bf16.

    python -m benchmarks.inference.structured [--model FOLDER] [--peer-python OTHER/bin/python] [--rounds 3]

FOLDER is a Hugging Face folder; by default the weights are random, so texts are of the schema and otherwise noise.
Tokens a second of the engine, the best of some rounds that take turns: without a grammar, by a schema of short names,
and by one of long names with their tokens as drafts and without. The head of peer_vllm.py says how to make the other
environment; with it, 16 clients ask both servers for texts by that schema, in turn. The table goes to structured.md.
"""

import datetime
import http.client
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.inference import against_vllm
from benchmarks.inference.against_vllm import SHAPE, features
from benchmarks.inference.against_vllm_server import SLOTS, prepare, serving
from benchmarks.inference.engine_claims import network
from benchmarks.inference.peer_vllm import ENVIRONMENT
from kitforge import load_model, load_processor, save_model
from kitforge.foundation.device import describe
from kitforge.inference.engine import Engine
from kitforge.inference.grammar import Grammar, GrammarCompiler
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.text_engine import TextEngine

TABLE = Path(__file__).with_suffix(".md")
BATCHES, NEW, CLIENTS, REQUESTS = [1, 16], 96, 16, 4
SMOKE = {"SHAPE": against_vllm.SMOKE["SHAPE"], "BATCHES": [2], "NEW": 8, "rounds": 1}


def listed(names: list[str]) -> dict[str, Any]:
    """The schema of a list of objects with these names, which does not end before the measurement."""
    properties = {name: {"type": "integer", "minimum": 0, "maximum": 999} for name in names}
    item = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"type": "array", "items": item, "minItems": 99}


SHORT = listed(["a", "b", "c"])
LONG = listed(["number_of_passengers_on_board", "total_weight_of_the_luggage", "minutes_until_the_departure"])


@contextmanager
def without_drafts() -> Iterator[None]:
    kept = Grammar.drafts
    setattr(Grammar, "drafts", lambda _self, _guesses: [])  # noqa: B010
    try:
        yield
    finally:
        setattr(Grammar, "drafts", kept)  # noqa: B010


def tokens_a_second(texts: TextEngine, batch: int, schema: dict[str, Any] | None) -> float:
    """Of decoding, after the prompts have been read."""
    constraint = None if schema is None else texts.grammars.compile("json_schema", schema)
    options = SamplingOptions(max_new_tokens=NEW, temperature=1.0, ignore_eos=schema is None)
    for place in range(batch):
        texts.engine.submit([place + 1] * 32, options, constraint=constraint)
    texts.engine.step()
    begun, count = time.perf_counter(), 0
    while texts.engine.has_work:
        count += sum(len(output.tokens) for output in texts.engine.step())
    return count / (time.perf_counter() - begun)


def mask_seconds(texts: TextEngine, schema: dict[str, Any]) -> float:
    """The median of the masks of a text, each with the token that follows."""
    constraint, times = texts.grammars.compile("json_schema", schema), []
    for _ in range(NEW):
        begun = time.perf_counter()
        mask = constraint.masks([])
        times.append(time.perf_counter() - begun)
        word = int((mask[0] != 0).argmax())
        bits = int(mask[0, word]) & 0xFFFFFFFF
        constraint.advance(word * 32 + (bits & -bits).bit_length() - 1)
    return statistics.median(times)


def first_mask_seconds(texts: TextEngine) -> tuple[float, float]:
    """Until a text by a schema of 2 KB, not met before, may begin: of the first such schema, which reads the tokens
    as a server does before it is ready, and the median of more."""
    grammars, times = GrammarCompiler(texts.tokenizer, texts.engine.stop_ids, texts.engine.vocab_size), []
    for number in range(9):
        kinds = [{"type": kind, "description": "in plain words"} for kind in ("string", "integer", "number", "boolean")]
        schema = {"type": "object", "properties": {f"field_{number}_{place}": kinds[place % 4] for place in range(32)}}
        begun = time.perf_counter()
        grammars.compile("json_schema", schema).masks([])
        times.append(time.perf_counter() - begun)
    return times[0], statistics.median(times[1:])


def client(port: int, place: int) -> int:
    """How many tokens a client gets for its requests, one after another."""
    connection, count = http.client.HTTPConnection("127.0.0.1", port, timeout=600), 0
    with closing(connection):
        for number in range(REQUESTS):
            form = {"type": "json_schema", "json_schema": {"name": "list", "schema": LONG}}
            body = {
                "prompt": f"Flights {place} {number}: ",
                "max_tokens": NEW,
                "temperature": 0,
                "response_format": form,
            }
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            count += answer["usage"]["completion_tokens"]
    return count


@contextmanager
def server(command: list[str], threads: int, environment: dict[str, str]) -> Iterator[int]:
    """The port of a server, after one request of each client."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [each.replace("PORT", str(port)) for each in command]
    with serving(command, port, {**environment, "OMP_NUM_THREADS": str(threads)}):
        of_all_clients(port, -CLIENTS)
        yield port


def of_all_clients(port: int, first: int) -> float:
    """Tokens a second of all clients, whose prompts are numbered from `first`."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(lambda place: client(port, first + place), range(CLIENTS))) / (time.perf_counter() - begun)


def beside_vllm(folder: Path, peer: Path, threads: int, rounds: int) -> list[tuple[float, float]]:
    """Tokens a second of our server and of vLLM's in turn, while the other one waits."""
    options = f"checkpoint={folder}", "port=PORT", "inference.dtype=bf16", f"inference.engine.max_num_seqs={SLOTS}"
    own = [sys.executable, "-m", "kitforge", "serve", *options]
    names = "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", str(SLOTS), "--port", "PORT"
    other = [str(peer), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *names]
    with server(own, threads, {}) as ours, server(other, threads, ENVIRONMENT) as theirs:
        prompts = [number * CLIENTS for number in range(rounds)]
        return [(of_all_clients(ours, first), of_all_clients(theirs, first)) for first in prompts]


def main() -> None:
    """All measurements."""
    parser = CommandLine(__doc__)
    parser.add_argument("--peer-python", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse(SMOKE, globals())
    torch.set_num_threads(arguments.threads)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as stored, tempfile.TemporaryDirectory() as folder:
        if not arguments.model:
            save_model(network("llama", SHAPE), stored, dtype="bfloat16")
        prepare(arguments.model or Path(stored), Path(folder))
        tokenizer: Any = load_processor(folder)
        engine = Engine(
            load_model(folder, dtype="bf16"), EngineOptions(max_num_seqs=max(BATCHES)), stop_ids=tokenizer.eos_ids
        )
        texts = TextEngine(engine, tokenizer)
        lines = [
            "| rows | no grammar | short names | long names | long names, no drafts |",
            "|---:|---:|---:|---:|---:|",
        ]
        for batch in BATCHES:
            found: list[list[float]] = [[], [], [], []]
            for _ in range(arguments.rounds):
                for place, schema in enumerate((None, SHORT, LONG)):
                    found[place].append(tokens_a_second(texts, batch, schema))
                with without_drafts():
                    found[3].append(tokens_a_second(texts, batch, LONG))
            lines.append(f"| {batch} | " + " | ".join(f"{max(each):.0f}" for each in found) + " |")
        first, later = (1e3 * seconds for seconds in first_mask_seconds(texts))
        lines += [
            "",
            f"A mask takes {1e6 * mask_seconds(texts, LONG):.0f} us at the median. A new schema of 2 KB delays the "
            f"first token by {later:.1f} ms; reading the tokens takes {first:.0f} ms once, before a server is ready.",
        ]
        if arguments.peer_python:
            rounds = beside_vllm(Path(folder), arguments.peer_python, arguments.threads, arguments.rounds)
            own, other = (statistics.median(each) for each in zip(*rounds, strict=True))
            ratio = statistics.median(ours / theirs for ours, theirs in rounds)
            lines += [
                "",
                f"Served to {CLIENTS} clients by the schema of long names, medians of rounds in turn: {own:.0f}, "
                f"by vLLM {other:.0f}; {ratio:.2f} times as many.",
            ]
    head = [
        "# Structured output on a CPU",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))} ({features()}), torch {torch.__version__}, "
        f"{arguments.model.name if arguments.model else 'random weights'}, bfloat16, {NEW} new tokens; tokens a "
        f"second, best of {arguments.rounds} rounds in turn; load average at the start {load:.1f}, so other work ran "
        "beside.",
        "",
    ]
    sys.stdout.write("\n".join([*head, *lines]) + "\n")
    write_result(TABLE, "\n".join([*head, *lines]) + "\n")


if __name__ == "__main__":
    main()
