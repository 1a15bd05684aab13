"""Drawn tokenizer.json files, whose tokens, places and texts are those of transformers' PreTrainedTokenizerFast."""

import json
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from kitforge.data.tokenizers.loading import load_tokenizer
from kitforge.foundation.errors import DataError
from tests.differential.drawn import drawn

CORPUS = ["the cat, the hat 12 2023 é ü x y\nif you go\tto Rome: (a) b's", "hello hello there, the end."] * 4
SPECIAL = ["<unk>", "<s>", "</s>"]
MODELS: dict[str, Any] = {
    "bpe": (models.BPE, trainers.BpeTrainer, {"unk_token": "<unk>"}),
    "bpe bytes": (models.BPE, trainers.BpeTrainer, {"unk_token": "<unk>", "byte_fallback": True}),
    "bpe dropout": (models.BPE, trainers.BpeTrainer, {"unk_token": "<unk>", "dropout": 0.5}),
    "unigram": (models.Unigram, trainers.UnigramTrainer, {}),
    "wordpiece": (models.WordPiece, trainers.WordPieceTrainer, {"unk_token": "<unk>"}),
    "wordlevel": (models.WordLevel, trainers.WordLevelTrainer, {"unk_token": "<unk>"}),
}
NORMALIZERS: dict[str, Any] = {
    "nfc": normalizers.NFC,
    "nfkd": normalizers.NFKD,
    "lower": normalizers.Lowercase,
    "strip": normalizers.Strip,
    "accents": lambda: normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()]),
    "bert": normalizers.BertNormalizer,
    "spaces": lambda: normalizers.Replace(Regex(" +"), " "),
    "prepend": lambda: normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
}
CUTS: dict[str, Any] = {
    "none": (lambda: None, lambda: None),
    "bytes": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel),
    "bytes prefixed": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel),
    "metaspace": (pre_tokenizers.Metaspace, decoders.Metaspace),
    "metaspace first": (
        lambda: pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
        lambda: decoders.Metaspace(prepend_scheme="first", split=False),
    ),
    "words": (pre_tokenizers.BertPreTokenizer, decoders.WordPiece),
    "white space": (pre_tokenizers.Whitespace, lambda: None),
    "digits": (
        lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        ),
        decoders.ByteLevel,
    ),
    "fused": (lambda: None, lambda: decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
}
LETTERS = ["the", "hello", "cat ", *"heé ü,.(12\n\t\u2581😀X", "<s>", "</s>", "<x>", "  ", "e\u0301"]
TEXT = st.lists(st.sampled_from(LETTERS), max_size=12).map("".join)
ADDED = st.fixed_dictionaries(
    {"content": st.sampled_from(["<x>", "he", "<tool>"])},
    optional={name: st.booleans() for name in ("single_word", "lstrip", "rstrip", "normalized", "special")},
)
# What transformers reads and we do not: the reason.
REFUSED = {"no end": "a vocabulary without a token that ends a document"}


@st.composite
def folders(draw: Any) -> Path:
    """A folder with a drawn tokenizer.json."""
    kind = draw(st.sampled_from([*MODELS]))
    model, trainer, options = MODELS[kind]
    pieces: Any = Tokenizer(model(**options))
    chosen = [NORMALIZERS[name]() for name in draw(st.lists(st.sampled_from([*NORMALIZERS]), max_size=2, unique=True))]
    if chosen:
        pieces.normalizer = normalizers.Sequence(chosen) if len(chosen) > 1 else chosen[0]
    cut, decoder = CUTS[draw(st.sampled_from([*CUTS]))]
    if (made := cut()) is not None:
        pieces.pre_tokenizer = made
    if (made := decoder()) is not None:
        pieces.decoder = made
    own = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))] if kind == "bpe bytes" else SPECIAL
    unknown = {"unk_token": "<unk>"} if kind == "unigram" else {}
    pieces.train_from_iterator(CORPUS, trainer(vocab_size=330, special_tokens=own, show_progress=False, **unknown))
    if "dropout" in options:
        # Training forgets it.
        pieces.model.dropout = options["dropout"]
    for entry in draw(st.lists(ADDED, max_size=2, unique_by=lambda each: each["content"])):
        pieces.add_tokens([AddedToken(**entry)])
    if draw(st.booleans()):
        pieces.post_processor = processors.TemplateProcessing(
            single=draw(st.sampled_from(["<s> $A", "<s> $A </s>", "$A </s>"])), special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    folder = Path(mkdtemp())
    pieces.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def peer_of(folder: Path) -> Any:
    """The tokenizer of transformers, which draws no tokens at random."""
    content = json.loads((folder / "tokenizer.json").read_text())
    if content["model"].get("dropout"):
        content["model"]["dropout"] = None
    place = Path(mkdtemp())
    (place / "tokenizer.json").write_text(json.dumps(content))
    (place / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    return transformers.PreTrainedTokenizerFast.from_pretrained(place, clean_up_tokenization_spaces=False)


@drawn(50)
@given(folders(), st.lists(TEXT, min_size=1, max_size=4))
def test_tokens_places_and_texts_are_those_of_transformers(folder: Path, texts: list[str]) -> None:
    ours, peer = load_tokenizer(folder), peer_of(folder)
    for text in texts:
        whole = peer(text, split_special_tokens=True, return_offsets_mapping=True)
        assert ours.encode_prompt(text) == whole["input_ids"]
        assert ours.encode_offsets(text) == (whole["input_ids"], whole["offset_mapping"])
        alone = peer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
        assert ours.encode(text) == alone
        assert ours.decode(alone) == peer.decode(alone, skip_special_tokens=True)
        assert ours.decode(alone[1:]) == peer.decode(alone[1:], skip_special_tokens=True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_words(name: str, tmp_path: Path) -> None:
    pieces = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    pieces.save(str(tmp_path / "tokenizer.json"))
    assert transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)("a")["input_ids"] == [1]
    with pytest.raises(DataError, match="no token that ends a document"):
        load_tokenizer(tmp_path)
