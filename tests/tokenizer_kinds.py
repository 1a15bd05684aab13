"""One tokenizer of each kind of published vocabularies that treats the beginning of a text in its own way."""

import io
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import sentencepiece
from tokenizers import Tokenizer as Pieces
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from kitforge.data.tokenizers.gguf import tokenizer_files
from kitforge.data.tokenizers.huggingface import HuggingFaceTokenizer
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.data.tokenizers.protocol import Tokenizer
from kitforge.data.tokenizers.sentencepiece import SentencePieceTokenizer

WORDS = "the school said hello to return x and He went Q A what answer is a ok def if two"
CORPUS = [f"{WORDS} . , ? : ( ) 1 2 3\nQ: what?\nA: school\n    return x\n" * 8]
SPECIAL = ["<unk>", "<s>", "</s>"]
_SPACE = "\u2581"
_BEGIN = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def _folder(pieces: Pieces) -> HuggingFaceTokenizer:
    pieces.post_processor = _BEGIN
    config = json.dumps({"bos_token": "<s>", "eos_token": "</s>"}).encode()
    return HuggingFaceTokenizer({"tokenizer.json": pieces.to_str().encode(), "tokenizer_config.json": config})


def _sentencepiece(*, add_dummy_prefix: bool, **options: Any) -> SentencePieceTokenizer:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS[0].splitlines()),
        model_writer=model,
        vocab_size=380,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=add_dummy_prefix,
        minloglevel=2,
        **{"model_type": "bpe", "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True} | options,
    )
    return SentencePieceTokenizer(model.getvalue(), b'{"add_bos_token": true, "bos_token": "<s>"}')


def _spelled_bpe(normalizer: Any, pre_tokenizer: Any, decoder: Any) -> HuggingFaceTokenizer:
    """BPE over the letters of sentencepiece, in bytes where a letter is unknown, as tokenizer.json of LLaMA 2."""
    trained = Pieces(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator(
        [each.replace("\n", " ") for each in CORPUS],
        trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False),
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(each) for each in model["merges"]]
    pieces = Pieces(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    pieces.add_special_tokens(SPECIAL)
    pieces.normalizer, pieces.pre_tokenizer, pieces.decoder = normalizer, pre_tokenizer, decoder
    return _folder(pieces)


def _prepended() -> HuggingFaceTokenizer:
    normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _spelled_bpe(normalizer, None, decoders.Sequence(steps))


def _metaspace(scheme: str, *, strips: bool = False) -> HuggingFaceTokenizer:
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)]
    if strips:
        steps = [decoders.Replace(_SPACE, " "), steps[0], decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _spelled_bpe(None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False), decoders.Sequence(steps))


def _stripped_unigram() -> HuggingFaceTokenizer:
    """As T5: white space around a text is lost, and several spaces are one."""
    pieces = Pieces(models.Unigram())
    pieces.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", _SPACE)])
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    pieces.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=90,
        special_tokens=SPECIAL,
        unk_token="<unk>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyzHQA"),
        show_progress=False,
    )
    pieces.train_from_iterator([each.replace("\n", " ") for each in CORPUS], trainer)
    return _folder(pieces)


def _byte_level(*, add_prefix_space: bool) -> HuggingFaceTokenizer:
    pieces = Pieces(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator(CORPUS, trainer)
    return _folder(pieces)


def _words() -> HuggingFaceTokenizer:
    """As BERT: the decoder joins words by spaces and cleans up those before punctuation."""
    pieces = Pieces(models.WordPiece(unk_token="<unk>"))
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    pieces.train_from_iterator(
        CORPUS,
        trainers.WordPieceTrainer(
            vocab_size=160,
            special_tokens=SPECIAL,
            initial_alphabet=list("abcdefghijklmnopqrstuvwxyzHQA"),
            show_progress=False,
        ),
    )
    return _folder(pieces)


def _suffixed() -> HuggingFaceTokenizer:
    """As CLIP: the last token of a word carries a mark, which is a space unless it ends the text."""
    pieces = Pieces(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    pieces.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pieces.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200,
        special_tokens=SPECIAL,
        end_of_word_suffix="</w>",
        initial_alphabet=list("abcdefghijklmnopqrstuvwxyzHQA"),
        show_progress=False,
    )
    pieces.train_from_iterator(CORPUS, trainer)
    return _folder(pieces)


def _gguf(*, add_space_prefix: bool) -> HuggingFaceTokenizer:
    model = _sentencepiece(add_dummy_prefix=add_space_prefix)
    numbers = {"normal": 1, "unknown": 2, "control": 3, "byte": 6}
    scored = model.scored_tokens()
    entries = {
        "model": "llama",
        "tokens": [text for text, _, _ in scored],
        "scores": [score for _, score, _ in scored],
        "token_type": [numbers[kind] for _, _, kind in scored],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": add_space_prefix,
    }
    return HuggingFaceTokenizer(tokenizer_files({f"tokenizer.ggml.{name}": value for name, value in entries.items()}))


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "prepend and strip": _prepended,
    "metaspace always": lambda: _metaspace("always"),
    "metaspace first": lambda: _metaspace("first"),
    "metaspace first and strip": lambda: _metaspace("first", strips=True),
    "metaspace never": lambda: _metaspace("never"),
    "sentencepiece": lambda: _sentencepiece(add_dummy_prefix=True),
    "sentencepiece unigram": lambda: _sentencepiece(add_dummy_prefix=True, model_type="unigram"),
    "sentencepiece without prefix": lambda: _sentencepiece(add_dummy_prefix=False),
    "sentencepiece that strips": lambda: _sentencepiece(
        add_dummy_prefix=True, remove_extra_whitespaces=True, allow_whitespace_only_pieces=False
    ),
    "gguf": lambda: _gguf(add_space_prefix=True),
    "gguf without prefix": lambda: _gguf(add_space_prefix=False),
    "byte-level": lambda: _byte_level(add_prefix_space=False),
    "byte-level with prefix": lambda: _byte_level(add_prefix_space=True),
    "stripped unigram": _stripped_unigram,
    "words": _words,
    "suffixed": _suffixed,
    "bytes": ByteTokenizer,
}
# Every text of these comes back to the letter, but for a space before it.
EXACT = [name for name in MAKERS if name not in ("stripped unigram", "words", "suffixed", "sentencepiece that strips")]
# These put a space before every text.
PREFIXING = ["prepend and strip", "metaspace always", "metaspace first and strip", "sentencepiece", "gguf"]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer of that kind."""
    return MAKERS[kind]()
