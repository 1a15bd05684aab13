"""Greedy and beam search of an encoder-decoder beside `generate` of transformers, whether texts end or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from kitforge.foundation.errors import ConfigError
from kitforge.inference.seq2seq import Seq2SeqInference, generate
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
    found = generate(model, sources, options, start_id=0, eos_ids=[EOS], pad_id=0)  # type: ignore[arg-type]
    for source, tokens in zip(sources, found, strict=True):
        text = theirs.generate(
            torch.tensor([source]), max_new_tokens=LONGEST, num_beams=beams, do_sample=False, length_penalty=penalty
        )[0].tolist()[1:]
        assert tokens == (text[: text.index(EOS)] if EOS in text else text)


def test_no_source_and_an_empty_one() -> None:
    options = Seq2SeqInference(max_new_tokens=3, num_beams=2)
    assert generate(tiny(), [], options, start_id=0, eos_ids=[EOS], pad_id=0) == []
    (found,) = generate(tiny(), [[]], options, start_id=0, eos_ids=[EOS], pad_id=0)
    assert len(found) <= 3
    with pytest.raises(ConfigError, match="num_beams"):
        Seq2SeqInference(num_beams=0)
    with pytest.raises(ConfigError, match="at most 30, by the vocabulary"):
        generate(tiny(), [[5]], Seq2SeqInference(num_beams=31), start_id=0, eos_ids=[EOS], pad_id=0)
