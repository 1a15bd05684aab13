"""The characters of each token, for every kind of tokenizer."""

import io
from itertools import pairwise
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from kitforge.data.tokenizers.loading import ByteTokenizer, HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer

CORPUS = ["the moon of Rome\n", "Ann Zoë saw the river\n", "stone and fire\n"] * 20
TEXTS = ["", "Ann saw Zoë", "  two  spaces ", "日本 🙂 x", "a▁b 🙂▁", "\n\ttabs"]


def sentence_piece(**options: object) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, vocab_size=300, model_type="bpe", byte_fallback=True,
        hard_vocab_limit=False, minloglevel=2, remove_extra_whitespaces=False, **options,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue(), b'{"add_bos_token": true, "add_eos_token": true}')


def byte_level(folder: Path) -> HuggingFaceTokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<end> $A <end>", special_tokens=[("<end>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return HuggingFaceTokenizer(folder)


def check(tokenizer: Tokenizer, text: str) -> None:
    ids, spans = tokenizer.encode_offsets(text)
    assert ids == tokenizer.encode_prompt(text)
    assert len(ids) == len(spans)
    for token, (start, stop) in zip(ids, spans, strict=True):
        spelled, own = tokenizer.token_bytes(token), text[start:stop].encode()
        assert spelled in own if start < stop else spelled.strip() == b""
    held = [each for each in spans if each[0] < each[1]]
    # Every character belongs to a token; tokens do not overlap but in the bytes of one character.
    assert {at for start, stop in held for at in range(start, stop)} == set(range(len(text)))
    assert all(first == second or first[1] == second[0] for first, second in pairwise(held))


@pytest.mark.parametrize("text", TEXTS)
def test_every_character_lies_in_the_tokens_that_spell_it(text: str, tmp_path: Path) -> None:
    own = sentence_piece(normalization_rule_name="identity", add_dummy_prefix=False)
    for tokenizer in (ByteTokenizer(), own, byte_level(tmp_path)):
        check(tokenizer, text)


def test_a_space_that_sentencepiece_adds_is_in_no_text() -> None:
    tokenizer = sentence_piece(normalization_rule_name="nmt_nfkc")
    text = "Ann saw Zoë"
    ids, spans = tokenizer.encode_offsets(text)
    assert ids == tokenizer.encode_prompt(text)
    assert spans[0] == spans[-1] == (0, 0)
    assert "".join(text[start:stop] for start, stop in dict.fromkeys(spans)) == text
