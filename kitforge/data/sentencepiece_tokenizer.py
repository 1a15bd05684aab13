"""SentencePiece tokenizers, loaded or trained on a corpus."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.optional_imports import import_optional
from kitforge.data.source import Source
from kitforge.data.tokenizer_protocol import (
    NO_TOKEN,
    Tokens,
    decode_known,
    parse_object,
    read_tokenizer_file,
    without_end,
)
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import atomic_file

SENTENCEPIECE_FILE = "tokenizer.model"
TOKENIZER_CONFIG = "tokenizer_config.json"

# Sentencepiece writes a space with this letter, so the letter itself has to be spelled in bytes.
_SPACE_LETTER = "\u2581"
# Training takes about a third of a second for a million characters and learns little from more text than this.
_TRAINING_CHARACTERS = 20_000_000
_LINE_CHARACTERS = 4000
_OPTIONS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.9995,
    # Every text must come back as it was: no letter is replaced, no space added or removed.
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
    "unk_surface": "\ufffd",
    "pad_id": 3,
    # In bytes of UTF-8; longer sentences would be left out without a word.
    "max_sentence_length": 4 * _LINE_CHARACTERS,
    # More threads would make the pieces depend on the machine.
    "num_threads": 1,
    "minloglevel": 2,
}


@final
class SentencePieceTokenizer:
    """A sentencepiece model, from a file or from its bytes. What begins and ends a text is said by `add_bos_token` and
    `add_eos_token` of a `tokenizer_config.json`, the one beside the file or the bytes `config`; by default nothing."""

    def __init__(self, model: str | Path | bytes, config: bytes | None = None) -> None:
        sentencepiece = import_optional("sentencepiece", needed_for="a sentencepiece tokenizer", extra="transformers")
        if not isinstance(model, bytes):
            config_path = Path(model).with_name(TOKENIZER_CONFIG)
            config = read_tokenizer_file(config_path) if config_path.is_file() else None
        self._model = model if isinstance(model, bytes) else read_tokenizer_file(Path(model))
        self._config = config
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        except RuntimeError as error:
            description = "the bytes" if isinstance(model, bytes) else model
            raise DataError(f"{description} hold no sentencepiece model", got=error) from None
        if processor.eos_id() < 0:
            raise without_end("the sentencepiece model")
        self._processor = processor
        self.vocab_size = int(processor.vocab_size())
        self.bos_id: int | None = processor.bos_id() if processor.bos_id() >= 0 else None
        self.eos_id = int(processor.eos_id())
        self.pad_id = int(processor.pad_id()) if processor.pad_id() >= 0 else self.eos_id
        self.eos_ids = (self.eos_id,)
        self._before, self._after = self._rule()
        rule = json.dumps([self._before, self._after]).encode() if self._before or self._after else b""
        self.fingerprint = hashlib.sha256(self._model + rule).hexdigest()
        self._space_letter = self._spelled_space_letter()

    def __reduce__(self) -> tuple[type[SentencePieceTokenizer], tuple[bytes, bytes | None]]:
        return SentencePieceTokenizer, (self._model, self._config)

    def encode(self, text: str) -> list[int]:
        """The pieces of the text."""
        if not self._space_letter or _SPACE_LETTER not in text:
            return list(self._processor.encode(text))
        first, *others = text.split(_SPACE_LETTER)
        ids = list(self._processor.encode(first))
        for part in others:
            ids += self._space_letter
            ids += self._processor.encode(part)
        return ids

    def encode_array(self, text: str) -> Tokens:
        """The pieces of the text, [pieces] of uint32."""
        return np.array(self.encode(text), dtype=np.uint32)

    def encode_prompt(self, text: str) -> list[int]:
        """The pieces of the text between the tokens that `tokenizer_config.json` asks for."""
        return [*self._before, *self.encode(text), *self._after]

    def encode_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The pieces of `encode_prompt`, and the characters of each."""
        parts = text.split(_SPACE_LETTER) if self._space_letter else [text]
        ids, spans, at = list(self._before), [(0, 0)] * len(self._before), 0
        for number, part in enumerate(parts):
            if number:
                ids += self._space_letter
                spans += [(at, at + 1)] * len(self._space_letter)
                at += 1
            found = self._processor.encode_as_offset_mapping(part)
            tokens = list(found["ids"])
            own = [(at + start, at + stop) for start, stop in found["offsets"]]
            for index in range(len(tokens) - 2, -1, -1):
                # Sentencepiece counts a character in bytes to its last byte.
                if own[index][0] == own[index][1] and self._processor.is_byte(tokens[index]):
                    own[index] = own[index + 1]
            ids += tokens
            spans += own
            at += len(part)
        return [*ids, *self._after], spans + [(0, 0)] * len(self._after)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the pieces."""
        return decode_known(ids, self.vocab_size, self._decode)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of the piece: one of a byte piece, a space for the letter that sentencepiece writes for it."""
        processor = self._processor
        if not 0 <= token < self.vocab_size:
            return NO_TOKEN
        if processor.is_control(token):
            return b""
        if processor.is_unknown(token):
            return self._decode([token]).encode()
        token_text = str(processor.id_to_piece(token))
        return (
            bytes.fromhex(token_text[3:5])
            if processor.is_byte(token)
            else token_text.replace(_SPACE_LETTER, " ").encode()
        )

    def scored_tokens(self) -> list[tuple[str, float, str]]:
        """Spelling, score and kind (normal, unknown, control, byte) of every piece."""
        processor = self._processor
        kinds = {"unknown": processor.is_unknown, "control": processor.is_control, "byte": processor.is_byte}
        return [
            (
                str(processor.id_to_piece(token)),
                float(processor.get_score(token)),
                next((kind for kind, holds in kinds.items() if holds(token)), "normal"),
            )
            for token in range(self.vocab_size)
        ]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.model`, and the `tokenizer_config.json` that lay beside it."""
        files = {SENTENCEPIECE_FILE: self._model, TOKENIZER_CONFIG: self._config}
        for name, content in files.items():
            if content is not None:
                with atomic_file(folder / name) as file:
                    file.write(content)

    def _rule(self) -> tuple[list[int], list[int]]:
        """The tokens before and after every text."""
        config = {} if self._config is None else parse_object(TOKENIZER_CONFIG, self._config)
        return self._added(config, "bos", self.bos_id), self._added(config, "eos", self.eos_id)

    def _added(self, config: Mapping[str, Any], role: str, default: int | None) -> list[int]:
        if config.get(f"add_{role}_token") is not True:
            return []
        token = config.get(f"{role}_token")
        spelled = token.get("content") if isinstance(token, dict) else token
        number = default
        if isinstance(spelled, str):
            number = self._processor.piece_to_id(spelled)
            number = number if self._processor.id_to_piece(number) == spelled else None
        if number is None:
            raise DataError(
                f"{TOKENIZER_CONFIG} asks for add_{role}_token, but the sentencepiece model has no such token",
                got=f"{role}_token={spelled!r}",
                expected="a piece of the model",
            )
        return [number]

    def _decode(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))

    def _spelled_space_letter(self) -> list[int]:
        """The byte pieces of the letter, or none where the model has none or puts a space before every text."""
        spelled = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_LETTER.encode()]
        has_bytes = all(self._processor.is_byte(token) for token in spelled)
        begins_with_space = self._processor.id_to_piece(self._processor.encode("a")[0]).startswith(_SPACE_LETTER)
        return spelled if has_bytes and not begins_with_space else []


def trained(source: Source, vocab_size: int, cache_folder: Path) -> SentencePieceTokenizer:
    """The vocabulary of a corpus: trained once, deterministically, then kept in `cache_folder`.

    Raises ConfigError when no vocabulary of this size can be made of the corpus.
    """
    # The name is a hash of everything that determines the bytes, so racing processes write the same file.
    name = fingerprint_of(source.fingerprint, vocab_size, sorted(_OPTIONS.items()), _TRAINING_CHARACTERS)
    path = cache_folder / f"sentencepiece-{name}.model"
    if not path.is_file():
        model = _train(source, vocab_size)
        with atomic_file(path) as file:
            file.write(model)
    return SentencePieceTokenizer(path)


def _train(source: Source, vocab_size: int) -> bytes:
    sentencepiece = import_optional("sentencepiece", needed_for="training a vocabulary", extra="transformers")
    model = io.BytesIO()
    # Read first, because the trainer would wrap an error of the corpus into one of its own.
    lines = list(_sample(source))
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size, **_OPTIONS
        )
    except RuntimeError as error:
        raise ConfigError(
            f"no sentencepiece vocabulary can be trained on {source.name}",
            got=f"tokenizer.vocab_size={vocab_size}: {str(error).split('] ')[-1]}",
            expected="at least a token for each byte and frequent letter, at most as many as the corpus has pieces",
            fix="change tokenizer.vocab_size, or tokenizer=byte",
        ) from None
    return model.getvalue()


def _sample(source: Source) -> Iterator[str]:
    """Lines of the corpus; of a large one, some from everywhere, always the same."""
    total = max(_TRAINING_CHARACTERS, sum(shard.size for shard in source.shards()))
    due = 0
    for text in source.documents():
        for line in _lines(text):
            due += _TRAINING_CHARACTERS
            if due >= total:
                due -= total
                yield line


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines(keepends=True):
        for start in range(0, len(line), _LINE_CHARACTERS):
            yield line[start : start + _LINE_CHARACTERS]
