"""Greedy and beam search of an encoder-decoder beside `generate` of transformers, whether texts end or not."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationMixin

from kitforge.foundation.errors import ConfigError
from kitforge.inference.seq2seq import Seq2SeqInference, _Finished, generate_targets
from kitforge.models import loading
from tests.models.test_t5 import tiny

VOCAB, EOS, LONGEST = 23, 1, 14


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("beams", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.6), (4, 2.0)])
def test_texts_equal_those_of_transformers(seed: int, beams: int, penalty: float, tmp_path: Path) -> None:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    config = transformers.T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes)
    torch.manual_seed(seed)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.5).add_(torch.randn_like(parameter) * 0.12)
        # Likelier ends, at different lengths.
        theirs.shared.weight[EOS] *= 2.5
    theirs.save_pretrained(tmp_path)
    model = loading.load(tmp_path, device=torch.device("cpu"))
    sources = [torch.randint(2, VOCAB, (length,)).tolist() for length in (5, 9, 3, 12, 1)]
    options = Seq2SeqInference(max_new_tokens=LONGEST, num_beams=beams, length_penalty=penalty, batch_size=3)
    found = generate_targets(model, sources, options, start_id=0, eos_ids=[EOS], pad_id=0)  # type: ignore[arg-type]
    for source, tokens in zip(sources, found, strict=True):
        text = theirs.generate(
            torch.tensor([source]), max_new_tokens=LONGEST, num_beams=beams, do_sample=False, length_penalty=penalty
        )[0].tolist()[1:]
        assert tokens == (text[: text.index(EOS)] if EOS in text else text)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A network of theirs and ours whose texts end at many lengths, so that the rule of stopping decides."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    torch.manual_seed(4)
    config = transformers.T5Config(vocab_size=11, decoder_start_token_id=0, **sizes)
    theirs = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(0.5).add_(torch.randn_like(parameter) * 0.4)
    folder = tmp_path_factory.mktemp("endings")
    theirs.save_pretrained(folder)
    return theirs, loading.load(folder, device=torch.device("cpu"))


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.5, 0.0, 0.7, 1.0, 3.0])
def test_beams_equal_those_of_transformers_where_the_rule_of_stopping_decides(
    penalty: float, early_stopping: Any, endings: tuple[Any, Any]
) -> None:
    theirs, model = endings
    sources = torch.randint(2, 11, (16, 5), generator=torch.Generator().manual_seed(1))
    for beams, longest in ((2, 10), (4, 7)):
        rule: Any = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early_stopping}
        options = Seq2SeqInference(max_new_tokens=longest, **rule)
        found = generate_targets(model, sources.tolist(), options, start_id=0, eos_ids=[EOS], pad_id=0)
        wanted = theirs.generate(sources, max_new_tokens=longest, do_sample=False, **rule)[:, 1:].tolist()
        assert [without_end(each) for each in found] == [without_end(each) for each in wanted]


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


def without_end(text: list[int]) -> list[int]:
    """Up to the end; theirs are padded with zeros, which ours may end with too."""
    kept = text[: text.index(EOS)] if EOS in text else text
    while kept and kept[-1] == 0:
        kept = kept[:-1]
    return kept


def test_no_source_and_an_empty_one() -> None:
    options = Seq2SeqInference(max_new_tokens=3, num_beams=2)
    assert generate_targets(tiny(), [], options, start_id=0, eos_ids=[EOS], pad_id=0) == []
    (found,) = generate_targets(tiny(), [[]], options, start_id=0, eos_ids=[EOS], pad_id=0)
    assert len(found) <= 3
    with pytest.raises(ConfigError, match="num_beams"):
        Seq2SeqInference(num_beams=0)
    with pytest.raises(ConfigError, match="at most 30, by the vocabulary"):
        generate_targets(tiny(), [[5]], Seq2SeqInference(num_beams=31), start_id=0, eos_ids=[EOS], pad_id=0)
