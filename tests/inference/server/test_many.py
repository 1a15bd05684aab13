"""Many requests at once: none is lost, none gets another's answer."""

from __future__ import annotations

import asyncio
import os

import httpx
import pytest

from kitforge.core.nn.decoder import Decoder
from kitforge.data.tokenizer import ByteTokenizer
from kitforge.inference.options import EngineOptions
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.server.options import ServeOptions
from kitforge.inference.text import InferenceOptions
from tests.inference.server.conftest import make_service, serving

COUNT = 10_000 if os.environ.get("KITFORGE_PROVE") else 300


async def ask_all(url: str, prompts: list[str]) -> list[str]:
    limits = httpx.Limits(max_connections=400)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:

        async def ask(prompt: str) -> str:
            answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 3})
            assert answer.status_code == 200
            return str(answer.json()["choices"][0]["text"])

        return await asyncio.gather(*map(ask, prompts))


@pytest.mark.prove
def test_none_is_lost_or_mixed_up(model: Decoder) -> None:
    options = EngineOptions(max_sequences=64)
    service = make_service(model, ServeOptions(max_requests=COUNT), options)
    prompts = [f"{place} asks" for place in range(COUNT)]
    pipeline = TextGenerationPipeline(model, ByteTokenizer(), InferenceOptions(max_new_tokens=3, engine=options))
    expected = [each[0]["generated_text"] for each in pipeline(prompts)]
    with serving(service) as served:
        found = asyncio.run(ask_all(served.url, prompts))
    assert [prompt + text for prompt, text in zip(prompts, found, strict=True)] == expected
    assert service.num_live == 0
