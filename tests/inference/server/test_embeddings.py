"""/v1/embeddings, /score and /rerank of a language model: as OpenAI's, vLLM's and Jina's clients ask."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI

from kitforge.inference.options import EngineOptions
from kitforge.inference.pooling import TextPooling
from kitforge.inference.server import scores
from kitforge.inference.server.options import ServeOptions
from tests.inference.server.conftest import Served, make_service, metric, serving, small_model
from tests.patience import PATIENCE

TEXTS = ["hello world", "abc", "a longer text than both"]
EMBEDDINGS = "/v1/embeddings"


def vector_of(text: str) -> torch.Tensor:
    with torch.no_grad():
        mean = small_model().hidden(torch.tensor([list(text.encode())]))[0].mean(0)
    return mean / mean.norm()


@pytest.fixture(scope="module")
def embedding() -> Iterator[Served]:
    service = make_service(small_model(), ServeOptions(max_requests=8), EngineOptions())
    service.pooling = TextPooling(mode="mean", normalize=True)
    with serving(service) as served:
        yield served


def vectors(served: Served, body: dict[str, Any]) -> list[list[float]]:
    data = served.post(EMBEDDINGS, body).json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return [each["embedding"] for each in data]


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_openais_client_reads_vectors_of_length_one(embedding: Served, form: Any) -> None:
    client = OpenAI(base_url=f"{embedding.url}/v1", api_key="unused", max_retries=0, timeout=PATIENCE)
    wishes = {} if form is None else {"encoding_format": form}
    found = client.embeddings.create(model="tiny", input=TEXTS, dimensions=32, **wishes)
    assert found.model == "tiny" and found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, TEXTS))
    for text, each in zip(TEXTS, found.data, strict=True):
        read: Any = each.embedding
        values = np.frombuffer(base64.b64decode(read), "<f4") if form == "base64" else np.array(read)
        assert np.allclose(values, vector_of(text).numpy(), atol=1e-6) and values.shape == (32,)


def test_texts_and_tokens_alone_and_among_others_have_the_same_bits(embedding: Served) -> None:
    alone = [vectors(embedding, {"input": text})[0] for text in TEXTS]
    assert vectors(embedding, {"input": TEXTS}) == alone
    assert vectors(embedding, {"input": [list(text.encode()) for text in TEXTS]}) == alone
    assert vectors(embedding, {"input": list(TEXTS[0].encode())}) == alone[:1]


def test_many_texts_are_embedded_a_few_at_a_time_while_others_are_generated(embedding: Served) -> None:
    """More than the server takes requests, which are what a request of so many counts as while it runs."""
    texts = [f"text {number}" for number in range(60)]
    before = metric(embedding.url, "kitforge_prompt_tokens_total")

    async def both() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=embedding.url, timeout=PATIENCE) as client:
            said = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
            return await asyncio.gather(said, client.post(EMBEDDINGS, json={"input": texts[:4]}))

    assert [each.status_code for each in asyncio.run(both())] == [200, 200]
    found = vectors(embedding, {"input": texts})
    assert found[41] == vectors(embedding, {"input": texts[41]})[0] and len(found) == 60
    size = sum(map(len, [*texts, *texts[:4], texts[41], "a"]))
    assert metric(embedding.url, "kitforge_prompt_tokens_total") - before == size
    assert metric(embedding.url, "kitforge_engine_prompts") == 0


def test_pairs_are_scored_by_their_cosine_and_documents_ranked_by_it(embedding: Served) -> None:
    expected = [float(vector_of(TEXTS[0]) @ vector_of(text)) for text in TEXTS]
    for names in (("text_1", "text_2"), ("queries", "documents")):
        reply = embedding.post("/score", dict(zip(names, (TEXTS[0], TEXTS), strict=True))).json()
        assert [each["score"] for each in reply["data"]] == pytest.approx(expected, abs=1e-6)
    pairs = embedding.post("/v1/score", {"text_1": TEXTS, "text_2": TEXTS}).json()["data"]
    assert pairs[2]["score"] == pytest.approx(1)
    documents = [TEXTS[1], {"text": TEXTS[0]}, TEXTS[2]]
    order = sorted((1, 0, 2), key=lambda at: -[expected[1], expected[0], expected[2]][at])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        found = embedding.post(path, {"query": TEXTS[0], "documents": documents, "top_n": 2}).json()["results"]
        assert [each["index"] for each in found] == order[:2]
        assert found[0] == {"index": 1, "relevance_score": pytest.approx(1), "document": {"text": TEXTS[0]}}
    body = {"query": TEXTS[0], "documents": documents, "return_documents": False}
    assert all([*each] == ["index", "relevance_score"] for each in embedding.post("/rerank", body).json()["results"])


def test_a_model_without_pooling_says_what_to_set_and_generates(served: Served) -> None:
    for path, body in ((EMBEDDINGS, {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        reply = served.post(path, body)
        assert reply.status_code == 400 and "serve.pooling=last, mean or cls" in reply.json()["error"]["message"]
    assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_outputs_that_are_not_finite_are_an_error() -> None:
    model = small_model()
    with torch.no_grad():
        model.embedding.weight[ord("x")] = torch.nan
    service = make_service(model, ServeOptions(), EngineOptions())
    service.pooling = TextPooling(mode="last", normalize=False)
    with serving(service) as served:
        reply = served.post(EMBEDDINGS, {"input": ["abc", "axc"]})
        assert reply.status_code == 500 and "not finite" in reply.json()["error"]["message"]
        assert len(vectors(served, {"input": "abc"})) == 1


def test_a_request_that_is_given_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(small_model(), ServeOptions(), EngineOptions())
    service.pooling = TextPooling(mode="last", normalize=False)

    async def given_up() -> None:
        service.worker.start()
        work = asyncio.ensure_future(scores.embed(service, ["x" * 100] * 200, None))
        while not service.num_active:
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert work.cancelled() and service.num_active == 0
        found = await service.worker.stats()
        assert found["running"] == found["waiting"] == found["blocks_used"] == 0
        await asyncio.to_thread(service.worker.stop)

    asyncio.run(given_up())
