"""Contracts of inference: the sampler is the trainer, a text has no neighbours, and every door gives the same."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from kitforge.api import load_model, load_processor, pipeline
from kitforge.composition import compose_predict
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.foundation.errors import DependencyError
from kitforge.foundation.files import write_text
from kitforge.inference.engine import Completion, Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.server.serve import serve
from kitforge.kits.kit import AnyKit
from kitforge.kits.registry import kit_of
from kitforge.kits.rlhf.reinforcement.rollout_batch import target_logprobs
from kitforge.verify.case import Case
from kitforge.verify.contract import Contract, Measured, NotOfferedError, furthest
from kitforge.verify.processes import Process, free_port
from kitforge.verify.sample_data import documents

SAMPLING = SamplingOptions(max_new_tokens=12, temperature=1.0, ignore_eos=True)
NUM_TEXTS, NUM_ROWS, NEW_TOKENS = 8, 16, 8
LOGPROB_BOUND, SCORE_BOUND = 1e-5, 1e-6
# Seconds until a server answers, and the most bytes of rows that are scored.
SERVER_TIMEOUT, LARGEST_FILE = 60.0, 32 << 20


def check_sampler(case: Case) -> Measured:
    """The log-probability of each sampled token, of the engine as it samples and of the trainer's own pass."""
    model, prompts = _language_model(case)
    completions = [each[0] for each in Engine(model, stop_ids=()).generate(prompts, SAMPLING)]
    figures = []
    for prompt, completion in zip(prompts, completions, strict=True):
        tokens = torch.tensor([[*prompt, *completion.tokens]])
        targets = torch.full_like(tokens, -100)
        targets[0, len(prompt) - 1 : -1] = tokens[0, len(prompt) :]
        with torch.no_grad():
            found, _ = target_logprobs(model, tokens, targets, SAMPLING.temperature or 0.0)
        trained = found[0, len(prompt) - 1 : -1].double().cpu()
        sampled = torch.tensor(completion.logprobs, dtype=torch.float64)
        figures.append(float((trained - sampled).abs().max()))
    return Measured(figure=furthest(figures), bound=LOGPROB_BOUND, unit=f"nats, {NUM_TEXTS} texts")


def check_batching(case: Case) -> Measured:
    """Sampled texts, each alone in its engine, against all of them in one engine that they enter at different steps."""
    model, prompts = _language_model(case)
    alone = []
    for key, prompt in enumerate(prompts):
        engine = Engine(model, EngineOptions(prefix_cache=False), stop_ids=())
        alone += _generate(engine, [(key, prompt)], steps_between=0)
    crowded = Engine(model, EngineOptions(max_num_seqs=3, max_num_batched_tokens=16), stop_ids=())
    together = _generate(crowded, list(enumerate(prompts)), steps_between=2)
    pairs = list(zip(alone, together, strict=True))
    differing = sum(one.tokens != other.tokens for one, other in pairs)
    same = [pair for pair in pairs if pair[0].tokens == pair[1].tokens]
    gaps = [abs(a - b) for one, other in same for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    words = f"of {len(prompts)} texts differ; log-probs by {furthest(gaps, default=0.0):.1g}"
    return Measured(figure=differing, unit=words)


def check_scores(case: Case) -> Measured:
    """Rows or prompts through `predict`, `pipeline` and HTTP."""
    return _check_texts(case) if case.kit.TEXT_TASK is not None else _check_rows(case)


def _check_rows(case: Case) -> Measured:
    spec = case.values["data.train"]
    # Reward models and classifiers are served too, but score texts.
    if not case.kit.IS_SERVED or not hasattr(load_processor(case.base), "schema"):
        raise NotOfferedError("the task has no service of rows")
    if isinstance(spec, str) and Path(spec).is_file() and Path(spec).stat().st_size > LARGEST_FILE:
        raise NotOfferedError(f"data.train is larger than {LARGEST_FILE >> 20} MB")
    with _server(case, case.kit) as ask:
        predicted = _predict(case.kit, case, case.values["task"], spec)[:NUM_ROWS]
        encoder: Any = load_processor(case.base)
        names = encoder.schema.layout(with_label=False).names
        rows = [{name: row[name] for name in names if name in row} for row in predicted]
        scored: Any = pipeline(case.values["task"], case.base)
        if scored.is_retrieval:
            raise NotOfferedError("the model ranks items and scores no rows")
        answer = ask("/score", [{"rows": rows}])[0]["scores"]
    ways = [[row["score"] for row in predicted], [each["score"] for each in scored(rows)], answer]
    figure = furthest(abs(one - other) for values in zip(*ways, strict=True) for one, other in combinations(values, 2))
    return Measured(figure=figure, bound=SCORE_BOUND, unit=f"largest difference of {len(rows)} rows")


def _check_texts(case: Case) -> Measured:
    task = case.kit.TEXT_TASK
    assert task is not None
    kit = kit_of(task)
    prompts = [f"{text} " for text in documents(5, NUM_TEXTS)]
    file = case.folder / "prompts-to-predict.jsonl"
    write_text(file, "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    bodies = [{"model": "base", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0} for prompt in prompts]
    with _server(case, kit) as ask:
        predicted = [row["generated_text"] for row in _predict(kit, case, task, str(file))]
        answers = pipeline(task, case.base)(prompts, max_new_tokens=NEW_TOKENS)
        piped = [each[0]["generated_text"][len(prompt) :] for each, prompt in zip(answers, prompts, strict=True)]
        served = [answer["choices"][0]["text"] for answer in ask("/v1/completions", bodies)]
    differing = sum(len({*texts}) > 1 for texts in zip(predicted, piped, served, strict=True))
    return Measured(figure=differing, unit=f"of {len(prompts)} texts differ")


def _predict(kit: AnyKit, case: Case, task: str, spec: object) -> list[dict[str, Any]]:
    output = case.folder / "predictions.jsonl"
    length = {"inference.max_new_tokens": NEW_TOKENS} if case.kit.TEXT_TASK is not None else {}
    choices = {"checkpoint": str(case.base), "data.eval": spec, "output": str(output), "trainer.progress": False}
    choices |= {"device": case.values["device"]}
    options = kit.read_options(compose_predict(task, choices | length).values)
    kit.predict_file(options, lambda folder, device, dtype: load_model(folder, device, dtype, task))
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


@contextmanager
def _server(case: Case, kit: AnyKit) -> Iterator[Callable[[str, Sequence[object]], list[Any]]]:
    """Gives a function of a path and bodies: the answers of a server on the loopback address, a process of its own.

    It begins before this process uses the device, since a fork of one that has cannot use an accelerator.
    """
    task, port = kit.OPTIONS().task, free_port()

    def work() -> None:
        choices = {"checkpoint": str(case.base), "device": case.values["device"]}
        options = kit.read_options(compose_predict(task, choices).values)
        model, processor = load_model(case.base, options.device, kit.load_dtype(options)), load_processor(case.base)
        service = kit.open_service(model, processor, "base", options)
        serve(service, kit.new_app(service), port, lambda _address: None)

    def ask(path: str, bodies: Sequence[object]) -> list[Any]:
        _wait_for(server, f"http://127.0.0.1:{port}/health")
        return [_post(f"http://127.0.0.1:{port}{path}", body) for body in bodies]

    server = Process(work)
    try:
        yield ask
    finally:
        server.kill()


def _wait_for(server: Process, address: str) -> None:
    until = time.monotonic() + SERVER_TIMEOUT
    while server.is_alive and time.monotonic() < until:
        try:
            with urllib.request.urlopen(address, timeout=SERVER_TIMEOUT):
                return
        except OSError:
            time.sleep(0.02)
    try:
        server.result(0.0)
    except DependencyError as error:
        raise NotOfferedError(str(error).splitlines()[0]) from None


def _post(address: str, body: object) -> Any:
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=SERVER_TIMEOUT) as answer:
        return json.load(answer)


def _generate(engine: Engine, prompts: Sequence[tuple[int, Sequence[int]]], steps_between: int) -> list[Completion]:
    """A sampled completion of each prompt, in order; after each submission the engine takes some steps."""
    found: dict[int, Completion] = {}

    def step() -> None:
        for output in engine.step():
            found[output.request].tokens += output.tokens
            found[output.request].logprobs += output.logprobs

    for key, prompt in prompts:
        found[engine.submit(prompt, SAMPLING, key=key)] = Completion(tokens=[], logprobs=[])
        for _ in range(steps_between):
            step()
    while engine.has_work:
        step()
    return list(found.values())


def _language_model(case: Case) -> tuple[nn.Module, list[list[int]]]:
    """The trained network and prompts of different lengths. Raises NotOfferedError for a network of another kind."""
    if case.kit.TEXT_TASK is None:
        raise NotOfferedError("the model writes no text")
    model, tokenizer = load_model(case.base, case.values["device"]), cast(Any, load_processor(case.base))
    if not isinstance(model, CausalLM):
        raise NotOfferedError("the network is not a causal language model")
    return model.eval(), [tokenizer.encode_prompt(f"{text} ") for text in documents(4, NUM_TEXTS)]


CONTRACTS = (
    Contract(name="sampler", promise="the sampler's log-probability = the trainer's", check=check_sampler),
    Contract(name="batching", promise="a text the same whoever is in the batch", check=check_batching),
    Contract(name="scores", promise="the same from predict, pipeline and HTTP", check=check_scores),
)
