"""When a search for targets stops, beside the rule of transformers, and sources without anything to say."""

import random
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from kitforge.foundation.errors import ConfigError
from kitforge.inference.seq2seq import Seq2SeqInference, _Finished, generate_targets
from tests.models.test_t5 import tiny

EOS = 1


@pytest.mark.parametrize("early_stopping", [False, "never"])
@pytest.mark.parametrize("penalty", [-1.5, -0.2, 0.0, 0.7, 1.0, 3.0])
def test_a_source_is_done_at_the_step_at_which_transformers_stops(penalty: float, early_stopping: Any) -> None:
    chance = random.Random(5)
    rule: Any = {"num_beams": 2, "length_penalty": penalty, "early_stopping": early_stopping}
    for length in range(1, 9):
        for _ in range(40):
            finished = _Finished(Seq2SeqInference(max_new_tokens=8, **rule))
            for _ in range(chance.randint(1, 3)):
                finished.add(-chance.uniform(2, 6), chance.randint(1, length), [])
            scores = torch.full((1, 2), -1e9, dtype=torch.float64)
            scores[0, : len(finished.heap)] = torch.tensor([score for score, _, _ in finished.heap])
            running = -chance.uniform(1, 9)
            goes_on = GenerationMixin._check_early_stop_heuristic(
                torch.ones(1, 1).bool(),
                torch.tensor([[running, running - 1]], dtype=torch.float64),
                scores,
                scores > -1e9,
                length + 1,
                9,
                1,
                early_stopping,
                penalty,
            )
            assert finished.is_done(running, length) is not bool(goes_on)


def test_no_source_and_an_empty_one() -> None:
    options = Seq2SeqInference(max_new_tokens=3, num_beams=2)
    assert generate_targets(tiny(), [], options, start_id=0, eos_ids=[EOS], pad_id=0) == []
    (found,) = generate_targets(tiny(), [[]], options, start_id=0, eos_ids=[EOS], pad_id=0)
    assert len(found) <= 3
    with pytest.raises(ConfigError, match="num_beams"):
        Seq2SeqInference(num_beams=0)
    with pytest.raises(ConfigError, match="at most 30, by the vocabulary"):
        generate_targets(tiny(), [[5]], Seq2SeqInference(num_beams=31), start_id=0, eos_ids=[EOS], pad_id=0)
