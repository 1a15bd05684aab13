"""Random requests that arrive at random steps at an engine of random options, and what has to come of them."""

import random
from dataclasses import dataclass, field

from kitforge.core.nn.decoder import Decoder
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from tests.core.nn.networks import VOCAB
from tests.inference.recomputation import recomputed

STOP = 7
TOLERANCE = 1e-10
SHAPES: list[SamplingOptions] = [
    SamplingOptions(),
    SamplingOptions(temperature=0.9, seed=3),
    SamplingOptions(temperature=1.3, top_k=9, top_p=0.8, min_p=0.02, seed=4),
    SamplingOptions(temperature=0.8, frequency_penalty=0.4, presence_penalty=0.3, repetition_penalty=1.3),
    SamplingOptions(repetition_penalty=1.2, logit_bias={"3": 1.5, "9": -4.0}),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    prompt: list[int]
    options: SamplingOptions
    step: int  # at which it arrives
    priority: int
    num_samples: int
    cancelled_after: int | None  # steps
    cancelled_samples: list[int | None]  # which of them, one after the other; None: all


@dataclass(slots=True, kw_only=True)
class Result:
    """What came of a workload."""

    completions: list[list[Completion]] = field(default_factory=list)
    stats: dict[str, int] = field(default_factory=dict)


def engine_options(chance: random.Random, model: Decoder) -> EngineOptions:
    """Any options; half of the time with so little memory that texts push one another out."""
    size = chance.choice([1, 2, 3, 4, 8])
    geometry = model.geometry
    block = (
        2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim * model.head_weight.element_size() * size
    )
    longest = -(-geometry.max_length // size)
    max_sequences = chance.choice([1, 2, 3, 5])
    return EngineOptions(
        block_size=size,
        kv_cache_bytes=chance.choice([None, block * longest, block * (longest + 3)]),
        max_num_seqs=max_sequences,
        max_num_batched_tokens=chance.choice([max_sequences, 5, 8, 64]),
        prefix_cache=chance.random() < 0.8,
        kv_layout=chance.choice(["auto", "paged"]),
        prompt_lookup_tokens=chance.choice([0, 0, 1, 4]),
    )


def requests(chance: random.Random, model: Decoder) -> list[Request]:
    """Prompts that often begin alike, as chats and samples of one question do."""
    limit = model.geometry.max_length
    stem = [chance.randrange(VOCAB) for _ in range(limit // 2)]
    found = []
    for _ in range(chance.randint(3, 7)):
        shared = stem[: chance.randint(0, limit // 2)]
        prompt = shared + [chance.randrange(VOCAB) for _ in range(chance.randint(0 if shared else 1, limit // 8))]
        shape = chance.choice(SHAPES)
        options = {name: getattr(shape, name) for name in shape.__dataclass_fields__}
        new = chance.randint(1, max(1, min(limit - len(prompt), limit // 3)))
        num_samples = chance.choice([1, 1, 2, 4])
        some: list[int | None] = list(chance.sample(range(num_samples), chance.randint(1, num_samples)))
        found.append(
            Request(
                prompt=prompt,
                options=SamplingOptions(**options | {"max_new_tokens": new}),
                step=chance.randint(0, 12),
                priority=chance.choice([0, 0, 0, 1, 2]),
                num_samples=num_samples,
                cancelled_after=chance.choice([None, None, 0, chance.randint(0, 8)]),
                cancelled_samples=chance.choice([[None], some]),
            )
        )
    return found


def serve(engine: Engine, wanted: list[Request], most_steps: int = 3000) -> Result:
    """Let the requests arrive, be cancelled and end."""
    result = Result(completions=[[] for _ in wanted])
    numbers: dict[int, int] = {}
    step = 0
    while engine.has_work or len(numbers) < len(wanted):
        assert step < most_steps, "the engine does not come to an end"
        for place, request in enumerate(wanted):
            if request.step == step:
                number = engine.submit(
                    request.prompt,
                    request.options,
                    priority=request.priority,
                    num_samples=request.num_samples,
                    key=place,
                )
                numbers[number] = place
                result.completions[place] = [Completion(tokens=[], logprobs=[]) for _ in range(request.num_samples)]
            if request.cancelled_after is not None and request.step + request.cancelled_after == step:
                number = next(number for number, owner in numbers.items() if owner == place)
                for sample in request.cancelled_samples:
                    engine.cancel(number, sample)
        for output in engine.step():
            completion = result.completions[numbers[output.request]][output.sample]
            assert completion.finish_reason is None, "a text goes on after its end"
            completion.tokens += output.tokens
            completion.logprobs += output.logprobs
            completion.finish_reason = output.finish_reason
        step += 1
    result.stats = engine.stats()
    return result


def check(model: Decoder, wanted: list[Request], result: Result) -> None:
    """Every text is the one that it would have been alone, recomputed without a cache; a cancelled one is its
    beginning."""
    for place, request in enumerate(wanted):
        for sample, got in enumerate(result.completions[place]):
            key = place if sample == 0 else f"{place}/{sample}"
            alone = recomputed(model, request.prompt, request.options, key, [STOP])
            size = len(got.tokens)
            assert got.tokens == alone.tokens[:size]
            if got.finish_reason != "cancelled":
                assert (size, got.finish_reason) == (len(alone.tokens), alone.finish_reason)
            differences = [abs(one - other) for one, other in zip(got.logprobs, alone.logprobs, strict=False)]
            assert max(differences, default=0.0) < TOLERANCE
    assert result.stats["blocks_used"] == result.stats["running"] == result.stats["waiting"] == 0


def run(model: Decoder, seed: int) -> tuple[list[Request], Result]:
    """The workload of a seed."""
    chance = random.Random(seed)
    wanted = requests(chance, model)
    return wanted, serve(Engine(model, engine_options(chance, model), stop_ids=[STOP]), wanted)
