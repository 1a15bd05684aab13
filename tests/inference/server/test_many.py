"""Many requests at once: none is lost, none gets another's answer, and those beyond the queue are told so."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from tests.inference.server.conftest import Served, make_service, serving
from tests.inference.server.crowd import PATH, allow_connections

COUNT = 10_000 if os.environ.get("KITFORGE_PROVE") else 300
ENGINE = EngineOptions(max_num_seqs=64)
TOKENS = 8
# Nothing here may depend on how busy the machine is.
PATIENCE = 3600.0
PROMPTS = [f"{place} asks" for place in range(COUNT)]


@pytest.fixture(scope="module")
def expected(model: Decoder) -> list[str]:
    """What an engine without a server says to each prompt."""
    tokenizer = ByteTokenizer()
    texts = TextEngine(Engine(model, ENGINE, stop_ids=tokenizer.eos_ids), tokenizer)
    options = InferenceOptions(max_new_tokens=TOKENS, temperature=2.0)
    requests = [
        texts.submit(prompt, replace(options, seed=place), key="seeded/0") for place, prompt in enumerate(PROMPTS)
    ]
    found = dict.fromkeys(requests, "")
    while texts.has_work:
        for piece in texts.step():
            found[piece.request] += piece.text
    assert len(set(found.values())) > COUNT / 2
    return list(found.values())


def asked_at_once(served: Served, folder: Path) -> tuple[list[Any], list[dict[str, int]]]:
    """Status, headers and answer to each prompt, and what /metrics said meanwhile."""
    allow_connections(COUNT)
    given, found, pages = folder / "given.json", folder / "found.json", []
    wishes = {"max_tokens": TOKENS, "temperature": 2.0}
    given.write_text(json.dumps([{"prompt": prompt, "seed": place} | wishes for place, prompt in enumerate(PROMPTS)]))
    command = [sys.executable, "-m", "tests.inference.server.crowd", str(served.address[1]), str(given), str(found)]
    with (
        httpx.Client(base_url=served.url, timeout=None) as watcher,
        subprocess.Popen(command, cwd=Path(__file__).parents[3]) as crowd,
    ):
        while crowd.poll() is None:
            assert watcher.get("/health").json() == {"status": "ok"}
            pages.append(counts(watcher.get("/metrics").text))
        pages.append(counts(watcher.get("/metrics").text))
    return json.loads(found.read_text()), pages


def counts(page: str) -> dict[str, int]:
    """The whole numbers of a page of metrics."""
    lines = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: int(float(value)) for name, _, value in lines if float(value).is_integer()}


def answers_with(status: int) -> str:
    return f'kitforge_requests_total{{path="{PATH}",status="{status}"}}'


@pytest.mark.slow
@pytest.mark.prove
def test_none_is_lost_or_mixed_up(model: Decoder, expected: list[str], tmp_path: Path) -> None:
    with serving(
        make_service(
            model, ServeOptions(max_requests=COUNT, max_connections=2 * COUNT, client_timeout=PATIENCE), ENGINE
        )
    ) as served:
        found, pages = asked_at_once(served, tmp_path)
        assert served.service.num_active == 0
    assert [answer["choices"][0]["text"] for _, _, answer in found] == expected
    assert pages[-1][answers_with(200)] == COUNT
    assert pages[-1]["kitforge_generated_tokens_total"] == sum(each["usage"]["completion_tokens"] for *_, each in found)
    assert pages[-1]["kitforge_engine_prompts"] == pages[-1]["kitforge_engine_blocks_used"] == 0
    # What is told while they are being answered grows, and never runs ahead of what was asked.
    done = [page.get(answers_with(200), 0) for page in pages]
    assert done == sorted(done)
    assert all(count + page["kitforge_engine_prompts"] <= COUNT for count, page in zip(done, pages, strict=True))


@pytest.mark.slow
def test_those_beyond_the_queue_are_told_so_and_the_others_answered(
    model: Decoder, expected: list[str], tmp_path: Path
) -> None:
    with serving(
        make_service(model, ServeOptions(max_requests=COUNT // 10, client_timeout=PATIENCE), ENGINE)
    ) as served:
        found, pages = asked_at_once(served, tmp_path)
    for (status, headers, answer), text in zip(found, expected, strict=True):
        if status == 200:
            assert answer["choices"][0]["text"] == text
        else:
            assert (status, headers["retry-after"], answer["error"]["code"]) == (429, "1", "queue_full")
    assert pages[-1][answers_with(200)] >= COUNT // 10
    assert pages[-1][answers_with(200)] + pages[-1][answers_with(429)] == COUNT
    assert all(page["kitforge_engine_prompts"] <= COUNT // 10 for page in pages)
