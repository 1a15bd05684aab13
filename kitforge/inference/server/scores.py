"""Embeddings of texts, and scores of pairs by their cosines or by a model that scores. Independent of HTTP.

Pairs are tuples; what a reward model scores may also be a conversation, the list of its messages.
"""

import asyncio
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, normalize

from kitforge.core.nn.score_head import ScoreModel
from kitforge.foundation.errors import KitforgeError
from kitforge.inference.pooling import TextPooling
from kitforge.inference.server.application import HttpService
from kitforge.inference.server.batcher import DynamicBatcher
from kitforge.inference.server.errors import ApiError, refused
from kitforge.inference.server.metrics import BatchMetrics
from kitforge.inference.server.options import HttpOptions
from kitforge.inference.server.request_body import invalid_value
from kitforge.inference.server.service import Service
from kitforge.inference.server.worker import PromptJob
from kitforge.inference.text_engine import InferenceOptions, TextDelta

# Texts of one request in the engine at once, so that others, and texts that are generated, do not wait for all.
WINDOW = 32
# The score of each pair or conversation, and the number of its tokens. Raises KitforgeError for what cannot be scored.
ScoreTexts = Callable[[Sequence[Any]], list[tuple[float, int]]]


class ScoreService(HttpService):
    """A served model that gives scores and writes no texts."""

    metrics: BatchMetrics

    def __init__(self, model: ScoreModel, score: ScoreTexts, name: str, limits: HttpOptions) -> None:
        super().__init__(name, limits, BatchMetrics())
        self.max_model_len = model.language_model.geometry.max_length
        # A request is a batch, so that its scores are those of one call of the pipeline, bit for bit.
        self.worker: DynamicBatcher[Sequence[Any], list[tuple[float, int]]] = DynamicBatcher(
            lambda inputs: [score(texts) for texts in inputs], self.metrics, max_rows=1, max_wait_ms=0
        )
        self.threads = (self.worker,)

    async def rendered_metrics(self) -> tuple[bytes, str]:
        self.metrics.num_live = self.num_active
        return self.metrics.rendered()

    async def scores(self, texts: Sequence[Any], _model: str | None) -> tuple[list[float], int]:
        """The scores, and how many tokens there are. Raises ApiError."""
        self.num_active += 1
        try:
            found = await self.worker.submit(texts, len(texts))
        except KitforgeError as error:
            raise ApiError(400, str(error), parameter="text", code="invalid_value") from None
        finally:
            self.num_active -= 1
        if not all(isfinite(score) for score, _ in found):
            raise ApiError(500, "the model's outputs are not finite", code="model_diverged")
        return [score for score, _ in found], sum(size for _, size in found)


async def cosines(service: Service, pairs: Sequence[Any], model: str | None) -> tuple[list[float], int]:
    """The cosine of the embeddings of each pair, and how many tokens there are. Raises ApiError."""
    if not isinstance(pairs[0], tuple):
        raise refused("messages", "this model compares texts", got="a conversation", expected="text_1 and text_2")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors, num_tokens = await embed(service, texts, model)
    found = dict(zip(texts, vectors, strict=True))
    firsts, seconds = (torch.stack([found[pair[side]] for pair in pairs]).double() for side in (0, 1))
    return cosine_similarity(firsts, seconds).clamp(-1, 1).tolist(), num_tokens


async def embed(
    service: Service, texts: Sequence[str | list[int]], model: str | None, body: Any = None
) -> tuple[list[Tensor], int]:
    """The embedding [dim] in fp32 of each text or list of tokens, and how many tokens there are. The bits of one depend
    on no other. `body` is that of /v1/embeddings. Raises ApiError."""
    pooling, dim = service.pooling, service.geometry.dim
    if not isinstance(pooling, TextPooling):
        raise ApiError(400, str(pooling), parameter="model", code="no_embeddings")
    if body is not None and body.dimensions not in (None, dim):
        raise invalid_value("dimensions", body.dimensions, f"{dim}, as many as the model has")
    options = InferenceOptions(max_new_tokens=0, pooling=pooling.mode, adapter=None if model == service.name else model)

    def encoded() -> list[list[int]]:
        """The tokens of the texts. Raises ApiError for one that is empty or too long, or has unknown tokens."""
        special = None if body is None else body.add_special_tokens
        prompts = []
        for index, text in enumerate(texts):
            tokens = service.encode(text, add_special_tokens=special) if isinstance(text, str) else text
            try:
                service.engine.validate(tokens if text else [], options)
            except KitforgeError as error:
                refusal = service.api_error(error)
                refusal.parameter = "text" if body is None else f"input[{index}]"
                raise refusal from None
            prompts.append(tokens)
        return prompts

    prompts = await asyncio.to_thread(encoded)
    vectors = await _vectors(service, prompts, options)
    return [normalize(each, dim=0) if pooling.normalize else each for each in vectors], sum(map(len, prompts))


async def _vectors(service: Service, prompts: Sequence[list[int]], options: InferenceOptions) -> list[Tensor]:
    queue: asyncio.Queue[tuple[int, TextDelta | Exception]] = asyncio.Queue()
    jobs = [
        PromptJob(prompt=prompt, options=options, num_samples=1, key=index, first_choice=index, queue=queue)
        for index, prompt in enumerate(prompts)
    ]
    window, found = min(WINDOW, len(jobs), service.limits.max_requests), dict[int, Tensor]()
    service.check_capacity(window)
    service.num_active += window
    try:
        for job in jobs[:window]:
            service.worker.submit(job)
        while len(found) < len(jobs):
            index, delta = await queue.get()
            if isinstance(delta, Exception):
                raise service.api_error(delta)
            if delta.embedding is None or not delta.embedding.isfinite().all():
                raise ApiError(500, "the model's outputs are not finite", code="model_diverged")
            found[index] = delta.embedding
            for job in jobs[window + len(found) - 1 : window + len(found)]:
                service.worker.submit(job)
    finally:
        service.num_active -= window
        for job in jobs if len(found) < len(jobs) else ():
            service.worker.cancel(job)
    service.metrics.prompt_tokens.inc(sum(map(len, prompts)))
    return [found[index] for index in range(len(jobs))]
