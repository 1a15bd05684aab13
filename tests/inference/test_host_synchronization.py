"""A step of the engine waits for its device once, for tokens, log-probabilities and whether all is finite."""

from typing import Any

import pytest
import torch

from kitforge.core.nn.decoder import Decoder
from kitforge.inference import engine as engine_file
from kitforge.inference.engine import Engine
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions, sample_tokens
from tests.core.nn import networks
from tests.device_reads import counted
from tests.inference.recomputation import until_end

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [8, 9]]
KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}, {}],
    "sampled": [{"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1}] * 2,
    "penalties": [{"repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {"4": 1.0}}] * 2,
    "mixed": [{"temperature": 0.8}, {"min_p": 0.1, "temperature": 1.0}],
}


def reads_and_steps(model: Decoder, kind: str, **options: Any) -> tuple[list[str], int]:
    """What was read from the device while both prompts were continued by six tokens, and the steps that took."""
    engine = Engine(model, EngineOptions(**options))
    with counted() as reads:
        for parameter in model.parameters():
            reads.mark(parameter)
        for prompt, sampling in zip(PROMPTS, KINDS[kind], strict=True):
            engine.submit(prompt, SamplingOptions(max_new_tokens=6, ignore_eos=True, **sampling))
        list(until_end(engine))
    return reads.found, engine._num_steps


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 4, "max_num_seqs": 4}], ids=["whole prompts", "prompts in parts"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_reads_the_device_once(kind: str, options: dict[str, Any]) -> None:
    # The references compute on tensors that torch sees; compiled loops read memory.
    found, num_steps = reads_and_steps(networks.build(networks.LLAMA, "O0", torch.float32), kind, **options)
    assert num_steps >= 6
    assert len(found) == num_steps, found


def test_a_second_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def curious(logits: torch.Tensor, *inputs: Any) -> Any:
        assert bool(torch.isfinite(logits).all())
        return sample_tokens(logits, *inputs)

    monkeypatch.setattr(engine_file, "sample_tokens", curious)
    found, num_steps = reads_and_steps(networks.build(networks.LLAMA, "O0", torch.float32), "greedy")
    assert len(found) == 2 * num_steps
